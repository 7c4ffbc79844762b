// The silu of bfloat16 gates by lookup, where there are rows enough to bring the table into shared memory.
#pragma once
#include "e2m1.cuh"

namespace mxfp4::cuda {

class SiluTable {
 public:
  static constexpr uint32_t kSize = kSiluMost - kSiluLeast + 1;
  static constexpr int kWords = (2 * kSize + 3) / 4 * 4;  // of positive and of negative gates, in whole 16 bytes

  __device__ __forceinline__ explicit SiluTable(const float* table) : table_(table) {}

  // Into shared memory, 16-byte aligned; a barrier follows. The table is constant: there is nothing to wait for.
  static __device__ __forceinline__ void load(float* table, int thread, int threads);

  __device__ __forceinline__ uint4 operator()(const uint4& gate, const uint4& up) const {
    if (__builtin_expect(!all_within(gate, kSiluLeast, kSiluMost), 0)) return of_any(gate, up);
    return make_uint4(pair(gate.x, up.x), pair(gate.y, up.y), pair(gate.z, up.z), pair(gate.w, up.w));
  }

 private:
  __device__ __forceinline__ uint32_t pair(uint32_t gate, uint32_t up) const {
    const uint32_t index = (gate >> 15 & 0x00010001u) * kSize + ((gate & kMagnitudes) - twice(kSiluLeast));
    return times_up(table_[index & 0xffffu], table_[index >> 16], up);
  }

  __device__ __forceinline__ float of(uint32_t gate) const {
    const uint32_t magnitude = gate & 0x7fffu, index = magnitude - kSiluLeast;
    if (index < kSize) return table_[(gate >> 15) * kSize + index];
    return mul_rn(BFloat16::to_float(static_cast<uint16_t>(gate)), silu_factor(magnitude, gate >> 15));
  }

  // In a short loop, through which the registers rotate.
  __device__ __forceinline__ uint4 of_any(uint4 gate, uint4 up) const {
#pragma unroll 1
    for (int i = 0; i < 4; ++i) {
      const uint32_t result = times_up(of(gate.x & 0xffffu), of(gate.x >> 16), up.x);
      gate = make_uint4(gate.y, gate.z, gate.w, result);
      up = make_uint4(up.y, up.z, up.w, up.x);
    }
    return gate;
  }

  static __device__ __forceinline__ uint32_t times_up(float low, float high, uint32_t up) {
    return round_pair<BFloat16>(mul_rn(low, low_to_float<BFloat16>(up)), mul_rn(high, high_to_float<BFloat16>(up)));
  }

  const float* table_;
};

alignas(16) static __device__ const uint32_t kSiluWords[SiluTable::kWords] = {
#include "silu_table.inc"  // made by the build (csrc/tools/silu_table.cpp)
};

__device__ __forceinline__ void SiluTable::load(float* table, int thread, int threads) {
  const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(table));
  for (int i = 4 * thread; i < kWords; i += 4 * threads)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared + 4 * i), "l"(kSiluWords + i) : "memory");
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace mxfp4::cuda
