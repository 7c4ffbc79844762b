"""The passes inside Inductor: bytes unchanged, other libraries' passes kept, caches used, and said to be used."""

import logging
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from moe_graphs import (
    TOPK,
    E,
    K,
    N,
    inputs,
    metadata_buffers,
    ops,
    same_bytes,
    stack,
    upstream_layer,
    write_metadata,
)
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import fresh_cache

import mxfp4_ops
from mxfp4_ops import passes
from mxfp4_ops.compat import vllm
from mxfp4_ops.passes.inductor import SLOT, TAKES_LISTS

pytestmark = [
    pytest.mark.usefixtures("compile_anew"),
    pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled:UserWarning"),
]


@pytest.fixture
def caches() -> Iterator[None]:
    """The caches on disk, on and empty."""
    with torch._inductor.config.patch(force_disable_caches=False, fx_graph_cache=True), fresh_cache():
        yield


class Other(CustomGraphPass):
    """Another library's pass, which notes how many quants on offset search it is shown."""

    def __init__(self, identity: str | None = "other") -> None:
        self.identity, self.seen = identity, []

    def __call__(self, graph: fx.Graph) -> None:
        quants = [n for n in graph.nodes if n.target is ops.mxfp4_experts_quant.default]
        self.seen.append(sum("sorted_expert_ids" not in quant.kwargs for quant in quants))

    def uuid(self) -> str | None:
        return self.identity


def rewritten(ours: passes.MXFP4Passes) -> tuple[int, int]:
    return tuple(ours.report.rules[rule].rewritten for rule in ("merge_metadata", "sorted_expert_ids"))


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("v2", [False, True], ids=["auto_v1", "auto_v2"])
def test_same_bytes(v2: bool, dynamic: bool, device: str) -> None:
    model, args, ours = stack(upstream_layer, 2), inputs(device), passes.MXFP4Passes()
    with torch._inductor.config.patch(enable_auto_functionalized_v2=v2):
        compiled = mxfp4_ops.compile(model, passes=ours, fullgraph=True, dynamic=dynamic)
        assert same_bytes(compiled(*args), model(*args))
    assert rewritten(ours) == (1, 4) and not ours.report.rules["sorted_expert_ids"].skipped


def test_static_buffers(device: str) -> None:
    def model(x: Tensor, topk_ids: Tensor, *buffers: Tensor) -> list[Tensor]:
        results = []
        for i in range(2):
            offsets, scale_offsets, _, _, permutation, _ = write_metadata(topk_ids, list(buffers))
            rows = vllm.shuffle_rows(x + i, permutation)
            results += vllm.mxfp4_experts_quant(rows, offsets, scale_offsets, E, TOPK)
        return results

    args, ours = inputs(device), passes.MXFP4Passes()
    buffers, expected = metadata_buffers(args[1]), metadata_buffers(args[1])
    compiled = mxfp4_ops.compile(model, passes=ours, fullgraph=True)
    assert same_bytes(compiled(*args, *buffers), model(*args, *expected))
    assert same_bytes(buffers, expected)
    assert rewritten(ours) == (1, 2)


def test_buffers_that_are_views_of_one() -> None:
    def model(x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        rows = topk_ids.numel()
        buffer = torch.empty(2 * (E + 1) + 3 * rows, dtype=torch.int32)
        offsets, scale_offsets, permutation, outputs, sorted_ids = buffer.split([E + 1, E + 1, rows, rows, rows])
        _, _, sizes1, sizes2, *_ = metadata_buffers(topk_ids)
        vllm.get_cutlass_moe_mm_data(
            topk_ids, offsets, sizes1, sizes2, permutation, outputs, E, N, K, scale_offsets, True, sorted_ids
        )
        return vllm.mxfp4_experts_quant(vllm.shuffle_rows(x, permutation), offsets, scale_offsets, E, TOPK)

    args, ours = inputs(), passes.MXFP4Passes()
    compiled = mxfp4_ops.compile(model, passes=ours, fullgraph=True)
    assert same_bytes(compiled(*args), model(*args))
    assert rewritten(ours) == (0, 1)


def _parts(workspace: Tensor) -> list[Tensor]:
    shapes = [b.shape for b in metadata_buffers(inputs()[1])]
    parts = workspace[: sum(shape.numel() for shape in shapes)].split([shape.numel() for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def test_calls_on_one_workspace_merge() -> None:
    def model(x: Tensor, topk_ids: Tensor, workspace: Tensor) -> list[Tensor]:
        results = []
        for i in range(2):
            offsets, scale_offsets, _, _, permutation, _ = write_metadata(topk_ids, _parts(workspace))
            results += vllm.mxfp4_experts_quant(vllm.shuffle_rows(x + i, permutation), offsets, scale_offsets, E, TOPK)
        return results

    args, ours = inputs(), passes.MXFP4Passes()
    buffers = [torch.zeros(100, dtype=torch.int32) for _ in range(2)]
    compiled = mxfp4_ops.compile(model, passes=ours, fullgraph=True)
    assert same_bytes(compiled(*args, buffers[0]), model(*args, buffers[1]))
    assert torch.equal(*buffers)
    assert rewritten(ours) == (1, 2)


@pytest.mark.xfail(strict=True, reason="torch adds the offset of the workspace twice")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_workspace_that_is_a_slice_itself(backend: str) -> None:
    def model(topk_ids: Tensor, workspace: Tensor) -> Tensor:
        return write_metadata(topk_ids, _parts(workspace))[0] + 0

    ids, (ours, expected) = inputs()[1], (torch.zeros(100, dtype=torch.int32)[7:] for _ in range(2))
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert same_bytes([compiled(ids, ours), ours], [model(ids, expected), expected])


def _static_then_returned(topk_ids, buffers):
    write_metadata(topk_ids, buffers)
    return mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K).expert_offsets


def _static_written_then_returned(topk_ids, buffers):
    write_metadata(topk_ids, buffers)
    data = mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K)
    buffers[0].add_(1)
    return data.expert_offsets


def _static_then_copy_returned(topk_ids, buffers):
    write_metadata(topk_ids, buffers)
    return mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K).expert_offsets.clone()


def _static_then_fresh_returned(topk_ids, buffers):
    write_metadata(topk_ids, buffers)
    return write_metadata(topk_ids, metadata_buffers(topk_ids))[0]


def _set_and_returned(topk_ids, buffers):
    first, second = (mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K).expert_offsets for _ in range(2))
    buffers[0].data = second
    return first


@pytest.mark.parametrize(
    "model",
    [
        _static_then_returned,
        _static_written_then_returned,
        _static_then_copy_returned,
        _static_then_fresh_returned,
        _set_and_returned,
    ],
)
def test_what_is_returned_is_no_buffer_of_the_caller(model: Callable) -> None:
    """Inductor writes results into the buffers that they are given, and a result of two calls would be in one."""
    ours = passes.MXFP4Passes()
    compiled = mxfp4_ops.compile(model, passes=ours, fullgraph=True)
    seen = []
    for function in (compiled, model):
        torch.manual_seed(0)
        buffers = [b.zero_() for b in metadata_buffers(inputs()[1])]
        first = function(inputs()[1], buffers)
        kept = first.clone()
        second = function(inputs()[1], buffers)
        second.add_(1)
        seen.append([kept, first, second, buffers])
    assert same_bytes(*seen)
    assert rewritten(ours) == (0, 0) and ours.report.rules["merge_metadata"].matched == 1


class _Static(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for i, buffer in enumerate(metadata_buffers(inputs()[1])):
            self.register_buffer(f"buffer{i}", buffer.zero_())

    def forward(self, topk_ids: Tensor) -> Tensor:
        return _static_written_then_returned(topk_ids, [getattr(self, f"buffer{i}") for i in range(6)])


@pytest.mark.parametrize("exported", [False, True])
def test_what_is_returned_is_no_buffer_of_the_module(exported: bool) -> None:
    ids = inputs()[1], inputs()[1]
    seen = []
    for eager in (True, False):
        module = _Static()
        if exported and not eager:
            program = torch.export.export(module, ids[:1]).run_decompositions({})
            assert passes.rewrite(program).rules["merge_metadata"].reasons().total() == 1
            module = program.module()
        function = module if eager else torch.compile(module) if exported else mxfp4_ops.compile(module)
        first = function(ids[0])
        kept = first.clone()
        seen.append([kept, function(ids[1]), first, *module.buffers()])
    assert same_bytes(*seen)


def test_a_merged_result_is_read_before_its_buffer_is_written_again() -> None:
    def model(x: Tensor, topk_ids: Tensor, other_ids: Tensor, *buffers: Tensor) -> list[Tensor]:
        write_metadata(topk_ids, list(buffers))
        data = mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K)
        view = data.expert_offsets.view(1, -1)
        write_metadata(other_ids, list(buffers))
        rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
        return [view + 1, *mxfp4_ops.mxfp4_experts_quant(rows, data.expert_offsets, data.blockscale_offsets, E)]

    args, ours = (*inputs(), inputs()[1]), passes.MXFP4Passes()
    buffers, expected = metadata_buffers(args[1]), metadata_buffers(args[1])
    compiled = mxfp4_ops.compile(model, passes=ours, fullgraph=True)
    assert same_bytes([compiled(*args, *buffers), buffers], [model(*args, *expected), expected])
    assert rewritten(ours) == (1, 1)


def test_nested_regions() -> None:
    @torch.compiler.nested_compile_region
    def layer(x: Tensor, topk_ids: Tensor) -> tuple[Tensor, ...]:
        return upstream_layer(x, topk_ids)

    @torch.compiler.nested_compile_region
    def outside(x: Tensor, offsets: Tensor, scale_offsets: Tensor) -> Tensor:
        return mxfp4_ops.mxfp4_experts_quant(x, offsets, scale_offsets, E).output

    def model(x: Tensor, topk_ids: Tensor) -> list[Tensor]:
        data = mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K)
        rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
        apart = [outside(rows + i, data.expert_offsets, data.blockscale_offsets) for i in range(2)]
        return [*apart, *(t for i in range(2) for t in layer(x + i, topk_ids))]

    args, ours = inputs(), passes.MXFP4Passes()
    compiled = mxfp4_ops.compile(model, passes=ours, fullgraph=True)
    assert same_bytes(compiled(*args), model(*args))
    rule = ours.report.rules["sorted_expert_ids"]
    assert rule.rewritten in (2, 4) and len(rule.skipped) in (1, 2)
    assert set(rule.reasons()) == {"expert_offsets comes into the subgraph from outside"}


@pytest.mark.parametrize("order", ["installed before", "installed after", "in the options"])
def test_beside_another_pass(order: str) -> None:
    model, args, ours, other = upstream_layer, inputs(), passes.MXFP4Passes(), Other()
    options = {SLOT: other} if order == "in the options" else None
    installed = torch._inductor.config.patch({SLOT: None if options else other})
    if order == "installed before":
        with installed:
            compiled = mxfp4_ops.compile(model, passes=ours, fullgraph=True)
            result = compiled(*args)
    else:
        compiled = mxfp4_ops.compile(model, passes=ours, fullgraph=True, options=options)
        with installed:
            result = compiled(*args)
    assert same_bytes(result, model(*args))
    assert other.seen == [1] and rewritten(ours) == (0, 2)


@pytest.mark.parametrize("ours_first", [False, True])
def test_in_the_slot_by_hand(ours_first: bool) -> None:
    """As a person installs them: on a torch that takes lists, in both orders."""
    if not TAKES_LISTS:
        pytest.skip("this torch takes one pass")
    ours, other, args = passes.MXFP4Passes(), Other(), inputs()
    both = [ours, other] if ours_first else [other, ours]
    with torch._inductor.config.patch({SLOT: both}):
        result = torch.compile(upstream_layer, fullgraph=True)(*args)
    assert same_bytes(result, upstream_layer(*args))
    assert rewritten(ours) == (0, 2) and other.seen == [0 if ours_first else 1]


def test_each_compilation_has_its_own_passes() -> None:
    args, model = inputs(), upstream_layer
    on, off = passes.MXFP4Passes(), passes.MXFP4Passes(sorted_expert_ids=False)
    for ours in (on, off):  # without a reset of Dynamo, which would part them
        assert same_bytes(mxfp4_ops.compile(model, passes=ours, fullgraph=True)(*args), model(*args))
        assert ours.report.graphs == 1


def _hits() -> int:
    return counters["inductor"]["fxgraph_cache_hit"] + counters["aot_autograd"]["autograd_cache_hit"]


def _compile_and_run(ours: passes.MXFP4Passes, args: tuple, function: Callable = upstream_layer) -> None:
    torch._dynamo.reset()
    assert same_bytes(mxfp4_ops.compile(function, passes=ours, fullgraph=True)(*args), function(*args))


def test_caches_cold_and_warm(caches: None, caplog: pytest.LogCaptureFixture) -> None:
    args = inputs()
    cold, warm, others = passes.MXFP4Passes(), passes.MXFP4Passes(), passes.MXFP4Passes(merge_metadata=False)
    _compile_and_run(cold, args)
    assert rewritten(cold) == (0, 2) and cold.report.from_cache == 0 and _hits() == 0

    with caplog.at_level(logging.INFO, "mxfp4_ops.passes"):
        _compile_and_run(warm, args)
    assert _hits() > 0
    assert warm.report.from_cache == 1 and warm.report.graphs == 0
    assert "mxfp4_ops passes: served from the cache, rewritten by an earlier run" in caplog.messages
    assert "1 compilations were served from the cache" in str(warm.report)

    _compile_and_run(others, args)  # other options make other programs
    assert others.report.graphs == 1 and others.report.from_cache == 0


def test_a_pass_without_identity_is_never_cached(caches: None) -> None:
    args, other = inputs(), Other(identity=None)
    with torch._inductor.config.patch({SLOT: other}):
        for _ in range(2):
            _compile_and_run(ours := passes.MXFP4Passes(), args)
            assert ours.report.graphs == 1
    assert len(other.seen) == 2 and _hits() == 0


def test_options_reach_inductor_and_mode_does() -> None:
    compiled = mxfp4_ops.compile(upstream_layer, options={"max_autotune": True, "guard_filter_fn": lambda guards: [
        True for _ in guards]})  # fmt: skip
    args = inputs()
    seen = []

    class Look(Other):
        def __call__(self, graph: fx.Graph) -> None:
            seen.append(torch._inductor.config.max_autotune)

    with torch._inductor.config.patch({SLOT: Look()}):
        assert same_bytes(compiled(*args), upstream_layer(*args))
    assert seen == [True] and not torch._inductor.config.max_autotune
    with pytest.raises(RuntimeError, match="no_such_option"):
        mxfp4_ops.compile(upstream_layer, options={"no_such_option": 1})


@pytest.mark.gpu
def test_cuda_graphs() -> None:
    model, args, ours = stack(upstream_layer, 2), inputs("cuda"), passes.MXFP4Passes()
    compiled = mxfp4_ops.compile(model, passes=ours, fullgraph=True, mode="reduce-overhead")
    for i in range(4):  # warm up, record, replay
        x, topk_ids = args[0] + i, args[1].roll(i, 0)
        torch.compiler.cudagraph_mark_step_begin()
        assert same_bytes([t.clone() for t in compiled(x, topk_ids)], model(x, topk_ids))
    assert rewritten(ours) == (1, 4)
    assert counters["inductor"]["cudagraph_skips"] == 0


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("own_ids", [False, True], ids=["same ids in all layers", "own ids in each layer"])
def test_decode_step_is_no_slower(own_ids: bool) -> None:
    """A step of 8 tokens and 256 experts, written the upstream way, under CUDA graphs; a ratio of one run.

    Layers with their own ids, as a router gives them, leave no metadata calls to merge.
    """
    experts, tokens, topk, width, layers = 256, 8, 8, 4096, 4

    def layer(x: Tensor, topk_ids: Tensor) -> Tensor:
        offsets, scale_offsets, sizes1, sizes2, permutation, outputs = metadata_buffers(topk_ids, experts)
        vllm.get_cutlass_moe_mm_data(
            topk_ids, offsets, sizes1, sizes2, permutation, outputs, experts, width // 2, width, scale_offsets
        )
        rows = vllm.shuffle_rows(x, permutation)
        codes, scales = vllm.mxfp4_experts_quant(rows, offsets, scale_offsets, experts, topk)
        activated = vllm.silu_and_mul_mxfp4_experts_quant(rows, offsets, scale_offsets, experts, topk)
        return codes, scales, *activated

    x = torch.randn(tokens, width, device="cuda").bfloat16()
    args = [x, *torch.randint(0, experts, (layers if own_ids else 1, tokens, topk), device="cuda")]
    ours = passes.MXFP4Passes()

    def model(x: Tensor, *topk_ids: Tensor) -> list[Tensor]:
        return [result for i in range(layers) for result in layer(x + i, topk_ids[i % len(topk_ids)])]

    def graph_of(compiled: Callable) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                results = compiled(*args)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = compiled(*args)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bytes(results, model(*args))
        return graph

    def seconds(graph: torch.cuda.CUDAGraph) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(200):
            graph.replay()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    without = graph_of(torch.compile(model, fullgraph=True))
    torch._dynamo.reset()
    with_passes = graph_of(mxfp4_ops.compile(model, passes=ours, fullgraph=True))
    assert rewritten(ours) == (0 if own_ids else layers - 1, 2 * layers)
    pairs = [(seconds(with_passes), seconds(without)) for _ in range(10)]
    ratio = min(a for a, _ in pairs) / min(b for _, b in pairs)
    ids = "own ids in each layer" if own_ids else "same ids in all layers"
    print(f"decode step with the passes, {ids}: {ratio:.3f} of the time without")
    assert ratio <= 1.05
