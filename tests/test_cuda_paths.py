"""Each way that a launch can take on the GPU gives the same bytes: sizes choose, and MXFP4_OPS_CUDA_WITHOUT forces."""

from collections.abc import Callable

import pytest
import samples
import torch
from torch import Tensor

import mxfp4_ops

pytestmark = pytest.mark.gpu

# What launches go without, and so must do in the other way. GPUs before SM90 have neither clusters nor programmatic
# dependent launch.
WITHOUT = [
    "",
    "warp_slots",
    "few_slots",
    "few_slots,clusters",
    "few_slots,tiled_scales",
    "clusters,dependent_launch",
    "few_slots,clusters,dependent_launch,tiled_scales",
    "wide_lanes,silu_table",
    "silu_table",
]


OPS = [op for op in samples.SAMPLES if op not in ("shuffle_rows", "mxfp4_dequantize")]


@pytest.mark.parametrize("op", OPS)
def test_samples(op: str, monkeypatch) -> None:
    """As the CPU, which test_ops.py compares with the oracle."""

    def call(name: str, device: str) -> list[Tensor]:
        made = samples.sample(op, name, device)
        functional = samples.results(op, samples.overload(op, "default")(*made.args, **made.kwargs))
        out = {result: samples.buffer(t.shape, t.dtype, "slice", device) for result, t in functional.items()}
        samples.overload(op, "out")(*made.args, **made.kwargs, **{result: b.view for result, b in out.items()})
        return [*functional.values(), *(b.memory for b in out.values())]

    for name in samples.SAMPLES[op]:
        want = call(name, "cpu")
        for without in WITHOUT[1:]:
            monkeypatch.setenv("MXFP4_OPS_CUDA_WITHOUT", without)
            for i, (got, t) in enumerate(zip(call(name, "cuda"), want, strict=True)):
                samples.assert_same(got, t, f"{op} {name} without {without}: result {i}")


def route(m: int, topk: int, E: int, kind: str) -> Tensor:
    if kind == "one hot":
        return torch.where(torch.rand(m, topk) < 0.9, E // 2, torch.randint(0, E, (m, topk)))
    return torch.full((m, topk), -1) if kind == "none" else torch.randint(-1, E + 1, (m, topk))


def run(op: Callable, *args: object, out: bool) -> list[Tensor]:
    """A functional call, or one into buffers of other bytes."""
    results = op(*args)
    if not out:
        return list(results)
    buffers = type(results)(*(torch.full_like(t, 0x25) for t in results))
    return list(op(*args, out=buffers))


def inputs_and_results(m: int, topk: int, E: int, K: int, kind: str) -> list[tuple[Callable, tuple, list, list]]:
    """Each op, its arguments and what the CPU makes of them, functional and into buffers."""
    torch.manual_seed(m)
    x = torch.randn(m, K) * torch.exp2(torch.randint(-9, 9, (m, 1)).float())
    x[-1, :2] = torch.tensor([float("inf"), -0.0])
    x = x.to(torch.bfloat16 if m % 2 == 0 else torch.float16)
    ids = route(m, topk, E, kind).to(torch.int32 if m % 3 else torch.int64)
    data = mxfp4_ops.get_cutlass_moe_mm_data(ids, E, 64, K)
    rows = mxfp4_ops.shuffle_rows(x, data.input_permutation)
    both = torch.cat((rows[:, K // 2 // 32 * 32 :], rows[:, K // 2 // 32 * 32 :]), 1)
    where = data.expert_offsets, data.blockscale_offsets, E
    calls = [
        (mxfp4_ops.moe_permute_mxfp4_quant, (x, ids, E, 64)),
        (mxfp4_ops.get_cutlass_moe_mm_data, (ids, E, 64, K)),
        (mxfp4_ops.mxfp4_experts_quant, (rows, *where)),
        (mxfp4_ops.mxfp4_experts_quant, (rows, *where, data.sorted_expert_ids)),
        (mxfp4_ops.silu_and_mul_mxfp4_experts_quant, (both, *where)),
        (mxfp4_ops.silu_and_mul_mxfp4_experts_quant, (both, *where, data.sorted_expert_ids)),
    ]
    return [(op, args, run(op, *args, out=False), run(op, *args, out=True)) for op, args in calls]


# (m, topk, E, K, routing): the slots of a warp, few, of a cluster whose last CTA has none, the most of a cluster, and
# one token more; more experts than a cluster takes; scales by tile; shapes that no CTA divides.
SHAPES = [
    (1, 16, 1024, 4096, "any"),
    (2, 9, 256, 1056, "any"),
    (256, 8, 256, 2880, "any"),
    (300, 7, 17, 96, "one hot"),
    (684, 3, 60, 160, "any"),
    (520, 8, 1024, 1120, "any"),
    (2049, 1, 1, 64, "any"),
    (4096, 8, 36, 2048, "one hot"),
    (1024, 8, 20, 2048, "none"),
    (8192, 8, 384, 1024, "any"),
    (8193, 8, 384, 32, "any"),
    (400, 8, 3000, 96, "any"),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape: tuple[int, int, int, int, str], monkeypatch) -> None:
    for op, args, functional, into_buffers in inputs_and_results(*shape):
        on_gpu = [a.cuda() if isinstance(a, Tensor) else a for a in args]
        for without in WITHOUT:
            monkeypatch.setenv("MXFP4_OPS_CUDA_WITHOUT", without)
            with samples.poisoned_allocator("cuda", [t.numel() * t.element_size() for t in functional]):
                results = run(op, *on_gpu, out=False)
            for i, (got, want) in enumerate(zip(results, functional, strict=True)):
                samples.assert_same(got, want, f"{op.__name__} without {without}: result {i}")
            for i, (got, want) in enumerate(zip(run(op, *on_gpu, out=True), into_buffers, strict=True)):
                samples.assert_same(got, want, f"{op.__name__} without {without}: buffer {i}")


# Torch's own kernels do not run where its PTX must be compiled: tensors are made on the CPU and copied.
ON_A_NEWER_GPU = r"""
import torch
import mxfp4_ops as ops
K, E = 96, 20
for m in (1, 30, 700, 5000):
    x, ids = torch.randn(m, K).bfloat16(), torch.randint(-1, E, (m, 8))
    want = ops.moe_permute_mxfp4_quant(x, ids, E, 64)
    fused = ops.moe_permute_mxfp4_quant(x.cuda(), ids.cuda(), E, 64)
    data = ops.get_cutlass_moe_mm_data(ids.cuda(), E, 64, K)
    rows = ops.shuffle_rows(x.cuda(), data.input_permutation)
    codes = ops.mxfp4_experts_quant(rows, data.expert_offsets, data.blockscale_offsets, E)
    for name, got in (("fused", fused), ("metadata", data), ("quant", codes)):
        for g, w in zip(got, want[-len(got):] if name == "quant" else want):
            assert torch.equal(g.cpu().view(torch.uint8), w.view(torch.uint8)), (name, m)
print("same")
"""


def test_a_gpu_newer_than_the_build() -> None:
    """It runs what its driver compiles from the PTX of the oldest architecture, without clusters or dependent launch."""
    done = samples.run_python(ON_A_NEWER_GPU, CUDA_FORCE_PTX_JIT="1", CUDA_CACHE_DISABLE="1")
    if "no kernel image" in done.stderr:
        pytest.skip("this build has no PTX")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "same\n"
