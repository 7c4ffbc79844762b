"""The oracle against vectors that other implementations made, exact rational arithmetic and float64.

golden/: in_*.npz are inputs (16-bit patterns); contract/ holds the required bytes, torchao018_even/ those of torchao
0.18.0 (EVEN), nvidia_headers_upstream/ those of CUDA 13.0's cuda_fp4.hpp with NaN dropped from amax; ops/ whole ops.
"""

import hashlib
import math
import time
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import reference
import torch
from torch import Tensor

pytestmark = pytest.mark.usefixtures("one_thread")

GOLDEN = Path(__file__).parent / "golden"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HALF_TYPES = tuple(DTYPES.values())


def load(name: str) -> dict[str, Tensor]:
    with np.load(GOLDEN / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    dtype = DTYPES[name.rsplit("_", 1)[1]]
    patterns = ("x", "silu_mul")
    return {
        key: torch.from_numpy(array.view(np.int16)).view(dtype) if key in patterns else torch.from_numpy(array)
        for key, array in arrays.items()
    }


def unpack(codes: Tensor) -> Tensor:
    """uint8 [R, K/2] -> uint8 [R, K]."""
    return torch.stack((codes & 0xF, codes >> 4), dim=-1).reshape(codes.shape[0], -1)


def blocks(x: Tensor) -> Tensor:
    return x.reshape(-1, reference.BLOCK)


def every_pattern(dtype: torch.dtype) -> Tensor:
    return torch.arange(1 << 16).to(torch.uint16).view(dtype)


def same(a: Tensor, b: Tensor) -> Tensor:
    """Elementwise: the same value with the same sign of zero, or both NaN."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return (a.contiguous().view(integer) == b.contiguous().view(integer)) | (a.isnan() & b.isnan())


def random_ids(m: int, topk: int, low: int, high: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high, (m, topk), generator=torch.Generator().manual_seed(seed))


# Golden blocks --------------------------------------------------------------------------------------------------------

# blocks in the file, those torchao agrees on, those NVIDIA's headers agree on
GOLDEN_BLOCKS = {
    "all_with_one_bf16": (2144, 2132, 2132),
    "all_with_one_fp16": (2144, 2076, 2076),
    "amax_edge_bf16": (3584, 3533, 3571),
    "amax_edge_fp16": (512, 496, 497),
    "gauss_bf16": (2048, 2048, 2048),
    "gauss_fp16": (2048, 2048, 2048),
    "laplace_bf16": (1024, 1024, 1024),
    "laplace_fp16": (1024, 1024, 1024),
    "special_bf16": (28, 8, 17),
    "special_fp16": (13, 7, 9),
    "ties_bf16": (35, 35, 35),
    "ties_fp16": (35, 35, 35),
}


@pytest.mark.parametrize("name", GOLDEN_BLOCKS)
def test_contract(name: str) -> None:
    x, want = load(f"in_{name}")["x"], load(f"contract/{name}")
    codes, scales = reference.quantize_blocks(x)
    assert torch.equal(scales, want["scales"])
    assert torch.equal(codes, want["codes"])
    assert scales.numel() == GOLDEN_BLOCKS[name][0]


def assert_agrees(name: str, source: str, comparable: Tensor, count: int) -> None:
    codes, scales = reference.quantize_blocks(load(f"in_{name}")["x"])
    want = load(f"{source}/{name}")
    assert torch.equal(scales.reshape(-1)[comparable], want["scales"].reshape(-1)[comparable])
    assert torch.equal(blocks(unpack(codes))[comparable], blocks(unpack(want["codes"]))[comparable])
    assert comparable.sum().item() == count


@pytest.mark.parametrize("name", GOLDEN_BLOCKS)
def test_torchao(name: str) -> None:
    value = blocks(load(f"in_{name}")["x"]).double()
    amax = value.abs().amax(dim=-1)
    comparable = value.isfinite().all(dim=-1) & ((amax == 0) | (amax >= 1.75 * 2.0**-125))
    assert_agrees(name, "torchao018_even", comparable, GOLDEN_BLOCKS[name][1])


@pytest.mark.parametrize("name", GOLDEN_BLOCKS)
def test_nvidia_headers(name: str) -> None:
    comparable = ~blocks(load(f"in_{name}")["x"]).isnan().any(dim=-1)
    assert_agrees(name, "nvidia_headers_upstream", comparable, GOLDEN_BLOCKS[name][2])


def test_every_golden_input_is_used() -> None:
    assert {path.stem[3:] for path in GOLDEN.glob("in_*.npz")} == set(GOLDEN_BLOCKS)


# Golden ops -----------------------------------------------------------------------------------------------------------


def assert_op(case: dict[str, Tensor], silu: bool) -> tuple[Tensor, Tensor]:
    """Checks the bytes that rows and padding have in every form; returns (codes, flat scales) of the oracle."""
    x, offsets, scale_offsets = case["x"], case["expert_offsets"], case["blockscale_offsets"]
    R, K, E = x.shape[0], x.shape[1] // (2 if silu else 1), offsets.shape[0] - 1
    S, columns = reference.scale_rows(R, E), 4 * reference.scale_tiles(K)
    output, output_scale = reference.experts_quant(x, offsets, scale_offsets, E, silu=silu)
    assert output.shape == (R, K // 2) and output_scale.shape == (S, columns)

    tiled = case["scales_tiled"]
    assert tiled.numel() == scale_offsets[-1].item() * columns <= output_scale.numel()
    assert torch.equal(output_scale.view(-1)[: tiled.numel()], tiled)
    assert not output_scale.view(-1)[tiled.numel() :].any()

    ids = torch.repeat_interleave(torch.arange(E, dtype=torch.int32), offsets.diff())
    by_ids = reference.experts_quant(x, offsets, scale_offsets, E, ids, silu=silu)
    assert torch.equal(by_ids[0], output) and torch.equal(by_ids[1], output_scale)
    flat = reference.unswizzle(output_scale, offsets, scale_offsets, R, E, K)
    assert torch.equal(reference.swizzle(flat, offsets, scale_offsets, R, E, K), output_scale)
    return output, flat


@pytest.mark.parametrize("name", ["quant_k96_bf16", "quant_k96_fp16", "quant_k256_bf16", "quant_k256_fp16"])
def test_quant_op(name: str) -> None:
    case = load(f"ops/{name}")
    output, flat = assert_op(case, silu=False)
    assert torch.equal(output, case["codes"])
    assert torch.equal(flat, case["scales_flat"])


@pytest.mark.parametrize(
    "name, ambiguous_count, step_count",
    [("fused_k96_bf16", 5, 0), ("fused_k96_fp16", 27, 0), ("fused_k256_bf16", 30, 0), ("fused_k256_fp16", 197, 2)],
)
def test_fused_op(name: str, ambiguous_count: int, step_count: int) -> None:
    case = load(f"ops/{name}")
    got, want = reference.silu_and_mul(case["x"]), case["silu_mul"]
    ambiguous = torch.from_numpy(np.unpackbits(case["ambiguous"].numpy(), axis=1)).bool()
    assert ambiguous.sum().item() == ambiguous_count
    differs = ~same(got, want)
    assert not (differs & ~ambiguous).any()
    assert differs.sum().item() == step_count
    steps = got.view(torch.int16).to(torch.int32) - want.view(torch.int16).to(torch.int32)
    assert steps.abs().max() <= 1

    output, flat = assert_op(case, silu=True)
    assert torch.equal(flat, case["scales_flat"])
    # The steps are too small to move an element over a boundary in these files.
    assert torch.equal(output, case["codes"])


# Numbers --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_scale_is_the_bit_formula(dtype: torch.dtype) -> None:
    x = torch.zeros(1 << 16, 32, dtype=dtype)
    x[:, 17] = every_pattern(dtype)
    x = x[~x[:, 17].isnan()]
    bits = x[:, 17].abs().float().view(torch.int32)
    exponent = ((bits + 0x00200000) >> 23) & 0xFF
    want = torch.where(exponent > 2, exponent - 2, 0)
    _, scales = reference.quantize_blocks(x)
    assert torch.equal(scales[:, 0].int(), want)
    assert want.shape[0] == {torch.bfloat16: 65536 - 254, torch.float16: 65536 - 2046}[dtype]
    finite = want[x[:, 17].isfinite() & (x[:, 17] != 0)]
    low, high = {torch.bfloat16: (0, 253), torch.float16: (101, 141)}[dtype]
    assert finite.min() == low and finite.max() == high


@pytest.mark.parametrize("dtype, denominator", [(torch.bfloat16, 32), (torch.float16, 256)])
@pytest.mark.parametrize("exponent", [-12, 0, 12])
def test_code_is_nearest_even(dtype: torch.dtype, denominator: int, exponent: int) -> None:
    numerators = [sign * n for sign in (1, -1) for n in range(7 * denominator)]
    x = torch.zeros(len(numerators), 32, dtype=dtype)
    x[:, 0] = torch.tensor(numerators) * (2.0**exponent / denominator)
    x[:, 1] = 4 * 2.0**exponent
    codes, scales = reference.quantize_blocks(x)
    assert (scales == 127 + exponent).all()
    for numerator, code in zip(numerators, unpack(codes)[:, 0].tolist()):
        distance = [abs(abs(numerator) - denominator * Fraction(v)) for v in reference.E2M1_VALUES[:8]]
        nearest = [c for c in range(8) if distance[c] == min(distance)]
        want = nearest[0] if len(nearest) == 1 else next(c for c in nearest if c % 2 == 0)
        assert code == want + 8 * (numerator < 0), Fraction(numerator, denominator)


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_nan_block(dtype: torch.dtype) -> None:
    x = torch.zeros(2, 64, dtype=dtype)
    x[0, :8] = torch.tensor([1.0, -1.0, 0.0, -0.0, torch.inf, -torch.inf, torch.nan, -torch.nan])
    x[0, 32:] = -6.0
    codes, scales = reference.quantize_blocks(x)
    assert unpack(codes)[0].tolist() == [0, 8, 0, 8, 7, 7, 7, 7] + [0] * 24 + [15] * 32
    assert scales.tolist() == [[255, 127], [0, 0]]


def test_flush_to_zero_changes_nothing() -> None:
    x = load("in_all_with_one_bf16")["x"], load("in_special_bf16")["x"], load("in_amax_edge_bf16")["x"]
    gates = every_pattern(torch.bfloat16)

    def results() -> list[Tensor]:
        silu = reference.silu32(reference.encode(reference.decode(gates), torch.float32)).view(torch.int32)
        return [silu] + [part for rows in x for part in reference.quantize_blocks(rows)]

    plain = results()
    if not torch.set_flush_denormal(True):
        pytest.skip("the processor cannot flush subnormals to zero")
    try:
        flushed = results()
    finally:
        torch.set_flush_denormal(False)
    assert all(torch.equal(a, b) for a, b in zip(plain, flushed, strict=True))


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_decode_and_encode_every_pattern(dtype: torch.dtype) -> None:
    x = every_pattern(dtype)
    assert same(reference.decode(x), x.double()).all()
    assert same(reference.encode(x.double(), dtype), x).all()


def test_encode_rounds_like_the_casts() -> None:
    generator = torch.Generator().manual_seed(1)
    doubles = torch.randint(-(2**63), 2**63 - 1, (200_000,), generator=generator).view(torch.float64)
    near_float32 = torch.randn(200_000, generator=generator).double() * torch.logspace(-47, 40, 200_000).double()
    for value in (doubles, near_float32):
        assert same(reference.encode(value, torch.float32), value.float()).all()
        assert same(reference.decode(value.float()), value.float().double()).all()
        for dtype in HALF_TYPES:
            assert same(reference.encode(value.float().double(), dtype), value.float().to(dtype)).all()


# Correctly rounded operations -----------------------------------------------------------------------------------------


def nearest_float32(value: Fraction, zero: float) -> float:
    """value rounded to float32, half to even; `zero` is the answer for an exact 0."""
    if value == 0:
        return zero
    sign, magnitude = (-1.0 if value < 0 else 1.0), abs(value)
    exponent = magnitude.numerator.bit_length() - magnitude.denominator.bit_length()
    exponent -= magnitude < Fraction(2) ** exponent
    quantum = Fraction(2) ** (max(exponent, -126) - 23)
    rounded = round(magnitude / quantum) * quantum
    return sign * (math.inf if rounded >= 2**128 else float(rounded))


def float32_operands(count: int, seed: int) -> Tensor:
    """float32 [count, 3]: finite, of every exponent."""
    bits = torch.randint(-(2**31), 2**31, (2 * count, 3), generator=torch.Generator().manual_seed(seed))
    operands = bits.to(torch.int32).view(torch.float32)
    return operands[operands.isfinite().all(dim=1)][:count]


def nasty_triples() -> Tensor:
    """float32 [N, 3]: products on or beside a tie, cancellation, subnormal results, the edge of overflow."""
    generator = torch.Generator().manual_seed(2)

    def significands(count: int, bits: int) -> Tensor:
        return 1 + torch.randint(0, 1 << bits, (count,), generator=generator).double() / 2**bits

    triples = []
    for bits, exponent in ((12, 0), (12, -60), (23, 0), (23, 60), (23, -120), (12, -134), (23, -140)):
        a = (significands(128, bits) * 2.0 ** (exponent // 2)).float()
        b = (significands(128, bits) * 2.0 ** (exponent - exponent // 2)).float()
        product = (a.double() * b.double()).float()
        step = torch.nextafter(product, torch.tensor(torch.inf))
        half_step = ((step.double() - product.double()) / 2).float()
        tiny = torch.full_like(a, 2.0**-149)
        for c in (tiny, -tiny, -product, -step, half_step, -half_step, product * 2.0**30, -product * 2.0**-24):
            triples.append(torch.stack((a, b, c), dim=1))
    edge = [[2.0**64, 2.0**64, c] for c in (-(2.0**103), -(2.0**103) * 1.5, -(2.0**104), 0.0, -(2.0**127))]
    ties = [[1 + 2.0**-12, 1 + 2.0**-12, c] for c in (2.0**-149, -(2.0**-149), 0.0, 2.0**-60, -(2.0**-100))]
    zeros = [[a, b, c] for a in (0.0, -0.0, 1.0) for b in (0.0, -1.0) for c in (0.0, -0.0, 1.0)]
    triples.append(torch.tensor(edge + ties + zeros, dtype=torch.float64).float())
    nasty = torch.cat(triples)
    return nasty[nasty.isfinite().all(dim=1)]


def test_fma_is_rounded_once() -> None:
    nasty = nasty_triples()
    triples = torch.cat((float32_operands(4000, seed=3), nasty))
    a, b, c = triples.T
    got = reference.fma32(a, b, c)
    want = []
    for x, y, z in triples.tolist():
        both_negative = math.copysign(1, x) * math.copysign(1, y) < 0 and math.copysign(1, z) < 0
        negative_zero = both_negative and x * y == 0 and z == 0
        want.append(nearest_float32(Fraction(x) * Fraction(y) + Fraction(z), -0.0 if negative_zero else 0.0))
    assert same(got.double(), torch.tensor(want, dtype=torch.float64)).all()
    assert len(triples) == 4000 + 7196
    # The triples must be nasty enough to catch an fma that rounds to float64 first.
    rounded_twice = (a.double() * b.double() + c.double()).float()
    assert (~same(got, rounded_twice)).sum().item() == 77


def test_fma_of_inf_and_nan() -> None:
    inf, nan = torch.inf, torch.nan
    a, b, c = torch.tensor([[inf, 1, 1], [inf, 0, 1], [1, 1, -inf], [inf, 1, -inf], [nan, 1, 1], [1, 1, nan]]).T
    want = torch.tensor([inf, nan, -inf, nan, nan, nan])
    assert same(reference.fma32(a, b, c), want).all()


def test_add_mul_div_are_correctly_rounded() -> None:
    nasty = nasty_triples()
    pairs = (float32_operands(2000, seed=4)[:, :2], nasty[::8, :2], nasty[::8, 1:], nasty[::8, [2, 0]])
    a, b = torch.cat(pairs).T
    exact = {
        "add": (reference.add32, lambda x, y: Fraction(x) + Fraction(y), lambda x, y: x + y),
        "mul": (reference.mul32, lambda x, y: Fraction(x) * Fraction(y), lambda x, y: x * y),
        "div": (reference.div32, lambda x, y: Fraction(x) / Fraction(y), lambda x, y: x / y),
    }
    a, b = a[b != 0], b[b != 0]
    for name, (operation, exactly, zero) in exact.items():
        want = [nearest_float32(exactly(x, y), zero(x, y)) for x, y in zip(a.tolist(), b.tolist())]
        assert same(operation(a, b).double(), torch.tensor(want, dtype=torch.float64)).all(), name


# silu -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name, checked", [("bf16", 49709), ("fp16", 53619)])
def test_silu_error(name: str, checked: int) -> None:
    gates = every_pattern(DTYPES[name]).float()
    got = reference.silu32(gates).double()
    exact = gates.double() / (1 + torch.exp(-gates.double()))
    inside = gates.isfinite() & (gates > -87.3)
    zero = inside & (gates == 0)
    assert same(got[zero], exact[zero]).all() and zero.sum() == 2
    inside &= gates != 0
    error = (got[inside] / exact[inside] - 1).abs().max().item() * 2**24
    assert error <= 3
    assert inside.sum().item() == checked

    assert got[gates.isnan() | (gates == -torch.inf)].isnan().all()
    assert (got[gates == torch.inf] == torch.inf).all()
    # The approximate exp and division give 0 here.
    assert (got[(gates > -88.72) & (gates < -87.3)] < 0).all()


def test_exp_edges() -> None:
    nan, inf = torch.nan, torch.inf
    t = torch.tensor([nan, inf, 88.72284, 88.722832, 0.0, -0.0, -104.0, -104.00001, -inf], dtype=torch.float32)
    got = reference.exp32(t)
    assert got[0].isnan() and got[1] == inf and got[2].item() == inf and 3.4e38 < got[3].item() < inf
    assert got[4:].tolist() == [1.0, 1.0, 0.0, 0.0, 0.0]
    # Below -87.34 the result is subnormal; its last bits are lost, not its value.
    assert got.dtype == torch.float32
    assert reference.exp32(torch.tensor([-103.0])).view(torch.int32).item() == 1


@pytest.mark.parametrize(
    "what, digest",
    [
        ("silu bf16", "bf14d0163c7e0622f1d5c901117f7b9b29d86b15929214fbdb352821e218453f"),
        ("silu fp16", "58587f88505dd5ecc4664137f7a8ed3628d64c87e42ec4b0d3357cb9ff5255cb"),
        ("exp float32", "336cb17013b569910daeeb3ce0b337c83739fb35b6883fbef4749f2de6696856"),
    ],
)
def test_silu_bits(what: str, digest: str) -> None:
    """The bits that the C++ header with std::fma and no contraction gives, NaN made 0x7fc00000."""
    if what == "exp float32":
        # The whole range thinly, then 0.3 to ln2 / 2, where the last coefficients weigh most.
        patterns = torch.cat((torch.arange(0, 1 << 32, 65521), torch.arange(0x3E99999A, 0x3EB17218, 6)))
        bits = reference.exp32(patterns.to(torch.uint32).view(torch.float32))
    else:
        bits = reference.silu32(every_pattern(DTYPES[what.split()[1]]).float())
    assert hashlib.sha256(bits.numpy().astype("<f4").tobytes()).hexdigest() == digest


@pytest.mark.parametrize("dtype", HALF_TYPES)
def test_silu_and_mul_is_its_parts(dtype: torch.dtype) -> None:
    x = torch.randn(64, 2, 96, generator=torch.Generator().manual_seed(5)).to(dtype)
    gate, up = x[:, 0].float(), x[:, 1].float()
    want = (reference.silu32(gate) * up).to(dtype)
    got = reference.silu_and_mul(x.reshape(64, 192))
    assert got.dtype == dtype and torch.equal(got, want)
    assert reference.silu_and_mul(torch.tensor([[-torch.inf, 1.0]], dtype=dtype)).isnan().all()


# Metadata -------------------------------------------------------------------------------------------------------------


def test_metadata_small() -> None:
    got = reference.metadata(torch.tensor([[0, -1], [1, -1], [5, 0]]), 3, n=64, k=128)
    assert {name: tensor.tolist() for name, tensor in got.items()} == {
        "expert_offsets": [0, 2, 3, 3],
        "blockscale_offsets": [0, 128, 256, 256],
        "problem_sizes1": [[2, 128, 128], [1, 128, 128], [0, 128, 128]],
        "problem_sizes2": [[2, 128, 64], [1, 128, 64], [0, 128, 64]],
        "input_permutation": [0, 2, 1, -1, -1, -1],
        "output_permutation": [0, -1, 2, -1, -1, 1],
        "sorted_expert_ids": [0, 0, 1, -1, -1, -1],
    }
    assert all(tensor.dtype == torch.int32 for tensor in got.values())
    ungated = reference.metadata(torch.tensor([[0]]), 1, n=64, k=128, is_gated=False)
    assert ungated["problem_sizes1"].tolist() == [[1, 64, 128]]


def test_metadata_expert_map() -> None:
    # -1 and 5 must not reach the map: the last entry, which -1 would find from Python, is a valid expert.
    expert_map = torch.tensor([-1, 1, -1, 7, 0], dtype=torch.int32)
    got = reference.metadata(torch.tensor([[4, 0], [1, 3], [5, -1]]), 2, n=32, k=32, expert_map=expert_map)
    assert got["expert_offsets"].tolist() == [0, 1, 2]
    assert got["input_permutation"].tolist() == [0, 1, -1, -1, -1, -1]
    assert got["output_permutation"].tolist() == [0, -1, 1, -1, -1, -1]
    assert got["sorted_expert_ids"].tolist() == [0, 1, -1, -1, -1, -1]


@pytest.mark.parametrize(
    "m, topk, E, low, high", [(17, 1, 128, 0, 128), (300, 4, 5, -2, 7), (0, 2, 3, 0, 1), (1, 1, 1, 0, 1)]
)
def test_metadata_is_a_stable_sort(m: int, topk: int, E: int, low: int, high: int) -> None:
    ids = random_ids(m, topk, low, high)
    got = reference.metadata(ids, E, n=32, k=64)
    key = torch.where((ids >= 0) & (ids < E), ids, E).reshape(-1)
    order = torch.argsort(key, stable=True)
    valid = int((key < E).sum())
    counts = torch.bincount(key, minlength=E + 1)[:E]
    assert got["expert_offsets"].tolist() == [0] + counts.cumsum(0).tolist()
    assert got["blockscale_offsets"].tolist() == [0] + ((counts + 127) // 128 * 128).cumsum(0).tolist()
    assert got["input_permutation"][:valid].tolist() == (order[:valid] // topk).tolist()
    assert got["sorted_expert_ids"][:valid].tolist() == key[order[:valid]].tolist()
    assert got["output_permutation"][order[:valid]].tolist() == list(range(valid))
    assert (got["output_permutation"][order[valid:]] == -1).all()
    assert (got["input_permutation"][valid:] == -1).all() and (got["sorted_expert_ids"][valid:] == -1).all()
    assert got["blockscale_offsets"][-1] <= reference.scale_rows(m * topk, E)
    assert got["problem_sizes1"].shape == got["problem_sizes2"].shape == (E, 3)


def test_metadata_copes_with_many_slots() -> None:
    ids = random_ids(8192, 8, 0, 256)
    start = time.perf_counter()
    reference.metadata(ids, 256, n=2048, k=7168)
    assert time.perf_counter() - start < 1


# Layout ---------------------------------------------------------------------------------------------------------------


def test_shapes() -> None:
    assert [reference.scale_tiles(K) for K in (32, 96, 128, 160, 2880)] == [1, 1, 1, 2, 23]
    assert reference.scale_rows(65536, 256) == 98048
    for R in range(400):
        for E in range(1, 6):
            active = min(R, E)
            most = 0 if R == 0 else active - 1 + (R - active + 1 + 127) // 128
            assert reference.scale_rows(R, E) == 128 * most, (R, E)


@pytest.mark.parametrize("rows, K", [(1, 32), (33, 160), (129, 96), (300, 2880)])
def test_swizzle_of_one_expert_is_a_permutation_of_axes(rows: int, K: int) -> None:
    T = reference.scale_tiles(K)
    flat = torch.randint(0, 256, (rows, K // 32), generator=torch.Generator().manual_seed(6)).to(torch.uint8)
    offsets, scale_offsets = torch.tensor([0, rows]), torch.tensor([0, (rows + 127) // 128 * 128])
    tiled = reference.swizzle(flat, offsets, scale_offsets, rows, 1, K)
    padded = torch.zeros(scale_offsets[1], 4 * T, dtype=torch.uint8)
    padded[:rows, : K // 32] = flat
    # Tile (128 rows, 4 columns): row = 32 * i + j, stored as [j, i, column].
    want = padded.view(-1, 4, 32, T, 4).permute(0, 3, 2, 1, 4).reshape(-1, 4 * T)
    assert torch.equal(tiled, want)
    assert torch.equal(reference.unswizzle(tiled, offsets, scale_offsets, rows, 1, K), flat)


def test_swizzle_keeps_what_no_row_writes() -> None:
    flat = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]], dtype=torch.uint8)
    offsets, scale_offsets = torch.tensor([0, 1, 2]), torch.tensor([0, 128, 256])
    before = torch.full((reference.scale_rows(3, 2), 4), 0xEE, dtype=torch.uint8)
    after = reference.swizzle(flat, offsets, scale_offsets, 3, 2, 96, out=before)
    assert (before == 0xEE).all()
    assert after[0].tolist() == [1, 2, 3, 0xEE] and after[128].tolist() == [4, 5, 6, 0xEE]
    assert (after != 0xEE).sum() == 6
    assert reference.unswizzle(after, offsets, scale_offsets, 3, 2, 96).tolist() == [[1, 2, 3], [4, 5, 6], [0, 0, 0]]


# Ops ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("silu", [False, True])
def test_rows_without_an_expert(silu: bool) -> None:
    x = torch.randn(5, 128 if silu else 64, generator=torch.Generator().manual_seed(7)).bfloat16()
    offsets, scale_offsets = torch.tensor([0, 1, 3]), torch.tensor([0, 128, 256])
    want = reference.experts_quant(x, offsets, scale_offsets, 2, silu=silu)
    assert want[0][:3].any(dim=1).all() and not want[0][3:].any()
    assert want[1].count_nonzero() == 3 * 2
    x[3:] = torch.nan
    for ids in (None, torch.tensor([0, 1, 1, -1, -1]), torch.tensor([0, 1, 1, 2, 4500])):
        got = reference.experts_quant(x, offsets, scale_offsets, 2, ids, silu=silu)
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])
    buffer = torch.full_like(want[1], 0xEE)
    output, output_scale = reference.experts_quant(x, offsets, scale_offsets, 2, silu=silu, output_scale=buffer)
    assert torch.equal(output, want[0])
    assert torch.equal(output_scale, torch.where(want[1] == 0, 0xEE, want[1]))
    hole = reference.experts_quant(x, offsets, scale_offsets, 2, torch.tensor([0, -1, 1, -1, -1]), silu=silu)
    assert not hole[0][1].any() and not hole[1][128].any() and torch.equal(hole[0][2], want[0][2])
    with pytest.raises(ValueError, match="sorted_expert_ids"):
        reference.experts_quant(x, offsets, scale_offsets, 2, torch.tensor([1, 1, 1, -1, -1]), silu=silu)


def test_empty() -> None:
    none = torch.tensor([0, 0, 0])
    for silu, width in ((False, 64), (True, 128)):
        output, output_scale = reference.experts_quant(torch.zeros(0, width).bfloat16(), none, none, 2, silu=silu)
        assert output.shape == (0, 32) and output_scale.shape == (0, 4)
        assert reference.dequantize(output, output_scale, none, none, torch.float32).shape == (0, 64)
    assert reference.shuffle_rows(torch.zeros(0, 64), torch.tensor([], dtype=torch.int32)).shape == (0, 64)
    assert reference.shuffle_rows(torch.zeros(0, 7), torch.tensor([0])).tolist() == [[0.0] * 7]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES])
def test_dequantize_every_code_and_scale(dtype: torch.dtype) -> None:
    code = torch.arange(32) % 16
    packed = (code[0::2] | code[1::2] << 4).to(torch.uint8).expand(256, 16).contiguous()
    flat = torch.arange(256).to(torch.uint8).unsqueeze(1)
    offsets, scale_offsets = torch.tensor([0, 200, 256]), torch.tensor([0, 256, 384])
    scale = reference.swizzle(flat, offsets, scale_offsets, 256, 2, 32)
    got = reference.dequantize(packed, scale, offsets, scale_offsets, dtype)
    exact = [[math.ldexp(reference.E2M1_VALUES[c], s - 127) for c in code.tolist()] for s in range(255)]
    # Exact in float32 up to overflow, so the second cast is the only one that rounds.
    want = torch.tensor(exact, dtype=torch.float64).float().to(dtype)
    assert got.dtype == dtype and same(got[:255], want).all()
    assert got[255].isnan().all()
    if dtype != torch.float16:
        assert got[253, :8].isinf().tolist() == [False] * 6 + [True] * 2
        assert got[0, 1] == 2.0**-128


@pytest.mark.parametrize("name", ["gauss_bf16", "gauss_fp16", "laplace_bf16", "laplace_fp16"])
def test_quantize_of_dequantized_is_the_same(name: str) -> None:
    x = load(f"in_{name}")["x"]
    R, K = x.shape
    offsets, scale_offsets = torch.tensor([0, R]), torch.tensor([0, R])
    codes, scale = reference.experts_quant(x, offsets, scale_offsets, 1)
    value = reference.dequantize(codes, scale, offsets, scale_offsets, x.dtype)
    assert not reference.dequantize(codes, scale, torch.tensor([0, 1]), scale_offsets, x.dtype)[1:].any()
    again, scale_again = reference.experts_quant(value, offsets, scale_offsets, 1)
    assert torch.equal(again, codes) and torch.equal(scale_again, scale)
    noise = (value.double() - x.double()).square().sum() / x.double().square().sum()
    assert -10 * torch.log10(noise).item() > 17


@pytest.mark.parametrize(
    "dtype, width",
    [
        (torch.uint8, 20),
        (torch.float8_e4m3fn, 8),
        (torch.int32, 1),
        (torch.bfloat16, 7),
        (torch.bool, 3),
        (torch.complex64, 2),
        (torch.float64, 5),
    ],
)
@pytest.mark.parametrize("map_dtype", [torch.int32, torch.int64])
def test_shuffle_rows(dtype: torch.dtype, width: int, map_dtype: torch.dtype) -> None:
    x = torch.arange(1, 2 * 3 * width + 1).reshape(3, 2 * width).to(dtype)[:, ::2]
    got = reference.shuffle_rows(x, torch.tensor([2, 0, 0, -1, 3, 1], dtype=map_dtype))
    assert got.dtype == dtype and got.shape == (6, width)
    got, x = (t.to(torch.complex128).tolist() for t in (got, x))
    assert got == [x[2], x[0], x[0], [0] * width, [0] * width, x[1]]
