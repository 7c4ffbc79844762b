#include <algorithm>
#include <type_traits>

#include "../numerics.h"
#include "backend.h"
#include "expert_rows.h"
#include "row_kernels.h"

namespace mxfp4::cpu {
namespace {

struct Float32 {
  static float from_float(float f) { return f; }
};

template <typename T>
void run(const DequantizeArgs& a, const ExpertRows& experts) {
  using Value = std::invoke_result_t<decltype(T::from_float), float>;
  const int64_t tiles = scale_tiles(a.K);
  for_rows(a.rows, a.K, [&](int64_t begin, int64_t end) {
    const ExactFloat exact;
    for (int64_t row = begin; row < end; ++row) {
      Value* out = static_cast<Value*>(a.output) + row * a.K;
      const int64_t e = experts.search(row);
      if (e == kNoExpert) {
        std::fill_n(out, a.K, Value{0});
        continue;
      }
      const auto r = static_cast<uint32_t>(row - experts.begin(e));
      const uint8_t* packed = a.packed + row * a.row_stride;
      const uint8_t* scales = a.scale + kTileBlocks * tiles * a.blockscale_offsets[e];
      for (int64_t b = 0; b < a.K / kBlock; ++b, packed += kBlock / 2, out += kBlock) {
        const float scale = scale_to_float(scales[scale_byte(r, static_cast<uint32_t>(b), tiles)]);
        Value values[16];
        for (uint32_t code = 0; code < 16; ++code) values[code] = T::from_float(e2m1_to_float(code, scale));
        for (int i = 0; i < kBlock / 2; ++i) {
          out[2 * i] = values[packed[i] & 15];
          out[2 * i + 1] = values[packed[i] >> 4];
        }
      }
    }
  });
}

}  // namespace

void Backend::dequantize(const DequantizeArgs& args) {
  const ExpertRows experts{args.expert_offsets, args.blockscale_offsets, args.num_experts};
  experts.validate(Checks("mxfp4_dequantize"), args.rows, args.scale_rows);
  switch (args.type) {
    case FloatType::kFloat32:
      return run<Float32>(args, experts);
    case FloatType::kBFloat16:
      return run<BFloat16>(args, experts);
    case FloatType::kFloat16:
      return run<Float16>(args, experts);
  }
}

}  // namespace mxfp4::cpu
