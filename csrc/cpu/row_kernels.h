// Inner loops over one row, in one version for each instruction set, chosen when the library loads.
#pragma once
#include <cstdint>

namespace mxfp4::cpu {

constexpr int64_t kChunk = 1024;  // columns that a kernel takes at most: what it holds between steps stays in L1

struct RowKernels {
  const char* name;
  // K columns of x, at most kChunk, to K / 2 packed bytes and K / 32 flat scale bytes.
  void (*quantize_bfloat16)(const uint16_t* x, int64_t K, uint8_t* codes, uint8_t* scales);
  void (*quantize_float16)(const uint16_t* x, int64_t K, uint8_t* codes, uint8_t* scales);
  // silu(gate) * up, rounded once to the type of both.
  void (*silu_and_mul_bfloat16)(const uint16_t* gate, const uint16_t* up, int64_t n, uint16_t* y);
  void (*silu_and_mul_float16)(const uint16_t* gate, const uint16_t* up, int64_t n, uint16_t* y);
};

// The best that this CPU runs; the environment variable MXFP4_OPS_CPU_CAPABILITY (default or avx2) asks for less.
const RowKernels& row_kernels();

// Round to nearest and subnormals kept while it lives, whatever torch.set_flush_denormal or the caller has set.
class ExactFloat {
 public:
  ExactFloat();
  ~ExactFloat();
  ExactFloat(const ExactFloat&) = delete;
  ExactFloat& operator=(const ExactFloat&) = delete;

 private:
  uint64_t saved_;
};

}  // namespace mxfp4::cpu
