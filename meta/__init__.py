"""Shape functions and fake kernels of the ops; importing it registers the fakes."""

from . import fakes
from .shapes import (
    dequantize_shape,
    experts_quant_shapes,
    metadata_shapes,
    moe_permute_shapes,
    scale_rows,
    scale_tiles,
    shuffle_rows_shape,
)

__all__ = [
    "dequantize_shape",
    "experts_quant_shapes",
    "fakes",
    "metadata_shapes",
    "moe_permute_shapes",
    "scale_rows",
    "scale_tiles",
    "shuffle_rows_shape",
]
