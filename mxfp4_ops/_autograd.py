"""What autograd knows of the ops: the gradient of shuffle_rows, and that the .out overloads write."""

import torch
from torch import Tensor

_library = torch.library.Library("mxfp4_ops", "IMPL")


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


def _register_writes(op: torch._ops.OpOverload) -> None:
    """Count a write as torch's own in-place ops do, so that autograd notices one over a tensor that it has saved."""
    name = op._schema.name.removeprefix("mxfp4_ops::")
    written = [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]

    def impl(keyset, *args, **kwargs):
        buffers = {n: kwargs[n] for n in written if kwargs.get(n) is not None}
        if torch.is_grad_enabled():
            for n, buffer in buffers.items():
                if buffer.requires_grad:
                    raise RuntimeError(f"{name}: {n} must not require grad, for a write into it has no backward")
        torch.autograd.graph.increment_version(buffers.values())
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return op.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args, **kwargs)

    _library.impl(f"{name}.{op._overloadname}", impl, "ADInplaceOrView", with_keyset=True)


for _name in (
    "get_cutlass_moe_mm_data",
    "shuffle_rows",
    "mxfp4_experts_quant",
    "silu_and_mul_mxfp4_experts_quant",
    "mxfp4_dequantize",
):
    _register_writes(getattr(torch.ops.mxfp4_ops, _name).out)
