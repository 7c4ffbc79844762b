"""Rule 1: a quant that searches the offsets takes the sorted_expert_ids of the metadata call that made them."""

from .calls import QUANTS, Call, same_number, value
from .effects import name_of
from .provenance import Tensors
from .report import RuleReport

NAME = "sorted_expert_ids"


def apply(tensors: Tensors, report: RuleReport) -> None:
    for quant in [call for call in tensors.calls.values() if call.op in QUANTS]:
        report.matched += 1
        found = _source_of_ids(tensors, quant)
        if isinstance(found, str):
            report.skip(quant.node, found)
        else:
            quant.set_argument("sorted_expert_ids", found.result("sorted_expert_ids"))
            report.rewritten += 1


def _source_of_ids(tensors: Tensors, quant: Call) -> Call | str:
    """The metadata call whose ids the quant may take, or why it may take none."""
    if quant.argument("sorted_expert_ids") is not None:
        return "has sorted_expert_ids already"
    found = metadata_call(tensors, quant)
    return found if isinstance(found, str) else _reason_against(tensors, quant, found) or found


def metadata_call(tensors: Tensors, quant: Call, *more: tuple[Call, str, str]) -> Call | str:
    """The one call that gives the offsets of a quant, or why there is none.

    ``more`` has other arguments that are to be its results: the call that takes one, the parameter, and the result.
    """
    found = None
    offsets = [(quant, name, name) for name in ("expert_offsets", "blockscale_offsets")]
    for user, parameter, result in (*offsets, *more):
        origin = tensors.origin(user.argument(parameter), user.node)
        if isinstance(origin, str):
            return f"{parameter} {origin}"
        if origin.result != result:
            return f"{parameter} is the metadata call's {origin.result}"
        if found not in (None, origin.call):
            return f"expert_offsets and {parameter} come from two metadata calls"
        found = origin.call
    if tensors.are_parted(quant.node, found.node):
        return "a module whose signature is preserved holds one of it and the metadata call and not the other"
    theirs, ours = quant.argument("n_experts"), found.argument("num_experts")
    return found if same_number(theirs, ours) else f"n_experts is {theirs}, num_experts of the metadata call {ours}"


def _reason_against(tensors: Tensors, quant: Call, call: Call) -> str | None:
    rows, ids = value(quant.argument("input")), value(call.argument("topk_ids"))
    if rows is None or ids is None or not same_number(rows.shape[0], ids.shape[0] * ids.shape[1]):
        shapes = [None if t is None else list(t.shape) for t in (rows, ids)]
        return f"its rows are not known to be those of topk_ids (input {shapes[0]}, topk_ids {shapes[1]})"
    if call.has_result("sorted_expert_ids"):
        sorted_ids = call.result("sorted_expert_ids")
        if writer := tensors.first_write(sorted_ids, call.node, quant.node):
            how = tensors.is_written(sorted_ids, writer)
            return f"sorted_expert_ids {how} after the metadata call, by {name_of(writer)}"
    return None
