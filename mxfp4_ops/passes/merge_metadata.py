"""Rule 2: metadata calls with the same arguments are one call, for the permutation is deterministic."""

import operator

import torch
from torch import fx

from .calls import Call, Form, same_place, value
from .provenance import Tensors, name_of
from .report import RuleReport

NAME = "merge_metadata"
_INPUTS = ("topk_ids", "num_experts", "n", "k", "is_gated", "expert_map")
_ALLOCATIONS = {
    torch.empty, torch.zeros, torch.full, torch.empty_like, torch.zeros_like, "new_empty", "new_zeros",
    torch.ops.aten.empty.memory_format, torch.ops.aten.zeros.default, torch.ops.aten.full.default,
    torch.ops.aten.new_empty.default, torch.ops.aten.new_zeros.default, torch.ops.aten.empty_like.default,
}  # fmt: skip


def apply(tensors: Tensors, report: RuleReport) -> None:
    kept: dict[tuple, Call] = {}
    for call in list(tensors.metadata_calls):
        # bool and int are told apart, for True == 1.
        key = tuple((type(a), a) for a in map(call.argument, _INPUTS))
        first = kept.setdefault(key, call)
        if first is call:
            continue
        report.matched += 1
        its_own = _written_result(tensors, call)
        if reason := its_own or _reason_against(tensors, first, call):
            report.skip(call.node, reason)
            if not its_own:  # what follows may be equal to this one where it is not to the first
                kept[key] = call
            continue
        _merge(tensors, first, call)
        report.rewritten += 1


def _items(call: Call) -> list[fx.Node]:
    return [user for user in call.node.users if user.target is operator.getitem]


def _written_result(tensors: Tensors, call: Call) -> str | None:
    for item in _items(call):
        if writer := tensors.first_write(item, call.node):
            return f"a result is written later, by {name_of(writer)}"
    return None


def _reason_against(tensors: Tensors, first: Call, second: Call) -> str | None:
    for name in ("topk_ids", "expert_map"):
        tensor = first.argument(name)
        if isinstance(tensor, fx.Node) and (writer := tensors.first_write(tensor, first.node, second.node)):
            return f"{name} is written between the calls, by {name_of(writer)}"
    if reason := _written_result(tensors, first):
        return reason.replace("a result", "a result of the first call")
    if Form.MUTATING in (first.form, second.form):
        return _reason_against_raw(tensors, first, second)
    for item in _items(second):
        name = _result_name(second, item)
        if name is None:
            if item.users:
                return "a result is part of a larger buffer"
        elif tensors.is_output(item) and first.has_result(name) and tensors.is_output(first.result(name)):
            return f"{name} of both calls is a graph output"
    return None


def _reason_against_raw(tensors: Tensors, first: Call, second: Call) -> str | None:
    if first.form is not second.form:
        return "one call writes buffers and the other does not"
    for name in second.written:
        ours, theirs = first.argument(name), second.argument(name)
        if theirs is None:
            continue
        if ours is theirs:
            if writer := tensors.first_write(ours, first.node, second.node):
                return f"{name} is written between the calls, by {name_of(writer)}"
        elif not _is_fresh(tensors, second, theirs) or not (ours is None or _is_fresh(tensors, first, ours)):
            return f"the calls write different buffers, and {name} is more than a fresh one"
        elif ours is not None and not same_place(value(ours), value(theirs)):
            return f"{name} is laid out differently"
        elif ours is not None and tensors.is_output(ours) and tensors.is_output(theirs):
            return f"{name} of both calls is a graph output"
    return None


def _is_fresh(tensors: Tensors, call: Call, buffer: fx.Node) -> bool:
    """Whether a buffer is allocated in the graph for this call alone: nobody else writes it or has seen it before."""
    if buffer.target not in _ALLOCATIONS or tensors.writers(buffer) != [call.node]:
        return False
    return not any(user < call.node for user in buffer.users)


def _result_name(call: Call, item: fx.Node) -> str | None:
    return call.result_at(item.args[1], value(item))


def _merge(tensors: Tensors, first: Call, second: Call) -> None:
    graph = second.node.graph
    replacements = {}
    if second.form is Form.MUTATING:
        replacements = {
            buffer: first.result(name)
            for name in second.written
            if (buffer := second.argument(name)) is not None and buffer is not first.argument(name)
        }
    else:
        for item in _items(second):
            if item.users:
                replacements[item] = first.result(_result_name(second, item))
    inputs = second.node.all_input_nodes
    for old, new in replacements.items():
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not second.node)
    for item in _items(second):
        graph.erase_node(item)
    tensors.forget(second)
    graph.erase_node(second.node)
    for buffer in inputs:
        if buffer.target in _ALLOCATIONS and not buffer.users:
            graph.erase_node(buffer)
