// mxfp4_dequantize: E2M1 codes and tiled E8M0 scales back to floating-point rows.
#pragma once
#include "../args.h"
#include "../layout.h"
#include "checks.h"

namespace mxfp4 {

// libtorch's code of a dtype; -1, which no tensor has, for one that the C interface does not carry.
inline int32_t dequantized_dtype_code(torch::headeronly::ScalarType dtype) {
  using torch::headeronly::ScalarType;
  if (dtype == ScalarType::Float) return aoti_torch_dtype_float32();
  if (dtype == ScalarType::BFloat16) return aoti_torch_dtype_bfloat16();
  if (dtype == ScalarType::Half) return aoti_torch_dtype_float16();
  try {
    return torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype));
  } catch (const std::exception&) {
    return -1;
  }
}

inline Checks check_dequantize(const Tensor& packed, const Tensor& scale, const Tensor& expert_offsets,
                               const Tensor& blockscale_offsets, int32_t dtype) {
  Checks check("mxfp4_dequantize");
  const int32_t u8 = aoti_torch_dtype_uint8(), i32 = aoti_torch_dtype_int32();
  check.dtype("packed", packed, {u8});
  check.dims("packed", packed, 2, "[R, K / 2]");
  check.columns("packed", packed.size(1), kBlock / 2, "(K / 2)");
  check.row_count("packed", packed.size(0), 0);
  check.dtype("scale", scale, {u8});
  check.dims("scale", scale, 2, "[S, 4T]");
  check.shape("scale", scale, {scale.size(0), kTileBlocks * scale_tiles(2 * packed.size(1))}, "[S, 4T]");
  if (scale.size(0) % kTileRows != 0) check.fail("scale", "have a multiple of 128 rows (S)", scale.size(0));
  check.device("scale", scale, "packed", packed);
  check.dtype("expert_offsets", expert_offsets, {i32});
  check.dims("expert_offsets", expert_offsets, 1, "[E + 1]");
  check.at_least("the size of expert_offsets", expert_offsets.size(0), 2);
  check.device("expert_offsets", expert_offsets, "packed", packed);
  check.exact("blockscale_offsets", blockscale_offsets, i32, {expert_offsets.size(0)}, "[E + 1]", "packed", packed);
  check.one_of("dtype", dtype, {aoti_torch_dtype_float32(), aoti_torch_dtype_bfloat16(), aoti_torch_dtype_float16()});
  return check;
}

template <typename Backend>
struct Dequantize {
  static void run(const Tensor& packed, const Tensor& scale, const Tensor& expert_offsets,
                  const Tensor& blockscale_offsets, int32_t dtype, const Tensor& output) {
    const Tensor rows = as_rows(packed, Backend::kAlignment), scales = as_contiguous(scale);
    const Tensor offsets = as_contiguous(expert_offsets), blockscale = as_contiguous(blockscale_offsets);
    DequantizeArgs args;
    args.packed = data<uint8_t>(rows);
    args.row_stride = rows.size(0) <= 1 ? rows.size(1) : rows.stride(0);
    args.scale = data<uint8_t>(scales);
    args.scale_rows = scales.size(0);
    args.rows = rows.size(0);
    args.K = 2 * rows.size(1);
    args.num_experts = offsets.numel() - 1;
    args.expert_offsets = data<int32_t>(offsets);
    args.blockscale_offsets = data<int32_t>(blockscale);
    args.output = output.mutable_data_ptr();
    args.type = dtype == aoti_torch_dtype_float32()    ? FloatType::kFloat32
                : dtype == aoti_torch_dtype_bfloat16() ? FloatType::kBFloat16
                                                       : FloatType::kFloat16;
    args.device = rows.get_device_index();
    Backend::dequantize(args);
  }

  static Tensor functional(const Tensor& packed, const Tensor& scale, const Tensor& expert_offsets,
                           const Tensor& blockscale_offsets, torch::headeronly::ScalarType dtype) {
    const int32_t code = dequantized_dtype_code(dtype);
    check_dequantize(packed, scale, expert_offsets, blockscale_offsets, code);
    Tensor output = empty({packed.size(0), 2 * packed.size(1)}, code, packed);
    run(packed, scale, expert_offsets, blockscale_offsets, code, output);
    return output;
  }

  static void out(const Tensor& packed, const Tensor& scale, const Tensor& expert_offsets,
                  const Tensor& blockscale_offsets, torch::headeronly::ScalarType dtype, const Tensor& output) {
    const int32_t code = dequantized_dtype_code(dtype);
    const Checks check = check_dequantize(packed, scale, expert_offsets, blockscale_offsets, code);
    check.buffer("output", output, code, {packed.size(0), 2 * packed.size(1)}, "[R, K]", "packed", packed);
    check.no_grad("output", output);
    check.no_overlap({{"packed", &packed},
                      {"scale", &scale},
                      {"expert_offsets", &expert_offsets},
                      {"blockscale_offsets", &blockscale_offsets}},
                     {{"output", &output}});
    Written written(output, Backend::kAlignment, false);
    run(packed, scale, expert_offsets, blockscale_offsets, code, written.tensor());
    written.commit();
  }
};

}  // namespace mxfp4
