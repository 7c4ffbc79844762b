#include <cstring>

#include "backend.h"

namespace mxfp4::cpu {
namespace {

template <typename Index>
void run(const ShuffleArgs& a) {
  const Index* map = static_cast<const Index*>(a.map);
  for_rows(a.rows, a.row_bytes, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t src = map[i];
      char* dst = a.output + i * a.row_bytes;
      if (src >= 0 && src < a.input_rows) std::memcpy(dst, a.input + src * a.row_stride_bytes, a.row_bytes);
      else std::memset(dst, 0, a.row_bytes);
    }
  });
}

}  // namespace

void Backend::shuffle_rows(const ShuffleArgs& args) { args.map_is_int64 ? run<int64_t>(args) : run<int32_t>(args); }

}  // namespace mxfp4::cpu
