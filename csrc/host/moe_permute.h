// moe_permute_mxfp4_quant: get_cutlass_moe_mm_data, shuffle_rows and mxfp4_experts_quant in one.
#pragma once
#include <tuple>
#include <utility>

#include "experts_quant.h"
#include "metadata.h"

namespace mxfp4 {

inline Checks check_moe_permute(const Tensor& hidden_states, const Routing& routing) {
  Checks check("moe_permute_mxfp4_quant");
  check_routing(check, routing);
  check.dtype("hidden_states", hidden_states, {aoti_torch_dtype_bfloat16(), aoti_torch_dtype_float16()});
  check.dims("hidden_states", hidden_states, 2, "[m, K]");
  check.shape("hidden_states", hidden_states, {routing.topk_ids.size(0), hidden_states.size(1)}, "[m, K]");
  check.columns("hidden_states", hidden_states.size(1), kBlock, "(K)");
  check.column_count("hidden_states", hidden_states.size(1));
  check.device("hidden_states", hidden_states, "topk_ids", routing.topk_ids);
  check.no_grad("hidden_states", hidden_states);
  return check;
}

template <typename Backend>
struct MoePermute {
  static void run(const Tensor& hidden_states, const Routing& routing, const MetadataBuffers& metadata,
                  const Tensor& output, const Tensor& output_scale, bool zero_padding) {
    const Tensor tokens = as_rows(hidden_states, Backend::kAlignment);
    const MetadataCall call(routing, metadata);
    PermuteQuantArgs args;
    args.metadata = call.args;
    args.hidden_states = data<uint16_t>(tokens);
    args.row_stride = tokens.size(0) <= 1 ? tokens.size(1) : tokens.stride(0);
    args.is_bfloat16 = dtype_code(tokens) == aoti_torch_dtype_bfloat16();
    args.tokens = tokens.size(0);
    args.K = tokens.size(1);
    args.output = mutable_data<uint8_t>(output);
    args.output_scale = mutable_data<uint8_t>(output_scale);
    args.scale_rows = output_scale.size(0);
    args.zero_padding = zero_padding;
    args.device = tokens.get_device_index();
    Backend::moe_permute_mxfp4_quant(args);
  }

  static auto functional(const Tensor& hidden_states, const Tensor& topk_ids, int64_t num_experts, int64_t n,
                         bool is_gated, const OptionalTensor& expert_map) {
    const Routing routing{topk_ids, num_experts, n, width(hidden_states), is_gated, expert_map};
    check_moe_permute(hidden_states, routing);
    MetadataResults metadata = empty_metadata(routing);
    QuantResults rows = empty_quantized(quant_shapes(routing.rows(), routing.k, num_experts), hidden_states);
    run(hidden_states, routing, metadata_buffers(metadata), std::get<0>(rows), std::get<1>(rows), true);
    return std::tuple_cat(std::move(metadata), std::move(rows));
  }

  static void out(const Tensor& hidden_states, const Tensor& topk_ids, int64_t num_experts, int64_t n, bool is_gated,
                  const OptionalTensor& expert_map, const Tensor& expert_offsets,
                  const OptionalTensor& blockscale_offsets, const Tensor& problem_sizes1, const Tensor& problem_sizes2,
                  const Tensor& input_permutation, const Tensor& output_permutation,
                  const OptionalTensor& sorted_expert_ids, const Tensor& output, const Tensor& output_scale) {
    const Routing routing{topk_ids, num_experts, n, width(hidden_states), is_gated, expert_map};
    const Checks check = check_moe_permute(hidden_states, routing);
    const MetadataBuffers buffers = metadata_buffers(expert_offsets, blockscale_offsets, problem_sizes1, problem_sizes2,
                                                     input_permutation, output_permutation, sorted_expert_ids);
    check_metadata_buffers(check, routing, buffers);
    check_quant_buffers(check, quant_shapes(routing.rows(), routing.k, num_experts), output, output_scale,
                        "hidden_states", hidden_states);
    std::vector<NamedTensor> outputs(buffers.begin(), buffers.end());
    outputs.insert(outputs.end(), {{"output", &output}, {"output_scale", &output_scale}});
    check.no_overlap({{"hidden_states", &hidden_states}, {"topk_ids", &topk_ids}, {"expert_map", address(expert_map)}},
                     outputs);
    WrittenMetadata metadata(buffers);
    Written codes(output, Backend::kAlignment, false), scales(output_scale, Backend::kAlignment, true);
    run(hidden_states, routing, metadata.buffers(), codes.tensor(), scales.tensor(), false);
    metadata.commit();
    codes.commit();
    scales.commit();
  }

 private:
  // Before the checks: any tensor, or none.
  static int64_t width(const Tensor& hidden_states) {
    return hidden_states.defined() && hidden_states.dim() == 2 ? hidden_states.size(1) : 0;
  }
};

}  // namespace mxfp4
