"""torch.cuda.graph and streams: captured calls replay right for any routing, nothing syncs, nothing leaves its stream."""

import contextlib
from collections.abc import Callable, Iterator

import pytest
import torch
from samples import SAMPLES, assert_same, capture
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

import mxfp4_ops

pytestmark = pytest.mark.gpu

E, TOPK, N, K = 17, 4, 96, 192
M = 33
POISON = 77


def chain(x: Tensor, topk_ids: Tensor, out: tuple | None = None) -> tuple:
    """Every op, functional or into `out`, which has the structure of the results."""
    outs = out or (None,) * 8
    data = mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K, out=outs[0])
    where = (data.expert_offsets, data.blockscale_offsets)
    rows = mxfp4_ops.shuffle_rows(x, data.input_permutation, out=outs[1])
    searched = mxfp4_ops.mxfp4_experts_quant(rows, *where, E, out=outs[2])
    quantized = mxfp4_ops.mxfp4_experts_quant(rows, *where, E, data.sorted_expert_ids, out=outs[3])
    activated = mxfp4_ops.silu_and_mul_mxfp4_experts_quant(rows, *where, E, data.sorted_expert_ids, out=outs[4])
    values = mxfp4_ops.mxfp4_dequantize(*quantized, *where, dtype=torch.bfloat16, out=outs[5])
    permuted = mxfp4_ops.moe_permute_mxfp4_quant(x, topk_ids, E, N, out=outs[6])
    permuted_values = mxfp4_ops.mxfp4_dequantize(*permuted[-2:], *permuted[:2], dtype=torch.bfloat16, out=outs[7])
    return data, rows, searched, quantized, activated, values, permuted, permuted_values


def routing(name: str, m: int = M) -> Tensor:
    ids = torch.randint(0, E, (m, TOPK))
    if name == "11_experts":
        ids = ids % 11
    elif name == "9_experts":
        ids = ids % 9 + 4
    elif name == "one_expert":
        ids = torch.full_like(ids, E - 1)
    elif name == "holes":
        ids = torch.where(torch.rand(ids.shape) < 0.4, -1, ids)
    elif name == "no_expert":
        ids = torch.full_like(ids, -1)
    return ids.int().cuda()


ROUTINGS = ("11_experts", "9_experts", "one_expert", "holes", "no_expert", "all_experts", "11_experts")


def static_inputs(m: int = M) -> tuple[Tensor, Tensor]:
    return torch.randn(m, K, dtype=torch.bfloat16, device="cuda"), routing("11_experts", m)


def poison(results: tuple) -> tuple:
    return tree_map(lambda t: torch.full_like(t, POISON), results)


def assert_results_same(got: tuple, want: tuple, case: str) -> None:
    for i, (g, w) in enumerate(zip(tree_leaves(got), tree_leaves(want), strict=True)):
        assert_same(g, w, f"{case}: result {i}")


@contextlib.contextmanager
def no_sync() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


# Capture and replay ---------------------------------------------------------------------------------------------------


def test_functional_replay_equals_eager() -> None:
    x, topk_ids = static_inputs()
    graph, results = capture(lambda: chain(x, topk_ids))
    for name in ROUTINGS:
        x.normal_()
        topk_ids.copy_(routing(name))
        for t in tree_leaves(results):
            t.fill_(POISON)  # what a replay does not write is seen
        graph.replay()
        assert_results_same(results, chain(x, topk_ids), name)


def test_out_replay_equals_eager() -> None:
    x, topk_ids = static_inputs()
    out = poison(chain(x, topk_ids))
    graph, _ = capture(lambda: chain(x, topk_ids, out))
    for name in ROUTINGS:
        x.normal_()
        topk_ids.copy_(routing(name))
        for t in tree_leaves(out):
            t.fill_(POISON)  # also what the padding of the scales must still be
        want = poison(out)
        graph.replay()
        assert_results_same(out, chain(x, topk_ids, want), name)


def test_out_into_a_buffer_zeroed_once() -> None:
    """An engine's way: scale bytes of an earlier step stay where this one has no row; those that count are right."""
    x, topk_ids = static_inputs()
    out = tree_map(torch.zeros_like, chain(x, topk_ids))
    graph, _ = capture(lambda: chain(x, topk_ids, out))
    for name in ROUTINGS:
        topk_ids.copy_(routing(name))
        graph.replay()
        want = chain(x, topk_ids)
        for i in (0, 1, 5, 7):  # the values hold every code and scale that has a meaning
            assert_results_same(out[i], want[i], f"{name}: {i}")


@pytest.mark.parametrize("m", [0, 1, 2000])
def test_capture_of_other_batches(m: int) -> None:
    x, topk_ids = static_inputs(m)
    graph, results = capture(lambda: chain(x, topk_ids))
    for name in ("9_experts", "holes"):
        topk_ids.copy_(routing(name, m))
        graph.replay()
        assert_results_same(results, chain(x, topk_ids), name)


def test_expert_map_may_change_between_replays() -> None:
    topk_ids = torch.randint(0, 64, (M, TOPK), dtype=torch.int64, device="cuda")
    expert_map = torch.full((64,), -1, dtype=torch.int32, device="cuda")
    expert_map[:E] = torch.arange(E)

    x = torch.randn(M, K, dtype=torch.bfloat16, device="cuda")

    def call() -> tuple:
        data = mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, E, N, K, expert_map=expert_map)
        return data, mxfp4_ops.moe_permute_mxfp4_quant(x, topk_ids, E, N, expert_map=expert_map)

    graph, results = capture(call)
    for shift in (0, 5, 47):
        expert_map.copy_(expert_map.roll(shift))
        graph.replay()
        assert_results_same(results, call(), f"rolled by {shift}")


def test_many_replays_are_identical() -> None:
    x, topk_ids = static_inputs()
    topk_ids.copy_(routing("holes"))
    graph, results = capture(lambda: chain(x, topk_ids))
    want = chain(x, topk_ids)
    for i in range(100):
        graph.replay()
        assert_results_same(results, want, f"replay {i}")


def test_two_graphs_in_one_pool() -> None:
    """Scratch that one graph left behind is not what the next one starts from."""
    pool = torch.cuda.graph_pool_handle()
    inputs = [static_inputs(m) for m in (300, M)]
    graphs = []
    for x, topk_ids in inputs:
        chain(x, topk_ids)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            results = chain(x, topk_ids)
        graphs.append((graph, results))
    for round in range(3):
        for (graph, results), (x, topk_ids) in zip(graphs, inputs):
            topk_ids.copy_(routing("holes", x.shape[0]))
            graph.replay()
            assert_results_same(results, chain(x, topk_ids), f"round {round}, m = {x.shape[0]}")


# Streams --------------------------------------------------------------------------------------------------------------

LONG = 200_000_000  # cycles of sleep: about 0.1 s


def late_input_of(op: str) -> tuple[Tensor, Callable[[Tensor], object]]:
    """(an input of the op, a call of the op on it)."""
    x, topk_ids = static_inputs()
    data, rows, _, quantized, *_ = chain(x, topk_ids)
    where = (data.expert_offsets, data.blockscale_offsets)
    function = getattr(mxfp4_ops, op)
    if op == "get_cutlass_moe_mm_data":
        return topk_ids, lambda ids: function(ids, E, N, K)
    if op == "moe_permute_mxfp4_quant":
        return x, lambda x: function(x, topk_ids, E, N)
    if op == "shuffle_rows":
        return x, lambda x: function(x, data.input_permutation)
    if op == "mxfp4_dequantize":
        return quantized.output, lambda packed: function(packed, quantized.output_scale, *where, dtype=torch.float32)
    return rows, lambda rows: function(rows, *where, E)


each_op = pytest.mark.parametrize("op", SAMPLES)


@each_op
def test_runs_on_the_current_stream(op: str) -> None:
    value, call = late_input_of(op)
    want = call(value)
    late = torch.zeros_like(value)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        late.copy_(value)  # an op on another stream would read the zeros
        got = call(late)
    stream.synchronize()
    assert_results_same(got, want, op)


@each_op
def test_does_not_wait_for_other_streams(op: str) -> None:
    value, call = late_input_of(op)
    want = call(value)
    busy, stream = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call(value)  # leaves memory for this stream in the caching allocator
    torch.cuda.synchronize()
    with torch.cuda.stream(busy):
        torch.cuda._sleep(10 * LONG)
        slept = busy.record_event()
    with torch.cuda.stream(stream):
        got = call(value)
    stream.synchronize()
    assert not slept.query(), "the op waited for work on another stream, or the sleep is too short"
    assert_results_same(got, want, op)
    busy.synchronize()


def test_capture_on_a_side_stream() -> None:
    x, topk_ids = static_inputs()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        chain(x, topk_ids)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results = chain(x, topk_ids)
        topk_ids.copy_(routing("9_experts"))
        graph.replay()
    torch.cuda.current_stream().wait_stream(stream)
    assert_results_same(results, chain(x, topk_ids), "side stream")


def test_nothing_syncs() -> None:
    x, topk_ids = static_inputs()
    want = chain(x, topk_ids)
    out = poison(want)
    torch.cuda.synchronize()
    with no_sync():
        got = chain(x, topk_ids)
        chain(x, topk_ids, out)
    assert_results_same(got, want, "functional")
    assert_results_same(out, chain(x, topk_ids, poison(want)), "out")


def test_calls_return_before_the_kernels_have_run() -> None:
    """What set_sync_debug_mode does not see: a synchronisation that the kernels' own code makes."""
    x, topk_ids = static_inputs()
    chain(x, topk_ids)
    torch.cuda.synchronize()
    torch.cuda._sleep(10 * LONG)
    slept = torch.cuda.current_stream().record_event()
    chain(x, topk_ids)
    assert not slept.query(), "a call waited for the device, or the sleep is too short"
    torch.cuda.synchronize()


def test_memory_comes_from_the_caching_allocator() -> None:
    x, topk_ids = static_inputs(2000)
    chain(x, topk_ids)
    torch.cuda.synchronize()
    reserved, taken = torch.cuda.memory_reserved(), []
    for _ in range(10):  # other processes use the device, too, but not in each of ten
        free, _ = torch.cuda.mem_get_info()
        for _ in range(50):
            chain(x, topk_ids)
        torch.cuda.synchronize()
        assert torch.cuda.memory_reserved() == reserved
        taken.append(free - torch.cuda.mem_get_info()[0])
    assert min(taken) < 16 << 20, "device memory went beside the caching allocator"


# Empty inputs, devices, determinism -----------------------------------------------------------------------------------


def test_empty_inputs_leave_no_error() -> None:
    empty = static_inputs(0)
    out = poison(chain(*empty))
    for _ in range(3):
        chain(*empty)
        chain(*empty, out)
        no_slots = torch.zeros(3, 0, dtype=torch.int32, device="cuda")
        mxfp4_ops.get_cutlass_moe_mm_data(no_slots, E, N, K)
        mxfp4_ops.moe_permute_mxfp4_quant(torch.zeros(3, K, dtype=torch.bfloat16, device="cuda"), no_slots, E, N)
        mxfp4_ops.shuffle_rows(torch.zeros(0, 64, device="cuda"), torch.tensor([-1, 0], device="cuda"))
        mxfp4_ops.shuffle_rows(torch.zeros(3, 0, device="cuda"), torch.tensor([-1, 0], device="cuda"))
    torch.cuda.synchronize()
    x, topk_ids = static_inputs()
    assert torch.equal(x + 1, x.cpu().cuda() + 1)
    assert_results_same(chain(x, topk_ids), chain(x.cpu(), topk_ids.cpu()), "after empty calls")


def test_an_error_of_a_check_leaves_no_error_on_the_device() -> None:
    x, topk_ids = static_inputs()
    with pytest.raises(RuntimeError, match="must"):
        mxfp4_ops.get_cutlass_moe_mm_data(topk_ids, 0, N, K)
    with pytest.raises(RuntimeError, match="must be on the device of"):
        mxfp4_ops.shuffle_rows(x, torch.tensor([0]))
    graph, results = capture(lambda: chain(x, topk_ids))
    graph.replay()
    assert_results_same(results, chain(x, topk_ids), "after errors")


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one GPU")
def test_runs_on_the_device_of_its_arguments() -> None:
    x, topk_ids = static_inputs()
    want = chain(x.cpu(), topk_ids.cpu())
    assert torch.cuda.current_device() == 0
    got = chain(x.to("cuda:1"), topk_ids.to("cuda:1"))
    assert torch.cuda.current_device() == 0
    assert all(t.device == torch.device("cuda:1") for t in tree_leaves(got))
    assert_results_same(got, want, "cuda:1")
    with pytest.raises(RuntimeError, match=r"must be on the device of input \(cuda:0\), got cuda:1"):
        mxfp4_ops.shuffle_rows(x, got[0].input_permutation)


def test_a_hundred_runs_are_identical() -> None:
    x, topk_ids = static_inputs(500)
    topk_ids.copy_(routing("holes", 500))
    want = chain(x, topk_ids)
    for i in range(100):
        assert_results_same(chain(x, topk_ids), want, f"run {i}")


def launches(function: Callable) -> int:
    """Kernels (and copies, of which there must be none) that a call puts on the GPU, as the profiler counts them."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return sum(e.count for e in profile.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA)


HAS_CLUSTERS = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 9


# Launches of the metadata op and of all in one: with few slots, in a cluster, by scale tiles, beyond a cluster.
@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "m, metadata_launches, more", [(1, 1, 0), (128, 1, 0), (1024, 1, 1), (8192, 1, 2), (8193, 2, 2)]
)
def test_launches(m: int, metadata_launches: int, more: int, ids_dtype: torch.dtype) -> None:
    """One for each op, but for many slots; beyond a cluster, and on a GPU without clusters, two for their metadata."""
    if m * 8 > 2048 and not HAS_CLUSTERS:
        metadata_launches = 2
    x, ids = torch.randn(m, 1024, dtype=torch.bfloat16, device="cuda"), torch.randint(-1, 257, (m, 8), device="cuda")
    ids, expert_map = ids.to(ids_dtype), torch.arange(-1, 256, dtype=torch.int32, device="cuda")
    metadata, permute = mxfp4_ops.get_cutlass_moe_mm_data, mxfp4_ops.moe_permute_mxfp4_quant
    data = metadata(ids, 256, 512, 1024)
    rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
    where = (data.expert_offsets, data.blockscale_offsets, 256)
    both = torch.cat((rows, rows), 1)
    assert launches(lambda: metadata(ids, 256, 512, 1024, expert_map=expert_map)) == metadata_launches
    assert launches(lambda: mxfp4_ops.shuffle_rows(x, data.input_permutation)) == 1
    for sorted_expert_ids in (None, data.sorted_expert_ids):
        assert launches(lambda: mxfp4_ops.mxfp4_experts_quant(rows, *where, sorted_expert_ids)) == 1
        assert launches(lambda: mxfp4_ops.silu_and_mul_mxfp4_experts_quant(both, *where, sorted_expert_ids)) == 1
    for out in (None, permute(x, ids, 256, 512)):
        assert launches(lambda: permute(x, ids, 256, 512, out=out)) == metadata_launches + more
