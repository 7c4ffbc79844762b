// What a front end hands to a kernel: plain pointers and sizes, nothing of torch, so that device code sees only this.
#pragma once
#include <cstdint>

namespace mxfp4 {

struct MetadataArgs {
  const void* topk_ids;  // [m, topk], int64 if ids_are_int64, else int32
  bool ids_are_int64;
  int64_t rows, topk;  // R = m * topk
  int64_t num_experts;
  int32_t n1, n, k;           // n1: columns of the first GEMM, 2n when gated
  bool has_expert_map;        // an empty map has no address, and maps nothing
  const int32_t* expert_map;  // [expert_map_size]
  int64_t expert_map_size;
  int32_t* expert_offsets;      // [E + 1]
  int32_t* blockscale_offsets;  // [E + 1] or null
  int32_t* problem_sizes1;      // [E, 3]
  int32_t* problem_sizes2;      // [E, 3]
  int32_t* input_permutation;   // [R]
  int32_t* output_permutation;  // [R]
  int32_t* sorted_expert_ids;   // [R] or null
  int32_t device;
};

struct ShuffleArgs {
  const char* input;
  int64_t input_rows;
  int64_t row_stride_bytes, row_bytes;
  const void* map;  // [rows], int64 if map_is_int64, else int32
  bool map_is_int64;
  int64_t rows;
  char* output;  // [rows, row_bytes]
  int32_t device;
};

struct QuantArgs {
  const uint16_t* input;  // [R, K], or [R, 2K] = gate then up with silu; rows row_stride elements apart
  int64_t row_stride;
  bool is_bfloat16, silu;
  int64_t rows, K;
  int64_t num_experts;
  const int32_t* expert_offsets;      // [E + 1]
  const int32_t* blockscale_offsets;  // [E + 1]
  const int32_t* sorted_expert_ids;   // [R], or null: search expert_offsets
  uint8_t* output;                    // [R, K / 2]
  uint8_t* output_scale;              // [scale_rows, 4T]
  int64_t scale_rows;
  bool zero_padding;  // write the scale bytes that belong to no real row and column, too
  int32_t device;
  const char* op;
};

struct PermuteQuantArgs {
  MetadataArgs metadata;          // tells the routed rows, R = metadata.rows, of which there may be none
  const uint16_t* hidden_states;  // [tokens, K]; rows row_stride elements apart
  int64_t row_stride;
  bool is_bfloat16;
  int64_t tokens, K;
  uint8_t* output;        // [R, K / 2]
  uint8_t* output_scale;  // [scale_rows, 4T]
  int64_t scale_rows;
  bool zero_padding;  // write the scale bytes that belong to no real row and column, too
  int32_t device;
};

enum class FloatType { kFloat32, kBFloat16, kFloat16 };

struct DequantizeArgs {
  const uint8_t* packed;  // [R, K / 2]; rows row_stride bytes apart
  int64_t row_stride;
  const uint8_t* scale;  // [scale_rows, 4T]
  int64_t scale_rows;
  int64_t rows, K;
  int64_t num_experts;
  const int32_t* expert_offsets;
  const int32_t* blockscale_offsets;
  void* output;  // [R, K] of type
  FloatType type;
  int32_t device;
};

}  // namespace mxfp4
