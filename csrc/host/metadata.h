// get_cutlass_moe_mm_data: router ids to the seven arrays that describe the routed rows.
#pragma once
#include <tuple>

#include "../args.h"
#include "../layout.h"
#include "checks.h"

namespace mxfp4 {

// What the rows of a call are sorted by, as its caller gave it.
struct Routing {
  const Tensor& topk_ids;
  int64_t num_experts, n, k;
  bool is_gated;
  const OptionalTensor& expert_map;

  int64_t rows() const { return topk_ids.numel(); }
};

// All but k, which an op may take from the shape of another argument.
inline void check_routing(const Checks& check, const Routing& routing) {
  const auto& [topk_ids, num_experts, n, k, is_gated, expert_map] = routing;
  check.dtype("topk_ids", topk_ids, {aoti_torch_dtype_int32(), aoti_torch_dtype_int64()});
  check.dims("topk_ids", topk_ids, 2, "[m, topk]");
  check.at_least("num_experts", num_experts, 1);
  check.at_most("num_experts", num_experts, INT32_MAX - 1);
  check.row_count("topk_ids", routing.rows(), scale_rows(routing.rows(), num_experts));
  check.at_least("n", n, 1);
  check.at_most("n", n, is_gated ? INT32_MAX / 2 : INT32_MAX);
  if (expert_map.has_value()) {
    check.dtype("expert_map", *expert_map, {aoti_torch_dtype_int32()});
    check.dims("expert_map", *expert_map, 1, "[global experts]");
    check.device("expert_map", *expert_map, "topk_ids", topk_ids);
  }
}

// The results in the order of the schema.
using MetadataResults = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using MetadataBuffers = std::array<NamedTensor, 7>;

template <typename Blockscale, typename Sorted>
MetadataBuffers metadata_buffers(const Tensor& expert_offsets, const Blockscale& blockscale_offsets,
                                 const Tensor& problem_sizes1, const Tensor& problem_sizes2,
                                 const Tensor& input_permutation, const Tensor& output_permutation,
                                 const Sorted& sorted_expert_ids) {
  return {{{"expert_offsets", &expert_offsets},
           {"blockscale_offsets", address(blockscale_offsets)},
           {"problem_sizes1", &problem_sizes1},
           {"problem_sizes2", &problem_sizes2},
           {"input_permutation", &input_permutation},
           {"output_permutation", &output_permutation},
           {"sorted_expert_ids", address(sorted_expert_ids)}}};
}

inline MetadataBuffers metadata_buffers(const MetadataResults& results) {
  return std::apply([](const auto&... t) { return metadata_buffers(t...); }, results);
}

inline MetadataResults empty_metadata(const Routing& routing) {
  const int32_t i32 = aoti_torch_dtype_int32();
  const Tensor& like = routing.topk_ids;
  const int64_t E = routing.num_experts, R = routing.rows();
  return {empty({E + 1}, i32, like), empty({E + 1}, i32, like), empty({E, 3}, i32, like), empty({E, 3}, i32, like),
          empty({R}, i32, like),     empty({R}, i32, like),     empty({R}, i32, like)};
}

inline void check_metadata_buffers(const Checks& check, const Routing& routing, const MetadataBuffers& buffers) {
  const int64_t E = routing.num_experts, R = routing.rows();
  auto buffer = [&](const NamedTensor& b, std::initializer_list<int64_t> shape, const char* layout) {
    if (b.second)
      check.buffer(b.first, *b.second, aoti_torch_dtype_int32(), shape, layout, "topk_ids", routing.topk_ids);
  };
  const auto& [offsets, blockscale, sizes1, sizes2, input_perm, output_perm, sorted] = buffers;
  buffer(offsets, {E + 1}, "[num_experts + 1]");
  buffer(blockscale, {E + 1}, "[num_experts + 1]");
  buffer(sizes1, {E, 3}, "[num_experts, 3]");
  buffer(sizes2, {E, 3}, "[num_experts, 3]");
  buffer(input_perm, {R}, "[m * topk]");
  buffer(output_perm, {R}, "[m * topk]");
  buffer(sorted, {R}, "[m * topk]");
}

// The caller's buffers as a kernel writes them.
class WrittenMetadata {
 public:
  explicit WrittenMetadata(const MetadataBuffers& targets) : buffers_(targets) {
    for (size_t i = 0; i < targets.size(); ++i)
      if (const Tensor* target = targets[i].second)
        buffers_[i].second = &written_[i].emplace(*target, static_cast<int64_t>(sizeof(int32_t)), false).tensor();
  }
  WrittenMetadata(const WrittenMetadata&) = delete;
  WrittenMetadata& operator=(const WrittenMetadata&) = delete;

  const MetadataBuffers& buffers() const { return buffers_; }
  void commit() {
    for (std::optional<Written>& written : written_)
      if (written) written->commit();
  }

 private:
  MetadataBuffers buffers_;
  std::array<std::optional<Written>, std::tuple_size_v<MetadataBuffers>> written_;
};

// What a kernel gets, and what it points into.
class MetadataCall {
 public:
  MetadataCall(const Routing& routing, const MetadataBuffers& results)
      : ids_(as_contiguous(routing.topk_ids)), map_(as_contiguous(routing.expert_map)) {
    args.topk_ids = ids_.data_ptr();
    args.ids_are_int64 = dtype_code(ids_) == aoti_torch_dtype_int64();
    args.rows = ids_.numel();
    args.topk = ids_.size(1);
    args.num_experts = routing.num_experts;
    args.n1 = static_cast<int32_t>(routing.is_gated ? 2 * routing.n : routing.n);
    args.n = static_cast<int32_t>(routing.n);
    args.k = static_cast<int32_t>(routing.k);
    args.has_expert_map = map_.has_value();
    args.expert_map = data<int32_t>(map_);
    args.expert_map_size = map_.has_value() ? map_->numel() : 0;
    int32_t** const pointers[] = {&args.expert_offsets,   &args.blockscale_offsets, &args.problem_sizes1,
                                  &args.problem_sizes2,   &args.input_permutation,  &args.output_permutation,
                                  &args.sorted_expert_ids};
    for (size_t i = 0; i < results.size(); ++i)
      *pointers[i] = results[i].second ? mutable_data<int32_t>(*results[i].second) : nullptr;
    args.device = ids_.get_device_index();
  }

  MetadataArgs args;

 private:
  Tensor ids_;
  OptionalTensor map_;
};

inline Checks check_metadata(const Routing& routing) {
  Checks check("get_cutlass_moe_mm_data");
  check_routing(check, routing);
  check.at_least("k", routing.k, 1);
  check.at_most("k", routing.k, INT32_MAX);
  return check;
}

template <typename Backend>
struct Metadata {
  static MetadataResults functional(const Tensor& topk_ids, int64_t num_experts, int64_t n, int64_t k, bool is_gated,
                                    const OptionalTensor& expert_map) {
    const Routing routing{topk_ids, num_experts, n, k, is_gated, expert_map};
    check_metadata(routing);
    MetadataResults results = empty_metadata(routing);
    Backend::metadata(MetadataCall(routing, metadata_buffers(results)).args);
    return results;
  }

  static void out(const Tensor& topk_ids, int64_t num_experts, int64_t n, int64_t k, bool is_gated,
                  const OptionalTensor& expert_map, const Tensor& expert_offsets,
                  const OptionalTensor& blockscale_offsets, const Tensor& problem_sizes1, const Tensor& problem_sizes2,
                  const Tensor& input_permutation, const Tensor& output_permutation,
                  const OptionalTensor& sorted_expert_ids) {
    const Routing routing{topk_ids, num_experts, n, k, is_gated, expert_map};
    const Checks check = check_metadata(routing);
    const MetadataBuffers buffers = metadata_buffers(expert_offsets, blockscale_offsets, problem_sizes1, problem_sizes2,
                                                     input_permutation, output_permutation, sorted_expert_ids);
    check_metadata_buffers(check, routing, buffers);
    check.no_overlap({{"topk_ids", &topk_ids}, {"expert_map", address(expert_map)}}, {buffers.begin(), buffers.end()});
    WrittenMetadata written(buffers);
    Backend::metadata(MetadataCall(routing, written.buffers()).args);
    written.commit();
  }
};

}  // namespace mxfp4
