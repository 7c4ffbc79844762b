"""Where a tensor of a graph comes from, and who writes it on the way."""

import operator
from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch.multiprocessing.reductions import StorageWeakRef

from .calls import METADATA, Call, Form, same_place, value

aten = torch.ops.aten

GRAPH_INPUT = "is a graph input"
SUBGRAPH_INPUT = "comes into the subgraph from outside"

# What keeps every element and its place: the walk passes through. The copying ones do so only for what is contiguous.
_COPYING = {aten.reshape, aten.contiguous, torch.reshape, "reshape", "contiguous"}
_COPYING |= {aten.reshape.default, aten.contiguous.default}
_KEEPING = _COPYING | {aten.alias, aten.detach, torch.detach, "view", "detach"}
_KEEPING |= {aten.view.default, aten.alias.default, aten.detach.default}
# Methods, in Dynamo's graphs, whose result may share the memory of the tensor they are called on.
_VIEW_METHODS = {
    "view", "reshape", "detach", "contiguous", "select", "narrow", "squeeze", "unsqueeze", "flatten", "transpose", "t",
    "permute", "expand", "view_as", "as_strided", "unbind", "split", "chunk", "ravel", "unflatten", "data", "to",
}  # fmt: skip
_CASTS = {aten._to_copy.default, aten.view.dtype, torch.ops.prims.convert_element_type.default}
_CASTS |= {getattr(aten.to, overload) for overload in aten.to.overloads()}
_CAST_METHODS = {"to", "int", "long", "short", "float", "double", "half", "bfloat16", "type", "type_as", "cpu", "cuda"}
_IN_PLACE_FUNCTIONS = {
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod,
    operator.ipow, operator.ior, operator.iand, operator.ixor, operator.ilshift, operator.irshift,
}  # fmt: skip
_IN_PLACE_METHODS = {f"__{function.__name__}__" for function in _IN_PLACE_FUNCTIONS}


def name_of(node: fx.Node) -> str:
    """What a node calls, as a person would name it."""
    return str(node.target) if node.op != "call_function" else getattr(node.target, "__name__", str(node.target))


@dataclass(frozen=True)
class Origin:
    """A tensor is this result of this metadata call."""

    call: Call
    result: str


class Tensors:
    """The tensors of one graph: its calls of our ops, whose memory is whose, and its writes, found once."""

    def __init__(self, graph: fx.Graph, nested: bool = False) -> None:
        self.nested = nested
        self.calls = {node: call for node in graph.nodes if (call := Call.parse(node)) is not None}
        self.metadata_calls = [call for call in self.calls.values() if call.op == METADATA]
        self._memory: dict[fx.Node, object] = {}
        self._writers: dict[object, list[fx.Node]] = defaultdict(list)
        self._writing_modules: dict[fx.GraphModule, bool] = {}
        for node in graph.nodes:
            for memory in {self.memory(tensor) for tensor in self._written_by(node)}:
                self._writers[memory].append(node)
        items = (user for call in self.metadata_calls if call.form is Form.AUTO_V2 for user in call.node.users)
        self._bases = {self.memory(item): item for item in items if self._is_item(item)}
        output = next((node for node in reversed(graph.nodes) if node.op == "output"), None)
        self._outputs = {self.memory(node) for node in output.all_input_nodes} if output is not None else set()

    # Memory and writes

    def memory(self, node: fx.Node) -> object:
        """An identity of the memory of a tensor: of its storage where tracing recorded a value, else of its maker."""
        if node not in self._memory:
            root = self._root(node)
            # Of several results, each has memory of its own, which the op that made them does not record.
            recorded = next((v for v in (value(root), value(node)) if _has_storage(v)), None)
            known = recorded is not None
            self._memory[node] = StorageWeakRef(recorded.untyped_storage()) if known else self._name_root(root)
        return self._memory[node]

    def _root(self, node: fx.Node) -> fx.Node:
        """The node, behind views, that made the memory of a tensor; for a result of ours, its getitem."""
        while (source := _alias_of(node)) is not None and source not in self.calls:
            node = source
        return node

    def _name_root(self, root: fx.Node) -> object:
        return tuple(root.args) if self._is_item(root) else root

    def _is_item(self, node: fx.Node) -> bool:
        """Whether a node is one of the results of a call of ours."""
        return node.target is operator.getitem and node.args[0] in self.calls

    def is_output(self, node: fx.Node) -> bool:
        return self.memory(node) in self._outputs

    def writers(self, node: fx.Node) -> list[fx.Node]:
        """All nodes that write the memory of a tensor, in order."""
        return self._writers.get(self.memory(node), [])

    def last_write(self, node: fx.Node, before: fx.Node) -> fx.Node | None:
        """The last node before another that writes the memory of a tensor."""
        writers = self.writers(node)
        index = bisect_left(writers, before)
        return writers[index - 1] if index else None

    def first_write(self, node: fx.Node, after: fx.Node, before: fx.Node | None = None) -> fx.Node | None:
        """The first node behind ``after`` (and before ``before``) that writes the memory of a tensor."""
        writers = self.writers(node)
        index = bisect_right(writers, after)
        return writers[index] if index < len(writers) and (before is None or writers[index] < before) else None

    def forget(self, call: Call) -> None:
        """A call is about to be erased."""
        for memory in {self.memory(tensor) for tensor in self._written_by(call.node)}:
            writers = self._writers[memory]
            del writers[bisect_left(writers, call.node)]
        del self.calls[call.node]

    # Provenance

    def origin(self, tensor: object, user: fx.Node) -> Origin | str:
        """The metadata result that a tensor is when ``user`` reads it, or the reason why that is not known."""
        if not isinstance(tensor, fx.Node):
            return "is not a tensor of the graph"
        node = tensor
        while True:
            found = self._result(node, user) or self._written_buffer(node, user)
            if found is not None:
                return found
            if reason := self._obstacle(node):
                return reason
            node = node.args[0]

    def _result(self, node: fx.Node, user: fx.Node) -> Origin | str | None:
        """The origin of what is a result of a call, or in the form AUTO_V2 a view of its result."""
        item = node if self._is_item(node) else self._bases.get(self.memory(node))
        if item is None:
            return None
        call = self.calls[item.args[0]]
        if call.op != METADATA:
            return f"is a result of {call.op}"
        name = call.result_at(item.args[1], value(node))
        if name is None:
            return "is part of a larger buffer" if item is node else None
        if writer := self.first_write(node, call.node, user):
            return f"is written after the metadata call, by {name_of(writer)}"
        return Origin(call, name)

    def _written_buffer(self, node: fx.Node, user: fx.Node) -> Origin | str | None:
        """The origin of a buffer that a raw metadata call wrote last."""
        writer = self.last_write(node, user)
        if writer is None:
            return None
        if self._is_raw_metadata(writer):
            call = self.calls[writer]
            return next((Origin(call, name) for name in call.written if self._is_buffer(call, name, node)), None)
        writers = self.writers(node)
        if any(map(self._is_raw_metadata, writers[: bisect_left(writers, user)])):
            return f"is written after the metadata call, by {name_of(writer)}"
        return None

    def _is_raw_metadata(self, node: fx.Node) -> bool:
        call = self.calls.get(node)
        return call is not None and call.op == METADATA and call.form is Form.MUTATING

    def _is_buffer(self, call: Call, name: str, node: fx.Node) -> bool:
        """Whether a node is the buffer that a raw call was given for a result, by itself or as the same view of it."""
        buffer = call.argument(name)
        if not isinstance(buffer, fx.Node) or buffer is node:
            return buffer is node
        return self.memory(buffer) == self.memory(node) and same_place(value(buffer), value(node))

    def _obstacle(self, node: fx.Node) -> str | None:
        """Why the walk does not go on to the first argument of a node."""
        if node.op == "placeholder":
            return SUBGRAPH_INPUT if self.nested else GRAPH_INPUT
        if node.op == "get_attr":
            return "is a constant"
        if self._written_by(node):
            return f"is written by {name_of(node)}"
        casts = node.target in (_CASTS if node.op == "call_function" else _CAST_METHODS)
        # view(dtype) is a cast by another name.
        dtypes = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, torch.dtype)]
        if casts or (node.target == "view" and dtypes):
            return f"passes through a cast ({name_of(node)})"
        if node.target in _COPYING and not _is_contiguous(node.args[0]):
            return f"passes through {name_of(node)}, of what is not contiguous"
        if node.target in _KEEPING:
            return None
        if node.target is operator.getitem and isinstance(value(node.args[0]), (tuple, list)):
            return f"passes through {name_of(node.args[0])}"
        return f"passes through {name_of(node)}"

    # What a node writes

    def _written_by(self, node: fx.Node) -> list[fx.Node]:
        """The tensors that a node writes in place, or may write: of what is not known, all that it is given."""
        target, call = node.target, self.calls.get(node)
        written: tuple = ()
        if call is not None:
            written = tuple(call.argument(name) for name in call.written) if call.form is Form.MUTATING else ()
        elif node.op == "call_method":
            written = node.args[:1] if _ends_in_place(target) else ()
        elif node.op == "call_module":
            written = (node.args, node.kwargs)
        elif node.op != "call_function" or target in (auto_functionalized, auto_functionalized_v2):
            pass
        elif isinstance(target, torch._ops.OpOverload):
            written = _declared_writes(node, [target])
        elif isinstance(target, torch._ops.OpOverloadPacket):
            written = _declared_writes(node, [getattr(target, overload) for overload in target.overloads()])
        elif isinstance(target, torch._ops.HigherOrderOperator):
            written = (node.args, node.kwargs) if self._subgraphs_write(node) else ()
        elif target in _IN_PLACE_FUNCTIONS or _ends_in_place(getattr(target, "__name__", "")):
            written = node.args[:1]
        elif _is_of_torch(target):
            written = (node.kwargs.get("out"),)
        else:
            written = (node.args, node.kwargs)
        nodes: list[fx.Node] = []
        fx.node.map_arg(written, nodes.append)
        return nodes

    def _subgraphs_write(self, node: fx.Node) -> bool:
        """Whether a higher-order op may write what it is given: without subgraphs it may, else if one of them does."""
        modules = [m for a in node.all_input_nodes if (m := nested_module(a)) is not None]
        return not modules or any(map(self._module_writes, modules))

    def _module_writes(self, module: fx.GraphModule) -> bool:
        if module not in self._writing_modules:
            inner = Tensors(module.graph, nested=True)
            inputs = (node for node in module.graph.nodes if node.op == "placeholder")
            self._writing_modules[module] = any(inner.writers(node) for node in inputs)
        return self._writing_modules[module]


def nested_module(node: fx.Node) -> fx.GraphModule | None:
    """The graph module that a get_attr node names."""
    if node.op != "get_attr" or node.graph.owning_module is None:
        return None
    found: object = node.graph.owning_module
    for part in str(node.target).split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, fx.GraphModule) else None


def _has_storage(recorded: object) -> bool:
    return isinstance(recorded, torch.Tensor) and torch._C._has_storage(recorded)


def _is_contiguous(node: fx.Node) -> bool:
    recorded = value(node)
    return isinstance(recorded, torch.Tensor) and recorded.is_contiguous()


def _ends_in_place(name: str) -> bool:
    return (name.endswith("_") and not name.startswith("_")) or name in _IN_PLACE_METHODS


def _is_of_torch(target: object) -> bool:
    """Whether a function follows torch's rule that only names with a trailing underscore, and out=, write."""
    module = getattr(target, "__module__", None) or "torch"
    return module.partition(".")[0] in ("torch", "_operator", "math", "builtins")


def _declared_writes(node: fx.Node, overloads: list[torch._ops.OpOverload]) -> tuple:
    written = []
    for overload in overloads:
        for position, argument in enumerate(overload._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                positional = position < len(node.args) and not argument.kwarg_only
                written.append(node.args[position] if positional else node.kwargs.get(argument.name))
    return tuple(written)


def _alias_of(node: fx.Node) -> fx.Node | None:
    """The argument whose memory the result of a node shares, as far as the node's name tells."""
    first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
    if node.op == "call_method":
        return first if _ends_in_place(node.target) or node.target in _VIEW_METHODS else None
    if node.op != "call_function":
        return None
    if node.target is operator.getitem or node.target in _IN_PLACE_FUNCTIONS:
        return first
    if isinstance(node.target, torch._ops.OpOverload):
        returned = {s for r in node.target._schema.returns if r.alias_info for s in r.alias_info.before_set}
        for argument, given in zip(node.target._schema.arguments, node.args, strict=False):
            if argument.alias_info and returned & set(argument.alias_info.before_set) and isinstance(given, fx.Node):
                return given
    return None
