// get_cutlass_moe_mm_data: router ids to the seven arrays that describe the routed rows.
#pragma once
#include <tuple>

#include "../args.h"
#include "../layout.h"
#include "checks.h"

namespace mxfp4 {

inline Checks check_metadata(const Tensor& topk_ids, int64_t num_experts, int64_t n, int64_t k, bool is_gated,
                             const OptionalTensor& expert_map) {
  Checks check("get_cutlass_moe_mm_data");
  check.dtype("topk_ids", topk_ids, {aoti_torch_dtype_int32(), aoti_torch_dtype_int64()});
  check.dims("topk_ids", topk_ids, 2, "[m, topk]");
  check.at_least("num_experts", num_experts, 1);
  check.at_most("num_experts", num_experts, INT32_MAX - 1);
  check.row_count("topk_ids", topk_ids.numel(), scale_rows(topk_ids.numel(), num_experts));
  check.at_least("n", n, 1);
  check.at_most("n", n, is_gated ? INT32_MAX / 2 : INT32_MAX);
  check.at_least("k", k, 1);
  check.at_most("k", k, INT32_MAX);
  if (expert_map.has_value()) {
    check.dtype("expert_map", *expert_map, {aoti_torch_dtype_int32()});
    check.dims("expert_map", *expert_map, 1, "[global experts]");
    check.device("expert_map", *expert_map, "topk_ids", topk_ids);
  }
  return check;
}

template <typename Backend>
struct Metadata {
  using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

  static void run(const Tensor& topk_ids, int64_t num_experts, int64_t n, int64_t k, bool is_gated,
                  const OptionalTensor& expert_map, const Tensor& expert_offsets, const Tensor* blockscale_offsets,
                  const Tensor& problem_sizes1, const Tensor& problem_sizes2, const Tensor& input_permutation,
                  const Tensor& output_permutation, const Tensor* sorted_expert_ids) {
    const Tensor ids = as_contiguous(topk_ids);
    const OptionalTensor map = as_contiguous(expert_map);
    MetadataArgs args;
    args.topk_ids = ids.data_ptr();
    args.ids_are_int64 = dtype_code(ids) == aoti_torch_dtype_int64();
    args.rows = ids.numel();
    args.topk = ids.size(1);
    args.num_experts = num_experts;
    args.n1 = static_cast<int32_t>(is_gated ? 2 * n : n);
    args.n = static_cast<int32_t>(n);
    args.k = static_cast<int32_t>(k);
    args.has_expert_map = map.has_value();
    args.expert_map = data<int32_t>(map);
    args.expert_map_size = map.has_value() ? map->numel() : 0;
    args.expert_offsets = mutable_data<int32_t>(expert_offsets);
    args.blockscale_offsets = blockscale_offsets ? mutable_data<int32_t>(*blockscale_offsets) : nullptr;
    args.problem_sizes1 = mutable_data<int32_t>(problem_sizes1);
    args.problem_sizes2 = mutable_data<int32_t>(problem_sizes2);
    args.input_permutation = mutable_data<int32_t>(input_permutation);
    args.output_permutation = mutable_data<int32_t>(output_permutation);
    args.sorted_expert_ids = sorted_expert_ids ? mutable_data<int32_t>(*sorted_expert_ids) : nullptr;
    args.device = ids.get_device_index();
    Backend::metadata(args);
  }

  static Outputs functional(const Tensor& topk_ids, int64_t num_experts, int64_t n, int64_t k, bool is_gated,
                            const OptionalTensor& expert_map) {
    check_metadata(topk_ids, num_experts, n, k, is_gated, expert_map);
    const int32_t i32 = aoti_torch_dtype_int32();
    const int64_t E = num_experts, R = topk_ids.numel();
    Outputs out{empty({E + 1}, i32, topk_ids), empty({E + 1}, i32, topk_ids), empty({E, 3}, i32, topk_ids),
                empty({E, 3}, i32, topk_ids),  empty({R}, i32, topk_ids),     empty({R}, i32, topk_ids),
                empty({R}, i32, topk_ids)};
    auto& [offsets, blockscale, sizes1, sizes2, input_perm, output_perm, sorted] = out;
    run(topk_ids, E, n, k, is_gated, expert_map, offsets, &blockscale, sizes1, sizes2, input_perm, output_perm,
        &sorted);
    return out;
  }

  static void out(const Tensor& topk_ids, int64_t num_experts, int64_t n, int64_t k, bool is_gated,
                  const OptionalTensor& expert_map, const Tensor& expert_offsets,
                  const OptionalTensor& blockscale_offsets, const Tensor& problem_sizes1, const Tensor& problem_sizes2,
                  const Tensor& input_permutation, const Tensor& output_permutation,
                  const OptionalTensor& sorted_expert_ids) {
    const Checks check = check_metadata(topk_ids, num_experts, n, k, is_gated, expert_map);
    const int64_t E = num_experts, R = topk_ids.numel();
    const Tensor* blockscale = blockscale_offsets.has_value() ? &*blockscale_offsets : nullptr;
    const Tensor* sorted = sorted_expert_ids.has_value() ? &*sorted_expert_ids : nullptr;
    auto buffer = [&](const char* name, const Tensor& t, std::initializer_list<int64_t> shape, const char* layout) {
      check.buffer(name, t, aoti_torch_dtype_int32(), shape, layout, "topk_ids", topk_ids);
    };
    buffer("expert_offsets", expert_offsets, {E + 1}, "[num_experts + 1]");
    if (blockscale) buffer("blockscale_offsets", *blockscale, {E + 1}, "[num_experts + 1]");
    buffer("problem_sizes1", problem_sizes1, {E, 3}, "[num_experts, 3]");
    buffer("problem_sizes2", problem_sizes2, {E, 3}, "[num_experts, 3]");
    buffer("input_permutation", input_permutation, {R}, "[m * topk]");
    buffer("output_permutation", output_permutation, {R}, "[m * topk]");
    if (sorted) buffer("sorted_expert_ids", *sorted, {R}, "[m * topk]");
    check.no_overlap({{"topk_ids", &topk_ids}, {"expert_map", expert_map.has_value() ? &*expert_map : nullptr}},
                     {{"expert_offsets", &expert_offsets},
                      {"blockscale_offsets", blockscale},
                      {"problem_sizes1", &problem_sizes1},
                      {"problem_sizes2", &problem_sizes2},
                      {"input_permutation", &input_permutation},
                      {"output_permutation", &output_permutation},
                      {"sorted_expert_ids", sorted}});

    constexpr int64_t align = sizeof(int32_t);
    Written offsets(expert_offsets, align, false), sizes1(problem_sizes1, align, false);
    Written sizes2(problem_sizes2, align, false), input_perm(input_permutation, align, false);
    Written output_perm(output_permutation, align, false);
    std::optional<Written> blockscale_out, sorted_out;
    if (blockscale) blockscale_out.emplace(*blockscale, align, false);
    if (sorted) sorted_out.emplace(*sorted, align, false);
    run(topk_ids, E, n, k, is_gated, expert_map, offsets.tensor(), blockscale ? &blockscale_out->tensor() : nullptr,
        sizes1.tensor(), sizes2.tensor(), input_perm.tensor(), output_perm.tensor(),
        sorted ? &sorted_out->tensor() : nullptr);
    for (Written* w : {&offsets, &sizes1, &sizes2, &input_perm, &output_perm}) w->commit();
    if (blockscale) blockscale_out->commit();
    if (sorted) sorted_out->commit();
  }
};

}  // namespace mxfp4
