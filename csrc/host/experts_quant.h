// mxfp4_experts_quant and silu_and_mul_mxfp4_experts_quant: rows to E2M1 codes and tiled E8M0 scales.
#pragma once
#include <tuple>

#include "../args.h"
#include "../layout.h"
#include "checks.h"

namespace mxfp4 {

inline const char* quant_name(bool silu) { return silu ? "silu_and_mul_mxfp4_experts_quant" : "mxfp4_experts_quant"; }

struct QuantShapes {
  int64_t codes[2], scales[2];
};

inline QuantShapes quant_shapes(int64_t R, int64_t K, int64_t n_experts) {
  return {{R, K / 2}, {scale_rows(R, n_experts), kTileBlocks * scale_tiles(K)}};
}

using QuantResults = std::tuple<Tensor, Tensor>;  // output, output_scale

inline QuantResults empty_quantized(const QuantShapes& shapes, const Tensor& like) {
  const int32_t u8 = aoti_torch_dtype_uint8();
  return {empty({shapes.codes[0], shapes.codes[1]}, u8, like), empty({shapes.scales[0], shapes.scales[1]}, u8, like)};
}

inline void check_quant_buffers(const Checks& check, const QuantShapes& shapes, const Tensor& output,
                                const Tensor& output_scale, const char* like_arg, const Tensor& like) {
  const int32_t u8 = aoti_torch_dtype_uint8();
  check.buffer("output", output, u8, {shapes.codes[0], shapes.codes[1]}, "[R, K / 2]", like_arg, like);
  check.buffer("output_scale", output_scale, u8, {shapes.scales[0], shapes.scales[1]}, "[S, 4T]", like_arg, like);
}

inline Checks check_experts_quant(bool silu, const Tensor& input, const Tensor& expert_offsets,
                                  const Tensor& blockscale_offsets, int64_t n_experts,
                                  const OptionalTensor& sorted_expert_ids) {
  Checks check(quant_name(silu));
  const int32_t i32 = aoti_torch_dtype_int32();
  check.dtype("input", input, {aoti_torch_dtype_bfloat16(), aoti_torch_dtype_float16()});
  check.dims("input", input, 2, silu ? "[R, 2K]" : "[R, K]");
  check.columns("input", input.size(1), silu ? 2 * kBlock : kBlock, silu ? "(2K)" : "(K)");
  check.at_least("n_experts", n_experts, 1);
  check.at_most("n_experts", n_experts, INT32_MAX - 1);
  check.row_count("input", input.size(0), scale_rows(input.size(0), n_experts));
  check.exact("expert_offsets", expert_offsets, i32, {n_experts + 1}, "[n_experts + 1]", "input", input);
  check.exact("blockscale_offsets", blockscale_offsets, i32, {n_experts + 1}, "[n_experts + 1]", "input", input);
  if (sorted_expert_ids.has_value())
    check.exact("sorted_expert_ids", *sorted_expert_ids, i32, {input.size(0)}, "[R]", "input", input);
  check.no_grad("input", input);
  return check;
}

template <typename Backend, bool kSilu>
struct ExpertsQuant {
  static int64_t width(const Tensor& input) { return kSilu ? input.size(1) / 2 : input.size(1); }

  static void run(const Tensor& input, const Tensor& expert_offsets, const Tensor& blockscale_offsets,
                  int64_t n_experts, const OptionalTensor& sorted_expert_ids, const Tensor& output,
                  const Tensor& output_scale, bool zero_padding) {
    const Tensor rows = as_rows(input, Backend::kAlignment);
    const Tensor offsets = as_contiguous(expert_offsets), blockscale = as_contiguous(blockscale_offsets);
    const OptionalTensor sorted = as_contiguous(sorted_expert_ids);
    QuantArgs args;
    args.input = data<uint16_t>(rows);
    args.row_stride = rows.size(0) <= 1 ? rows.size(1) : rows.stride(0);
    args.is_bfloat16 = dtype_code(rows) == aoti_torch_dtype_bfloat16();
    args.silu = kSilu;
    args.rows = rows.size(0);
    args.K = width(rows);
    args.num_experts = n_experts;
    args.expert_offsets = data<int32_t>(offsets);
    args.blockscale_offsets = data<int32_t>(blockscale);
    args.sorted_expert_ids = data<int32_t>(sorted);
    args.output = mutable_data<uint8_t>(output);
    args.output_scale = mutable_data<uint8_t>(output_scale);
    args.scale_rows = output_scale.size(0);
    args.zero_padding = zero_padding;
    args.device = rows.get_device_index();
    args.op = quant_name(kSilu);
    Backend::experts_quant(args);
  }

  static QuantResults functional(const Tensor& input, const Tensor& expert_offsets, const Tensor& blockscale_offsets,
                                 int64_t n_experts, const OptionalTensor& sorted_expert_ids) {
    check_experts_quant(kSilu, input, expert_offsets, blockscale_offsets, n_experts, sorted_expert_ids);
    QuantResults result = empty_quantized(quant_shapes(input.size(0), width(input), n_experts), input);
    run(input, expert_offsets, blockscale_offsets, n_experts, sorted_expert_ids, std::get<0>(result),
        std::get<1>(result), true);
    return result;
  }

  static void out(const Tensor& input, const Tensor& expert_offsets, const Tensor& blockscale_offsets,
                  int64_t n_experts, const OptionalTensor& sorted_expert_ids, const Tensor& output,
                  const Tensor& output_scale) {
    const Checks check =
        check_experts_quant(kSilu, input, expert_offsets, blockscale_offsets, n_experts, sorted_expert_ids);
    check_quant_buffers(check, quant_shapes(input.size(0), width(input), n_experts), output, output_scale, "input",
                        input);
    check.no_overlap({{"input", &input},
                      {"expert_offsets", &expert_offsets},
                      {"blockscale_offsets", &blockscale_offsets},
                      {"sorted_expert_ids", address(sorted_expert_ids)}},
                     {{"output", &output}, {"output_scale", &output_scale}});
    Written codes(output, Backend::kAlignment, false), scales(output_scale, Backend::kAlignment, true);
    run(input, expert_offsets, blockscale_offsets, n_experts, sorted_expert_ids, codes.tensor(), scales.tensor(),
        false);
    codes.commit();
    scales.commit();
  }
};

}  // namespace mxfp4
