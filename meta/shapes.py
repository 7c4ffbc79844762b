"""Shapes of every result, once: the fakes, the Python surface and the tests call these.

``R`` routed rows (m * topk), ``E`` experts, ``K`` quantised columns; every function takes ints or SymInts.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch

Size = int | torch.SymInt
S = TypeVar("S", int, torch.SymInt)

BLOCK = 32  # columns that share a scale
TILE_ROWS = 128  # rows of a scale tile
TILE_BLOCKS = 4  # scale columns of a tile


def scale_tiles(K: S) -> S:
    """T: scale tiles along K columns, each 128 columns wide."""
    return (K + BLOCK * TILE_BLOCKS - 1) // (BLOCK * TILE_BLOCKS)


def scale_rows(R: S, E: int) -> S:
    """S: rows of the scale tensor that suffice for any routing of R rows over E experts, each padded to 128 rows."""
    # sym_min adds no guard on which of the two is smaller; of plain ints Dynamo of torch 2.11 cannot trace it.
    smaller = min(R, E) if isinstance(R, int) and isinstance(E, int) else torch.sym_min(R, E)
    return (R + (TILE_ROWS - 1) * smaller) // TILE_ROWS * TILE_ROWS


def metadata_shapes(m: Size, topk: Size, E: Size) -> tuple[Sequence[Size], ...]:
    """Shapes of get_cutlass_moe_mm_data's results, in order; all int32."""
    R = m * topk
    return (
        (E + 1,),  # expert_offsets
        (E + 1,),  # blockscale_offsets
        (E, 3),  # problem_sizes1
        (E, 3),  # problem_sizes2
        (R,),  # input_permutation
        (R,),  # output_permutation
        (R,),  # sorted_expert_ids
    )


def shuffle_rows_shape(width: Size, rows: Size) -> Sequence[Size]:
    """Shape of shuffle_rows' result; dtype of the input."""
    return (rows, width)


def experts_quant_shapes(R: Size, K: Size, E: Size) -> tuple[Sequence[Size], Sequence[Size]]:
    """Shapes of a quant op's output and output_scale; both uint8."""
    return (R, K // 2), (scale_rows(R, E), TILE_BLOCKS * scale_tiles(K))


def moe_permute_shapes(m: Size, topk: Size, K: Size, E: Size) -> tuple[Sequence[Size], ...]:
    """Shapes of moe_permute_mxfp4_quant's results: those of get_cutlass_moe_mm_data, then those of a quant op."""
    return (*metadata_shapes(m, topk, E), *experts_quant_shapes(m * topk, K, E))


def dequantize_shape(R: Size, half_K: Size) -> Sequence[Size]:
    """Shape of mxfp4_dequantize's result."""
    return (R, 2 * half_K)
