"""Which nodes of a graph hold equal values, found once and in the order of the graph (value numbering)."""

import operator

import torch
from torch import fx

from .calls import same_layout, same_place, same_storage, value
from .provenance import Tensors

# Methods, in Dynamo's graphs, that compute the same from the same.
_PURE_METHODS = {
    "view", "reshape", "detach", "contiguous", "select", "narrow", "squeeze", "unsqueeze", "flatten", "transpose", "t",
    "permute", "expand", "view_as", "unflatten", "clone", "to", "int", "long", "short", "type", "size",
}  # fmt: skip
_PURE_FUNCTIONS = {
    operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv, operator.mod, operator.neg,
    torch.reshape, torch.detach, torch.flatten, torch.clone,
}  # fmt: skip
_PURE_NAMESPACES = ("aten", "prims", "mxfp4_ops")


class Numbers:
    """A number for each node: where it is the same for two, and nobody writes in between, they hold the same values."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._known: dict[object, int] = {}
        self._numbers: dict[fx.Node, int] = {}
        self._roots: dict[int, int] = {}
        if len(tensors.routing_calls) > 1:
            for node in tensors.graph.nodes:
                self._numbers[node] = self._number(node)

    def of(self, argument: object) -> object:
        """What stands for an argument of a call: the number of a node; for a constant itself, with its type (True == 1)."""
        if isinstance(argument, fx.Node):
            return self._numbers.get(argument, argument)
        return type(argument), argument

    def are_same(self, a: object, user_a: fx.Node, b: object, user_b: fx.Node) -> bool:
        """Whether two arguments are the same for their users."""
        return self.of(a) == self.of(b) and self.writer_between(a, user_a, b, user_b) is None

    def writer_between(self, a: object, user_a: fx.Node, b: object, user_b: fx.Node) -> tuple[fx.Node, fx.Node] | None:
        """Of two arguments of one number: which of them is written before its use and not the other, and by whom.

        One writer may write two tensors differently, so that after a write only one and the same tensor is equal.
        """
        writers = self._last_write(a, user_a), self._last_write(b, user_b)
        if writers[0] is writers[1] and (writers[0] is None or self._are_one(a, b)):
            return None
        return (a, writers[0]) if writers[1] is None else (b, writers[1])

    def _are_one(self, a: fx.Node, b: fx.Node) -> bool:
        return a is b or (self._tensors.storages_tell and same_place(value(a), value(b)))

    def _last_write(self, argument: object, user: fx.Node) -> fx.Node | None:
        return self._tensors.last_write(argument, user) if isinstance(argument, fx.Node) else None

    def _number(self, node: fx.Node) -> int:
        if (same := self._same_elements(node)) is not None:
            return same
        key: object = node
        if _is_pure(node):
            try:
                key = (node.target, self._key(node.args, node), self._key(node.kwargs, node))
                hash(key)
            except TypeError:
                key = node
        elif node.op == "get_attr":
            key = (node.op, node.target)
        return self._known.setdefault(key, len(self._known))

    def _same_elements(self, node: fx.Node) -> int | None:
        """The number of what is an argument's memory, looked at as the argument is, or in order and whole."""
        source = node.args[0] if node.args else None
        recorded, whole = value(node), value(source) if isinstance(source, fx.Node) else None
        if not node.op.startswith("call") or not self._tensors.storages_tell or not same_storage(recorded, whole):
            return None
        if same_layout(recorded, whole):
            return self._numbers[source]
        both = (recorded, whole)
        if not all(t.is_contiguous() and all(isinstance(n, int) for n in (*t.shape, t.storage_offset())) for t in both):
            return None
        places = {(t.dtype, t.is_neg(), t.is_conj(), t.storage_offset(), t.numel()) for t in both}
        if len(places) > 1:
            return None
        # Views of views are views of the first, and one that looks like the first is it.
        number = self._numbers[source]
        root = self._roots.setdefault(number, number)
        if root == number:
            self._known.setdefault(("view", root, tuple(whole.shape)), root)
        number = self._known.setdefault(("view", root, tuple(recorded.shape)), len(self._known))
        self._roots[number] = root
        return number

    def _key(self, argument: object, user: fx.Node) -> object:
        """Arguments with numbers for nodes, or themselves with who wrote them last."""
        if isinstance(argument, fx.Node):
            writer = self._last_write(argument, user)
            return (self._numbers[argument], None) if writer is None else (argument, writer)
        if isinstance(argument, (list, tuple)):
            return (list, *(self._key(a, user) for a in argument))
        if isinstance(argument, dict):
            return (dict, *((k, self._key(v, user)) for k, v in sorted(argument.items())))
        if isinstance(argument, slice):
            return (slice, *(self._key(a, user) for a in (argument.start, argument.stop, argument.step)))
        return type(argument), argument


def _is_pure(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _PURE_METHODS
    if node.op != "call_function":
        return False
    if isinstance(node.target, torch._ops.OpOverload):
        schema, tags = node.target._schema, node.target.tags
        random = torch.Tag.nondeterministic_seeded in tags
        return node.target.namespace in _PURE_NAMESPACES and not schema.is_mutable and not random
    return node.target in _PURE_FUNCTIONS
