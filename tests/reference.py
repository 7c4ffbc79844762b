"""The oracle of the tests: every op of mxfp4_ops once more, slow and obvious, on CPU tensors.

Nothing here comes from mxfp4_ops. Floats are taken apart and put together with integers and every value between is
exact in float64, so no result depends on vector units, fused multiply-adds or flush-to-zero.

Symbols: R routed rows, E experts, K quantised width, T = ceil(K / 128) tiles across, S scale rows.
"""

import functools

import torch
from torch import Tensor

BLOCK = 32

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)

# dtype -> (fraction bits, exponent of the smallest normal, integer of the same width)
_FORMATS = {
    torch.float32: (23, -126, torch.int32),
    torch.bfloat16: (7, -126, torch.int16),
    torch.float16: (10, -14, torch.int16),
}


# Floats ---------------------------------------------------------------------------------------------------------------


def _pow2(exponent: Tensor) -> Tensor:
    """int64 -> float64 2^exponent, for exponents of normal float64."""
    return ((exponent + 1023) << 52).view(torch.float64)


def decode(x: Tensor) -> Tensor:
    """float32 / bf16 / fp16 -> float64, exact."""
    fraction_bits, min_exponent, int_dtype = _FORMATS[x.dtype]
    exponent_mask = (1 << (8 * x.element_size() - 1 - fraction_bits)) - 1
    bits = x.contiguous().view(int_dtype).to(torch.int64)
    exponent = (bits >> fraction_bits) & exponent_mask
    fraction = bits & ((1 << fraction_bits) - 1)
    significand = torch.where(exponent > 0, fraction + (1 << fraction_bits), fraction).double()
    magnitude = significand * _pow2(exponent.clamp(min=1) - 1 + min_exponent - fraction_bits)
    magnitude[(exponent == exponent_mask) & (fraction == 0)] = torch.inf
    magnitude[(exponent == exponent_mask) & (fraction != 0)] = torch.nan
    return torch.where(bits < 0, -magnitude, magnitude)


def encode(value: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 -> float32 / bf16 / fp16 in one rounding to nearest even; every NaN becomes the positive quiet one."""
    fraction_bits, min_exponent, int_dtype = _FORMATS[dtype]
    sign_bit = 8 * dtype.itemsize - 1
    infinity = (1 << sign_bit) - (1 << fraction_bits)
    finite = torch.where(value.isfinite(), value, 0.0).abs()
    exponent = torch.where(finite == 0, min_exponent, torch.frexp(finite).exponent.to(torch.int64) - 1)
    exponent = exponent.clamp(min=min_exponent)
    # torch.round is half to even. A significand that rounds up to the next power of two carries into the exponent.
    significand = torch.round(finite * _pow2(fraction_bits - exponent)).to(torch.int64)
    bits = (significand + ((exponent - min_exponent) << fraction_bits)).clamp(max=infinity)
    bits = torch.where(value.isinf(), infinity, bits)
    bits = torch.where(value.signbit(), bits - (1 << sign_bit), bits)
    bits = torch.where(value.isnan(), infinity + (1 << (fraction_bits - 1)), bits)
    return bits.to(int_dtype).view(dtype)


def _float32(value: Tensor | float) -> Tensor:
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float32)


# float64 holds float32 products exactly. Sums and quotients are rounded twice, which is once: 53 >= 2 * 24 + 2.
def add32(a: Tensor | float, b: Tensor | float) -> Tensor:
    """float32 a + b, correctly rounded."""
    return encode(decode(_float32(a)) + decode(_float32(b)), torch.float32)


def mul32(a: Tensor | float, b: Tensor | float) -> Tensor:
    """float32 a * b, correctly rounded."""
    return encode(decode(_float32(a)) * decode(_float32(b)), torch.float32)


def div32(a: Tensor | float, b: Tensor | float) -> Tensor:
    """float32 a / b, correctly rounded."""
    return encode(decode(_float32(a)) / decode(_float32(b)), torch.float32)


def fma32(a: Tensor | float, b: Tensor | float, c: Tensor | float) -> Tensor:
    """float32 a * b + c, rounded once."""
    product = decode(_float32(a)) * decode(_float32(b))
    addend = decode(_float32(c)).expand(torch.broadcast_shapes(product.shape, _float32(c).shape))
    total = product + addend
    # Two-sum: total + error is the exact sum. Rounded to odd, its 53 bits stay on their side of every float32 tie.
    addend_part = total - product
    error = (product - (total - addend_part)) + (addend - addend_part)
    bits = total.view(torch.int64)
    to_odd = total.isfinite() & (error != 0) & (bits & 1 == 0)
    bits = torch.where(to_odd, bits + torch.where((error > 0) == (total > 0), 1, -1), bits)
    return encode(bits.view(torch.float64), torch.float32)


# silu -----------------------------------------------------------------------------------------------------------------


def exp32(t: Tensor) -> Tensor:
    """float32 exp in the kernels' sequence of correctly rounded operations."""
    z = fma32(t, 1.44269502, 12582912.0)
    n = add32(z, -12582912.0)
    r = fma32(n, -0.693145752, t)
    r = fma32(n, -1.42860677e-06, r)
    p = _float32(1.37805939e-3)
    for coefficient in (8.37312452e-3, 4.16695364e-2, 1.66664720e-1, 4.99999851e-1, 1.0, 1.0):
        p = fma32(p, r, coefficient)
    # Two factors, each a normal float32, because n reaches from -150 to 128. Halved towards zero, as C divides.
    whole = torch.where(t.isnan(), 0.0, decode(n)).clamp(-150, 128).to(torch.int64)
    half = torch.div(whole, 2, rounding_mode="trunc")
    p = mul32(mul32(p, encode(_pow2(half), torch.float32)), encode(_pow2(whole - half), torch.float32))
    p = torch.where(t > _float32(88.7228394), torch.inf, p)
    return torch.where(t < -104.0, 0.0, p)


def silu32(x: Tensor) -> Tensor:
    """float32 x / (1 + exp(-x)) in the kernels' sequence of correctly rounded operations."""
    return div32(x, add32(1.0, exp32(-x)))


@functools.cache
def _silu_of_every(dtype: torch.dtype) -> Tensor:
    """float32 [65536]: silu32 by the bit pattern of a bf16 or fp16 gate."""
    patterns = torch.arange(1 << 16).to(torch.uint16).view(dtype)
    return silu32(encode(decode(patterns), torch.float32))


def silu_and_mul(x: Tensor) -> Tensor:
    """bf16 / fp16 [R, 2K], gate then up -> [R, K] of the same dtype."""
    gate, up = x.chunk(2, dim=-1)
    silu = _silu_of_every(x.dtype)[gate.contiguous().view(torch.int16).to(torch.int64) & 0xFFFF]
    product = encode(decode(silu) * decode(up), torch.float32)
    return encode(decode(product), x.dtype)


# Blocks ---------------------------------------------------------------------------------------------------------------

# The smallest amax that has scale byte 1, 2, ..., 253: amax / 2^(s - 127) lies in [3.5, 7).
_SCALE_THRESHOLDS = 3.5 * _pow2(torch.arange(1, 254) - 127)


def quantize_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 / fp16 [R, K] -> codes uint8 [R, K/2], scales uint8 [R, K/32] (flat)."""
    rows, width = x.shape
    value = decode(x).reshape(rows, width // BLOCK, BLOCK)
    nan = value.isnan()
    magnitude = torch.where(nan, 0.0, value.abs())
    amax = torch.zeros(rows, width // BLOCK, dtype=torch.float64) if x.numel() == 0 else magnitude.amax(dim=-1)
    scale = torch.searchsorted(_SCALE_THRESHOLDS, amax, right=True)

    v = magnitude * _pow2(127 - scale).unsqueeze(-1)
    # Ties go to the even code: a closed lower end where the code above the boundary is even.
    code = torch.zeros_like(v, dtype=torch.uint8)
    code[v > 0.25] = 1
    code[v >= 0.75] = 2
    code[v > 1.25] = 3
    code[v >= 1.75] = 4
    code[v > 2.5] = 5
    code[v >= 3.5] = 6
    code[v > 5.0] = 7
    code[scale == 0] = 0
    code += 8 * value.signbit().to(torch.uint8)

    nan_block = nan.any(dim=-1, keepdim=True)
    signed_zero = 8 * value.signbit().to(torch.uint8)
    code = torch.where(nan_block, torch.where(value.isfinite(), signed_zero, 7), code).reshape(rows, width)
    scale = torch.where(nan_block.squeeze(-1), 0xFF, scale).to(torch.uint8)
    return code[:, 0::2] | code[:, 1::2] << 4, scale


# Layout ---------------------------------------------------------------------------------------------------------------


def scale_tiles(K: int) -> int:
    """T: tiles of 4 scale columns in a row of width K."""
    return (K + 127) // 128


def scale_rows(R: int, E: int) -> int:
    """S: the most scale rows that R rows can need when each of E experts starts on a multiple of 128."""
    return (R + 127 * min(R, E)) // 128 * 128


def scale_byte(e_base_row: int | Tensor, r: int | Tensor, c: int | Tensor, T: int) -> int | Tensor:
    """Place in the tiled buffer of the scale of row r of the expert whose first scale row is e_base_row, block c."""
    return 4 * T * e_base_row + (r // 128 * T + c // 4) * 512 + r % 32 * 16 + r // 32 % 4 * 4 + c % 4


def row_experts(R: int, expert_offsets: Tensor, E: int, sorted_expert_ids: Tensor | None = None) -> Tensor:
    """int64 [R]: the expert of each sorted row, -1 for none. Ids that contradict the offsets are refused."""
    offsets = expert_offsets.tolist()
    by_offset = torch.full((R,), -1)
    for expert in range(E):
        by_offset[offsets[expert] : offsets[expert + 1]] = expert
    if sorted_expert_ids is None:
        return by_offset
    ids = sorted_expert_ids.to(torch.int64)
    ids = torch.where((ids >= 0) & (ids < E), ids, -1)
    if not torch.equal(ids[ids >= 0], by_offset[ids >= 0]):
        raise ValueError("sorted_expert_ids names an expert whose offsets do not hold the row")
    return ids


def _scale_places(experts: Tensor, expert_offsets: Tensor, blockscale_offsets: Tensor, K: int) -> tuple[Tensor, Tensor]:
    """(rows with an expert int64 [V], the places of their scales int64 [V, K/32])."""
    rows = (experts >= 0).nonzero().squeeze(1)
    expert = experts[rows]
    base = blockscale_offsets.to(torch.int64)[expert].unsqueeze(1)
    r = (rows - expert_offsets.to(torch.int64)[expert]).unsqueeze(1)
    return rows, scale_byte(base, r, torch.arange(K // BLOCK).unsqueeze(0), scale_tiles(K))


def swizzle(
    scales_flat: Tensor,
    expert_offsets: Tensor,
    blockscale_offsets: Tensor,
    R: int,
    E: int,
    K: int,
    out: Tensor | None = None,
    sorted_expert_ids: Tensor | None = None,
) -> Tensor:
    """uint8 [R, K/32] -> a new uint8 [S, 4T]; what no row writes is 0, or what `out` (left alone) has there."""
    S, columns = scale_rows(R, E), 4 * scale_tiles(K)
    tiled = torch.zeros(S, columns, dtype=torch.uint8) if out is None else out.contiguous().clone()
    experts = row_experts(R, expert_offsets, E, sorted_expert_ids)
    rows, places = _scale_places(experts, expert_offsets, blockscale_offsets, K)
    tiled.view(-1)[places] = scales_flat[rows]
    return tiled


def unswizzle(
    scales_tiled: Tensor, expert_offsets: Tensor, blockscale_offsets: Tensor, R: int, E: int, K: int
) -> Tensor:
    """uint8 [S, 4T] -> uint8 [R, K/32]; rows that have no expert are 0."""
    flat = torch.zeros(R, K // BLOCK, dtype=torch.uint8)
    rows, places = _scale_places(row_experts(R, expert_offsets, E), expert_offsets, blockscale_offsets, K)
    flat[rows] = scales_tiled.reshape(-1)[places]
    return flat


# Ops ------------------------------------------------------------------------------------------------------------------


def metadata(
    topk_ids: Tensor,
    num_experts: int,
    n: int,
    k: int,
    is_gated: bool = True,
    expert_map: Tensor | None = None,
) -> dict[str, Tensor]:
    """int32 / int64 [m, topk] -> the seven int32 tensors of get_cutlass_moe_mm_data, by name and in its order."""
    topk = topk_ids.shape[1]
    local_of = None if expert_map is None else expert_map.tolist()
    slots_of: list[list[int]] = [[] for _ in range(num_experts)]
    for slot, expert in enumerate(topk_ids.reshape(-1).tolist()):
        if local_of is not None:
            expert = local_of[expert] if 0 <= expert < len(local_of) else -1
        if 0 <= expert < num_experts:
            slots_of[expert].append(slot)

    expert_offsets, blockscale_offsets = [0], [0]
    problem_sizes1, problem_sizes2 = [], []
    input_permutation = [-1] * topk_ids.numel()
    output_permutation = [-1] * topk_ids.numel()
    sorted_expert_ids = [-1] * topk_ids.numel()
    for expert, slots in enumerate(slots_of):
        for row, slot in enumerate(slots, start=expert_offsets[-1]):
            input_permutation[row] = slot // topk
            output_permutation[slot] = row
            sorted_expert_ids[row] = expert
        expert_offsets.append(expert_offsets[-1] + len(slots))
        blockscale_offsets.append(blockscale_offsets[-1] + (len(slots) + 127) // 128 * 128)
        problem_sizes1.append([len(slots), 2 * n if is_gated else n, k])
        problem_sizes2.append([len(slots), k, n])
    results = {
        "expert_offsets": expert_offsets,
        "blockscale_offsets": blockscale_offsets,
        "problem_sizes1": problem_sizes1,
        "problem_sizes2": problem_sizes2,
        "input_permutation": input_permutation,
        "output_permutation": output_permutation,
        "sorted_expert_ids": sorted_expert_ids,
    }
    return {name: torch.tensor(values, dtype=torch.int32) for name, values in results.items()}


def shuffle_rows(x: Tensor, dst2src_map: Tensor) -> Tensor:
    """[N, width] of any dtype, integer [M] -> [M, width]; an index outside [0, N) gives a zero row."""
    width_bytes = x.shape[1] * x.element_size()
    # As bytes, because indexing is not there for every dtype.
    source = x.contiguous().view(-1).view(torch.uint8).reshape(x.shape[0], width_bytes)
    rows = dst2src_map.to(torch.int64)
    inside = (rows >= 0) & (rows < x.shape[0])
    shuffled = torch.zeros(rows.shape[0], width_bytes, dtype=torch.uint8)
    shuffled[inside] = source[rows[inside]]
    return shuffled.view(-1).view(x.dtype).reshape(rows.shape[0], x.shape[1])


def moe_permute_mxfp4_quant(
    hidden_states: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    n: int,
    is_gated: bool = True,
    expert_map: Tensor | None = None,
    output_scale: Tensor | None = None,
) -> dict[str, Tensor]:
    """bf16 / fp16 [m, K], int32 / int64 [m, topk] -> the results of metadata and of experts_quant, by name."""
    data = metadata(topk_ids, num_experts, n, hidden_states.shape[1], is_gated, expert_map)
    rows = shuffle_rows(hidden_states, data["input_permutation"])
    offsets = data["expert_offsets"], data["blockscale_offsets"]
    codes, scales = experts_quant(rows, *offsets, num_experts, data["sorted_expert_ids"], output_scale=output_scale)
    return {**data, "output": codes, "output_scale": scales}


def experts_quant(
    x: Tensor,
    expert_offsets: Tensor,
    blockscale_offsets: Tensor,
    n_experts: int,
    sorted_expert_ids: Tensor | None = None,
    silu: bool = False,
    output_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """bf16 / fp16 [R, K], or [R, 2K] with silu -> output uint8 [R, K/2], output_scale uint8 [S, 4T].

    `output_scale` is the buffer of the .out overload before the call; it is left alone, its padding is in the result.
    """
    experts = row_experts(x.shape[0], expert_offsets, n_experts, sorted_expert_ids)
    codes, scales = quantize_blocks(silu_and_mul(x) if silu else x)
    codes[experts < 0] = 0
    R, K = codes.shape[0], 2 * codes.shape[1]
    return codes, swizzle(
        scales, expert_offsets, blockscale_offsets, R, n_experts, K, output_scale, sorted_expert_ids
    )


def dequantize(
    packed: Tensor, scale: Tensor, expert_offsets: Tensor, blockscale_offsets: Tensor, dtype: torch.dtype
) -> Tensor:
    """uint8 [R, K/2], uint8 [S, 4T] -> float32 / bf16 / fp16 [R, K], rounded once; rows that have no expert are 0."""
    R, K, E = packed.shape[0], 2 * packed.shape[1], expert_offsets.shape[0] - 1
    s = unswizzle(scale, expert_offsets, blockscale_offsets, R, E, K).to(torch.int64)
    code = torch.stack((packed & 0xF, packed >> 4), dim=-1).reshape(R, K // BLOCK, BLOCK).to(torch.int64)
    value = torch.tensor(E2M1_VALUES, dtype=torch.float64)[code] * _pow2(s - 127).unsqueeze(-1)
    value[s == 0xFF] = torch.nan
    value[row_experts(R, expert_offsets, E) < 0] = 0.0
    return encode(value.reshape(R, K), dtype)
