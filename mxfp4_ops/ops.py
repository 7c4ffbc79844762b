"""The public functions: one for each op of ``torch.ops.mxfp4_ops``, with named results and an ``out=`` form.

Every function works on CPU and CUDA tensors, under ``torch.compile`` and ``torch.export``, and inside a CUDA-graph
capture. Wrong dtypes, shapes and devices raise RuntimeError. Symbols: ``m`` tokens, ``topk`` experts a token, ``E``
experts on this device, ``R = m * topk`` routed rows, ``K`` quantised columns, ``T = ceil(K / 128)`` scale tiles a row,
``S = floor((R + 127 * min(R, E)) / 128) * 128`` scale rows.
"""

from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

T = TypeVar("T", bound=tuple)

_ops = torch.ops.mxfp4_ops


class MoEMetadata(NamedTuple):
    """How the routed rows are sorted by expert; every field is int32 on the device of the router ids."""

    expert_offsets: Tensor
    """[E + 1]: sorted rows of expert e are expert_offsets[e] to expert_offsets[e + 1] - 1."""
    blockscale_offsets: Tensor
    """[E + 1]: first scale row of expert e, each expert padded to 128 rows."""
    problem_sizes1: Tensor
    """[E, 3]: (rows, 2n or n, k) of the first GEMM."""
    problem_sizes2: Tensor
    """[E, 3]: (rows, k, n) of the second GEMM."""
    input_permutation: Tensor
    """[R]: sorted row to token, -1 in the tail of rows without an expert."""
    output_permutation: Tensor
    """[R]: slot t * topk + j to sorted row, -1 where the id has no expert here."""
    sorted_expert_ids: Tensor
    """[R]: sorted row to expert, -1 in the tail."""


class QuantizedRows(NamedTuple):
    """MXFP4 rows as a grouped GEMM reads them."""

    output: Tensor
    """uint8 [R, K / 2]: two E2M1 codes a byte, the even column in the low nibble."""
    output_scale: Tensor
    """uint8 [S, 4T]: E8M0 scales of 32 columns each, in tiles of 128 rows by 4 scales (SWIZZLE_32_4_4)."""


class PermutedQuantizedRows(NamedTuple):
    """The tokens as MXFP4 rows sorted by expert, and how they are sorted: MoEMetadata's fields, then QuantizedRows'."""

    expert_offsets: Tensor
    """int32 [E + 1], and so on as MoEMetadata has them."""
    blockscale_offsets: Tensor
    problem_sizes1: Tensor
    problem_sizes2: Tensor
    input_permutation: Tensor
    output_permutation: Tensor
    sorted_expert_ids: Tensor
    output: Tensor
    """uint8 [R, K / 2], as QuantizedRows has it."""
    output_scale: Tensor
    """uint8 [S, 4T], as QuantizedRows has it."""


# torch.export.save and torch.load(weights_only=True) take the results by these names.
for _result in (MoEMetadata, QuantizedRows, PermutedQuantizedRows):
    torch.utils._pytree._register_namedtuple(_result, serialized_type_name=f"mxfp4_ops.{_result.__name__}")
    torch.serialization.add_safe_globals([_result])


def _refuse_grad(op: str, **tensors: Tensor) -> None:
    # The kernels say the same in eager. Under torch.compile they run where autograd is off already, so it is said here.
    if torch.is_grad_enabled():
        for name, tensor in tensors.items():
            if tensor.requires_grad:
                raise RuntimeError(
                    f"{op}: {name} must not require grad, for there is no backward: call it under torch.no_grad() or "
                    "torch.inference_mode(), or on a detached tensor where no gradient is wanted"
                )


def _as_result(op: str, result: type[T], out: tuple[Tensor | None, ...]) -> T:
    fields = result._fields
    if len(out) != len(fields):
        raise RuntimeError(f"{op}: out must have {len(fields)} buffers ({', '.join(fields)}), got {len(out)}")
    return result(*out)


def _experts_quant(op: str, rows: tuple, out: tuple[Tensor, Tensor] | None) -> QuantizedRows:
    _refuse_grad(op, input=rows[0])
    overloads = getattr(_ops, op)
    if out is None:
        return QuantizedRows(*overloads.default(*rows))
    result = _as_result(op, QuantizedRows, out)
    overloads.out(*rows, output=result.output, output_scale=result.output_scale)
    return result


def get_cutlass_moe_mm_data(
    topk_ids: Tensor,
    num_experts: int,
    n: int,
    k: int,
    *,
    is_gated: bool = True,
    expert_map: Tensor | None = None,
    out: tuple[Tensor | None, ...] | None = None,
) -> MoEMetadata:
    """Sort the routed rows by expert: offsets, problem sizes and permutations from router ids, in one call.

    The order is stable (rows of an expert stay in slot order), so results are equal from run to run and from device to
    device. An id outside ``[0, num_experts)`` after ``expert_map`` has no expert here: it is counted nowhere and its
    slot has ``output_permutation = -1``.

    Args:
        topk_ids: int32 or int64 [m, topk], the experts of each token.
        num_experts: E, experts on this device, at least 1.
        n: intermediate size, at least 1.
        k: hidden size, at least 1.
        is_gated: whether the first GEMM computes gate and up, 2n columns, or n.
        expert_map: int32 [global experts], global id to local id or -1; ``num_experts`` then counts local experts.
        out: buffers of the seven results, in order, to write instead of fresh ones; ``blockscale_offsets`` and
            ``sorted_expert_ids`` may be None.

    Returns:
        MoEMetadata of seven int32 tensors (``out``, when given).

    Raises:
        RuntimeError: an argument has a wrong dtype, shape or device, or a size is out of range.

    Example:
        >>> import torch, mxfp4_ops
        >>> data = mxfp4_ops.get_cutlass_moe_mm_data(torch.tensor([[2, 0], [2, 1]]), num_experts=4, n=64, k=32)
        >>> data.expert_offsets.tolist(), data.sorted_expert_ids.tolist()
        ([0, 1, 2, 4, 4], [0, 1, 2, 2])
        >>> data.input_permutation.tolist(), data.output_permutation.tolist()
        ([0, 1, 0, 1], [2, 0, 3, 1])
    """
    if out is None:
        return MoEMetadata(
            *_ops.get_cutlass_moe_mm_data.default(topk_ids, num_experts, n, k, is_gated=is_gated, expert_map=expert_map)
        )
    result = _as_result("get_cutlass_moe_mm_data", MoEMetadata, out)
    _ops.get_cutlass_moe_mm_data.out(
        topk_ids, num_experts, n, k, is_gated=is_gated, expert_map=expert_map, **result._asdict()
    )
    return result


def shuffle_rows(input: Tensor, dst2src_map: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Gather rows: ``output[i] = input[dst2src_map[i]]``, a zero row where the map points outside the input.

    Differentiable in ``input`` (without ``out``): a row's gradient is the sum over the rows that it went to, added up
    as the backward of ``input[dst2src_map]`` does.

    Args:
        input: [rows, width], any dtype, any width, any strides.
        dst2src_map: int32 or int64 [output rows].
        out: [output rows, width] of the dtype of ``input``, written instead of a fresh tensor.

    Returns:
        Tensor [output rows, width].

    Raises:
        RuntimeError: an argument has a wrong dtype, shape or device.

    Example:
        >>> import torch, mxfp4_ops
        >>> mxfp4_ops.shuffle_rows(torch.tensor([[1, 2], [3, 4]]), torch.tensor([1, -1, 0])).tolist()
        [[3, 4], [0, 0], [1, 2]]
    """
    if out is None:
        return _ops.shuffle_rows.default(input, dst2src_map)
    _refuse_grad("shuffle_rows", input=input, output=out)
    _ops.shuffle_rows.out(input, dst2src_map, output=out)
    return out


def mxfp4_experts_quant(
    input: Tensor,
    expert_offsets: Tensor,
    blockscale_offsets: Tensor,
    n_experts: int,
    sorted_expert_ids: Tensor | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> QuantizedRows:
    """Quantise rows sorted by expert to MXFP4: E2M1 codes and E8M0 scales of 32 columns, rounded as EVEN does.

    With ``sorted_expert_ids`` a row's expert is read; without, it is searched for in ``expert_offsets``. The bytes are
    the same. A row without an expert becomes zeros and has no scale. A block with a NaN has scale 0xff (NaN).

    Args:
        input: bfloat16 or float16 [R, K], K a multiple of 32, any strides.
        expert_offsets: int32 [E + 1], as MoEMetadata has it.
        blockscale_offsets: int32 [E + 1], as MoEMetadata has it.
        n_experts: E.
        sorted_expert_ids: int32 [R]; an entry outside [0, E) means no expert.
        out: (uint8 [R, K / 2], uint8 [S, 4T]) to write instead of fresh tensors. Scale bytes of padding rows and
            columns are then left as they are; without ``out`` they are 0.

    Returns:
        QuantizedRows of two uint8 tensors, [R, K / 2] and [S, 4T].

    Raises:
        RuntimeError: an argument has a wrong dtype, shape or device; on the CPU also offsets that do not ascend or
            leave the buffers; an input that requires grad while grad mode is on, for there is no backward.

    Example:
        >>> import torch, mxfp4_ops
        >>> x = torch.tensor([[6.0, -1.0] * 16], dtype=torch.bfloat16)
        >>> offsets, scales = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 128], dtype=torch.int32)
        >>> rows = mxfp4_ops.mxfp4_experts_quant(x, offsets, scales, 1)
        >>> rows.output[0, :2].tolist(), rows.output_scale[0, 0].item(), tuple(rows.output_scale.shape)
        ([167, 167], 127, (128, 4))
    """
    rows = (input, expert_offsets, blockscale_offsets, n_experts, sorted_expert_ids)
    return _experts_quant("mxfp4_experts_quant", rows, out)


def silu_and_mul_mxfp4_experts_quant(
    input: Tensor,
    expert_offsets: Tensor,
    blockscale_offsets: Tensor,
    n_experts: int,
    sorted_expert_ids: Tensor | None = None,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> QuantizedRows:
    """``silu(gate) * up`` in float32, rounded once to the input's dtype, then quantised as mxfp4_experts_quant does.

    silu is built from correctly rounded operations alone, so CPU and CUDA give the same bytes.

    Args:
        input: bfloat16 or float16 [R, 2K], gate then up, K a multiple of 32, any strides.
        expert_offsets, blockscale_offsets, n_experts, sorted_expert_ids, out: as for mxfp4_experts_quant.

    Returns:
        QuantizedRows of two uint8 tensors, [R, K / 2] and [S, 4T].

    Raises:
        RuntimeError: as mxfp4_experts_quant.

    Example:
        >>> import torch, mxfp4_ops
        >>> gate_up = torch.ones(3, 64, dtype=torch.float16)
        >>> data = mxfp4_ops.get_cutlass_moe_mm_data(torch.tensor([[0], [1], [0]]), num_experts=2, n=32, k=64)
        >>> rows = mxfp4_ops.silu_and_mul_mxfp4_experts_quant(
        ...     gate_up, data.expert_offsets, data.blockscale_offsets, 2, data.sorted_expert_ids)
        >>> tuple(rows.output.shape), tuple(rows.output_scale.shape)
        ((3, 16), (256, 4))
    """
    rows = (input, expert_offsets, blockscale_offsets, n_experts, sorted_expert_ids)
    return _experts_quant("silu_and_mul_mxfp4_experts_quant", rows, out)


def moe_permute_mxfp4_quant(
    hidden_states: Tensor,
    topk_ids: Tensor,
    num_experts: int,
    n: int,
    *,
    is_gated: bool = True,
    expert_map: Tensor | None = None,
    out: tuple[Tensor | None, ...] | None = None,
) -> PermutedQuantizedRows:
    """Route the tokens to their experts and quantise them: get_cutlass_moe_mm_data, shuffle_rows, mxfp4_experts_quant.

    The bytes are those of the three calls, the last one with ``sorted_expert_ids``. The sorted rows are never in memory
    but as MXFP4.

    Args:
        hidden_states: bfloat16 or float16 [m, K], K a multiple of 32, any strides.
        topk_ids: int32 or int64 [m, topk], the experts of each token.
        num_experts: E, experts on this device, at least 1.
        n: intermediate size, at least 1.
        is_gated: whether the first GEMM computes gate and up, 2n columns, or n.
        expert_map: int32 [global experts], global id to local id or -1; ``num_experts`` then counts local experts.
        out: buffers of the nine results, in order, to write instead of fresh ones; ``blockscale_offsets`` and
            ``sorted_expert_ids`` may be None. Scale bytes of padding rows and columns are then left as they are;
            without ``out`` they are 0.

    Returns:
        PermutedQuantizedRows (``out``, when given): the seven int32 tensors of MoEMetadata with k = K, then uint8
        [R, K / 2] and [S, 4T]. Rows from ``expert_offsets[E]`` on have no expert: zeros without a scale.

    Raises:
        RuntimeError: an argument has a wrong dtype, shape or device, or a size is out of range; ``hidden_states``
            requires grad while grad mode is on, for there is no backward.

    Example:
        >>> import torch, mxfp4_ops
        >>> x = torch.tensor([[6.0] * 32, [-1.0] * 32], dtype=torch.bfloat16)
        >>> rows = mxfp4_ops.moe_permute_mxfp4_quant(x, torch.tensor([[1, 0], [1, -1]]), num_experts=2, n=64)
        >>> rows.input_permutation.tolist(), rows.output[:, 0].tolist(), tuple(rows.output_scale.shape)
        ([0, 0, 1, -1], [119, 119, 238, 0], (256, 4))
    """
    op = "moe_permute_mxfp4_quant"
    _refuse_grad(op, hidden_states=hidden_states)
    routing = (topk_ids, num_experts, n)
    options = {"is_gated": is_gated, "expert_map": expert_map}
    if out is None:
        return PermutedQuantizedRows(*_ops.moe_permute_mxfp4_quant.default(hidden_states, *routing, **options))
    result = _as_result(op, PermutedQuantizedRows, out)
    _ops.moe_permute_mxfp4_quant.out(hidden_states, *routing, **options, **result._asdict())
    return result


def mxfp4_dequantize(
    packed: Tensor,
    scale: Tensor,
    expert_offsets: Tensor,
    blockscale_offsets: Tensor,
    *,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Values of quantised rows: code * 2^(scale - 127), rounded once to ``dtype``; rows without an expert are 0.

    Args:
        packed: uint8 [R, K / 2].
        scale: uint8 [S, 4T], any multiple of 128 rows that holds every expert's scales.
        expert_offsets: int32 [E + 1].
        blockscale_offsets: int32 [E + 1].
        dtype: float32, bfloat16 or float16.
        out: [R, K] of ``dtype``, written instead of a fresh tensor.

    Returns:
        Tensor [R, K] of ``dtype``. Scale 0xff gives NaN.

    Raises:
        RuntimeError: an argument has a wrong dtype, shape or device; on the CPU also offsets that do not ascend or
            leave the buffers.

    Example:
        >>> import torch, mxfp4_ops
        >>> x = torch.tensor([[6.0, -1.0] * 16], dtype=torch.bfloat16)
        >>> offsets, scales = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, 128], dtype=torch.int32)
        >>> rows = mxfp4_ops.mxfp4_experts_quant(x, offsets, scales, 1)
        >>> mxfp4_ops.mxfp4_dequantize(*rows, offsets, scales, dtype=torch.float32)[0, :2].tolist()
        [6.0, -1.0]
    """
    if out is None:
        return _ops.mxfp4_dequantize.default(packed, scale, expert_offsets, blockscale_offsets, dtype=dtype)
    _refuse_grad("mxfp4_dequantize", output=out)
    _ops.mxfp4_dequantize.out(packed, scale, expert_offsets, blockscale_offsets, dtype=dtype, output=out)
    return out
