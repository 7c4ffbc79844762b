// Writing tiled scales, and zeros, on the host.
#pragma once
#include <algorithm>
#include <cstring>

#include "../layout.h"
#include "backend.h"

namespace mxfp4::cpu {

// Flat scales of `blocks` blocks of scale row r, from block `first` (a multiple of 4) on, to their places in the tiles.
inline void store_scales(const uint8_t* flat, int64_t first, int64_t blocks, int64_t T, int64_t r,
                         uint8_t* expert_scale) {
  uint8_t* tile = expert_scale + scale_byte(static_cast<uint32_t>(r), static_cast<uint32_t>(first), T);
  for (int64_t c = 0; c < blocks; c += kTileBlocks, tile += kTileBytes)
    std::memcpy(tile, flat + c, static_cast<size_t>(std::min(kTileBlocks, blocks - c)));
}

inline void zero_rows(uint8_t* rows, int64_t count, int64_t row_bytes) {
  for_rows(count, row_bytes, [&](int64_t begin, int64_t end) {
    std::memset(rows + begin * row_bytes, 0, static_cast<size_t>((end - begin) * row_bytes));
  });
}

}  // namespace mxfp4::cpu
