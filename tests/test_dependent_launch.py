"""Kernels start while the one in front of them, anybody's, still ends: they must wait for what it writes and reads."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import samples
import torch
from torch import Tensor

import mxfp4_ops

pytestmark = pytest.mark.gpu

E = 20
LATE = 1 << 25  # bytes that a kernel takes some 15 us to write


@dataclass(frozen=True)
class Size:
    m: int
    K: int = 512
    topk: int = 4
    without: str = ""  # what launches do without (MXFP4_OPS_CUDA_WITHOUT)

    def __str__(self) -> str:
        return "-".join(str(part) for part in (self.m, self.K, self.topk, self.without) if part)


SIZES = [Size(m) for m in (1, 5, 100, 700)]  # a warp's slots, a CTA's, a cluster's
# Each other way that a call can take: the silu table and wide lanes (900, 1024), scales in whole tiles (1024, 8192, 8).
WAYS = [
    *(Size(100, without=without) for without in ("few_slots", "few_slots,clusters", "warp_slots", "wide_lanes")),
    Size(700, without="clusters"),
    Size(200, 1024),
    Size(900, 1024),
    Size(900, 1024, without="clusters"),
    Size(900, 1024, without="silu_table"),
    Size(1024, 8192, 8),
    Size(1024, 8192, 8, "clusters"),
]


class Late:
    """Tensors at the end of a large buffer, so that the kernel that copies into it writes them last."""

    def __init__(self, tensors: list[Tensor]) -> None:
        end = LATE + sum(-(-t.nbytes // 256) * 256 for t in tensors)
        self.memory, self.views = torch.zeros(end, dtype=torch.uint8, device="cuda"), []
        for t in tensors:
            end -= -(-t.nbytes // 256) * 256
            self.views.append(self.memory[end : end + t.nbytes].view(t.dtype).view(t.shape))
        self.fill(tensors)

    def fill(self, tensors: list[Tensor]) -> None:
        for view, t in zip(self.views, tensors, strict=True):
            view.copy_(t)


@dataclass(eq=False)
class Call:
    op: Callable
    inputs: tuple[list, list]  # arguments on the CPU, of two calls in turn

    def __call__(self, arguments: list, **buffers: object) -> list[Tensor]:
        result = self.op(*arguments, **buffers)
        return [result] if isinstance(result, Tensor) else list(result)

    def tensors(self, turn: int) -> list[Tensor]:
        return [a for a in self.inputs[turn] if isinstance(a, Tensor)]

    def arguments(self, tensors: list[Tensor]) -> list:
        """The same with these tensors."""
        replaced = iter(tensors)
        return [next(replaced) if isinstance(a, Tensor) else a for a in self.inputs[0]]

    @functools.cached_property
    def want(self) -> list[list[Tensor]]:
        """What the CPU makes of each turn."""
        return [self(i) for i in self.inputs]


def inputs(size: Size, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, E, (size.m, size.topk), generator=generator)
    x = torch.randn(size.m, size.K, generator=generator).bfloat16()
    if not has_rows(size):
        return {"ids": ids, "x": x}
    data = mxfp4_ops.get_cutlass_moe_mm_data(ids, E, 64, size.K)
    rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
    packed, scale = mxfp4_ops.mxfp4_experts_quant(rows, data.expert_offsets, data.blockscale_offsets, E)
    both = torch.cat((rows, rows.flip(0)), 1)
    return {"ids": ids, "x": x, "rows": rows, "both": both, "packed": packed, "scale": scale} | data._asdict()


def has_rows(size: Size) -> bool:
    """Whether sorted rows are few enough for a quick test."""
    return size.m * size.topk * size.K <= 1 << 22


def calls(size: Size) -> Iterator[Call]:
    of = [inputs(size, seed) for seed in range(2)]

    def call(op: Callable, *arguments: object) -> Call:
        return Call(op, tuple([i[a] if isinstance(a, str) else a for a in arguments] for i in of))

    yield call(mxfp4_ops.get_cutlass_moe_mm_data, "ids", E, 64, size.K)
    yield call(mxfp4_ops.moe_permute_mxfp4_quant, "x", "ids", E, 64)
    if not has_rows(size):
        return
    yield call(mxfp4_ops.shuffle_rows, "x", "input_permutation")
    to_float = functools.partial(mxfp4_ops.mxfp4_dequantize, dtype=torch.float32)
    yield call(to_float, "packed", "scale", "expert_offsets", "blockscale_offsets")
    for op, rows in ((mxfp4_ops.mxfp4_experts_quant, "rows"), (mxfp4_ops.silu_and_mul_mxfp4_experts_quant, "both")):
        yield call(op, rows, "expert_offsets", "blockscale_offsets", E)
        yield call(op, rows, "expert_offsets", "blockscale_offsets", E, "sorted_expert_ids")


def same(results: list[Tensor], want: list[Tensor], what: str) -> None:
    for i, (got, t) in enumerate(zip(results, want, strict=True)):
        equal = torch.equal(got.cpu().view(torch.uint8), t.view(torch.uint8))
        assert equal, f"{what}: result {i}"


def copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)  # no kernel


def kernel(target: Tensor, source: Tensor) -> None:
    torch.bitwise_or(source, 0, out=target)


def kernel_and_memset(target: Tensor, source: Tensor) -> None:
    kernel(target, source)
    torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")


def two_streams(target: Tensor, source: Tensor) -> None:
    other = torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        kernel(target, source)
    torch.zeros(1 << 10, device="cuda").add_(1)
    torch.cuda.current_stream().wait_stream(other)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("front", [copy, kernel, kernel_and_memset, two_streams])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_waits_for_what_is_written_in_front(size: Size, front: Callable, captured: bool) -> None:
    check_waits(size, front, captured)


@pytest.mark.parametrize("size", WAYS, ids=str)
def test_waits_in_every_way(size: Size, monkeypatch) -> None:
    monkeypatch.setenv("MXFP4_OPS_CUDA_WITHOUT", size.without)
    check_waits(size, kernel, captured=True)
    check_leaves_alone(size)


def check_waits(size: Size, front: Callable, captured: bool) -> None:
    for call in calls(size):
        sources = [Late(call.tensors(turn)).memory for turn in range(2)]
        source, target = torch.empty_like(sources[0]), Late(call.tensors(1))

        def step(call: Call = call, target: Late = target, source: Tensor = source) -> list[Tensor]:
            front(target.memory, source)
            return call(call.arguments(target.views))

        source.copy_(sources[1])
        step()
        if captured:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = step()
        for turn in range(3):
            source.copy_(sources[turn % 2])
            target.memory.zero_()
            if captured:
                graph.replay()
            else:
                results = step()
            same(results, call.want[turn % 2], f"{call.op} {size}, turn {turn}")


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_captured_alone(size: Size) -> None:
    """The first node of a graph has nothing in front of it."""
    for call in calls(size):
        target = Late(call.tensors(1))
        call(call.arguments(target.views))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = call(call.arguments(target.views))
        for turn in range(3):
            kernel(target.memory, Late(call.tensors(turn % 2)).memory)
            graph.replay()
            same(results, call.want[turn % 2], f"{call.op} {size}, turn {turn}")


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_leaves_alone_what_is_read_in_front(size: Size) -> None:
    check_leaves_alone(size)


def check_leaves_alone(size: Size) -> None:
    for call in calls(size):
        result = call.op(*call.inputs[0])

        def out(views: list[Tensor], result: object = result) -> object:
            return views[0] if isinstance(result, Tensor) else type(result)(*views)

        of = [call.arguments([t.cuda() for t in call.tensors(turn)]) for turn in range(2)]
        buffers, want = Late(call.want[0]), [t.clone() for t in call.want[0]]
        saved = torch.empty_like(buffers.memory)
        for turn in range(1, 4):
            before = buffers.memory.cpu()
            kernel(saved, buffers.memory)
            call(of[turn % 2], out=out(buffers.views))
            equal = torch.equal(saved.cpu(), before)
            assert equal, f"{call.op} {size}, turn {turn}"
            call(call.inputs[turn % 2], out=out(want))
            same(buffers.views, want, f"{call.op} {size}, turn {turn}")


def test_a_chain() -> None:
    """Each kernel starts while the one before ends, and the ends of all before it are behind it."""
    size = Size(64)
    of = [inputs(size, seed) for seed in range(2)]

    def chain(x: Tensor, ids: Tensor) -> list[Tensor]:
        results = []
        for _ in range(3):
            data = mxfp4_ops.get_cutlass_moe_mm_data(ids, E, 64, size.K)
            rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
            where = data.expert_offsets, data.blockscale_offsets
            codes, scale = mxfp4_ops.mxfp4_experts_quant(rows, *where, E, data.sorted_expert_ids)
            values = mxfp4_ops.mxfp4_dequantize(codes, scale, *where, dtype=x.dtype)
            x = mxfp4_ops.shuffle_rows(values, data.output_permutation[:: size.topk].contiguous())
            results += [*data, rows, codes, scale, values, x]
        return results

    x, ids = of[0]["x"].cuda(), of[0]["ids"].cuda()
    chain(x, ids)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = chain(x, ids)
    for turn in range(6):
        x.copy_(of[turn % 2]["x"])
        ids.copy_(of[turn % 2]["ids"])
        graph.replay()
        want = chain(of[turn % 2]["x"], of[turn % 2]["ids"])
        same(results, want, f"captured, turn {turn}")
        same(chain(x, ids), want, f"eager, turn {turn}")


FIRST_CALLS_CAPTURED = r"""
import torch
import mxfp4_ops as ops
K, E = 1024, 20
graphs = []
for m in (700, 1):  # what the first calls ask of the GPU, they ask while a stream is captured
    x, ids = torch.randn(m, K).bfloat16(), torch.randint(-1, E, (m, 4))
    on_gpu = x.cuda(), ids.cuda()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fused = ops.moe_permute_mxfp4_quant(*on_gpu, E, 64)
        rows = ops.shuffle_rows(on_gpu[0], fused.input_permutation)
        codes = ops.mxfp4_experts_quant(rows, fused.expert_offsets, fused.blockscale_offsets, E)
    graph.replay()
    want = ops.moe_permute_mxfp4_quant(x, ids, E, 64)
    for got, w in zip((*fused, *codes), (*want, *want[-2:]), strict=True):
        assert torch.equal(got.cpu(), w), m
print("same")
"""


def test_the_first_calls_are_captured() -> None:
    done = samples.run_python(FIRST_CALLS_CAPTURED)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "same\n"
