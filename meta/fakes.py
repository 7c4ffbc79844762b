"""Fake kernels: the checks and shapes of each op, for torch.compile, export and the meta device."""

import torch
from torch import Tensor

from . import shapes
from .checks import INT32_MAX, Checks

_METADATA_RESULTS = (
    ("expert_offsets", "[num_experts + 1]"),
    ("blockscale_offsets", "[num_experts + 1]"),
    ("problem_sizes1", "[num_experts, 3]"),
    ("problem_sizes2", "[num_experts, 3]"),
    ("input_permutation", "[m * topk]"),
    ("output_permutation", "[m * topk]"),
    ("sorted_expert_ids", "[m * topk]"),
)
_OPTIONAL_RESULTS = ("blockscale_offsets", "sorted_expert_ids")


def check_routing(
    check: Checks, topk_ids: Tensor, num_experts: int, n: int, is_gated: bool, expert_map: Tensor | None
) -> None:
    """All but k, which an op may take from the shape of another argument."""
    check.dtype("topk_ids", topk_ids, torch.int32, torch.int64)
    check.dims("topk_ids", topk_ids, 2, "[m, topk]")
    check.at_least("num_experts", num_experts, 1)
    check.at_most("num_experts", num_experts, INT32_MAX - 1)
    R = topk_ids.shape[0] * topk_ids.shape[1]
    check.row_count("topk_ids", R, shapes.scale_rows(R, num_experts))
    check.at_least("n", n, 1)
    check.at_most("n", n, INT32_MAX // 2 if is_gated else INT32_MAX)
    if expert_map is not None:
        check.dtype("expert_map", expert_map, torch.int32)
        check.dims("expert_map", expert_map, 1, "[global experts]")
        check.device("expert_map", expert_map, "topk_ids", topk_ids)


def check_metadata(
    topk_ids: Tensor, num_experts: int, n: int, k: int, is_gated: bool, expert_map: Tensor | None
) -> Checks:
    check = Checks("get_cutlass_moe_mm_data")
    check_routing(check, topk_ids, num_experts, n, is_gated, expert_map)
    check.at_least("k", k, 1)
    check.at_most("k", k, INT32_MAX)
    return check


def _empty_metadata(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, ...]:
    result = shapes.metadata_shapes(topk_ids.shape[0], topk_ids.shape[1], num_experts)
    return tuple(topk_ids.new_empty(shape, dtype=torch.int32) for shape in result)


def _check_metadata_buffers(
    check: Checks, topk_ids: Tensor, num_experts: int, buffers: dict[str, Tensor | None]
) -> None:
    result = shapes.metadata_shapes(topk_ids.shape[0], topk_ids.shape[1], num_experts)
    for (name, layout), shape in zip(_METADATA_RESULTS, result, strict=True):
        buffer = buffers.get(name)
        if buffer is not None or name not in _OPTIONAL_RESULTS:
            check.buffer(name, buffer, torch.int32, shape, layout, "topk_ids", topk_ids)


@torch.library.register_fake("mxfp4_ops::get_cutlass_moe_mm_data")
def _(topk_ids, num_experts, n, k, *, is_gated=True, expert_map=None):
    check_metadata(topk_ids, num_experts, n, k, is_gated, expert_map)
    return _empty_metadata(topk_ids, num_experts)


@torch.library.register_fake("mxfp4_ops::get_cutlass_moe_mm_data.out")
def _(topk_ids, num_experts, n, k, *, is_gated=True, expert_map=None, **buffers):
    check = check_metadata(topk_ids, num_experts, n, k, is_gated, expert_map)
    _check_metadata_buffers(check, topk_ids, num_experts, buffers)


def check_shuffle_rows(input: Tensor, dst2src_map: Tensor) -> Checks:
    check = Checks("shuffle_rows")
    check.dims("input", input, 2, "[rows, width]")
    check.dtype("dst2src_map", dst2src_map, torch.int32, torch.int64)
    check.dims("dst2src_map", dst2src_map, 1, "[output rows]")
    check.device("dst2src_map", dst2src_map, "input", input)
    return check


@torch.library.register_fake("mxfp4_ops::shuffle_rows")
def _(input, dst2src_map):
    check_shuffle_rows(input, dst2src_map)
    return input.new_empty(shapes.shuffle_rows_shape(input.shape[1], dst2src_map.shape[0]))


@torch.library.register_fake("mxfp4_ops::shuffle_rows.out")
def _(input, dst2src_map, *, output):
    check = check_shuffle_rows(input, dst2src_map)
    shape = shapes.shuffle_rows_shape(input.shape[1], dst2src_map.shape[0])
    check.buffer("output", output, input.dtype, shape, "[output rows, width]", "input", input)


def check_experts_quant(
    silu: bool,
    input: Tensor,
    expert_offsets: Tensor,
    blockscale_offsets: Tensor,
    n_experts: int,
    sorted_expert_ids: Tensor | None,
) -> Checks:
    check = Checks("silu_and_mul_mxfp4_experts_quant" if silu else "mxfp4_experts_quant")
    check.dtype("input", input, torch.bfloat16, torch.float16)
    check.dims("input", input, 2, "[R, 2K]" if silu else "[R, K]")
    check.columns("input", input.shape[1], 2 * shapes.BLOCK if silu else shapes.BLOCK, "(2K)" if silu else "(K)")
    check.at_least("n_experts", n_experts, 1)
    check.at_most("n_experts", n_experts, INT32_MAX - 1)
    check.row_count("input", input.shape[0], shapes.scale_rows(input.shape[0], n_experts))
    for name, offsets in (("expert_offsets", expert_offsets), ("blockscale_offsets", blockscale_offsets)):
        check.exact(name, offsets, torch.int32, (n_experts + 1,), "[n_experts + 1]", "input", input)
    if sorted_expert_ids is not None:
        check.exact("sorted_expert_ids", sorted_expert_ids, torch.int32, (input.shape[0],), "[R]", "input", input)
    return check


def _quant_shapes(silu: bool, input: Tensor, n_experts: int):
    K = input.shape[1] // 2 if silu else input.shape[1]
    return shapes.experts_quant_shapes(input.shape[0], K, n_experts)


def _empty_quantized(quantized: tuple, like: Tensor) -> tuple[Tensor, Tensor]:
    output, output_scale = quantized
    return like.new_empty(output, dtype=torch.uint8), like.new_empty(output_scale, dtype=torch.uint8)


def _check_quant_buffers(
    check: Checks, quantized: tuple, output: Tensor, output_scale: Tensor, like_arg: str, like: Tensor
) -> None:
    codes, scales = quantized
    check.buffer("output", output, torch.uint8, codes, "[R, K / 2]", like_arg, like)
    check.buffer("output_scale", output_scale, torch.uint8, scales, "[S, 4T]", like_arg, like)


def _register_experts_quant(name: str, silu: bool) -> None:
    @torch.library.register_fake(f"mxfp4_ops::{name}")
    def _(input, expert_offsets, blockscale_offsets, n_experts, sorted_expert_ids=None):
        check_experts_quant(silu, input, expert_offsets, blockscale_offsets, n_experts, sorted_expert_ids)
        return _empty_quantized(_quant_shapes(silu, input, n_experts), input)

    @torch.library.register_fake(f"mxfp4_ops::{name}.out")
    def _(input, expert_offsets, blockscale_offsets, n_experts, sorted_expert_ids=None, *, output, output_scale):
        check = check_experts_quant(silu, input, expert_offsets, blockscale_offsets, n_experts, sorted_expert_ids)
        _check_quant_buffers(check, _quant_shapes(silu, input, n_experts), output, output_scale, "input", input)


_register_experts_quant("mxfp4_experts_quant", silu=False)
_register_experts_quant("silu_and_mul_mxfp4_experts_quant", silu=True)


def check_moe_permute(
    hidden_states: Tensor, topk_ids: Tensor, num_experts: int, n: int, is_gated: bool, expert_map: Tensor | None
) -> Checks:
    check = Checks("moe_permute_mxfp4_quant")
    check_routing(check, topk_ids, num_experts, n, is_gated, expert_map)
    check.dtype("hidden_states", hidden_states, torch.bfloat16, torch.float16)
    check.dims("hidden_states", hidden_states, 2, "[m, K]")
    K = hidden_states.shape[1]
    check.shape("hidden_states", hidden_states, (topk_ids.shape[0], K), "[m, K]")
    check.columns("hidden_states", K, shapes.BLOCK, "(K)")
    check.column_count("hidden_states", K)
    check.device("hidden_states", hidden_states, "topk_ids", topk_ids)
    return check


def _permuted_shapes(hidden_states: Tensor, topk_ids: Tensor, num_experts: int) -> tuple:
    """Of output and output_scale."""
    m, topk = topk_ids.shape
    return shapes.moe_permute_shapes(m, topk, hidden_states.shape[1], num_experts)[-2:]


@torch.library.register_fake("mxfp4_ops::moe_permute_mxfp4_quant")
def _(hidden_states, topk_ids, num_experts, n, *, is_gated=True, expert_map=None):
    check_moe_permute(hidden_states, topk_ids, num_experts, n, is_gated, expert_map)
    quantized = _permuted_shapes(hidden_states, topk_ids, num_experts)
    return *_empty_metadata(topk_ids, num_experts), *_empty_quantized(quantized, hidden_states)


@torch.library.register_fake("mxfp4_ops::moe_permute_mxfp4_quant.out")
def _(hidden_states, topk_ids, num_experts, n, *, is_gated=True, expert_map=None, output, output_scale, **metadata):
    check = check_moe_permute(hidden_states, topk_ids, num_experts, n, is_gated, expert_map)
    _check_metadata_buffers(check, topk_ids, num_experts, metadata)
    quantized = _permuted_shapes(hidden_states, topk_ids, num_experts)
    _check_quant_buffers(check, quantized, output, output_scale, "hidden_states", hidden_states)


def check_dequantize(
    packed: Tensor, scale: Tensor, expert_offsets: Tensor, blockscale_offsets: Tensor, dtype: torch.dtype
) -> Checks:
    check = Checks("mxfp4_dequantize")
    check.dtype("packed", packed, torch.uint8)
    check.dims("packed", packed, 2, "[R, K / 2]")
    check.columns("packed", packed.shape[1], shapes.BLOCK // 2, "(K / 2)")
    check.row_count("packed", packed.shape[0], 0)
    check.dtype("scale", scale, torch.uint8)
    check.dims("scale", scale, 2, "[S, 4T]")
    tiles = shapes.scale_tiles(2 * packed.shape[1])
    check.shape("scale", scale, (scale.shape[0], shapes.TILE_BLOCKS * tiles), "[S, 4T]")
    check.require(scale.shape[0] % shapes.TILE_ROWS == 0, "scale", "have a multiple of 128 rows (S)", scale.shape[0])
    check.device("scale", scale, "packed", packed)
    check.dtype("expert_offsets", expert_offsets, torch.int32)
    check.dims("expert_offsets", expert_offsets, 1, "[E + 1]")
    check.at_least("the size of expert_offsets", expert_offsets.shape[0], 2)
    check.device("expert_offsets", expert_offsets, "packed", packed)
    check.exact(
        "blockscale_offsets", blockscale_offsets, torch.int32, expert_offsets.shape, "[E + 1]", "packed", packed
    )
    check.one_of("dtype", dtype, torch.float32, torch.bfloat16, torch.float16)
    return check


@torch.library.register_fake("mxfp4_ops::mxfp4_dequantize")
def _(packed, scale, expert_offsets, blockscale_offsets, *, dtype):
    check_dequantize(packed, scale, expert_offsets, blockscale_offsets, dtype)
    return packed.new_empty(shapes.dequantize_shape(packed.shape[0], packed.shape[1]), dtype=dtype)


@torch.library.register_fake("mxfp4_ops::mxfp4_dequantize.out")
def _(packed, scale, expert_offsets, blockscale_offsets, *, dtype, output):
    check = check_dequantize(packed, scale, expert_offsets, blockscale_offsets, dtype)
    shape = shapes.dequantize_shape(packed.shape[0], packed.shape[1])
    check.buffer("output", output, dtype, shape, "[R, K]", "packed", packed)
