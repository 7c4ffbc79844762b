"""The ops in plain torch, as one would write them for ``torch.compile``: the peers, and what every result must equal.

Nothing here syncs or depends on data for a shape, so that all of it compiles to one graph and is captured in a CUDA graph.
``flat_scale`` arguments are the scale buffer of an ``.out`` call: uint8 [4T * S + 1], whose last byte takes the scales of
rows that have no expert. Without one, a zeroed buffer is made.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from ..layout import scale_index
from ..meta.shapes import BLOCK, TILE_ROWS, experts_quant_shapes
from ..ops import MoEMetadata, QuantizedRows


def metadata(topk_ids: Tensor, E: int, n: int, k: int) -> MoEMetadata:
    """int32 [m, topk] -> the seven int32 tensors of get_cutlass_moe_mm_data."""
    topk, ids = topk_ids.shape[1], topk_ids.reshape(-1)
    expert, slot = ids.masked_fill((ids < 0) | (ids >= E), E).sort(stable=True)
    no_expert = expert == E
    experts = torch.arange(E + 1, dtype=expert.dtype, device=ids.device)
    expert_offsets = torch.searchsorted(expert, experts, out_int32=True)
    count = expert_offsets.diff()
    padded = (count + (TILE_ROWS - 1)) // TILE_ROWS * TILE_ROWS
    n1, n2, k_ = (torch.full_like(count, size) for size in (2 * n, n, k))
    row = torch.arange(ids.numel(), dtype=torch.int32, device=ids.device)
    return MoEMetadata(
        expert_offsets=expert_offsets,
        blockscale_offsets=F.pad(padded.cumsum(0, dtype=torch.int32), (1, 0)),
        problem_sizes1=torch.stack((count, n1, k_), 1),
        problem_sizes2=torch.stack((count, k_, n2), 1),
        input_permutation=(slot // topk).int().masked_fill(no_expert, -1),
        output_permutation=torch.empty_like(row).scatter(0, slot, row.masked_fill(no_expert, -1)),
        sorted_expert_ids=expert.masked_fill(no_expert, -1),
    )


def shuffle_rows(x: Tensor, rows: Tensor) -> Tensor:
    """[N, width], int32 [M] -> [M, width]; zero rows where the map is -1."""
    return x[rows.clamp(min=0)].masked_fill((rows < 0)[:, None], 0)


def quantize_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """bf16 / fp16 [R, K] -> codes uint8 [R, K / 2], scales uint8 [R, K / 32] (flat)."""
    blocks = x.unflatten(1, (-1, BLOCK))
    amax = blocks.abs().amax(2).float()
    scale = (((amax.view(torch.int32) + 0x200000) >> 23) - 2).clamp(min=0)
    reciprocal = ((254 - scale) << 23).view(torch.float32).masked_fill((scale == 0) | amax.isnan(), 0)
    value = blocks.float() * reciprocal[:, :, None]
    is_nan = value.ne(value)  # Inductor's isnan() is no vector instruction on the CPU
    v = value.abs().masked_fill(is_nan, 6.0)
    # Codes step by 0.5 below 2, by 1 below 4 and by 2 from there; round() is half to even, and so is the code.
    code = torch.where(v < 2, (2 * v).round(), torch.where(v < 4, v.round() + 2, (0.5 * v).round().clamp(max=3) + 4))
    sign = ((blocks.view(torch.int16) >> 12) & 8).masked_fill(is_nan, 0)
    code = (code.to(torch.uint8) | sign.to(torch.uint8)).flatten(1)
    return code[:, 0::2] | (code[:, 1::2] << 4), scale.masked_fill(amax.isnan(), 0xFF).to(torch.uint8)


def place(
    codes: Tensor, scales: Tensor, offsets: Tensor, scale_offsets: Tensor, ids: Tensor, flat_scale: Tensor | None = None
) -> QuantizedRows:
    """Quantised rows, flat -> what a quant op gives of them, by the offsets and the sorted_expert_ids."""
    R, K, E = codes.shape[0], 2 * codes.shape[1], offsets.shape[0] - 1
    shape = experts_quant_shapes(R, K, E)[1]
    size = shape[0] * shape[1]
    flat = scales.new_zeros(size + 1) if flat_scale is None else flat_scale
    no_expert = (ids < 0)[:, None]
    rows = torch.arange(R, device=codes.device)
    index = scale_index(rows, K, offsets, scale_offsets, ids.clamp(min=0).long())
    flat.index_put_((index.masked_fill(no_expert, size),), scales)
    return QuantizedRows(codes.masked_fill(no_expert, 0), flat[:size].view(shape))


def experts_quant(
    x: Tensor, offsets: Tensor, scale_offsets: Tensor, ids: Tensor, flat_scale: Tensor | None = None
) -> QuantizedRows:
    """bf16 / fp16 [R, K] -> output, output_scale."""
    return place(*quantize_blocks(x), offsets, scale_offsets, ids, flat_scale)


def silu_and_mul(x: Tensor) -> Tensor:
    """bf16 / fp16 [R, 2K] -> [R, K], by torch's silu: not the ops' last bits of float32, so a few codes differ."""
    gate, up = x.chunk(2, 1)
    return (F.silu(gate.float()) * up.float()).to(x.dtype)


def silu_experts_quant(
    x: Tensor, offsets: Tensor, scale_offsets: Tensor, ids: Tensor, flat_scale: Tensor | None = None
) -> QuantizedRows:
    """bf16 / fp16 [R, 2K], gate then up -> output, output_scale."""
    return experts_quant(silu_and_mul(x), offsets, scale_offsets, ids, flat_scale)


def moe_permute_quant(
    x: Tensor, topk_ids: Tensor, E: int, n: int, flat_scale: Tensor | None = None
) -> tuple[Tensor, ...]:
    """bf16 / fp16 [m, K], int32 [m, topk] -> the nine results of moe_permute_mxfp4_quant; each token quantised once."""
    data = metadata(topk_ids, E, n, x.shape[1])
    codes, scales = (shuffle_rows(t, data.input_permutation) for t in quantize_blocks(x))
    where = (data.expert_offsets, data.blockscale_offsets, data.sorted_expert_ids)
    return (*data, *place(codes, scales, *where, flat_scale))


# The ops' own silu, for the reference: float32 fma, add, mul and div, each rounded once, on the CPU. ------------------


def _fma(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """float32 a * b + c, rounded once."""
    a, b, c = (torch.as_tensor(t, dtype=torch.float32).double() for t in (a, b, c))
    product = a * b  # exact
    total = product + c
    part = total - product
    error = (product - (total - part)) + (c - part)
    # Rounded to odd, the 53 bits stay on their side of every tie of float32.
    bits = total.view(torch.int64)
    to_odd = total.isfinite() & (error != 0) & (bits & 1 == 0)
    return (bits + torch.where((error > 0) == (total > 0), 1, -1) * to_odd).view(torch.float64).float()


def exact_silu(x: Tensor) -> Tensor:
    """float32, on the CPU -> float32 x / (1 + exp(-x)), bit for bit as the kernels compute it."""
    t = -x
    z = _fma(t, 1.44269502, 12582912.0)
    n = z - 12582912.0
    r = _fma(n, -1.42860677e-06, _fma(n, -0.693145752, t))
    p = torch.full_like(r, 1.37805939e-3)
    for coefficient in (8.37312452e-3, 4.16695364e-2, 1.66664720e-1, 4.99999851e-1, 1.0, 1.0):
        p = _fma(p, r, coefficient)
    # float64 has room for every 2^n, and its result is rounded once, as the kernels' two factors leave it.
    e = (p.double() * n.double().clamp(-200, 200).exp2()).float()
    e = e.masked_fill(t > torch.tensor(88.7228394), torch.inf).masked_fill(t < -104.0, 0.0)
    return x / (e + 1.0)


@functools.cache
def _silu_of_every(dtype: torch.dtype, device: torch.device) -> Tensor:
    """float32 [65536]: exact_silu by the bits of a bf16 or fp16 gate."""
    return exact_silu(torch.arange(1 << 16).to(torch.uint16).view(dtype).float()).to(device)


def exact_silu_and_mul(x: Tensor) -> Tensor:
    """bf16 / fp16 [R, 2K], gate then up -> [R, K] with the ops' silu."""
    gate, up = x.chunk(2, 1)
    bits = gate.contiguous().view(torch.int16).int() & 0xFFFF
    return (_silu_of_every(x.dtype, x.device)[bits] * up.float()).to(x.dtype)
