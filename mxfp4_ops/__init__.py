"""MXFP4 ops between a MoE router and an FP4 grouped GEMM, for torch.compile and CUDA graphs.

The functions here are the ops of ``torch.ops.mxfp4_ops`` with named results; ``layout`` describes and converts the
scale layout; ``compat.vllm`` has vLLM's own signatures; ``meta`` the shape functions and fakes; ``passes`` and
``compile`` rewrite graphs so that the fast forms are used.
"""

import importlib

from . import _library, _autograd, compat, meta, layout  # noqa: F401  # isort: skip  (_library defines the ops)
from .ops import (
    MoEMetadata,
    PermutedQuantizedRows,
    QuantizedRows,
    get_cutlass_moe_mm_data,
    moe_permute_mxfp4_quant,
    mxfp4_dequantize,
    mxfp4_experts_quant,
    shuffle_rows,
    silu_and_mul_mxfp4_experts_quant,
)

__version__ = "0.1.0"

__all__ = [
    "MoEMetadata",
    "PermutedQuantizedRows",
    "QuantizedRows",
    "compat",
    "compile",
    "get_cutlass_moe_mm_data",
    "layout",
    "meta",
    "moe_permute_mxfp4_quant",
    "mxfp4_dequantize",
    "mxfp4_experts_quant",
    "passes",
    "shuffle_rows",
    "silu_and_mul_mxfp4_experts_quant",
]


def __getattr__(name: str):
    # The passes import Inductor, which takes seconds; who only calls the ops does not wait for it.
    if name == "passes":
        return importlib.import_module(".passes", __name__)
    if name == "compile":
        return importlib.import_module(".passes.inductor", __name__).compile
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
