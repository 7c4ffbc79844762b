"""Kernels start while the one in front of them, anybody's, still ends: they must wait for what it writes and reads."""

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

import mxfp4_ops

pytestmark = pytest.mark.gpu

K, E, TOPK = 512, 20, 4
LATE = 1 << 25  # bytes of a buffer that a kernel takes some 15 us to write; what is at its end is written last


class Late:
    """Tensors at the end of a large buffer, so that the kernel that copies into it writes them last."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.memory = torch.zeros(LATE, dtype=torch.uint8, device="cuda")
        self.views, end = [], LATE
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


def inputs(m: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, E, (m, TOPK), generator=generator)
    data = mxfp4_ops.get_cutlass_moe_mm_data(ids, E, 64, K)
    x = torch.randn(m, K, generator=generator).bfloat16()
    rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
    packed, scale = mxfp4_ops.mxfp4_experts_quant(rows, data.expert_offsets, data.blockscale_offsets, E)
    both = torch.cat((rows, rows.flip(0)), 1)
    return {"ids": ids, "x": x, "rows": rows, "both": both, "packed": packed, "scale": scale} | data._asdict()


def calls(m: int) -> Iterator[Call]:
    of = [inputs(m, seed) for seed in range(2)]

    def call(op: Callable, *arguments: object) -> Call:
        return Call(op, tuple([i[a] if isinstance(a, str) else a for a in arguments] for i in of))

    yield call(mxfp4_ops.get_cutlass_moe_mm_data, "ids", E, 64, K)
    yield call(mxfp4_ops.moe_permute_mxfp4_quant, "x", "ids", E, 64)
    yield call(mxfp4_ops.shuffle_rows, "x", "input_permutation")
    to_float = functools.partial(mxfp4_ops.mxfp4_dequantize, dtype=torch.float32)
    yield call(to_float, "packed", "scale", "expert_offsets", "blockscale_offsets")
    for op, rows in ((mxfp4_ops.mxfp4_experts_quant, "rows"), (mxfp4_ops.silu_and_mul_mxfp4_experts_quant, "both")):
        yield call(op, rows, "expert_offsets", "blockscale_offsets", E)
        yield call(op, rows, "expert_offsets", "blockscale_offsets", E, "sorted_expert_ids")


SIZES = [1, 5, 100, 700, 4000]  # one launch, two, three


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
@pytest.mark.parametrize("m", SIZES)
def test_waits_for_what_is_written_in_front(m: int, front: Callable, captured: bool) -> None:
    for call in calls(m):
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
            same(results, call.want[turn % 2], f"{call.op} m {m}, turn {turn}")


@pytest.mark.parametrize("m", SIZES)
def test_captured_alone(m: int) -> None:
    """The first node of a graph has nothing in front of it."""
    for call in calls(m):
        target = Late(call.tensors(1))
        call(call.arguments(target.views))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = call(call.arguments(target.views))
        for turn in range(3):
            kernel(target.memory, Late(call.tensors(turn % 2)).memory)
            graph.replay()
            same(results, call.want[turn % 2], f"{call.op} m {m}, turn {turn}")


@pytest.mark.parametrize("m", SIZES)
def test_leaves_alone_what_is_read_in_front(m: int) -> None:
    for call in calls(m):
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
            assert equal, f"{call.op} m {m}, turn {turn}"
            call(call.inputs[turn % 2], out=out(want))
            same(buffers.views, want, f"{call.op} m {m}, turn {turn}")


def test_a_chain() -> None:
    """Each kernel starts while the one before ends, and the ends of all before it are behind it."""
    m = 64
    of = [inputs(m, seed) for seed in range(2)]

    def chain(x: Tensor, ids: Tensor) -> list[Tensor]:
        results = []
        for _ in range(3):
            data = mxfp4_ops.get_cutlass_moe_mm_data(ids, E, 64, K)
            rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
            where = data.expert_offsets, data.blockscale_offsets
            codes, scale = mxfp4_ops.mxfp4_experts_quant(rows, *where, E, data.sorted_expert_ids)
            values = mxfp4_ops.mxfp4_dequantize(codes, scale, *where, dtype=x.dtype)
            x = mxfp4_ops.shuffle_rows(values, data.output_permutation[::TOPK].contiguous())
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
