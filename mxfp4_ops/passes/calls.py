"""Calls of our ops in an FX graph, whatever form tracing gave them, seen through one interface.

Forms: the functional overload; ``auto_functionalized`` and ``auto_functionalized_v2`` of the ``.out`` overload, which
AOT makes of a mutating call; and the raw ``.out`` call itself, as Dynamo and export graphs have it. Indices of results
come from the schema.
"""

import operator
from collections.abc import Callable
from enum import Enum
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized, auto_functionalized_v2
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.immutable_collections import immutable_list
from torch.utils._pytree import tree_leaves

METADATA = "get_cutlass_moe_mm_data"
SHUFFLE = "shuffle_rows"
QUANT = "mxfp4_experts_quant"
QUANTS = (QUANT, "silu_and_mul_mxfp4_experts_quant")
FUSED = "moe_permute_mxfp4_quant"
ROUTING = (METADATA, FUSED)  # what gives metadata, by the same names
ALLOCATIONS = {
    torch.empty, torch.zeros, torch.full, torch.empty_like, torch.zeros_like, "new_empty", "new_zeros",
    torch.ops.aten.empty.memory_format, torch.ops.aten.zeros.default, torch.ops.aten.full.default,
    torch.ops.aten.new_empty.default, torch.ops.aten.new_zeros.default, torch.ops.aten.empty_like.default,
}  # fmt: skip


class Form(Enum):
    FUNCTIONAL = "functional"
    AUTO_V1 = "auto_functionalized"
    AUTO_V2 = "auto_functionalized_v2"
    MUTATING = "mutating"


def value(node: object) -> Any:
    """What tracing recorded for a node (a FakeTensor, SymInt or tuple); of what is no node, the object itself."""
    if not isinstance(node, fx.Node):
        return node
    return node.meta.get("val", node.meta.get("example_value"))


def set_value(node: fx.Node, recorded: object, like: fx.Node) -> None:
    """Record a value under the name that this kind of graph uses, as ``like`` shows it."""
    node.meta["example_value" if "val" not in like.meta and "example_value" in like.meta else "val"] = recorded


def record_anew(node: fx.Node) -> None:
    """Record for a view what it is now of its arguments."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    with torch.no_grad():
        target = getattr(args[0], node.target) if node.op == "call_method" else node.target
        set_value(node, target(*(args[1:] if node.op == "call_method" else args), **kwargs), node)


def same_number(a: object, b: object) -> bool:
    """Whether two ints, SymInts or nodes of these are equal for every input of the graph."""
    if a is b:
        return True
    a, b = value(a), value(b)
    return a is not None and b is not None and statically_known_true(a == b)


def has_storage(recorded: object) -> bool:
    return isinstance(recorded, torch.Tensor) and torch._C._has_storage(recorded)


def tensors_in(recorded: object) -> list[torch.Tensor]:
    return [t for t in tree_leaves(recorded) if isinstance(t, torch.Tensor)]


def same_storage(a: object, b: object) -> bool:
    """Whether two recorded tensors are known to have one storage."""
    return has_storage(a) and has_storage(b) and a.untyped_storage()._cdata == b.untyped_storage()._cdata


def same_layout(a: object, b: object) -> bool:
    """Whether two tensors are known to lie in the same way in storages that may be two."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.dim() != b.dim() or a.dtype != b.dtype:
        return False
    if a.is_neg() != b.is_neg() or a.is_conj() != b.is_conj():
        return False
    numbers = [(*t.shape, *t.stride(), t.storage_offset()) for t in (a, b)]
    return all(same_number(x, y) for x, y in zip(*numbers, strict=True))


def same_place(a: object, b: object) -> bool:
    """Whether two tensors are known to be the same elements of one storage in the same order."""
    return same_storage(a, b) and same_layout(a, b)


@cache
def _signature(overload: torch._ops.OpOverload) -> tuple[str, dict[str, object], list[str], list[str]]:
    """Name of the op, parameters with their defaults, the parameters that are written, and the results."""
    schema = overload._schema
    defaults = {argument.name: argument.default_value for argument in schema.arguments}
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    return schema.name.removeprefix("mxfp4_ops::"), defaults, written, written or [r.name for r in schema.returns]


class Call:
    """One call of an op of this package."""

    def __init__(self, node: fx.Node, overload: torch._ops.OpOverload, form: Form) -> None:
        self.node, self.form = node, form
        self.op, self.defaults, self.written, self.results = _signature(overload)
        self.parameters = list(self.defaults)

    @classmethod
    def parse(cls, node: fx.Node) -> "Call | None":
        if node.op != "call_function":
            return None
        target, auto = node.target, None
        if target in (auto_functionalized, auto_functionalized_v2):
            auto = Form.AUTO_V1 if target is auto_functionalized else Form.AUTO_V2
            target = node.args[0]
        if isinstance(target, torch._ops.OpOverloadPacket) and target._qualified_op_name.startswith("mxfp4_ops::"):
            out = {a.name for a in target.out._schema.arguments} - {a.name for a in target.default._schema.arguments}
            target = target.out if out & node.kwargs.keys() else target.default
        if not isinstance(target, torch._ops.OpOverload) or target.namespace != "mxfp4_ops":
            return None
        form = auto or (Form.MUTATING if target._schema.is_mutable else Form.FUNCTIONAL)
        return cls(node, target, form)

    @classmethod
    def add(cls, op: str, like: "Call", given: dict[str, tuple[object, object]]) -> "Call":
        """A call of an op, in the form of another and at the graph's insertion point; buffers are still to be given.

        ``given`` has each argument with the value that it had in eager mode.
        """
        packet = getattr(torch.ops.mxfp4_ops, op)
        overload = packet.default if like.form is Form.FUNCTIONAL else packet.out
        target: Callable = overload
        args, kwargs = [], {}
        for argument in overload._schema.arguments:
            if argument.name in given and like.form in (Form.FUNCTIONAL, Form.MUTATING) and not argument.kwarg_only:
                args.append(given[argument.name])
            elif argument.name in given:
                kwargs[argument.name] = given[argument.name]
            elif like.form is Form.AUTO_V1:
                kwargs[argument.name] = None, None
            elif like.form is Form.AUTO_V2:
                kwargs[f"_{argument.name}_base_index"] = None, None
        recorded: tuple | None = None
        if like.form is Form.AUTO_V1:
            target, args = auto_functionalized, [(overload, None)]
            recorded = (None,) * (1 + len(_signature(overload)[2]))
        elif like.form is Form.AUTO_V2:
            target, args, recorded = auto_functionalized_v2, [(overload, None)], (None,)
            kwargs["_all_bases"] = [], immutable_list()
        node = like._new_node(target, tuple(a for a, _ in args), {k: a for k, (a, _) in kwargs.items()}, recorded)
        if "eager_input_vals" in like.node.meta:
            node.meta["eager_input_vals"] = tuple(e for _, e in args), {k: e for k, (_, e) in kwargs.items()}
        return cls(node, overload, like.form)

    # Arguments

    def argument(self, name: str) -> object:
        """The value of a parameter, its default if it is not given; not for what AUTO_V2 writes."""
        if name in self.node.kwargs:
            return self.node.kwargs[name]
        position = self.parameters.index(name)
        if self.form in (Form.FUNCTIONAL, Form.MUTATING) and position < len(self.node.args):
            return self.node.args[position]
        return self.defaults[name]

    def eager(self, name: str) -> object:
        """The value that a parameter had in eager mode, where that is kept."""
        args, kwargs = self.node.meta.get("eager_input_vals", ((), {}))
        position = self.parameters.index(name)
        if self.form in (Form.FUNCTIONAL, Form.MUTATING) and position < len(args):
            return args[position]
        return kwargs.get(name)

    def hidden_size(self) -> object:
        """Of a call that gives metadata: the k in its problem sizes."""
        if self.op == METADATA:
            return self.argument("k")
        hidden_states = value(self.argument("hidden_states"))
        return None if hidden_states is None else hidden_states.shape[1]

    def set_argument(self, name: str, new: fx.Node) -> None:
        position = self.parameters.index(name)
        if self.form in (Form.FUNCTIONAL, Form.MUTATING) and position < len(self.node.args):
            self.node.update_arg(position, new)
            if eager := self.node.meta.get("eager_input_vals"):
                args = (*eager[0][:position], value(new), *eager[0][position + 1 :])
                self.node.meta["eager_input_vals"] = args, eager[1]
        else:
            self._set_kwargs({name: new}, {name: value(new)})

    def _set_kwargs(self, new: dict, values: dict) -> None:
        self.node.kwargs = {**self.node.kwargs, **new}
        # Inductor keeps the values that arguments had in eager mode, and wants them in the structure of the arguments.
        if eager := self.node.meta.get("eager_input_vals"):
            self.node.meta["eager_input_vals"] = eager[0], {**eager[1], **values}

    # Results

    def index(self, name: str) -> int | None:
        """Where a result is in what the call returns, or of AUTO_V2 the buffer that holds it; None of no result."""
        if not self.has_result(name):
            return None
        if self.form is Form.FUNCTIONAL:
            return self.results.index(name)
        return 1 + (self.written.index(name) if self.form is Form.AUTO_V1 else self._base(name))

    def results_at(self, index: int) -> list[str]:
        """The results that are in one item of what the call returns; more than one where they are views of a buffer."""
        return [name for name in self.results if self.form is not Form.MUTATING and self.index(name) == index]

    def is_item(self, name: str) -> bool:
        """Whether a result is the whole item that holds it."""
        return self.form is not Form.AUTO_V2 or self._view_call(name) is None

    def result_at(self, index: int, tensor: object, whole: bool) -> str | None:
        """Name of the result that a tensor is: the item of that index, if ``whole``, or for AUTO_V2 a view of it."""
        names = self.results_at(index)
        if whole:
            return names[0] if len(names) == 1 and self.is_item(names[0]) else None
        item = self.recorded_item(index)
        return next(
            (name for name in names if item is not None and same_place(self._view_of(name, item), tensor)), None
        )

    def recorded_item(self, index: int) -> object:
        """What tracing recorded for an item: in the call's value, which is not always there."""
        recorded = value(self.node)
        return None if recorded is None else recorded[index]

    def recorded(self, name: str) -> object:
        """What tracing recorded for a result; of one that is still to be added, what would be."""
        if not self.has_result(name):
            return self.fresh(name)
        if self.form is Form.MUTATING:
            return value(self.argument(name))
        item = self.recorded_item(self.index(name))
        return item if item is None or self.form is not Form.AUTO_V2 else self._view_of(name, item)

    def fresh(self, name: str) -> torch.Tensor | None:
        """What tracing would record for a result of metadata that is a tensor of its own."""
        ids, experts = value(self.argument("topk_ids")), self.argument("num_experts")
        if ids is None:
            return None
        shapes = {"expert_offsets": (experts + 1,), "blockscale_offsets": (experts + 1,)}
        shapes |= {"problem_sizes1": (experts, 3), "problem_sizes2": (experts, 3)}
        return ids.new_empty(shapes.get(name, (ids.shape[0] * ids.shape[1],)), dtype=torch.int32)

    def item_nodes(self) -> list[fx.Node]:
        """The nodes that take one item of what the call returns."""
        return [user for user in self.node.users if user.target is operator.getitem]

    def items(self) -> range:
        """Indices of what an auto-functionalized call returns, the buffers as they were written."""
        return range(1, 1 + len(self.written if self.form is Form.AUTO_V1 else self.node.kwargs["_all_bases"]))

    def buffer(self, index: int) -> object:
        """The buffer that an auto-functionalized call was given for an item."""
        if self.form is Form.AUTO_V1:
            return self.argument(self.written[index - 1])
        return self.node.kwargs["_all_bases"][index - 1]

    def view_arguments(self, name: str) -> dict[str, object]:
        """What makes the buffer of AUTO_V2 from its base."""
        prefix = f"_{name}_"
        return {k: v for k, v in self.node.kwargs.items() if k.startswith(prefix) and k != f"{prefix}base_index"}

    def _base(self, name: str) -> int | None:
        return self.node.kwargs.get(f"_{name}_base_index")

    def _view_call(self, name: str) -> tuple[Callable, list] | None:
        """The op and its arguments that make the buffer of AUTO_V2 from its base, None where it is the base."""
        kwargs = self.node.kwargs
        if f"_{name}_size" in kwargs:
            return torch.ops.aten.as_strided.default, [
                kwargs[f"_{name}_{k}"] for k in ("size", "stride", "storage_offset")
            ]
        if f"_{name}_slice_dim" in kwargs:
            return torch.ops.aten.slice.Tensor, [kwargs[f"_{name}_slice_{k}"] for k in ("dim", "start", "end")]
        return None

    def _view_of(self, name: str, base: torch.Tensor) -> torch.Tensor:
        view = self._view_call(name)
        return base if view is None else view[0](base, *fx.node.map_arg(view[1], value))

    def has_result(self, name: str) -> bool:
        """Whether the call produces this result: an optional buffer may not have been given."""
        if self.form is Form.FUNCTIONAL:
            return True
        if self.form is Form.AUTO_V2:
            return self._base(name) is not None
        return self.argument(name) is not None

    def result(self, name: str) -> fx.Node:
        """A node right after the call that holds a result; where the buffer was not given, it is made and added."""
        if not self.has_result(name):
            self.add_buffer(name)
        if self.form is Form.MUTATING:
            return self.argument(name)
        if self.form is Form.FUNCTIONAL:
            return self.item(self.results.index(name))
        if self.form is Form.AUTO_V1:
            return self.item(1 + self.written.index(name))
        return self._view(name, self.item(1 + self._base(name)))

    def _new_node(self, target: Callable, args: tuple, kwargs: dict | None = None, recorded: object = None) -> fx.Node:
        """A node at the graph's insertion point, said to stem from where the call stems from."""
        node = self.node.graph.call_function(target, args, kwargs)
        for key in ("stack_trace", "nn_module_stack"):
            if key in self.node.meta:
                node.meta[key] = self.node.meta[key]
        if recorded is not None:
            set_value(node, recorded, self.node)
        return node

    def item(self, index: int) -> fx.Node:
        """The node right after the call that holds an item of what it returns."""
        for user in self.node.users:
            if user.target is operator.getitem and user.args[1] == index:
                self.node.append(user)  # it may stand behind the quant that is to use it
                return user
        recorded = value(self.node)
        with self.node.graph.inserting_after(self.node):
            return self._new_node(
                operator.getitem, (self.node, index), recorded=None if recorded is None else recorded[index]
            )

    def _view(self, name: str, base: fx.Node) -> fx.Node:
        view = self._view_call(name)
        if view is None:
            return base
        target, args = view
        for user in base.users:
            if user.target is target and list(user.args[1:]) == args:
                base.append(user)
                return user
        with base.graph.inserting_after(base):
            return self._new_node(target, (base, *args), recorded=self._view_of(name, value(base)))

    def add_buffer(self, name: str, recorded: torch.Tensor | None = None) -> None:
        """Give the call a fresh int32 buffer for a result of metadata; ``recorded`` is of the result, if it has one."""
        ids, like = self.argument("topk_ids"), self.fresh(name)
        with self.node.graph.inserting_before(self.node):
            options = {"dtype": torch.int32, "device": like.device, "pin_memory": False}
            size = [self._product(ids, n) for n in like.shape]
            if self.form is Form.MUTATING and recorded is not None:
                like = recorded
            buffer = self._new_node(torch.ops.aten.empty.memory_format, (size,), options, like)
        self._give(name, buffer, like, like if recorded is None else recorded)

    def _give(self, name: str, buffer: fx.Node, eager: object, recorded: object) -> None:
        if self.form is Form.AUTO_V2:
            index = {f"_{name}_base_index": len(self.node.kwargs["_all_bases"])}
            # As with the other arguments that are no nodes, nothing is kept for the index.
            self._add_bases([buffer], [eager], [recorded], index, dict.fromkeys(index))
            return
        self._set_kwargs({name: buffer}, {name: eager})
        if self.form is Form.AUTO_V1 and value(self.node) is not None:
            results = list(value(self.node))
            results[1 + self.written.index(name)] = recorded
            set_value(self.node, tuple(results), self.node)

    def _product(self, ids: fx.Node, rows: "int | torch.SymInt") -> "int | fx.Node":
        """A number: where it is no constant that of the elements of ids, computed in the graph."""
        if not isinstance(rows, torch.SymInt):
            return rows
        sizes = [
            self._new_node(torch.ops.aten.sym_size.int, (ids, dim), recorded=size)
            if isinstance(size, torch.SymInt)
            else size
            for dim, size in enumerate(value(ids).shape)
        ]
        return self._new_node(operator.mul, tuple(sizes), recorded=rows)

    def _add_bases(self, bases: list, eager: list, recorded: list, arguments: dict, values: dict) -> None:
        kept = self.node.meta.get("eager_input_vals", ((), {}))[1].get("_all_bases", ())
        arguments = {"_all_bases": [*self.node.kwargs["_all_bases"], *bases], **arguments}
        self._set_kwargs(arguments, {"_all_bases": immutable_list([*kept, *eager]), **values})
        if value(self.node) is not None:
            set_value(self.node, (*value(self.node), *recorded), self.node)

    def take_buffers(self, other: "Call") -> None:
        """Write what another call of the same form writes, which has the same names."""
        if self.form is not Form.AUTO_V2:
            for name in other.written:
                if other.has_result(name):
                    self._give(name, other.argument(name), other.eager(name), other.recorded(name))
            return
        shift, arguments = len(self.node.kwargs["_all_bases"]), {}
        for name in other.written:
            if other.has_result(name):
                arguments |= {f"_{name}_base_index": shift + other._base(name), **other.view_arguments(name)}
        eager = other.node.meta.get("eager_input_vals", ((), {}))[1]
        bases = other.node.kwargs["_all_bases"]
        recorded = [other.recorded_item(index) for index in other.items()]
        values = {name: eager.get(name) for name in arguments}
        self._add_bases(bases, eager.get("_all_bases", ()), recorded, arguments, values)
