"""The gradient of shuffle_rows. What has no gradient refuses in the kernels (csrc/host/checks.h)."""

import torch
from torch import Tensor


def _save_map(ctx, inputs, output) -> None:
    input, dst2src_map = inputs
    ctx.save_for_backward(dst2src_map)
    ctx.rows = input.shape[0]


def _shuffle_rows_backward(ctx, grad: Tensor):
    (dst2src_map,) = ctx.saved_tensors
    valid = (dst2src_map >= 0) & (dst2src_map < ctx.rows)
    # Rows from outside the input gather in a row of their own, which is cut off. The sum is that of the backward of
    # input[dst2src_map], with its order: torch.use_deterministic_algorithms fixes it.
    target = torch.where(valid, dst2src_map, ctx.rows).long()
    result = grad.new_zeros(ctx.rows + 1, grad.shape[1])
    return result.index_put((target,), grad, accumulate=True)[: ctx.rows], None


torch.library.register_autograd("mxfp4_ops::shuffle_rows", _shuffle_rows_backward, setup_context=_save_map)
