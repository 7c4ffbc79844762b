"""Where a tensor of a graph comes from, whose memory is whose, who writes it on the way, and who sees it in the end."""

import operator
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef

from .calls import ALLOCATIONS, ROUTING, SHUFFLE, Call, Form, has_storage, same_place, same_storage, tensors_in, value
from .effects import AUTO, Effects, attribute, base_name, name_of, nested_module, shared_by, written_by
from .exported import Exported

aten = torch.ops.aten

OUTPUT = "output"
GRAPH_INPUT = "is a graph input"
SUBGRAPH_INPUT = "comes into the subgraph from outside"

# What keeps every element and its place: the walk passes through. The copying ones do so only for what is contiguous.
_COPYING = {aten.reshape, aten.contiguous, torch.reshape, "reshape", "contiguous"}
_COPYING |= {aten.reshape.default, aten.contiguous.default}
_KEEPING = _COPYING | {aten.alias, aten.detach, torch.detach, "view", "detach"}
_KEEPING |= {aten.view.default, aten.alias.default, aten.detach.default}
_CASTS = {aten._to_copy.default, aten.view.dtype, torch.ops.prims.convert_element_type.default}
_CASTS |= {getattr(aten.to, overload) for overload in aten.to.overloads()}
_CAST_METHODS = {"to", "int", "long", "short", "float", "double", "half", "bfloat16", "type", "type_as", "cpu", "cuda"}
# What a compiler may leave out, so that its result is its argument: Inductor does where it finds that nothing changes.
_LEFT_OUT = {
    "clone", "copy", "_to_copy", "to", "contiguous", "cat", "repeat", "constant_pad_nd", "slice_scatter", "pow",
    "convert_element_type", "device_put", "ceil", "floor", "round", "trunc", "int", "type", "cpu", "cuda",
}  # fmt: skip
_COPIES_INTO = {"copy_", "_foreach_copy_", "setitem", "__setitem__"}
# After these a tensor is other memory than before, and what tracing recorded is only how it ended.
_MOVES = {"set_", "resize_", "resize_as_", "swap_tensors"}


@dataclass(frozen=True)
class Origin:
    """A tensor is this result of this call."""

    call: Call
    result: str


class Tensors:
    """The tensors of one graph: its calls of our ops, whose memory is whose, its writes, and what is seen outside.

    ``exported`` is what is known of the exported program that the graph is of, or in which it is nested.
    """

    def __init__(self, graph: fx.Graph, nested: bool = False, exported: Exported | None = None) -> None:
        self.graph, self.nested, self.exported = graph, nested, exported or Exported()
        self.calls = {node: call for node in graph.nodes if (call := Call.parse(node)) is not None}
        self.routing_calls = [call for call in self.calls.values() if call.op in ROUTING]
        self.storages_tell = not any(base_name(node) in _MOVES for node in graph.nodes)
        self._inner: dict[fx.GraphModule, Effects] = {}
        self._effects = {node: self._effects_of(node) for node in graph.nodes if _is_higher_order(node)}
        self._parents: dict[object, object] = {}
        self._keys: dict[object, object] = {}
        self._writers: dict[object, list[fx.Node]] = {}
        self._touching: dict[object, list[fx.Node]] = {}
        self._seen: dict[object, set] = {}
        self._items: dict[object, fx.Node] = {}
        for node in graph.nodes:
            self._place(node)
        for node in graph.nodes:
            for index, memory in self._indexed(node):
                index.setdefault(memory, []).append(node)
        followed = [call for call in self.calls.values() if call.op in (*ROUTING, SHUFFLE)]
        items = (item for call in followed if call.form is Form.AUTO_V2 for item in call.item_nodes())
        self._items = {self.memory(item): item for item in items}
        self._find_seen()

    # Memory: classes of what may share it

    def memory(self, tensor: object) -> object:
        """An identity of the memory of a node, or of an item (call node, index): equal where memory may be shared."""
        if not isinstance(tensor, fx.Node):
            tensor = self._keys.setdefault(tensor, tensor)
        elif tensor not in self._parents:
            self._place(tensor)
        parents = self._parents
        while (parent := parents.get(tensor, tensor)) is not tensor:
            parents[tensor] = tensor = parents.get(parent, parent)  # halving the way keeps all ways short
        return tensor

    def join(self, a: object, b: object) -> None:
        """Two tensors may be in one memory: what writes and sees one writes and sees the other."""
        a, b = self.memory(a), self.memory(b)
        if a is b:
            return
        self._parents[a] = b
        for index in (self._writers, self._touching):
            if a in index:
                index[b] = sorted({*index.pop(a), *index.get(b, ())})
        if a in self._seen:
            self._seen[b] = self._seen.pop(a) | self._seen.get(b, set())
        if a in self._items:
            self._items.setdefault(b, self._items.pop(a))

    def _place(self, node: fx.Node) -> None:
        self._parents[node] = node
        if self.is_item(node):
            self.join(node, (node.args[0], node.args[1]))
        elif node.op == "get_attr":
            self.join(node, ("attribute", node.target))
        call = self.calls.get(node)
        # Of several results, each has memory of its own.
        if node.op != "output" and (call is None or (call.form is Form.FUNCTIONAL and len(call.results) == 1)):
            recorded = [*tensors_in(value(node)), attribute(node), self.exported.given.get(node)]
            for storage in {StorageWeakRef(t.untyped_storage()) for t in recorded if has_storage(t)}:
                self.join(node, storage)
        if not self.is_item(node):
            for source in shared_by(node, call, self._effects.get(node), self.storages_tell):
                self.join(node, source)

    def is_item(self, node: fx.Node) -> bool:
        """Whether a node is one of the results of a call of ours."""
        call = self.calls.get(node.args[0]) if node.target is operator.getitem else None
        return call is not None and (call.form in (Form.AUTO_V1, Form.AUTO_V2) or len(call.results) > 1)

    # Writes

    def _written_by(self, node: fx.Node) -> list[fx.Node]:
        return written_by(node, self.calls.get(node), self._effects.get(node))

    def _indexed(self, node: fx.Node) -> Iterator[tuple[dict[object, list[fx.Node]], object]]:
        """The memories that a node writes, and those that it touches in any way, each with the index of such nodes."""
        for index, tensors in ((self._writers, self._written_by(node)), (self._touching, node.all_input_nodes)):
            for memory in {self.memory(tensor) for tensor in tensors}:
                yield index, memory

    def writers(self, tensor: object) -> list[fx.Node]:
        """All nodes that write the memory of a tensor, in order."""
        return self._writers.get(self.memory(tensor), [])

    def last_write(self, tensor: object, before: fx.Node) -> fx.Node | None:
        """The last node before another that writes the memory of a tensor."""
        writers = self.writers(tensor)
        index = bisect_left(writers, before)
        return writers[index - 1] if index else None

    def first_write(self, tensor: object, after: fx.Node, before: fx.Node | None = None) -> fx.Node | None:
        """The first node behind ``after`` (and before ``before``) that writes the memory of a tensor."""
        writers = self.writers(tensor)
        index = bisect_right(writers, after)
        return writers[index] if index < len(writers) and (before is None or writers[index] < before) else None

    def is_written(self, tensor: fx.Node, writer: fx.Node) -> str:
        """How a person would say what a writer of a tensor's memory does to the tensor."""
        written = [value(t) for t in self._written_by(writer) if self.memory(t) is self.memory(tensor)]
        if self.storages_tell and all(_are_apart(value(tensor), w) for w in written):
            return "is in a buffer of which another part is written"
        return "is written"

    def touching(self, tensor: object, after: fx.Node, until: fx.Node) -> list[fx.Node]:
        """The nodes behind ``after`` and no later than ``until`` that read, write or view the memory of a tensor."""
        nodes = self._touching.get(self.memory(tensor), [])
        return nodes[bisect_right(nodes, after) : bisect_right(nodes, until)]

    def last_touch(self, tensor: object, before: fx.Node) -> fx.Node | None:
        """The last node before another that reads, writes or views the memory of a tensor."""
        nodes = self._touching.get(self.memory(tensor), [])
        index = bisect_left(nodes, before)
        return nodes[index - 1] if index else None

    def share(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether two tensors may have an element in common."""
        return self.memory(a) is self.memory(b) and not (self.storages_tell and _are_apart(value(a), value(b)))

    def is_view(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether a node does nothing but look at the memory of a tensor, or what may be it."""
        if node.op not in ("call_function", "call_method") or _is_higher_order(node) or self._written_by(node):
            return False
        return self.memory(node) is self.memory(source)

    def is_fresh(self, call: Call, buffer: fx.Node) -> bool:
        """Whether a buffer is allocated for this call alone: nobody else writes it or has seen it before."""
        if buffer.target not in ALLOCATIONS or self.writers(buffer) != [call.node]:
            return False
        return not any(user < call.node for user in buffer.users)

    # Calls that come and go

    def forget(self, call: Call) -> None:
        """A call is about to be erased."""
        for index, memory in self._indexed(call.node):
            del index[memory][bisect_left(index[memory], call.node)]
        del self.calls[call.node]

    def learn(self, call: Call) -> None:
        """A call was added, with all its buffers."""
        self.calls[call.node] = call
        for index, memory in self._indexed(call.node):
            insort(index.setdefault(memory, []), call.node)

    def hand_over(self, item: fx.Node, call: Call, index: int) -> None:
        """Make the item of a call that is about to be erased that of another; what reads it stays as it is."""
        item.args = (call.node, index)
        self.join(item, (call.node, index))
        if call.form is Form.AUTO_V2:
            self._items[self.memory(item)] = item

    # Who sees a tensor outside of the graph

    def seen(self, tensor: object) -> set[object]:
        """The memories outside of the graph that a tensor is in or may be put into: of inputs, constants, and OUTPUT.

        Inductor writes a result straight into the input that it was given as a buffer for or is copied into, and leaves
        out copies that change nothing: so these count, and not only outputs.
        """
        return {OUTPUT if m is OUTPUT else self.memory(m) for m in self._seen.get(self.memory(tensor), ())}

    def _find_seen(self) -> None:
        for node in self.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._see(node, {self.memory(node)})
        built_in: dict[object, set] = {memory: set(seen) for memory, seen in self._seen.items()}
        items = []
        for node in self.graph.nodes:
            for memory, source in self._built_from(node):
                if found := built_in.get(self.memory(source)):
                    built_in.setdefault(memory, set()).update(found)
                    items.append(memory)
        for memory in items:
            self._see(memory, built_in[memory])
        for node in reversed(self.graph.nodes):
            if node.op == "output":
                for result, seen in self._outputs(node):
                    self._see(result, {seen})
            elif node.op.startswith("call"):
                name = base_name(node)
                target = next(iter(self._written_by(node)), None) if name in _COPIES_INTO else node
                if target is not None and (target is not node or name in _LEFT_OUT):
                    for source in node.all_input_nodes:
                        self._see(source, self._seen.get(self.memory(target), ()))

    def _outputs(self, node: fx.Node) -> Iterator[tuple[fx.Node, object]]:
        """The results of the graph, each with what it is seen in: of an exported program, some are copied into inputs."""
        updated = {} if self.nested else self.exported.updated
        for place, result in enumerate(node.args[0] if updated else node.all_input_nodes):
            if isinstance(result, fx.Node):
                yield result, self.memory(updated[place]) if place in updated else OUTPUT

    def _see(self, tensor: object, seen: "set[object] | tuple") -> None:
        if seen:
            self._seen.setdefault(self.memory(tensor), set()).update(seen)

    def _built_from(self, node: fx.Node) -> list[tuple[object, fx.Node]]:
        """Memories, and the tensors in whose memory Inductor may build them: only of int32, as metadata is."""
        call = self.calls.get(node)
        if call is not None and call.form in (Form.AUTO_V1, Form.AUTO_V2):
            buffers = ((index, call.buffer(index)) for index in call.items())
            return [(self.memory((node, index)), b) for index, b in buffers if isinstance(b, fx.Node)]
        if call is not None or node.op != "call_function" or node.target in ALLOCATIONS:
            return []
        recorded = value(node)
        if node.target in AUTO or recorded is None or torch.int32 in {t.dtype for t in tensors_in(recorded)}:
            return [(self.memory(node), source) for source in node.all_input_nodes]
        return []

    # Modules whose signatures are to stay

    def are_parted(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether a module whose signature is preserved holds one of two nodes and not the other."""
        return bool(self.exported.preserved) and self._preserved_around(a) != self._preserved_around(b)

    def _preserved_around(self, node: fx.Node) -> list[str]:
        paths = [entry[0] for entry in node.meta.get("nn_module_stack", {}).values()]
        return [path for path in paths if path.partition("@")[0] in self.exported.preserved]

    # Provenance

    def origin(self, tensor: object, user: fx.Node, ops: tuple[str, ...] = ROUTING) -> Origin | str:
        """The result of one of ``ops`` that a tensor is when ``user`` reads it, or the reason why that is not known."""
        if not isinstance(tensor, fx.Node):
            return "is not a tensor of the graph"
        node = tensor
        while True:
            found = self._result(node, user, ops) or self._written_buffer(node, user, ops)
            if found is not None:
                return found
            if reason := self._obstacle(node):
                return reason
            node = node.args[0]

    def _result(self, node: fx.Node, user: fx.Node, ops: tuple[str, ...]) -> Origin | str | None:
        """The origin of what is a result of a call, or in the form AUTO_V2 a view of its result."""
        item = node if self.is_item(node) else self._items.get(self.memory(node))
        call = self.calls.get(node if item is None else item.args[0])
        if call is None or (item is None and (call.op not in ops or len(call.results) > 1)):
            return None
        if call.op not in ops:
            return f"is a result of {call.op}"
        name = call.results[0] if item is None else call.result_at(item.args[1], value(node), whole=item is node)
        if name is None:
            return "is part of a larger buffer" if item is node else None
        if writer := self.first_write(node, call.node, user):
            return self._is_written_after(node, writer, ops)
        return Origin(call, name)

    def _written_buffer(self, node: fx.Node, user: fx.Node, ops: tuple[str, ...]) -> Origin | str | None:
        """The origin of a buffer that a raw call wrote last."""
        writer = self.last_write(node, user)
        if writer is None:
            return None
        if self._is_raw(writer, ops):
            call = self.calls[writer]
            return next((Origin(call, name) for name in call.written if self._is_buffer(call, name, node)), None)
        writers = self.writers(node)
        if any(self._is_raw(other, ops) for other in writers[: bisect_left(writers, user)]):
            return self._is_written_after(node, writer, ops)
        return None

    def _is_written_after(self, node: fx.Node, writer: fx.Node, ops: tuple[str, ...]) -> str:
        where = "the metadata call" if ops is ROUTING else "the shuffle"
        return f"{self.is_written(node, writer)} after {where}, by {name_of(writer)}"

    def _is_raw(self, node: fx.Node, ops: tuple[str, ...]) -> bool:
        call = self.calls.get(node)
        return call is not None and call.op in ops and call.form is Form.MUTATING

    def _is_buffer(self, call: Call, name: str, node: fx.Node) -> bool:
        """Whether a node is the buffer that a raw call was given for a result, by itself or as the same view of it."""
        buffer = call.argument(name)
        if not isinstance(buffer, fx.Node) or buffer is node:
            return buffer is node
        return self.storages_tell and same_place(value(buffer), value(node))

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

    # Higher-order ops

    def _effects_of(self, node: fx.Node) -> Effects:
        """Of a higher-order op: those of its subgraphs, and where it has none, all that may be."""
        modules = [m for a in node.all_input_nodes if (m := nested_module(a)) is not None]
        effects = [self._effects_inside(module) for module in modules]
        return Effects(not effects or any(e.writes for e in effects), not effects or any(e.shares for e in effects))

    def _effects_inside(self, module: fx.GraphModule) -> Effects:
        if module not in self._inner:
            inner = Tensors(module.graph, nested=True)
            inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
            memories = {inner.memory(node) for node in inputs}
            outputs = [result for node in module.graph.nodes if node.op == "output" for result in node.all_input_nodes]
            shares = any(inner.memory(result) in memories for result in outputs)
            self._inner[module] = Effects(any(inner.writers(node) for node in inputs), shares)
        return self._inner[module]


def _is_higher_order(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target not in AUTO


def _is_contiguous(node: fx.Node) -> bool:
    recorded = value(node)
    return isinstance(recorded, torch.Tensor) and recorded.is_contiguous()


def _are_apart(a: object, b: object) -> bool:
    """Whether two tensors are known to lie in different parts of one storage."""
    if not same_storage(a, b):
        return False
    numbers = [(t.storage_offset(), *t.shape, *t.stride()) for t in (a, b)]
    if not all(isinstance(n, int) for n in (*numbers[0], *numbers[1])) or not a.numel() or not b.numel():
        return False
    ends = [t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) for t in (a, b)]
    return ends[0] < b.storage_offset() or ends[1] < a.storage_offset()
