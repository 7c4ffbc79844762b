#include <algorithm>
#include <vector>

#include "../layout.h"
#include "backend.h"

namespace mxfp4::cpu {
namespace {

// A counting sort by expert, stable by construction.
template <typename Id>
void run(const MetadataArgs& a) {
  const Id* ids = static_cast<const Id*>(a.topk_ids);
  const int64_t E = a.num_experts;
  auto expert_of = [&](int64_t slot) -> int64_t {
    int64_t id = ids[slot];
    if (a.has_expert_map) id = id >= 0 && id < a.expert_map_size ? a.expert_map[id] : -1;
    return id >= 0 && id < E ? id : E;
  };

  std::vector<int32_t> next(static_cast<size_t>(E) + 1, 0);
  for (int64_t slot = 0; slot < a.rows; ++slot) ++next[static_cast<size_t>(expert_of(slot))];

  int64_t row = 0, scale_row = 0;
  for (int64_t e = 0; e < E; ++e) {
    const int32_t count = next[static_cast<size_t>(e)];
    next[static_cast<size_t>(e)] = static_cast<int32_t>(row);
    a.expert_offsets[e] = static_cast<int32_t>(row);
    if (a.blockscale_offsets) a.blockscale_offsets[e] = static_cast<int32_t>(scale_row);
    const int32_t sizes1[3] = {count, a.n1, a.k}, sizes2[3] = {count, a.k, a.n};
    std::copy_n(sizes1, 3, a.problem_sizes1 + 3 * e);
    std::copy_n(sizes2, 3, a.problem_sizes2 + 3 * e);
    row += count;
    scale_row += round_up(count, kTileRows);
  }
  a.expert_offsets[E] = static_cast<int32_t>(row);
  if (a.blockscale_offsets) a.blockscale_offsets[E] = static_cast<int32_t>(scale_row);

  for (int64_t slot = 0; slot < a.rows; ++slot) {
    const int64_t e = expert_of(slot);
    if (e == E) {
      a.output_permutation[slot] = -1;
      continue;
    }
    const int32_t sorted = next[static_cast<size_t>(e)]++;
    a.output_permutation[slot] = sorted;
    a.input_permutation[sorted] = static_cast<int32_t>(slot / a.topk);
    if (a.sorted_expert_ids) a.sorted_expert_ids[sorted] = static_cast<int32_t>(e);
  }
  std::fill(a.input_permutation + row, a.input_permutation + a.rows, -1);
  if (a.sorted_expert_ids) std::fill(a.sorted_expert_ids + row, a.sorted_expert_ids + a.rows, -1);
}

}  // namespace

void Backend::metadata(const MetadataArgs& args) { args.ids_are_int64 ? run<int64_t>(args) : run<int32_t>(args); }

}  // namespace mxfp4::cpu
