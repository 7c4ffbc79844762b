"""The passes where memory is shared: views, writes in place, buffers of the caller, and results that leave the graph."""

import io
import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from moe_graphs import (
    TOPK,
    Compiled,
    E,
    K,
    N,
    counts,
    inputs,
    metadata_buffers,
    ops,
    reasons,
    same_bytes,
    write_metadata,
)
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import mxfp4_ops
from mxfp4_ops import passes
from mxfp4_ops.compat import vllm
from mxfp4_ops.passes.effects import written_by

FORMS = ("dynamo", "auto_v1", "auto_v2")
SEEN = "of both calls is seen outside of the graph"

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch about itself, in export


def data_of(topk_ids: Tensor) -> mxfp4_ops.MoEMetadata:
    return mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K)


def quant(x: Tensor, permutation: Tensor, offsets: Tensor, scale_offsets: Tensor) -> list[Tensor]:
    return vllm.mxfp4_experts_quant(vllm.shuffle_rows(x, permutation), offsets, scale_offsets, E, TOPK)


def quant_by(x: Tensor, data: mxfp4_ops.MoEMetadata) -> list[Tensor]:
    return quant(x, data.input_permutation, data.expert_offsets, data.blockscale_offsets)


def quant_in(x: Tensor, buffers: list[Tensor]) -> list[Tensor]:
    return quant(x, buffers[4], buffers[0], buffers[1])


def as_eager(made: Callable, function: Callable, *args: Tensor) -> bool:
    """Whether two functions return the same and leave the same in their arguments, again when they are called again.

    In between the caller writes into what was returned, so that memory that results share shows, too.
    """
    seen = []
    for f in (made, function):
        copies = [a.clone() for a in args]
        first = f(*copies)
        kept = [t.clone() for t in first]
        for result in first:
            result.add_(1)
        seen.append([kept, f(*copies), first, copies])
    return same_bytes(*seen)


class Module(torch.nn.Module):
    def __init__(self, function: Callable) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> object:
        return self.function(*args)


def loaded(module: torch.nn.Module, *args: Tensor) -> torch.export.ExportedProgram:
    file = io.BytesIO()
    torch.export.save(torch.export.export(module, args), file)
    file.seek(0)
    return torch.export.load(file)


def saved(function: Callable, *args: Tensor) -> torch.export.ExportedProgram:
    return loaded(Module(function), *args)


# Writes ---------------------------------------------------------------------------------------------------------------


def between(write: Callable) -> Callable:
    """A program that does something with the ids between two calls on them."""

    def model(x: Tensor, topk_ids: Tensor) -> list[Tensor]:
        first = data_of(topk_ids).expert_offsets + 0
        write(topk_ids)
        return [first, *quant_by(x, data_of(topk_ids))]

    return model


IN_PLACE = {
    "inplace=True": lambda t: F.relu(t, inplace=True),
    "inplace by position": lambda t: F.relu(t, True),
    "hardtanh": lambda t: F.hardtanh(t, 0, 1, inplace=True),
    "relu6 by position": lambda t: F.relu6(t, True),
    "threshold by position": lambda t: F.threshold(t, 1, 0, True),
    "module": lambda t: torch.nn.ReLU(inplace=True)(t),
    "foreach": lambda t: torch._foreach_add_([t], 1),
    "foreach copy": lambda t: torch._foreach_copy_([t], [t + 1]),
    "underscore": lambda t: torch.relu_(t),
    "method of the class": lambda t: torch.Tensor.fill_(t, 1),
    "by keyword": lambda t: torch.nn.init.zeros_(tensor=t),
    "out": lambda t: torch.add(t, 1, out=t),
    "setitem": lambda t: t.__setitem__(0, 1),
    "augmented": lambda t: operator.iadd(t, 1),
}


@pytest.mark.parametrize("write", IN_PLACE)
def test_functions_that_write_in_place(write: str) -> None:
    model, args = between(IN_PLACE[write]), inputs()
    compiled = Compiled(model, "dynamo")
    assert as_eager(compiled, model, *args)
    both = dict.fromkeys(("sorted_expert_ids", "fuse_permute"), (1, 1, 0))
    assert counts(compiled.report) == {"merge_metadata": (1, 0, 1), **both}
    [reason] = reasons(compiled.report, "merge_metadata")
    assert reason.startswith("topk_ids is written between the calls, by ")


@pytest.mark.parametrize("flag", [(False,), ()])
def test_functions_that_could_write_in_place_and_do_not(flag: tuple) -> None:
    model = between(lambda t: F.relu(t, *flag))
    compiled = Compiled(model, "dynamo")
    assert as_eager(compiled, model, *inputs())
    assert counts(compiled.report)["merge_metadata"] == (1, 1, 0)


def test_functions_of_others_may_write_all() -> None:
    """As torch.fx leaves them in a graph; torch's own functions say in their names or parameters that they write."""
    graph = fx.Graph()
    tensor = graph.placeholder("tensor")
    for function in (metadata_buffers, setattr, torch._foreach_zero_, torch.relu_, torch.Tensor.__setitem__):
        assert written_by(graph.call_function(function, (tensor,)), None, None) == [tensor]
    for function in (torch.relu, F.relu, operator.add, len, torch.Tensor.add):
        assert written_by(graph.call_function(function, (tensor,)), None, None) == []


# Views ----------------------------------------------------------------------------------------------------------------


def in_a_region(t: Tensor) -> Tensor:
    with torch.no_grad():
        return t.view(-1)


VIEWS = {
    "split": lambda t: t.split(1)[0],
    "unbind": lambda t: t.unbind(0)[1],
    "chunk": lambda t: torch.chunk(t, 2)[1],
    "tensor_split": lambda t: t.tensor_split(2)[0],
    "hsplit": lambda t: torch.hsplit(t, [1])[0],
    "unsafe_split": lambda t: t.unsafe_split(1)[0],
    "item of an item": lambda t: t.split(2)[0].unbind(0)[1],
    "select": lambda t: t[1],
    "transpose": lambda t: t.movedim(0, -1),
    "reshape": lambda t: t.reshape(-1),
    "flatten": lambda t: torch.flatten(t),
    "type_as": lambda t: t.type_as(t.detach()),
    "einsum": lambda t: torch.einsum("...i->i...", t),
    "region": in_a_region,
}


def offsets_touched(view: Callable) -> Callable:
    def model(x: Tensor, topk_ids: Tensor) -> list[Tensor]:
        data = data_of(topk_ids)
        view(data.expert_offsets).add_(0)
        return quant_by(x, data)

    return model


@pytest.mark.parametrize("how", ["real", "saved"])
@pytest.mark.parametrize("view", VIEWS)
def test_views_whose_storages_are_not_recorded(view: str, how: str) -> None:
    """Values of a graph traced without fake tensors, or that was saved, have storages of their own."""
    args = inputs()
    for model in (between(lambda t: VIEWS[view](t).fill_(1)), offsets_touched(VIEWS[view])):
        program = saved(model, *args) if how == "saved" else make_fx(model)(*(a.clone() for a in args))
        report = passes.rewrite(program)
        assert as_eager(program if how == "real" else program.module(), model, *args)
        # A graph that goes on with what the write returned holds no two calls on the same ids.
        assert report.rules["merge_metadata"].rewritten == 0
        skipped = [skipped.reason for rule in report.rules.values() for skipped in rule.skipped]
        assert all(
            r.startswith(("topk_ids is written between the calls", "expert_offsets is written")) for r in skipped
        )
        assert skipped or view == "type_as"


def test_parts_of_one_buffer_are_told_apart_without_storages() -> None:
    """Without fake tensors the offset in a storage is not recorded, either."""

    def model(x: Tensor, topk_ids: Tensor) -> list[Tensor]:
        both = torch.empty(2 * (E + 1), dtype=torch.int32)
        buffers = write_metadata(topk_ids, [both[: E + 1], both[E + 1 :], *metadata_buffers(topk_ids)[2:]])
        return quant(x, buffers[4], both[: E + 1], both[E + 1 :])

    args = inputs()
    for mode, count in (("real", (1, 0, 1)), ("fake", (1, 1, 0))):
        module = make_fx(model, tracing_mode=mode)(*args)
        assert counts(passes.rewrite(module))["sorted_expert_ids"] == count
        assert same_bytes(module(*args), model(*args))


def test_graphs_without_values_are_not_merged() -> None:
    def model(x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        first = ops.get_cutlass_moe_mm_data(topk_ids, E, N, K)[0]
        topk_ids.T.fill_(1)
        return first, ops.get_cutlass_moe_mm_data(topk_ids, E, N, K)[0]

    module = fx.symbolic_trace(model)
    assert reasons(passes.rewrite(module), "merge_metadata") == [
        "the graph has no recorded values, which tell whose memory is whose"
    ]
    assert as_eager(module, model, *inputs())


def dynamo_graph(model: Callable, *args: Tensor) -> fx.GraphModule:
    graphs = []

    def backend(module: fx.GraphModule, _: list) -> Callable:
        graphs.append(module)
        return module.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True)(*args)
    return graphs[0]


@pytest.mark.parametrize("view", [v for v in VIEWS if v != "region"])
def test_what_is_not_recorded_may_share_memory(view: str) -> None:
    args = inputs()
    module = dynamo_graph(between(lambda t: VIEWS[view](t).fill_(1)), *(a.clone() for a in args))
    for node in module.graph.nodes:
        if "fill" not in node.name and not node.name.startswith(("l_", "get_cutlass", "mxfp4", "shuffle")):
            node.meta.clear()
    assert reasons(passes.rewrite(module), "merge_metadata") == ["topk_ids is written between the calls, by fill_"]


def test_attributes_share_memory() -> None:
    class Ids(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("ids", inputs()[1])
            self.register_buffer("part", self.ids[:2])

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return x

    graph = fx.Graph()
    graph.placeholder("x")
    call = (ops.get_cutlass_moe_mm_data.default, (E, N, K))
    results = []
    for _ in range(2):
        ids = graph.get_attr("ids")
        ids.meta["val"] = inputs()[1]
        results.append(graph.call_function(operator.getitem, (graph.call_function(call[0], (ids, *call[1])), 0)))
        graph.call_method("fill_", (graph.get_attr("part"), 1))
    graph.output(results)
    module = fx.GraphModule(Ids(), graph)
    assert reasons(passes.rewrite(module), "merge_metadata") == ["topk_ids is written between the calls, by fill_"]


class KeepsIds(torch.nn.Module):
    """Two buffers, or of what is not registered constants, which may share memory."""

    def __init__(self, part: Callable, persistent: "tuple[bool | None, bool | None]") -> None:
        super().__init__()
        topk_ids = torch.tensor([[0, 1], [2, 3], [1, 0]])
        for name, tensor, kept in zip(("ids", "part"), (topk_ids, part(topk_ids)), persistent, strict=True):
            if kept is None:
                setattr(self, name, tensor)
            else:
                self.register_buffer(name, tensor, persistent=kept)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = data_of(self.ids).expert_offsets + 0
        self.part.mul_(x)
        return first, data_of(self.ids).expert_offsets + 0


@pytest.mark.parametrize("persistent", [(True, True), (False, False), (None, None)], ids=["kept", "not", "constant"])
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize(
    "part", [lambda t: t[1:], lambda t: t.detach(), lambda t: t.view(-1)], ids=["part", "same", "flat"]
)
def test_buffers_of_loaded_programs_share_memory(part: Callable, shares: bool, persistent: tuple) -> None:
    """A loaded program shows that in its tensors, and not in its graph."""
    module, x = KeepsIds(part if shares else lambda t: part(t).clone(), persistent), torch.tensor(0)
    program, unlifted = loaded(module, x), loaded(module, x).module()
    results = module(x)
    assert torch.equal(*results) != shares
    for made in (program, unlifted):
        report = passes.rewrite(made)
        assert reasons(report, "merge_metadata") == ["topk_ids is written between the calls, by mul_.Tensor"] * shares
        assert same_bytes(made(x) if made is unlifted else made.module()(x), results)


@pytest.mark.parametrize("persistent", [(True, False), (True, None)], ids=["not", "constant"])
def test_torch_may_part_buffers_in_loading(persistent: tuple) -> None:
    """What the state dict has and what it has not are saved apart, and torch 2.13 loads them as two tensors."""
    module, x = KeepsIds(lambda t: t.detach(), persistent), torch.tensor(0)
    program, untouched = loaded(module, x), loaded(module, x)
    passes.rewrite(program)
    assert same_bytes(program.module()(x), untouched.module()(x))


# What is seen outside of the graph ------------------------------------------------------------------------------------


def static_then_returned(x, topk_ids, *buffers):
    write_metadata(topk_ids, list(buffers))
    return [data_of(topk_ids).expert_offsets, *quant_by(x, data_of(topk_ids))]


def static_written_then_returned(x, topk_ids, *buffers):
    write_metadata(topk_ids, list(buffers))
    data = data_of(topk_ids)
    buffers[0].add_(1)
    return [data.expert_offsets, *quant_by(x, data)]


def static_then_view_returned(x, topk_ids, *buffers):
    write_metadata(topk_ids, list(buffers))
    return [data_of(topk_ids).expert_offsets.view(1, -1)[:, 1:]]


def static_then_copy_returned(x, topk_ids, *buffers):
    """A copy that changes nothing is left out by Inductor."""
    write_metadata(topk_ids, list(buffers))
    return [data_of(topk_ids).expert_offsets.clone()]


def static_then_fresh_buffers_returned(x, topk_ids, *buffers):
    write_metadata(topk_ids, list(buffers))
    return write_metadata(topk_ids, metadata_buffers(topk_ids))


def returned_then_static(x, topk_ids, *buffers):
    fresh = write_metadata(topk_ids, metadata_buffers(topk_ids))
    return [fresh[0], *quant_in(x, write_metadata(topk_ids, list(buffers)))]


def copied_and_returned(x, topk_ids, *buffers):
    first, second = data_of(topk_ids), data_of(topk_ids)
    buffers[0].copy_(second.expert_offsets)
    return [first.expert_offsets, *quant_by(x, second)]


def set_and_returned(x, topk_ids, *buffers):
    first, second = data_of(topk_ids), data_of(topk_ids)
    buffers[0].data = second.expert_offsets
    return [first.expert_offsets, *quant_by(x, second)]


def third_call_returned(x, topk_ids, *buffers):
    """The first call's result is seen by nobody until the second's is it."""
    return [*quant_by(x, data_of(topk_ids)), *(data_of(topk_ids).expert_offsets for _ in range(2))]


ESCAPES = [
    (static_then_returned, (2, 1, 1)),
    (static_written_then_returned, (1, 0, 1)),
    (static_then_view_returned, (1, 0, 1)),
    (static_then_copy_returned, (1, 0, 1)),
    (static_then_fresh_buffers_returned, (1, 0, 1)),
    (returned_then_static, (1, 0, 1)),
    (copied_and_returned, (1, 0, 1)),
    (set_and_returned, (1, 0, 1)),
    (third_call_returned, (2, 1, 1)),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("model", "count"), ESCAPES, ids=[e[0].__name__ for e in ESCAPES])
def test_results_that_leave_the_graph(model: Callable, count: tuple, form: str) -> None:
    x, topk_ids = inputs()
    args = x, topk_ids, *(b.zero_() for b in metadata_buffers(topk_ids))
    compiled = Compiled(model, form)
    assert as_eager(compiled, model, *args)
    assert counts(compiled.report)["merge_metadata"] == count
    [reason] = reasons(compiled.report, "merge_metadata")
    if form != "dynamo" and model is not set_and_returned:
        assert reason.endswith(SEEN)


EXPORTED = [e for e in ESCAPES if e[0] is not set_and_returned]  # torch does not export that


@pytest.mark.parametrize(("model", "count"), EXPORTED, ids=[e[0].__name__ for e in EXPORTED])
def test_results_that_leave_an_exported_program(model: Callable, count: tuple) -> None:
    """Its graph returns what is copied into inputs later."""
    x, topk_ids = inputs()
    args = x, topk_ids, *(b.zero_() for b in metadata_buffers(topk_ids))
    program = torch.export.export(Module(model), args).run_decompositions({})
    report = passes.rewrite(program)
    assert counts(report)["merge_metadata"] == count
    [reason] = reasons(report, "merge_metadata")
    assert reason.endswith(SEEN)
    assert as_eager(program.module(), model, *args)


def in_static_buffers(x: Tensor, topk_ids: Tensor, *buffers: Tensor) -> list[Tensor]:
    return [t for i in range(3) for t in quant_in(x + i, write_metadata(topk_ids, list(buffers)))]


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_static_buffers_of_exported_programs_are_seen_once(backend: str, kept: bool) -> None:
    class Keeps(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for i, buffer in enumerate(metadata_buffers(inputs()[1])):
                self.register_buffer(f"buffer{i}", buffer.zero_())

        def forward(self, x: Tensor, topk_ids: Tensor) -> list[Tensor]:
            return in_static_buffers(x, topk_ids, *self.buffers())

    x, topk_ids = inputs()
    args = (x, topk_ids) if kept else (x, topk_ids, *(b.zero_() for b in metadata_buffers(topk_ids)))
    eager = Keeps() if kept else Module(in_static_buffers)
    program = torch.export.export(Keeps() if kept else eager, args).run_decompositions({})
    both = dict.fromkeys(("sorted_expert_ids", "fuse_permute"), (3, 3, 0))
    assert counts(passes.rewrite(program)) == {"merge_metadata": (2, 2, 0), **both}
    module = program.module()
    torch._dynamo.reset()
    assert as_eager(torch.compile(module, backend=backend), eager, *args)
    assert same_bytes([*module.buffers()], [*eager.buffers()])


def test_the_same_static_buffers_are_seen_once(device: str) -> None:
    x, topk_ids = inputs(device)
    args = x, topk_ids, *(b.zero_() for b in metadata_buffers(topk_ids))
    for form in FORMS:
        compiled = Compiled(in_static_buffers, form)
        assert as_eager(compiled, in_static_buffers, *args)
        both = dict.fromkeys(("sorted_expert_ids", "fuse_permute"), (3, 3, 0))
        assert counts(compiled.report) == {"merge_metadata": (2, 2, 0), **both}


class Static(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for i, buffer in enumerate(metadata_buffers(inputs()[1])):
            self.register_buffer(f"buffer{i}", buffer.zero_())

    def forward(self, x: Tensor, topk_ids: Tensor) -> Tensor:
        write_metadata(topk_ids, [getattr(self, f"buffer{i}") for i in range(6)])
        result = data_of(topk_ids).expert_offsets
        self.buffer0.add_(1)
        return result


def test_mutated_buffers_of_exported_programs() -> None:
    args = inputs()
    program = torch.export.export(Static(), args).run_decompositions({})
    report = passes.rewrite(program)
    assert reasons(report, "merge_metadata") == [f"expert_offsets {SEEN}"]
    module, eager = program.module(), Static()
    assert torch.equal(module(*args), eager(*args))
    assert same_bytes([*module.buffers()], [*eager.buffers()])


# Layouts, and buffers that are views ----------------------------------------------------------------------------------

SIZES = [buffer.shape for buffer in metadata_buffers(torch.empty(inputs()[1].shape, device="meta"))]
ROOM = sum(shape.numel() for shape in SIZES)


def parts(workspace: Tensor, start: int = 0) -> list[Tensor]:
    made = []
    for shape in SIZES:
        made.append(workspace[start : start + shape.numel()].view(shape))
        start += shape.numel()
    return made


def in_a_workspace(x, topk_ids, workspace):
    return [t for i in range(3) for t in quant_in(x + i, write_metadata(topk_ids, parts(workspace)))]


def in_workspaces_of_their_own(x, topk_ids, workspace):
    made = [torch.empty(ROOM, dtype=torch.int32) for _ in range(3)]
    return [t for i in range(3) for t in quant_in(x + i, write_metadata(topk_ids, parts(made[i])))]


def in_other_parts(x, topk_ids, workspace):
    return [t for i in range(2) for t in quant_in(x, write_metadata(topk_ids, parts(workspace, i)))]


def in_workspaces_that_differ(x, topk_ids, workspace):
    """What lies between the parts is seen, too."""
    made = [torch.full((ROOM + 3,), i, dtype=torch.int32) for i in range(2)]
    results = [t for m in made for t in quant_in(x, write_metadata(topk_ids, parts(m, 3)))]
    return [*results, made[1] + 0]


def with_a_write_between(x, topk_ids, workspace):
    first = quant_in(x, write_metadata(topk_ids, parts(workspace)))
    workspace[-1:].add_(1)
    return [*first, *quant_in(x, write_metadata(topk_ids, parts(workspace)))]


ANOTHER_PART = "expert_offsets is in a buffer of which another part is written between the calls, by add_"
DIFFERENT = "the calls write different buffers, and expert_offsets is more than a fresh one"
WORKSPACES = [
    (in_a_workspace, (2, 2, 0), (2, 2, 0), None),
    (in_workspaces_of_their_own, (2, 0, 2), (2, 2, 0), DIFFERENT),
    (in_other_parts, (1, 0, 1), (1, 0, 1), DIFFERENT),
    (in_workspaces_that_differ, (1, 0, 1), (1, 0, 1), DIFFERENT),
    (with_a_write_between, (1, 0, 1), (1, 0, 1), ANOTHER_PART),
]


@pytest.mark.parametrize("form", ["dynamo", "auto_v2"])
@pytest.mark.parametrize(("model", "raw", "auto", "reason"), WORKSPACES, ids=[w[0].__name__ for w in WORKSPACES])
def test_buffers_that_are_views_of_one(model: Callable, raw: tuple, auto: tuple, reason: str, form: str) -> None:
    args = *inputs(), torch.zeros(ROOM + 3, dtype=torch.int32)
    compiled = Compiled(model, form)
    assert as_eager(compiled, model, *args)
    count = raw if form == "dynamo" else auto
    assert counts(compiled.report)["merge_metadata"] == count
    if count[2]:
        expected = reason if form == "dynamo" else "a result is part of a larger buffer"
        assert set(reasons(compiled.report, "merge_metadata")) == {expected}
    quants = 3 if count == (2, 2, 0) or raw == (2, 0, 2) else 2
    assert counts(compiled.report)["sorted_expert_ids"] == (quants, quants, 0)


@pytest.mark.parametrize("fresh_first", [False, True])
def test_results_that_lie_otherwise(fresh_first: bool) -> None:
    """Strides and offsets are seen where a result is looked at by them."""

    def model(x: Tensor, topk_ids: Tensor) -> list[Tensor]:
        table = torch.zeros(topk_ids.numel(), 2, dtype=torch.int32)
        spread = [*metadata_buffers(topk_ids)[:4], table[:, 0], table[:, 1]]
        kinds = [spread, metadata_buffers(topk_ids)]
        first, second = (write_metadata(topk_ids, b) for b in (reversed(kinds) if fresh_first else kinds))
        looked_at = [b[4].as_strided((3,), (1,), 0) + 0 for b in (first, second)]
        return [*looked_at, *quant_in(x, first), *quant_in(x, second)]

    args = inputs()
    for form in FORMS:
        compiled = Compiled(model, form)
        assert as_eager(compiled, model, *args)
        assert counts(compiled.report)["merge_metadata"] == (1, 0, 1)


def test_views_of_what_was_merged_are_recorded_anew() -> None:
    """Inductor goes by the storages of values, as the rules do: a view has that of what it is a view of now."""

    def model(x: Tensor, topk_ids: Tensor) -> list[Tensor]:
        first, second = data_of(topk_ids), data_of(topk_ids)
        views = [second.expert_offsets.view(1, -1)[0], *second.blockscale_offsets.split([1, E])]
        return [*quant_by(x, first), *(v + 1 for v in views)]

    for form in ("dynamo", "auto_v2"):
        compiled = Compiled(model, form)
        assert as_eager(compiled, model, *inputs())
        assert counts(compiled.report)["merge_metadata"] == (1, 1, 0)
        checked = 0
        for node in compiled.module.graph.nodes:
            recorded = [n.meta.get("val", n.meta.get("example_value")) for n in (node, *node.all_input_nodes)]
            if node.name.startswith(("view", "select", "getitem")) and isinstance(recorded[0], Tensor):
                storages = [t.untyped_storage()._cdata for t in tree_leaves(recorded) if isinstance(t, Tensor)]
                assert storages[0] in storages[1:]
                checked += 1
        assert checked >= 4


# Views that change values ---------------------------------------------------------------------------------------------


def negated(x: Tensor) -> tuple[Tensor, Tensor]:
    topk_ids = x.int()
    return topk_ids, torch._neg_view(topk_ids)


def views_of_negated(x: Tensor) -> tuple[Tensor, Tensor]:
    topk_ids = x.int()
    return topk_ids.view(-1).view(-1, TOPK), torch._neg_view(topk_ids).view(-1).view(-1, TOPK)


def conjugated(x: Tensor) -> tuple[Tensor, Tensor]:
    complex_ids = torch.view_as_complex(x.view(-1, TOPK, 2))
    return complex_ids.imag.int(), complex_ids.conj().imag.int()


@pytest.mark.parametrize("how", ["dynamo", "dynamic", "export", "fake"])
@pytest.mark.parametrize("pair", [negated, views_of_negated, conjugated])
def test_views_that_change_values(pair: Callable, how: str) -> None:
    """Negated and conjugated in the memory and the layout of what they are views of, by a bit of the tensor alone."""

    def model(x: Tensor) -> list[Tensor]:
        return [data_of(ids).expert_offsets + 0 for ids in (*pair(x), *pair(x))]

    x = torch.tensor([[0.0, 1.0, 2.0, 3.0], [1.0, 0.0, 2.0, 3.0]])
    first, second, *_ = model(x)
    assert not torch.equal(first, second)
    if how in ("dynamo", "dynamic"):
        program = compiled = Compiled(model, "dynamo", dynamic=how == "dynamic")
        compiled(x)
        report = compiled.report
    else:
        exported = torch.export.export(Module(model), (x,)) if how == "export" else None
        traced = exported or make_fx(model, tracing_mode="fake", pre_dispatch=True)(x)
        report = passes.rewrite(traced)
        program = exported.module() if exported else traced
    assert as_eager(program, model, x)
    # Dynamo's torch._neg_view and getattr are not among the functions known to give the same again.
    merged = 2 if how in ("export", "fake") else 0 if pair is conjugated else 1
    assert counts(report)["merge_metadata"] == (merged, merged, 0)


@pytest.mark.parametrize("form", FORMS)
def test_negated_offsets_are_not_the_offsets(form: str) -> None:
    def model(x: Tensor, topk_ids: Tensor) -> list[Tensor]:
        buffers = write_metadata(topk_ids, metadata_buffers(topk_ids))
        return quant(x, buffers[4], torch._neg_view(buffers[0]), buffers[1])

    compiled = Compiled(model, form)
    with pytest.raises(RuntimeError, match="expert_offsets"):
        compiled(torch.randn(2, K).bfloat16(), torch.tensor([[0, 1], [2, 3]]))
    [reason] = reasons(compiled.report)
    assert reason.startswith("expert_offsets passes through _neg_view") or form != "dynamo"


# Equal arguments ------------------------------------------------------------------------------------------------------

EQUAL = {
    "cast": (lambda t: t.to(torch.int32), True),
    "cast by name": (lambda t: t.int(), True),
    "view": (lambda t: t.view(-1, 1, TOPK).view(-1, TOPK), True),
    "copy": (lambda t: t.clone(), True),
    "part": (lambda t: t[1:], True),
    "cast of a view": (lambda t: t.view(TOPK, -1).t().contiguous().to(torch.int32), True),
    "random": (lambda t: torch.randint_like(t, E), False),
}


def on_each(shape: Callable, write: bool = False) -> Callable:
    def model(x: Tensor, topk_ids: Tensor) -> list[Tensor]:
        results = []
        for i in range(2):
            results.append(data_of(shape(topk_ids)).expert_offsets + i)
            if write:
                topk_ids.fill_(1)
        return results

    return model


@pytest.mark.parametrize("how", ["dynamo", "fake", "real", "saved"])
@pytest.mark.parametrize("shape", EQUAL)
def test_equal_arguments(shape: str, how: str) -> None:
    function, merges = EQUAL[shape]
    args = inputs()
    for write in (False, True):
        model = on_each(function, write)
        if how == "dynamo":
            program = compiled = Compiled(model, "dynamo")
            compiled(*(a.clone() for a in args))
            report = compiled.report
        else:
            copies = [a.clone() for a in args]
            exported = saved(model, *copies) if how == "saved" else None
            program = exported.module() if exported else make_fx(model, tracing_mode=how)(*copies)
            report = passes.rewrite(program)
        assert counts(report)["merge_metadata"][1] == (1 if merges and not write else 0)
        assert shape == "random" or as_eager(program, model, *args)


def test_the_same_ids_by_two_names() -> None:
    def model(x: Tensor, topk_ids: Tensor) -> list[Tensor]:
        names = topk_ids, topk_ids.view(-1).view(-1, TOPK), topk_ids.detach(), topk_ids.view(TOPK, -1)
        return [data_of(ids).expert_offsets + i for i, ids in enumerate(names)]

    compiled = Compiled(model, "dynamo")
    assert as_eager(compiled, model, *inputs())
    assert counts(compiled.report)["merge_metadata"] == (2, 2, 0)


def test_copies_made_before_and_after_a_write_differ() -> None:
    def model(x: Tensor, topk_ids: Tensor) -> list[Tensor]:
        before, view = topk_ids.clone(), topk_ids.view(-1, TOPK)
        topk_ids.fill_(1)
        after = topk_ids.clone()
        return [data_of(ids).expert_offsets + i for i, ids in enumerate((before, after, view, topk_ids))]

    compiled = Compiled(model, "dynamo")
    assert as_eager(compiled, model, *inputs())
    assert counts(compiled.report)["merge_metadata"] == (1, 1, 0)


# Words ----------------------------------------------------------------------------------------------------------------


def test_a_write_to_another_part_is_called_that() -> None:
    def model(x: Tensor, topk_ids: Tensor) -> list[Tensor]:
        buffers = parts(torch.zeros(ROOM + 3, dtype=torch.int32), 3)
        write_metadata(topk_ids, buffers)
        buffers[3].fill_(1)
        return quant_in(x, buffers)

    compiled = Compiled(model, "dynamo")
    assert as_eager(compiled, model, *inputs())
    [reason] = reasons(compiled.report)
    assert reason == "expert_offsets is in a buffer of which another part is written after the metadata call, by fill_"


def _one_writer_of_two(ids: Tensor) -> tuple[Tensor, Tensor]:
    first, second = ids.clone(), ids.clone()
    torch._foreach_add_([first, second], [0, 1])
    return data_of(first).expert_offsets * 1, data_of(second).expert_offsets * 1


def _one_writer_of_what_may_be_shared(ids: Tensor) -> tuple[Tensor, ...]:
    first, second = ids.clone(), ids.clone()
    both = torch.hstack([first, second])
    first.add_(1)
    return data_of(first).expert_offsets * 1, data_of(second).expert_offsets * 1, both


@pytest.mark.parametrize("how", ["eager", "aot_eager", "inductor", "export"])
@pytest.mark.parametrize("model", [_one_writer_of_two, _one_writer_of_what_may_be_shared])
def test_one_writer_may_write_different_values(model: Callable, how: str) -> None:
    ids = torch.tensor([[0, 1], [2, 3], [1, 0]])
    if how == "export":

        class Module(torch.nn.Module):
            def forward(self, ids: Tensor) -> tuple[Tensor, ...]:
                return model(ids)

        program = torch.export.export(Module(), (ids,))
        assert passes.rewrite(program).rules["merge_metadata"].rewritten == 0
        made = program.module()
    else:
        torch._dynamo.reset()
        made = mxfp4_ops.compile(model, backend=how)
    assert same_bytes(made(ids.clone()), model(ids.clone()))
