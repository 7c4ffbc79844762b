"""The scale layout: sizes, a reference swizzle and unswizzle, and views in torch's FP4 and E8M0 dtypes.

Scales of an expert's rows are tiles of 128 rows by 4 scales, 512 bytes each, a row of tiles after the other
(``SWIZZLE_32_4_4`` in torch). The functions are pure torch: for tests, checkpoints and debugging, not the hot path.
"""

import torch
from torch import Tensor

from .meta.shapes import BLOCK, TILE_BLOCKS, TILE_ROWS, scale_rows, scale_tiles

__all__ = ["as_e8m0", "as_float4", "scale_index", "scale_rows", "scale_tiles", "swizzle", "unswizzle"]


def scale_index(
    rows: Tensor, K: int, expert_offsets: Tensor, blockscale_offsets: Tensor, experts: Tensor | None = None
) -> Tensor:
    """Byte addresses of the scales of ``rows`` in the tiled layout.

    Args:
        rows: int64 [n], sorted rows that have an expert.
        K: quantised columns.
        expert_offsets, blockscale_offsets: int32 [E + 1].
        experts: int64 [n], the experts of the rows; searched for in ``expert_offsets`` unless given.

    Returns:
        int64 [n, K / 32]: for each block of 32 columns, an index into the flattened scale tensor.
    """
    T = scale_tiles(K)
    if experts is None:
        experts = torch.searchsorted(expert_offsets[1:].long(), rows, right=True)
    r = (rows - expert_offsets.long()[experts])[:, None]
    c = torch.arange(K // BLOCK, device=rows.device)[None, :]
    tile = (r // TILE_ROWS) * T + c // TILE_BLOCKS
    base = TILE_BLOCKS * T * blockscale_offsets.long()[experts][:, None]
    return base + tile * (TILE_ROWS * TILE_BLOCKS) + (r % 32) * 16 + (r // 32) % 4 * 4 + c % TILE_BLOCKS


def swizzle(scales: Tensor, expert_offsets: Tensor, blockscale_offsets: Tensor, S: int | None = None) -> Tensor:
    """Flat scales to the tiled layout.

    Args:
        scales: uint8 [R, K / 32], the scales of the sorted rows; rows from expert_offsets[-1] on are ignored.
        expert_offsets, blockscale_offsets: int32 [E + 1].
        S: scale rows of the result, ``scale_rows(R, E)`` unless given.

    Returns:
        uint8 [S, 4T], 0 wherever no row has a scale.

    Example:
        >>> import torch
        >>> offsets = torch.tensor([0, 1, 2], dtype=torch.int32)
        >>> tiled = swizzle(torch.tensor([[7], [9]], dtype=torch.uint8), offsets, 128 * offsets)
        >>> tuple(tiled.shape), tiled.flatten()[[0, 512]].tolist()
        ((256, 4), [7, 9])
    """
    R, blocks = scales.shape
    K = blocks * BLOCK
    S = scale_rows(R, expert_offsets.numel() - 1) if S is None else S
    tiled = scales.new_zeros(S, TILE_BLOCKS * scale_tiles(K))
    rows = torch.arange(int(expert_offsets[-1]), device=scales.device)
    tiled.view(-1)[scale_index(rows, K, expert_offsets, blockscale_offsets)] = scales[: rows.numel()]
    return tiled


def unswizzle(scale: Tensor, R: int, K: int, expert_offsets: Tensor, blockscale_offsets: Tensor) -> Tensor:
    """The tiled layout back to flat scales.

    Args:
        scale: uint8 [S, 4T].
        R, K: rows and quantised columns.
        expert_offsets, blockscale_offsets: int32 [E + 1].

    Returns:
        uint8 [R, K / 32], 0 for rows without an expert.

    Example:
        >>> import torch
        >>> offsets = torch.tensor([0, 1, 2], dtype=torch.int32)
        >>> flat = torch.tensor([[7], [9]], dtype=torch.uint8)
        >>> unswizzle(swizzle(flat, offsets, 128 * offsets), 2, 32, offsets, 128 * offsets).tolist()
        [[7], [9]]
    """
    flat = scale.new_zeros(R, K // BLOCK)
    rows = torch.arange(int(expert_offsets[-1]), device=scale.device)
    flat[: rows.numel()] = scale.reshape(-1)[scale_index(rows, K, expert_offsets, blockscale_offsets)]
    return flat


def as_float4(packed: Tensor) -> Tensor:
    """View packed codes, uint8 [R, K / 2], as ``torch.float4_e2m1fn_x2``, same shape, for torch's own consumers."""
    return packed.view(torch.float4_e2m1fn_x2)


def as_e8m0(scale: Tensor) -> Tensor:
    """View scales, uint8 [S, 4T], as ``torch.float8_e8m0fnu``, same shape, for torch's own consumers."""
    return scale.view(torch.float8_e8m0fnu)
