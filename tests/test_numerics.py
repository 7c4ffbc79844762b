"""The bytes of the ops, exhaustively: golden vectors, every 16-bit pattern under every scale, every gate of silu.

golden/ is described in test_reference.py, which holds the oracle to the same vectors.
"""

import ctypes
import functools
import hashlib
import platform
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from samples import BF16, FP16, I32, PERMUTE_OP, QUANT_OPS, assert_same, run_python
from torch import Tensor

import mxfp4_ops
from mxfp4_ops import _library

pytestmark = pytest.mark.usefixtures("one_thread")

QUANT_OP, SILU_OP = QUANT_OPS
each_quant = pytest.mark.parametrize("op", [QUANT_OP, PERMUTE_OP])

GOLDEN = Path(__file__).parent / "golden"
DTYPES = {"bf16": BF16, "fp16": FP16}
INFINITY = {BF16: 0x7F80, FP16: 0x7C00}


def one_expert(R: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    offsets = torch.tensor([[0, R], [0, (R + 127) // 128 * 128]], dtype=I32, device=device)
    return offsets[0], offsets[1]


def quantize(x: Tensor, device: str = "cpu", op: str = QUANT_OP) -> tuple[Tensor, Tensor]:
    """The op on one expert -> codes uint8 [R, K/2], scales uint8 [R, K/32] (flat), on the CPU."""
    R = x.shape[0]
    if op == PERMUTE_OP:
        routing = torch.zeros(R, 1, dtype=I32, device=device), 1, 32
    else:
        routing = *one_expert(R, device), 1
    *_, codes, scale = (t.cpu() for t in getattr(mxfp4_ops, op)(x.to(device), *routing))
    return codes, reference.unswizzle(scale, *one_expert(R), R, 1, 2 * codes.shape[1])


def load(name: str) -> dict[str, Tensor]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    dtype = DTYPES[name.rsplit("_", 1)[1]]
    return {
        key: torch.from_numpy(array.view(np.int16)).view(dtype) if key in ("x", "silu_mul") else torch.from_numpy(array)
        for key, array in arrays.items()
    }


def in_blocks(codes: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """(codes uint8 [blocks, 16], scales uint8 [blocks])."""
    return codes.reshape(-1, 16), scales.reshape(-1)


# Golden vectors -------------------------------------------------------------------------------------------------------

GOLDEN_NAMES = sorted(path.stem[3:] for path in GOLDEN.glob("in_*.npz"))


def comparable_blocks(source: str, x: Tensor) -> Tensor:
    """Where the implementation that made the vectors follows our rule."""
    value = x.reshape(-1, 32).double()
    if source == "contract":
        return torch.ones(value.shape[0], dtype=torch.bool)
    if source == "nvidia_headers_upstream":
        return ~value.isnan().any(dim=1)
    amax = value.abs().amax(dim=1)
    return value.isfinite().all(dim=1) & ((amax == 0) | (amax >= 1.75 * 2.0**-125))


@each_quant
@pytest.mark.parametrize("source", ["contract", "torchao018_even", "nvidia_headers_upstream"])
@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_golden_blocks(name: str, source: str, op: str, device: str) -> None:
    x, want = load(f"in_{name}")["x"], load(f"{source}/{name}")
    comparable = comparable_blocks(source, x)
    assert comparable.sum() > 6
    got_codes, got_scales = in_blocks(*quantize(x, device, op))
    want_codes, want_scales = in_blocks(want["codes"], want["scales"])
    assert_same(got_scales[comparable], want_scales[comparable], f"{source} {name} scales")
    assert_same(got_codes[comparable], want_codes[comparable], f"{source} {name} codes")


def test_there_are_golden_vectors() -> None:
    assert len(GOLDEN_NAMES) == 12 and len(list((GOLDEN / "ops").glob("*.npz"))) == 8


@pytest.mark.parametrize("name", sorted(path.stem for path in (GOLDEN / "ops").glob("*.npz")))
def test_golden_ops(name: str, device: str) -> None:
    case = load(f"ops/{name}")
    offsets, scale_offsets = (case[key].to(device, I32) for key in ("expert_offsets", "blockscale_offsets"))
    E = offsets.numel() - 1
    op = mxfp4_ops.silu_and_mul_mxfp4_experts_quant if "fused" in name else mxfp4_ops.mxfp4_experts_quant
    output, scale = op(case["x"].to(device), offsets, scale_offsets, E)
    assert_same(output, case["codes"], "codes")
    tiled = case["scales_tiled"]
    assert_same(scale.flatten()[: tiled.numel()], tiled, "scales")
    assert not scale.flatten()[tiled.numel() :].any()


# Every pattern under every scale --------------------------------------------------------------------------------------


def assert_blocks(x: Tensor, got: tuple[Tensor, Tensor], want: tuple[Tensor, Tensor], case: str) -> None:
    """Codes and flat scales are the same; the failure names the first block that differs."""
    got_codes, got_scales = in_blocks(*got)
    want_codes, want_scales = in_blocks(*want)
    differs = (got_codes != want_codes).any(dim=1) | (got_scales != want_scales)
    if differs.any():
        block = int(differs.nonzero()[0])
        patterns = x.reshape(-1, 32)[block].view(torch.int16).numpy().astype("<u2")
        raise AssertionError(
            f"{case}: {int(differs.sum())} of {differs.numel()} blocks differ, the first is {block}:\n"
            f"input {[f'{p:#06x}' for p in patterns.tolist()]}\n"
            f"scale {got_scales[block]}, want {want_scales[block]}\n"
            f"codes {bytes(got_codes[block].tolist()).hex(' ')}\n want {bytes(want_codes[block].tolist()).hex(' ')}"
        )


def as_matrix(blocks: Tensor, blocks_a_row: int) -> Tensor:
    """[blocks, 32] -> [R, 32 * blocks_a_row], with blocks of zeros at the end."""
    padding = blocks.new_zeros(-len(blocks) % blocks_a_row, 32)
    return torch.cat((blocks, padding)).reshape(-1, 32 * blocks_a_row)


def blocks_with_lead(lead: Tensor, held: Tensor) -> Tensor:
    """int64 patterns -> [blocks, 32]: 31 of `held` a block, and of `lead` in turn one, at every place in turn."""
    held = held[torch.arange(-(-len(held) // 31) * 31) % len(held)].reshape(-1, 31)
    block = torch.arange(len(held))
    together = torch.cat((lead[block % len(lead)].unsqueeze(1), held), dim=1)
    return together.gather(1, (torch.arange(32) - block.unsqueeze(1)) % 32)


@functools.cache
def every_pattern_under_every_scale(dtype: torch.dtype) -> Tensor:
    """[R, 33 * 32]: for each scale byte that the dtype has, every pattern that a block with that scale can hold."""
    magnitude = torch.arange(INFINITY[dtype] + 1)
    alone = torch.zeros(len(magnitude), 32, dtype=dtype)
    alone[:, 0] = magnitude.to(torch.uint16).view(dtype)
    scale_of = reference.quantize_blocks(alone)[1][:, 0]
    blocks = []
    for scale in scale_of.unique():
        lead = magnitude[scale_of == scale]
        held = magnitude[: lead[-1] + 1]
        blocks.append(blocks_with_lead(torch.cat((lead, lead + 0x8000)), torch.cat((held, held + 0x8000))))
    nan = torch.arange(INFINITY[dtype] + 1, 0x8000)
    blocks.append(blocks_with_lead(torch.cat((nan, nan + 0x8000)), torch.arange(1 << 16)))
    return as_matrix(torch.cat(blocks).to(torch.uint16).view(dtype), blocks_a_row=33)


@functools.cache
def oracle(sweep: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if sweep == "patterns":
        return reference.quantize_blocks(every_pattern_under_every_scale(dtype))
    return reference.quantize_blocks(reference.silu_and_mul(SILU_SWEEPS[sweep](dtype)))


@each_quant
@pytest.mark.parametrize("dtype, scales", [(BF16, 255), (FP16, 44)], ids=DTYPES)
def test_every_pattern_under_every_scale(dtype: torch.dtype, scales: int, op: str, device: str) -> None:
    x, want = every_pattern_under_every_scale(dtype), oracle("patterns", dtype)
    # bf16: 0 to 253 and NaN. fp16: amax of zero, 101 to 141, infinity, NaN.
    assert len(want[1].unique()) == scales
    assert_blocks(x, quantize(x, device, op), want, str(dtype))


@each_quant
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("K", [32, 64, 96, 128, 160, 1024, 2048])
def test_width_does_not_matter(dtype: torch.dtype, K: int, op: str, device: str) -> None:
    blocks = every_pattern_under_every_scale(dtype).reshape(-1, 32)[::97]
    x = as_matrix(blocks, K // 32)
    assert_blocks(x, quantize(x, device, op), reference.quantize_blocks(x), f"{dtype} {K}")


@functools.cache
def rare_among_usual(dtype: torch.dtype) -> Tensor:
    """[R, 2K], also read as [2R, K]: usual numbers, and in some blocks what kernels may set apart. K is no whole number
    of what a kernel takes at a time."""
    seeded = torch.Generator().manual_seed(0)
    x = torch.randn(96, 74, 32, generator=seeded).to(dtype)
    limits = torch.finfo(dtype)
    subnormal = torch.tensor([0.25, 1.0, 1.75, 3.25, 3.5, 7.0]) * limits.smallest_normal
    large = torch.tensor([79.5, 80.0, 80.5, 88.5, 88.75, 95.0, limits.max, torch.inf])
    edge = torch.cat((torch.tensor([0.0, 8e-4, 1e-3, torch.nan]), subnormal, large, -large))
    kind = torch.randint(0, 8, x.shape[:2], generator=seeded)
    value = edge[torch.randint(0, len(edge), x.shape[:2], generator=seeded)].to(dtype)
    one = torch.arange(32) == torch.randint(0, 32, x.shape[:2], generator=seeded).unsqueeze(-1)
    x = torch.where(((kind == 0).unsqueeze(-1) & one), value.unsqueeze(-1), x)  # one such number
    small = value.where(value.isfinite(), torch.zeros_like(value)).unsqueeze(-1)
    x = torch.where((kind == 1).unsqueeze(-1), (x * 0.25).clamp(-1, 1) * small, x)  # a block no larger
    return x.reshape(96, 74 * 32)


@each_quant
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_rare_blocks_among_usual_ones(dtype: torch.dtype, op: str, device: str) -> None:
    x = rare_among_usual(dtype).reshape(192, -1)
    assert_blocks(x, quantize(x, device, op), reference.quantize_blocks(x), str(dtype))


# silu -----------------------------------------------------------------------------------------------------------------


def every_gate(dtype: torch.dtype) -> Tensor:
    """[R, 2K]: every gate with a few ups."""
    gates = torch.arange(1 << 16).to(torch.uint16).view(dtype).reshape(-1, 2048)
    limits = torch.finfo(dtype)
    ups = (1.0, -1.0, 0.0, -0.0, 3.140625, -0.3359375, limits.max, limits.tiny, limits.smallest_normal / 4)
    return torch.cat([torch.cat((gates, torch.full_like(gates, up)), dim=1) for up in (*ups, torch.inf, torch.nan)])


def every_gate_beside_a_boundary(dtype: torch.dtype) -> Tensor:
    """[R, 2K]: every gate with the ups that bring the product next to a boundary between codes, under scale 127."""
    gates = torch.arange(1 << 16).to(torch.uint16).view(dtype)
    silu = gates.double() / (1 + (-gates.double()).exp())
    rows = []
    for boundary in (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0):
        up = (boundary / silu).to(dtype)
        usable = up.isfinite() & silu.isfinite() & (silu != 0) & (up != 0)
        for step in (-1, 0, 1):
            beside = (up[usable].view(torch.int16) + step).view(dtype)
            pairs = torch.stack((gates[usable], torch.where(beside.isfinite(), beside, 0.0).to(dtype)))
            # 31 of them a block, and 32 * 0.1875 = 6 to fix the scale.
            pairs = torch.cat((pairs, pairs[:, : -pairs.shape[1] % 31]), dim=1).reshape(2, -1, 31)
            lead = torch.tensor([32.0, 0.1875], dtype=dtype).reshape(2, 1, 1).expand(2, pairs.shape[1], 1)
            gate, up_blocks = torch.cat((pairs, lead), dim=2)
            rows.append(torch.cat((as_matrix(gate, 33), as_matrix(up_blocks, 33)), dim=1))
    return torch.cat(rows)


SILU_SWEEPS = {"ups": functools.cache(every_gate), "boundaries": functools.cache(every_gate_beside_a_boundary)}


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("sweep", SILU_SWEEPS)
def test_every_gate_of_silu(sweep: str, dtype: torch.dtype, device: str) -> None:
    x, want = SILU_SWEEPS[sweep](dtype), oracle(sweep, dtype)
    assert_blocks(reference.silu_and_mul(x), quantize(x, device, SILU_OP), want, f"{sweep} {dtype}")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_rare_gates_among_usual_ones(dtype: torch.dtype, device: str) -> None:
    x = rare_among_usual(dtype)
    y = reference.silu_and_mul(x)
    assert_blocks(y, quantize(x, device, SILU_OP), reference.quantize_blocks(y), str(dtype))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_gate_of_silu_in_wide_rows(dtype: torch.dtype, device: str) -> None:
    """So many that a GPU takes several blocks a lane and looks bfloat16's silu up; some rows of common gates alone."""
    gates = torch.arange(1 << 16).to(torch.uint16).view(dtype).view(-1, 1024).repeat(128, 1)
    gates[::3] = torch.randn(gates[::3].shape).to(dtype) * 4
    ups = torch.randn(gates.shape).to(dtype)
    x = torch.cat((gates, ups), 1)
    assert_blocks(gates, quantize(x, device, SILU_OP), quantize(x, "cpu", SILU_OP), "wide rows")


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_boundary_sweep_sees_one_wrong_bit(dtype: torch.dtype) -> None:
    """The last bit of silu in float32, before the product and two roundings to fewer bits."""
    x, (codes, scales) = SILU_SWEEPS["boundaries"](dtype), oracle("boundaries", dtype)
    assert scales.unique().tolist() == [0, 127]
    gate, up = x.chunk(2, dim=1)
    silu = reference.silu32(torch.arange(1 << 16).to(torch.uint16).view(dtype).float())
    stepped = (silu.view(I32) - 1).view(torch.float32)[gate.contiguous().view(torch.int16).long() & 0xFFFF]
    wrong_codes, _ = reference.quantize_blocks((stepped * up.float()).to(dtype))
    assert (wrong_codes != codes).sum() > 5000


# Dequantisation -------------------------------------------------------------------------------------------------------


@functools.cache
def every_code_and_scale() -> tuple[Tensor, Tensor]:
    """packed [256, 256], so that each row has every byte in blocks of 16; scale byte r in row r."""
    packed = torch.arange(256).to(torch.uint8).expand(256, 256).contiguous()
    flat = torch.arange(256).to(torch.uint8).unsqueeze(1).expand(256, 16)
    return packed, reference.swizzle(flat, *one_expert(256), 256, 1, 512)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, FP16], ids=str)
def test_dequantize_every_code_and_scale(dtype: torch.dtype, device: str) -> None:
    packed, scale = every_code_and_scale()
    want = reference.dequantize(packed, scale, *one_expert(256), dtype)
    got = mxfp4_ops.mxfp4_dequantize(packed.to(device), scale.to(device), *one_expert(256, device), dtype=dtype)
    assert_same(got, want, str(dtype), any_nan=True)


# Whatever the CPU is set to -------------------------------------------------------------------------------------------


def all_bytes(dtype: torch.dtype) -> list[Tensor]:
    """Results of the float ops on the sweeps, on the CPU."""
    packed, scale = every_code_and_scale()
    patterns = every_pattern_under_every_scale(dtype)
    tensors = [*quantize(patterns), *quantize(patterns, op=PERMUTE_OP)]
    tensors += quantize(rare_among_usual(dtype).reshape(192, -1))
    for x in (rare_among_usual(dtype), *(sweep(dtype) for sweep in SILU_SWEEPS.values())):
        tensors += quantize(x, op=SILU_OP)
    return [*tensors, mxfp4_ops.mxfp4_dequantize(packed, scale, *one_expert(256), dtype=dtype)]


def digest(dtype: torch.dtype) -> str:
    parts = (hashlib.sha256(t.contiguous().view(torch.uint8).numpy()).hexdigest() for t in all_bytes(dtype))
    return " ".join(part[:16] for part in parts)


@functools.cache
def usual_digest(dtype: torch.dtype) -> str:
    return digest(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_flush_to_zero_changes_nothing(dtype: torch.dtype) -> None:
    want = usual_digest(dtype)
    subnormal = torch.tensor([1e-310], dtype=torch.float64)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU does not flush subnormals")
    try:
        assert digest(dtype) == want
        assert subnormal.mul(1).item() == 0, "the caller's setting is gone"
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.skipif(platform.machine() != "x86_64" or platform.libc_ver()[0] != "glibc", reason="FE_UPWARD of x86")
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_rounding_mode_changes_nothing(dtype: torch.dtype) -> None:
    want = usual_digest(dtype)
    libm, FE_TONEAREST, FE_UPWARD = ctypes.CDLL("libm.so.6"), 0, 0x800
    libm.fesetround(FE_UPWARD)
    try:
        got, kept = digest(dtype), libm.fegetround()
    finally:
        libm.fesetround(FE_TONEAREST)
    assert got == want
    assert kept == FE_UPWARD, "the caller's setting is gone"


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(threads: int, dtype: torch.dtype) -> None:
    want = usual_digest(dtype)
    torch.set_num_threads(threads)
    try:
        assert digest(dtype) == want
    finally:
        torch.set_num_threads(1)


CAPABILITIES = ("default", "avx2", "avx512")


@pytest.mark.parametrize("asked", [*CAPABILITIES, "unheard of"])
def test_instruction_sets_give_the_same_bytes(asked: str) -> None:
    code = r"""
import torch
import test_numerics as t
torch.set_num_threads(1)
print(t._library.cpu_capability())
print(*(t.digest(dtype) for dtype in t.DTYPES.values()), sep="\n")
"""
    done = run_python(code, MXFP4_OPS_CPU_CAPABILITY=asked)
    assert done.returncode == 0, done.stderr
    used, *digests = done.stdout.splitlines()
    at_most = CAPABILITIES.index(asked) if asked in CAPABILITIES else len(CAPABILITIES)  # no such set: not asked
    assert used in CAPABILITIES[: at_most + 1]
    want = [usual_digest(dtype) for dtype in DTYPES.values()]
    assert digests == want, f"{used} differs from {_library.cpu_capability()}"
