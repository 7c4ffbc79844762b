"""Rule 2: metadata calls with equal arguments are one call, for the permutation is deterministic.

The first may be a moe_permute_mxfp4_quant, which gives metadata, too.

Not so where somebody could tell: by a write, by what is returned or lies in a buffer of the caller, or by a layout.
"""

import operator

import torch
from torch import fx

from .calls import (
    ALLOCATIONS,
    METADATA,
    Call,
    Form,
    record_anew,
    same_layout,
    same_place,
    same_storage,
    tensors_in,
    value,
)
from .effects import name_of
from .numbering import Numbers
from .provenance import OUTPUT, Tensors
from .report import RuleReport

NAME = "merge_metadata"
_INPUTS = ("topk_ids", "num_experts", "n", "is_gated", "expert_map")

# What takes the place of what: for an item or a buffer of the second call the name of a result of the first, or the
# index of an item that holds several.
Plan = dict[fx.Node, "str | int"]


def apply(tensors: Tensors, report: RuleReport) -> None:
    numbers = Numbers(tensors)
    kept: dict[tuple, Call] = {}
    for call in list(tensors.routing_calls):
        key = _key(numbers, call)
        first = kept.setdefault(key, call)
        if first is call or call.op != METADATA:
            continue
        report.matched += 1
        its_own = _written_result(tensors, call)
        found = its_own or _reason_against(tensors, numbers, first, call) or _plan(tensors, numbers, first, call)
        if isinstance(found, str):
            report.skip(call.node, found)
            if not its_own:  # what follows may be equal to this one where it is not to the first
                kept[key] = call
            continue
        _merge(tensors, first, call, found)
        report.rewritten += 1


def _key(numbers: Numbers, call: Call) -> tuple:
    """Equal for calls whose arguments are; a width that no number of the graph stands for is like no other."""
    k = call.hidden_size()
    return numbers.of(call if isinstance(k, torch.SymInt) else k), *(
        numbers.of(call.argument(name)) for name in _INPUTS
    )


def _written_result(tensors: Tensors, call: Call) -> str | None:
    for item in call.item_nodes():
        if writer := tensors.first_write(item, call.node):
            return f"a result {tensors.is_written(item, writer)} later, by {name_of(writer)}"
    return None


def _reason_against(tensors: Tensors, numbers: Numbers, first: Call, second: Call) -> str | None:
    if value(second.argument("topk_ids")) is None:
        return "the graph has no recorded values, which tell whose memory is whose"
    if tensors.are_parted(first.node, second.node):
        return "a module whose signature is preserved holds one of the calls and not the other"
    for name in ("topk_ids", "expert_map"):
        written = numbers.writer_between(first.argument(name), first.node, second.argument(name), second.node)
        if written is not None:
            return f"{name} {tensors.is_written(*written)} between the calls, by {name_of(written[1])}"
    if reason := _written_result(tensors, first):
        return reason.replace("a result", "a result of the first call")
    if any(user.target is not operator.getitem for user in second.node.users):
        return "its results are used as one"
    return None


def _plan(tensors: Tensors, numbers: Numbers, first: Call, second: Call) -> Plan | str:
    """What takes the place of the second call's results, or why nothing may."""
    plan = _plan_raw if Form.MUTATING in (first.form, second.form) else _plan_items
    return plan(tensors, numbers, first, second)


def _plan_items(tensors: Tensors, numbers: Numbers, first: Call, second: Call) -> Plan | str:
    plan, seen = {}, {}
    for item in second.item_nodes():
        if not item.users:
            continue
        index = item.args[1]
        name = second.result_at(index, value(item), whole=True)
        if name is not None:
            plan[item], place, recorded, label = name, first.index(name), first.recorded(name), name
        else:
            place = _same_buffer(numbers, first, second, index)
            if place is None:
                return "a result is part of a larger buffer"
            plan[item], recorded, label = place, first.recorded_item(place), "the buffer of several results"
        if not same_layout(value(item), recorded):
            return f"{label} is laid out differently"
        if place is not None:
            memory = tensors.memory((first.node, place))
            ours = seen.setdefault(memory, tensors.seen(memory))
            if _are_told_apart(ours, theirs := tensors.seen(item)):
                return f"{label} of both calls is seen outside of the graph"
            ours |= theirs
    return plan


def _are_told_apart(ours: set, theirs: set) -> bool:
    """Whether outside of the graph two tensors would show that they are one: by several names for one memory.

    What both calls write into the same input is one already.
    """
    return bool(ours) and bool(theirs) and (len(ours | theirs) > 1 or OUTPUT in ours)


def _same_buffer(numbers: Numbers, first: Call, second: Call, index: int) -> int | None:
    """Which item of the first call is the same buffer with the same views of it written, all else in it equal, too."""
    names = second.results_at(index)
    if not names or Form.AUTO_V2 not in (first.form, second.form) or first.form is not second.form:
        return None
    place = first.index(names[0])
    for name in names:
        if first.index(name) != place or first.view_arguments(name) != second.view_arguments(name):
            return None
    if place is None or first.results_at(place) != names:
        return None
    ours, theirs = first.buffer(place), second.buffer(index)
    if theirs.target is operator.getitem and theirs.args == (first.node, place):
        return place
    return place if numbers.are_same(ours, first.node, theirs, second.node) else None


def _plan_raw(tensors: Tensors, numbers: Numbers, first: Call, second: Call) -> Plan | str:
    if {first.form, second.form} & {Form.AUTO_V1, Form.AUTO_V2}:
        return "one call writes buffers and the other does not"
    plan = {}
    for theirs, name in _raw_results(second):
        ours = first.argument(name) if first.form is Form.MUTATING else None
        if ours is theirs or (ours is not None and tensors.storages_tell and same_place(value(ours), value(theirs))):
            if writer := tensors.first_write(ours, first.node, second.node):
                return f"{name} {tensors.is_written(ours, writer)} between the calls, by {name_of(writer)}"
            continue
        buffers = [(first, ours), (second, theirs if second.form is Form.MUTATING else None)]
        if any(buffer is not None and not tensors.is_fresh(call, buffer) for call, buffer in buffers):
            return f"the calls write different buffers, and {name} is more than a fresh one"
        if not same_layout(value(theirs), first.recorded(name)):
            return f"{name} is laid out differently"
        place = ours if first.form is Form.MUTATING else (first.node, first.index(name))
        if place is not None and _are_told_apart(tensors.seen(place), tensors.seen(theirs)):
            return f"{name} of both calls is seen outside of the graph"
        plan[theirs] = name
    return plan


def _raw_results(call: Call) -> list[tuple[fx.Node, str]]:
    """The buffers of a raw call, or of a functional one the items in use, each with the name of the result in it."""
    if call.form is Form.MUTATING:
        return [(call.argument(name), name) for name in call.written if call.has_result(name)]
    return [(item, call.results[item.args[1]]) for item in call.item_nodes() if item.users]


def _record_views(old: object, users: list[fx.Node]) -> None:
    """Give views of what is gone values in the storage of what took its place, for storages say whose memory is whose."""
    pending = [user for user in users if user.op.startswith("call")]
    while pending:
        node = pending.pop()
        if any(same_storage(old, recorded) for recorded in tensors_in(value(node))):
            record_anew(node)
            pending += [user for user in node.users if user.op.startswith("call")]


def _merge(tensors: Tensors, first: Call, second: Call, plan: Plan) -> None:
    graph = second.node.graph
    inputs = second.node.all_input_nodes
    for old, what in plan.items():
        new = first.result(what) if isinstance(what, str) else first.item(what)
        views = [user for user in old.users if user is not second.node]
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user is not second.node)
        tensors.join(old, new)
        _record_views(value(old), views)
    for item in second.item_nodes():
        graph.erase_node(item)
    tensors.forget(second)
    graph.erase_node(second.node)
    for buffer in inputs:
        if buffer.target in ALLOCATIONS and not buffer.users:
            graph.erase_node(buffer)
