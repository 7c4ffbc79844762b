"""What one node does to memory: the tensors that it may write, and those whose memory its result may share."""

import inspect
import operator
import types
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2

from .calls import Call, Form, has_storage, tensors_in, value

AUTO = (auto_functionalized, auto_functionalized_v2)

_IN_PLACE_FUNCTIONS = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
    operator.ipow, operator.ior, operator.iand, operator.ixor, operator.ilshift, operator.irshift, operator.imatmul,
}  # fmt: skip
_IN_PLACE_METHODS = {f"__{function.__name__}__" for function in _IN_PLACE_FUNCTIONS}
_PLAIN_FUNCTIONS = (
    types.FunctionType, types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType,
)  # fmt: skip


def name_of(node: fx.Node) -> str:
    """What a node calls, as a person would name it."""
    return str(node.target) if node.op != "call_function" else getattr(node.target, "__name__", str(node.target))


def base_name(node: fx.Node) -> str:
    """The name without an overload: "copy_" of torch.ops.aten.copy_.default as of the method."""
    return name_of(node).partition(".")[0]


def nested_module(node: fx.Node) -> fx.GraphModule | None:
    """The graph module that a get_attr node names."""
    found = attribute(node)
    return found if isinstance(found, fx.GraphModule) else None


def attribute(node: fx.Node) -> object:
    """What a get_attr node gets, None for others."""
    if node.op != "get_attr" or node.graph.owning_module is None:
        return None
    found: object = node.graph.owning_module
    for part in str(node.target).split("."):
        found = getattr(found, part, None)
    return found


@dataclass(frozen=True)
class Effects:
    """Of a higher-order op: whether it may write what it is given, and may return memory of it."""

    writes: bool
    shares: bool


# Writing -------------------------------------------------------------------------------------------------------------


def written_by(node: fx.Node, call: Call | None, effects: Effects | None) -> list[fx.Node]:
    """The tensors that a node writes in place, or may write: of what is not known, all that it is given."""
    target = node.target
    written: object = ()
    if call is not None:
        written = tuple(call.argument(name) for name in call.written) if call.form is Form.MUTATING else ()
    elif node.op == "call_method":
        written = node.args[:1] if _ends_in_place(target) else ()
    elif node.op == "call_module":
        # What torch.export puts first into an unlifted program only checks its inputs.
        written = () if target == "_guards_fn" else (node.args, node.kwargs)
    elif node.op != "call_function" or target in AUTO:
        pass
    elif isinstance(target, torch._ops.OpOverload):
        written = _declared_writes(node, [target])
    elif isinstance(target, torch._ops.OpOverloadPacket):
        written = _declared_writes(node, _overloads(target))
    elif effects is not None:
        written = (node.args, node.kwargs) if effects.writes else ()
    else:
        written = _written_by_function(node)
    return nodes_in(written)


def _written_by_function(node: fx.Node) -> object:
    """For torch's functions a trailing underscore, ``inplace`` or ``out`` says it; of others nothing is known.

    A few functions of torch write without saying so, such as batch_norm its running statistics: all of them floats.
    """
    target = node.target
    name = getattr(target, "__name__", "")
    if target in _IN_PLACE_FUNCTIONS or name in _IN_PLACE_METHODS:
        return node.args[:1]
    if not _is_of_torch(target) or _asks_in_place(node):
        return node.args, node.kwargs
    if _ends_in_place(name):
        # Those that begin with one, too, are fused or over lists, and write more than the first.
        return (node.args if name.startswith("_") else node.args[:1]), node.kwargs
    return node.kwargs.get("out")


def _ends_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE_METHODS


def _is_of_torch(target: object) -> bool:
    """Whether a function follows torch's rules of what writes."""
    module = getattr(target, "__module__", None) or "torch"
    known = module.partition(".")[0] in ("torch", "_operator", "math", "builtins")
    return known and isinstance(target, _PLAIN_FUNCTIONS) and target not in (setattr, delattr)


@cache
def _in_place_parameter(function: object) -> tuple[int, object] | None:
    """Position and default of a function's parameter ``inplace``."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return None
    return next(((i, p.default) for i, p in enumerate(parameters) if p.name == "inplace"), None)


def _asks_in_place(node: fx.Node) -> bool:
    position, default = _in_place_parameter(node.target) or (len(node.args), False)
    given = node.args[position] if position < len(node.args) else node.kwargs.get("inplace", default)
    return given is not False


def _declared_writes(node: fx.Node, overloads: list[torch._ops.OpOverload]) -> list:
    return [
        given
        for overload in overloads
        for argument, given in _given(node, overload)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _overloads(packet: torch._ops.OpOverloadPacket) -> list[torch._ops.OpOverload]:
    return [getattr(packet, overload) for overload in packet.overloads()]


def _given(node: fx.Node, overload: torch._ops.OpOverload) -> Iterator[tuple[torch.Argument, object]]:
    """The arguments of a schema with what a node gives for them."""
    for position, argument in enumerate(overload._schema.arguments):
        if argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]
        elif position < len(node.args) and not argument.kwarg_only:
            yield argument, node.args[position]


def nodes_in(arguments: object) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    fx.node.map_arg(arguments, nodes.append)
    return nodes


# Sharing -------------------------------------------------------------------------------------------------------------


def shared_by(node: fx.Node, call: Call | None, effects: Effects | None, storages_tell: bool) -> list[fx.Node]:
    """The nodes whose memory the result of a node may share, as its schema says or, without one, what tracing recorded.

    Storages that tracing recorded are not believed where there is a schema: programs that were saved, and graphs traced
    without fake tensors, have one for each node.
    """
    target = node.target
    if node.op in ("placeholder", "get_attr", "output") or call is not None or target in AUTO:
        return []
    if isinstance(target, torch._ops.OpOverload):
        return _declared_sharing(node, target)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return list(dict.fromkeys(n for overload in _overloads(target) for n in _declared_sharing(node, overload)))
    if effects is not None:
        return node.all_input_nodes if effects.shares else []
    if target is operator.getitem and not isinstance(value(node.args[0]), torch.Tensor):
        return node.all_input_nodes[:1]
    return [] if storages_tell and _has_recorded_storages(node) else node.all_input_nodes


def _declared_sharing(node: fx.Node, overload: torch._ops.OpOverload) -> list[fx.Node]:
    sharing = _sharing(overload)
    if sharing is None:
        return []
    nodes = nodes_in([given for argument, given in _given(node, overload) if argument.name in sharing])
    if _annotated(overload):
        return nodes
    # What is not declared returns an argument as it is, so its dtype is the same, where it is known.
    dtypes = {t.dtype for t in tensors_in(value(node))}
    return [n for n in nodes if not dtypes or value(n) is None or any(t.dtype in dtypes for t in tensors_in(value(n)))]


def _annotated(overload: torch._ops.OpOverload) -> bool:
    return any(r.alias_info is not None for r in overload._schema.returns)


@cache
def _sharing(overload: torch._ops.OpOverload) -> frozenset[str] | None:
    """The arguments whose memory the results may share; of lists of views the schema does not tell which it is.

    Not declared is it of the unsafe_* views and of compositions, which may return an argument (type_as, einsum).
    """
    schema = overload._schema
    everything = frozenset(a.name for a in schema.arguments)
    name = schema.name.partition("::")[2]
    if name == "set_":
        return everything
    if _annotated(overload):
        return frozenset(a.name for a in schema.arguments if a.alias_info is not None)
    composite = torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd")
    if composite or "unsafe_" in name or torch.Tag.maybe_aliasing_or_mutating in overload.tags:
        return everything
    return None


def _has_recorded_storages(node: fx.Node) -> bool:
    """Whether the storages of a node's result and of what it is given are recorded, which then tell what is shared."""
    recorded = [value(n) for n in (node, *node.all_input_nodes)]
    return all(r is not None and all(map(has_storage, tensors_in(r))) for r in recorded)
