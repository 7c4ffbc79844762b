"""vLLM's own Python signatures: a caller of these functions changes one import.

``get_cutlass_moe_mm_data`` writes the caller's buffers, the others return fresh tensors. Scales come back as uint8,
where vLLM views them as ``float8_e8m0fnu`` or int32: ``mxfp4_ops.layout.as_e8m0`` makes that view.
"""

import torch
from torch import Tensor

from .. import ops


def get_cutlass_moe_mm_data(
    topk_ids: Tensor,
    expert_offsets: Tensor,
    problem_sizes1: Tensor,
    problem_sizes2: Tensor,
    input_permutation: Tensor,
    output_permutation: Tensor,
    num_experts: int,
    n: int,
    k: int,
    blockscale_offsets: Tensor | None = None,
    is_gated: bool = True,
    sorted_expert_ids: Tensor | None = None,
) -> None:
    """Write the metadata of ``topk_ids`` (int32 or int64 [m, topk]) into the caller's int32 buffers.

    Shapes: ``expert_offsets`` and ``blockscale_offsets`` [E + 1], ``problem_sizes1`` and ``problem_sizes2`` [E, 3], the
    permutations and ``sorted_expert_ids`` [m * topk]. See mxfp4_ops.get_cutlass_moe_mm_data for meaning and errors.
    """
    torch.ops.mxfp4_ops.get_cutlass_moe_mm_data.out(
        topk_ids,
        num_experts,
        n,
        k,
        is_gated=is_gated,
        expert_offsets=expert_offsets,
        blockscale_offsets=blockscale_offsets,
        problem_sizes1=problem_sizes1,
        problem_sizes2=problem_sizes2,
        input_permutation=input_permutation,
        output_permutation=output_permutation,
        sorted_expert_ids=sorted_expert_ids,
    )


def shuffle_rows(input_tensor: Tensor, dst2src_map: Tensor) -> Tensor:
    """``input_tensor[dst2src_map]`` for [rows, width] and int32 [output rows]; see mxfp4_ops.shuffle_rows."""
    return ops.shuffle_rows(input_tensor, dst2src_map)


def mxfp4_experts_quant(
    input_tensor: Tensor,
    expert_offsets: Tensor,
    blockscale_offsets: Tensor,
    n_experts: int,
    topk: int,
    sorted_expert_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Quantise bf16 or fp16 [R, K]; returns uint8 [R, K / 2] and uint8 [S, 4T]. ``topk`` is accepted and not needed."""
    return tuple(
        ops.mxfp4_experts_quant(input_tensor, expert_offsets, blockscale_offsets, n_experts, sorted_expert_ids)
    )


def silu_and_mul_mxfp4_experts_quant(
    input_tensor: Tensor,
    expert_offsets: Tensor,
    blockscale_offsets: Tensor,
    n_experts: int,
    topk: int,
    sorted_expert_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """silu(gate) * up of bf16 or fp16 [R, 2K], quantised; returns uint8 [R, K / 2] and uint8 [S, 4T]."""
    return tuple(
        ops.silu_and_mul_mxfp4_experts_quant(
            input_tensor, expert_offsets, blockscale_offsets, n_experts, sorted_expert_ids
        )
    )
