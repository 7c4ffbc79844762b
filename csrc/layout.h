// Where bytes live: the tiled scale layout (SWIZZLE_32_4_4) and the bound of its rows. Host and device.
#pragma once
#include <cstdint>

#if defined(__CUDACC__)
#define MXFP4_HD __host__ __device__ __forceinline__
#else
#define MXFP4_HD inline __attribute__((always_inline))
#endif

namespace mxfp4 {

constexpr int64_t kBlock = 32;      // columns that share a scale
constexpr int64_t kTileRows = 128;  // rows of a scale tile
constexpr int64_t kTileBlocks = 4;  // scale columns of a tile, so a tile spans 128 columns
constexpr int64_t kTileBytes = kTileRows * kTileBlocks;

MXFP4_HD int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
MXFP4_HD int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// T: tiles along K columns.
MXFP4_HD int64_t scale_tiles(int64_t K) { return ceil_div(K, kBlock * kTileBlocks); }

// S: rows of the scale tensor that always suffice for R routed rows of E experts.
MXFP4_HD int64_t scale_rows(int64_t R, int64_t E) {
  return (R + (kTileRows - 1) * (R < E ? R : E)) / kTileRows * kTileRows;
}

// Byte of (row r of an expert, block c) behind the expert's first byte, which is 4 * T * blockscale_offsets[e].
// Unsigned, so that the divisions are shifts.
MXFP4_HD int64_t scale_byte(uint32_t r, uint32_t c, int64_t T) {
  return (r / 128u * T + c / 4u) * kTileBytes + (r % 32u * 16u + r / 32u % 4u * 4u + c % 4u);
}

}  // namespace mxfp4
