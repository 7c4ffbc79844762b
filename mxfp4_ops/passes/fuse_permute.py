"""Rule 3: a shuffle by metadata that only a quant reads, and that quant, become moe_permute_mxfp4_quant.

It computes the metadata anew, which costs less than the rows that are then never in memory. Where all that reads the
metadata can stand behind it, the metadata call goes, too: what reads that reads the fused call's results. The fused
call has the form of the quant, for of the two kinds of overload only one leaves the padding of scales as it was.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import fx

from .calls import (
    ALLOCATIONS,
    FUSED,
    METADATA,
    QUANT,
    SHUFFLE,
    Call,
    Form,
    same_layout,
    same_number,
    set_value,
    tensors_in,
    value,
)
from .effects import name_of
from .provenance import Tensors
from .report import RuleReport
from .sorted_ids import metadata_call

NAME = "fuse_permute"
_ROUTING = ("topk_ids", "num_experts", "n", "is_gated", "expert_map")
_METADATA = (
    "expert_offsets", "blockscale_offsets", "problem_sizes1", "problem_sizes2", "input_permutation",
    "output_permutation", "sorted_expert_ids",
)  # fmt: skip
_OPTIONAL = ("blockscale_offsets", "sorted_expert_ids")


@dataclass(frozen=True)
class Fusion:
    """The calls that are to be one, and the nodes that hold or view the shuffled rows."""

    metadata: Call
    shuffle: Call
    quant: Call
    rows: list[fx.Node]

    @property
    def hidden_states(self) -> fx.Node:
        return self.shuffle.argument("input")

    @property
    def reads(self) -> dict[str, fx.Node]:
        """The tensors that the fused call reads."""
        given = {name: self.metadata.argument(name) for name in ("topk_ids", "expert_map")}
        return {"hidden_states": self.hidden_states, **{k: v for k, v in given.items() if v is not None}}


def apply(tensors: Tensors, report: RuleReport) -> None:
    calls = tensors.calls.values()
    shuffled = {tensors.memory(_rows_of(call)) for call in calls if call.op == SHUFFLE}
    candidates = [c for c in calls if c.op == QUANT and tensors.memory(c.argument("input")) in shuffled]
    report.matched += len(candidates)
    staying: set[Call] = set()  # looked at once: a metadata call may have as many readers as the graph has nodes
    refused = _fuse_all(tensors, candidates, staying)
    # A shuffle that is gone no longer overwrites the rows of one before it, so that the last may make way for all.
    while refused:
        again = _fuse_all(tensors, reversed(refused), staying)
        if len(again) == len(refused):
            break
        refused = again
    report.rewritten += len(candidates) - len(refused)
    for quant in [c for c in candidates if c in refused]:
        report.skip(quant.node, refused[quant])


def _fuse_all(tensors: Tensors, quants: Iterable[Call], staying: set[Call]) -> dict[Call, str]:
    """Fuse what may be fused; returns the rest with reasons."""
    refused = {}
    for quant in quants:
        fusion = _fusion(tensors, quant)
        if isinstance(fusion, str):
            refused[quant] = fusion
            continue
        place = None if fusion.metadata in staying else _place(tensors, fusion)
        if place is None:
            staying.add(fusion.metadata)
        _fuse(tensors, fusion, place)
    return refused


def _rows_of(shuffle: Call) -> object:
    """What has the memory of the shuffled rows."""
    if shuffle.form is Form.FUNCTIONAL:
        return shuffle.node
    return shuffle.argument("output") if shuffle.form is Form.MUTATING else (shuffle.node, shuffle.index("output"))


def _buffers(call: Call) -> list[fx.Node]:
    """The buffers that a call is given."""
    if call.form is Form.FUNCTIONAL:
        return []
    if call.form is Form.MUTATING:
        return [call.argument(name) for name in call.written if call.has_result(name)]
    return [buffer for index in call.items() if (buffer := call.buffer(index)) is not None]


# Whether to fuse -------------------------------------------------------------------------------------------------------


def _fusion(tensors: Tensors, quant: Call) -> Fusion | str:
    """What the quant may be fused with, or why it may not be."""
    origin = tensors.origin(quant.argument("input"), quant.node, (SHUFFLE,))
    if isinstance(origin, str):
        return f"input {origin}"
    shuffle = origin.call
    needed = [(shuffle, "dst2src_map", "input_permutation")]
    if quant.argument("sorted_expert_ids") is not None:
        needed.append((quant, "sorted_expert_ids", "sorted_expert_ids"))
    metadata = metadata_call(tensors, quant, *needed)
    if isinstance(metadata, str):
        return metadata
    rows = _rows(tensors, shuffle, quant)
    if isinstance(rows, str):
        return rows
    fusion = Fusion(metadata, shuffle, quant, rows)
    return _reason_against_values(fusion) or _reason_against_memory(tensors, fusion) or fusion


def _rows(tensors: Tensors, shuffle: Call, quant: Call) -> list[fx.Node] | str:
    """The nodes that hold or view the shuffled rows, or who else reads these."""
    pending = [shuffle.node] if shuffle.form is Form.FUNCTIONAL else shuffle.item_nodes()
    if shuffle.form is Form.MUTATING:
        pending = [shuffle.argument("output")]
        if not tensors.is_fresh(shuffle, pending[0]):
            return "its rows are in a buffer that is more than a fresh one"
    found = []
    while pending:
        found.append(node := pending.pop())
        for user in node.users:
            if user not in (shuffle.node, quant.node):
                if not tensors.is_view(user, node):
                    return f"its rows are read by {name_of(user)}, too"
                pending.append(user)
    return found


def _reason_against_values(fusion: Fusion) -> str | None:
    metadata, quant = fusion.metadata, fusion.quant
    recorded = [value(tensor) for tensor in (*fusion.reads.values(), quant.argument("input"))]
    if any(not isinstance(r, torch.Tensor) for r in recorded) or (
        quant.form is not Form.MUTATING and value(quant.node) is None
    ):
        return "the graph has no recorded values, which tell whose memory is whose"
    hidden_states, ids, rows = recorded[0], recorded[1], recorded[-1]
    if hidden_states.dtype not in (torch.bfloat16, torch.float16) or hidden_states.dim() != 2:
        return f"hidden_states is {hidden_states.dtype} with {hidden_states.dim()} dimensions"
    if hidden_states.requires_grad:
        return "hidden_states requires grad"
    if not same_number(hidden_states.shape[0], ids.shape[0]):
        return f"hidden_states has {hidden_states.shape[0]} rows, topk_ids {ids.shape[0]}"
    if not same_number(hidden_states.shape[1], k := metadata.hidden_size()):
        return f"hidden_states has {hidden_states.shape[1]} columns, k of the metadata call is {k}"
    if not same_number(rows.shape[0], ids.shape[0] * ids.shape[1]) or not same_number(rows.shape[1], k):
        return f"its input {list(rows.shape)} is not the shuffled rows as they are"
    return None


def _reason_against_memory(tensors: Tensors, fusion: Fusion) -> str | None:
    metadata, shuffle, quant = fusion.metadata, fusion.shuffle, fusion.quant
    if tensors.are_parted(quant.node, shuffle.node):
        return "a module whose signature is preserved holds one of it and the shuffle and not the other"
    for name, tensor in fusion.reads.items():
        reader, where = (shuffle, "the shuffle") if name == "hidden_states" else (metadata, "the metadata call")
        writer = tensors.last_write(tensor, quant.node)
        if writer is not None and not writer < reader.node:
            return f"{name} {tensors.is_written(tensor, writer)} after {where}, by {name_of(writer)}"
        if any(tensors.share(buffer, tensor) for buffer in _buffers(quant)):
            return f"{name} is in the memory of a buffer that it writes"
    return None


# Whether the metadata call goes ----------------------------------------------------------------------------------------


def _place(tensors: Tensors, fusion: Fusion) -> fx.Node | None:
    """The node right behind which the fused call can stand for the metadata call, too; None where that has to stay."""
    metadata, shuffle, quant = fusion.metadata, fusion.shuffle, fusion.quant
    if metadata.op != METADATA or not _can_take_over(tensors, fusion):
        return None
    ours, theirs, hidden_states = _buffers(quant), _buffers(metadata), fusion.hidden_states
    before = [metadata.node, hidden_states, tensors.last_write(hidden_states, shuffle.node)]
    before += [tensors.last_touch(buffer, quant.node) for buffer in ours]
    before += [node for buffer in ours for node in (buffer.all_input_nodes if _can_move(buffer) else [buffer])]
    place = max(node for node in before if node is not None)
    if tensors.are_parted(place, metadata.node):
        return None
    items = metadata.item_nodes()
    readers = [user for item in items for user in item.users]
    if metadata.form is quant.form:
        readers += [node for buffer in theirs for node in tensors.touching(buffer, metadata.node, place)]
    elif metadata.form is Form.MUTATING:
        readers += [user for buffer in theirs for user in buffer.users if user is not metadata.node]
    if any(not place < reader for reader in readers if reader is not shuffle.node) or not {*items}.isdisjoint(ours):
        return None
    return place


def _can_move(buffer: fx.Node) -> bool:
    """Whether a buffer may as well be allocated earlier, where its sizes are known."""
    return buffer.target in ALLOCATIONS and not any(tensors_in(value(node)) for node in buffer.all_input_nodes)


def _can_take_over(tensors: Tensors, fusion: Fusion) -> bool:
    """Whether a fused call in the form of the quant can give what the metadata call gives, where that is to be."""
    metadata, quant = fusion.metadata, fusion.quant
    items, buffers = metadata.item_nodes(), _buffers(metadata)
    if len(items) < len(metadata.node.users) or (metadata.form is not Form.MUTATING and value(metadata.node) is None):
        return False
    if metadata.form is quant.form:
        others = (fusion.hidden_states, *_buffers(quant))
        return not any(tensors.share(buffer, other) for buffer in buffers for other in others)
    if Form.MUTATING in (metadata.form, quant.form) and tensors.exported.preserved:
        return False  # results get other names, by which the signatures know them
    if metadata.form is Form.FUNCTIONAL:
        return True
    if quant.form is not Form.FUNCTIONAL:
        return False
    if metadata.form is Form.MUTATING:
        return all(tensors.is_fresh(metadata, buffer) for buffer in buffers) and all(
            same_layout(metadata.recorded(name), metadata.fresh(name)) for name in _METADATA
        )
    used = [item for item in items if item.users]
    names = [metadata.result_at(item.args[1], value(item), whole=True) for item in used]
    return all(buffer.target in ALLOCATIONS for buffer in buffers) and all(
        name is not None and same_layout(value(item), metadata.fresh(name))
        for item, name in zip(used, names, strict=True)
    )


# Fusing ----------------------------------------------------------------------------------------------------------------


def _fuse(tensors: Tensors, fusion: Fusion, place: fx.Node | None) -> None:
    """Make the fused call: behind ``place`` and for the metadata call, too, or in the place of the quant."""
    metadata, shuffle, quant = fusion.metadata, fusion.shuffle, fusion.quant
    graph = quant.node.graph
    gone = [quant, shuffle] if place is None else [quant, shuffle, metadata]
    for call in gone:
        tensors.forget(call)
    given = {name: (metadata.argument(name), metadata.eager(name)) for name in _ROUTING}
    given["hidden_states"] = fusion.hidden_states, shuffle.eager("input")
    with graph.inserting_before(quant.node) if place is None else graph.inserting_after(place):
        fused = Call.add(FUSED, quant, given)
    if place is not None:
        moved = [buffer for buffer in _buffers(quant) if fused.node < buffer]
        for buffer in dict.fromkeys(moved):
            fused.node.prepend(buffer)
        for node in (fused.node, *moved):
            _stand_with(node, place)
    _give_results(fused, fusion, place is not None)
    tensors.learn(fused)
    if place is not None:
        _take_items(tensors, fused, metadata, 0)
        _take_buffers_of_raw_call(tensors, fused, metadata)
    _take_items(tensors, fused, quant, len(_bases(fused)) - len(_bases(quant)))

    inputs = [node for call in gone for node in call.node.all_input_nodes]
    for node in sorted({*fusion.rows, *(call.node for call in gone)}, reverse=True):
        if node.target not in ALLOCATIONS:
            graph.erase_node(node)
    for buffer in dict.fromkeys(inputs):
        if buffer.target in ALLOCATIONS and not buffer.users:
            graph.erase_node(buffer)


def _stand_with(node: fx.Node, neighbour: fx.Node) -> None:
    """What stands together is of one module."""
    if "nn_module_stack" in neighbour.meta:
        node.meta["nn_module_stack"] = neighbour.meta["nn_module_stack"]


def _bases(call: Call) -> list[fx.Node]:
    return call.node.kwargs.get("_all_bases", [])


def _give_results(fused: Call, fusion: Fusion, whole: bool) -> None:
    """Give the fused call its buffers, and a value made of what was recorded; ``whole``: the metadata call goes."""
    metadata, quant = fusion.metadata, fusion.quant
    recorded = {name: metadata.recorded(name) if whole else fused.fresh(name) for name in _METADATA}
    if fused.form is Form.FUNCTIONAL:
        recorded |= {name: quant.recorded(name) for name in quant.results}
        set_value(fused.node, tuple(recorded[name] for name in fused.results), quant.node)
        return
    if whole and metadata.form is fused.form:
        fused.take_buffers(metadata)
    else:
        used = {metadata.results[item.args[1]] for item in metadata.item_nodes() if item.users} if whole else set()
        for name in _METADATA:
            if name in used or name not in _OPTIONAL:
                fused.add_buffer(name, recorded[name])
    fused.take_buffers(quant)


def _take_items(tensors: Tensors, fused: Call, call: Call, shift: int) -> None:
    """Let what reads the items of a call read those of the fused one; ``shift`` is from its bases to the fused call's."""
    for item in reversed(call.item_nodes()):
        index = item.args[1]
        name = call.result_at(index, value(item), whole=True) if item.users else None
        if not item.users or fused.form is Form.MUTATING:
            if item.users:
                _replace(tensors, item, fused.argument(name))
            item.graph.erase_node(item)
            continue
        index = index + shift if call.form is Form.AUTO_V2 is fused.form else fused.index(name)
        tensors.hand_over(item, fused, index)
        if item < fused.node:
            fused.node.append(item)
            _stand_with(item, fused.node)


def _take_buffers_of_raw_call(tensors: Tensors, fused: Call, metadata: Call) -> None:
    """Let what reads the buffers of a raw call read the results of a functional one."""
    if metadata.form is not Form.MUTATING or fused.form is not Form.FUNCTIONAL:
        return
    for name in metadata.written:
        if metadata.has_result(name):
            _replace(tensors, metadata.argument(name), fused.result(name), but=metadata.node)


def _replace(tensors: Tensors, old: fx.Node, new: fx.Node, but: fx.Node | None = None) -> None:
    old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not but)
    tensors.join(old, new)
