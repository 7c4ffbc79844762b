// Which expert and which scale row a routed row has, on the host, where bad offsets raise.
#pragma once
#include <algorithm>

#include "../host/checks.h"
#include "../layout.h"

namespace mxfp4::cpu {

constexpr int64_t kNoExpert = -1;

struct ExpertRows {
  const int32_t* expert_offsets;
  const int32_t* blockscale_offsets;
  int64_t num_experts;

  int64_t begin(int64_t e) const { return expert_offsets[e]; }
  int64_t end(int64_t e) const { return expert_offsets[e + 1]; }

  // The expert whose range holds `row`, by binary search.
  int64_t search(int64_t row) const {
    const int32_t* ends = expert_offsets + 1;
    const int64_t e = std::upper_bound(ends, ends + num_experts, row) - ends;
    return e < num_experts ? e : kNoExpert;
  }

  // Raises unless the ranges ascend from 0 within `rows` and every expert's scale rows lie within `scale_rows`.
  void validate(const Checks& check, int64_t rows, int64_t scale_rows) const {
    auto at = [](const char* name, int64_t e) { return std::string(name) + "[" + std::to_string(e) + "]"; };
    int64_t free_row = 0;  // first scale row that no expert has yet
    if (begin(0) != 0) check.fail("expert_offsets[0]", "be 0", begin(0));
    for (int64_t e = 0; e < num_experts; ++e) {
      if (end(e) < begin(e) || end(e) > rows)
        check.fail(at("expert_offsets", e + 1).c_str(),
                   "be from " + at("expert_offsets", e) + " (" + std::to_string(begin(e)) +
                       ") to the number of rows (" + std::to_string(rows) + ")",
                   end(e));
      if (end(e) == begin(e)) continue;  // an expert without rows reads no scale
      const int64_t first = blockscale_offsets[e], needed = round_up(end(e) - begin(e), kTileRows);
      if (first < free_row || first % kTileRows != 0)
        check.fail(at("blockscale_offsets", e).c_str(), "be a multiple of 128 from " + std::to_string(free_row) + " up",
                   first);
      if (first + needed > scale_rows)
        check.fail(at("blockscale_offsets", e).c_str(),
                   "leave " + std::to_string(needed) + " scale rows below S (" + std::to_string(scale_rows) + ")",
                   first);
      free_row = first + needed;
    }
  }
};

}  // namespace mxfp4::cpu
