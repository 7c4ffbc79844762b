// Few slots: every CTA counts all of them for itself, so that the place of any row, the arrays of any expert and the
// rows of any scale tile are a warp's sum away, and no CTA waits for another.
#pragma once
#include "../../args.h"
#include "experts.cuh"

namespace mxfp4::cuda {

// Beyond these, counting all slots in every CTA costs more than further launches.
constexpr int kFewSlots = 2048;
constexpr int kFewExperts = 2048;  // counts and slots fit in the shared memory of any GPU

// A router's id, -1 if it is none of those there are. Compared in 64 bits: no id is cut before it is checked.
template <typename Id>
__device__ __forceinline__ int checked_id(const MetadataArgs& a, Id raw) {
  const auto id = static_cast<uint64_t>(static_cast<int64_t>(raw));
  return id < static_cast<uint64_t>(a.has_expert_map ? a.expert_map_size : a.num_experts) ? static_cast<int>(id) : -1;
}

// num_experts stands for none.
__device__ __forceinline__ int expert_or_none(const MetadataArgs& a, int expert) {
  return static_cast<int>(min(static_cast<unsigned>(expert), static_cast<unsigned>(a.num_experts)));
}

// The expert here of a router's id or -1.
__device__ __forceinline__ int local_expert(const MetadataArgs& a, int id) {
  if (a.has_expert_map && id >= 0) id = a.expert_map[id];
  return expert_or_none(a, id);
}

// Past L1, for some ask before they wait (dependent_launch.cuh).
template <typename Id>
__device__ __forceinline__ int expert_of(const MetadataArgs& a, int64_t slot) {
  int id = checked_id(a, __ldcg(static_cast<const Id*>(a.topk_ids) + slot));
  if (a.has_expert_map && id >= 0) id = __ldcg(a.expert_map + id);
  return expert_or_none(a, id);
}

__device__ __forceinline__ int tiles_of(int count) { return (count + 127) >> 7; }

template <typename T>
__device__ __forceinline__ T inclusive_scan(T value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const T earlier = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += earlier;
  }
  return value;
}

// Where a slot goes.
struct Place {
  int row;     // of the sorted rows; of a slot without an expert, one behind those that have one
  int expert;  // num_experts without one
  int scale_row;
};

// What the permutations say of a slot.
__device__ __forceinline__ void write_slot(const MetadataArgs& a, int slot, int token, const Place& p) {
  const bool routed = p.expert < static_cast<int>(a.num_experts);
  a.output_permutation[slot] = routed ? p.row : -1;
  a.input_permutation[p.row] = routed ? token : -1;
  if (a.sorted_expert_ids != nullptr) a.sorted_expert_ids[p.row] = routed ? p.expert : -1;
}

// What the arrays of the experts say of one: `rows` and `tiles` of those before it and `count` rows of its own.
__device__ __forceinline__ void write_expert(const MetadataArgs& a, int expert, int rows, int tiles, int count) {
  const bool last = expert == static_cast<int>(a.num_experts) - 1;
  a.expert_offsets[expert] = rows;
  if (last) a.expert_offsets[expert + 1] = rows + count;
  if (a.blockscale_offsets != nullptr) {
    a.blockscale_offsets[expert] = tiles * 128;
    if (last) a.blockscale_offsets[expert + 1] = (tiles + tiles_of(count)) * 128;
  }
  int32_t* sizes1 = a.problem_sizes1 + int64_t{3} * expert;
  int32_t* sizes2 = a.problem_sizes2 + int64_t{3} * expert;
  sizes1[0] = count, sizes1[1] = a.n1, sizes1[2] = a.k;
  sizes2[0] = count, sizes2[1] = a.k, sizes2[2] = a.n;
}

// A handful of slots: every warp has them all, one a lane, and finds all places without another warp. Whole warps call.
class WarpSlots {
 public:
  static constexpr int kMost = 16;  // 32 lanes would hold more, but then counting in shared memory is faster

  template <typename Id>
  static __device__ __forceinline__ Id load(const MetadataArgs& a) {
    const int lane = threadIdx.x & 31;
    return lane < static_cast<int>(a.rows) ? static_cast<const Id*>(a.topk_ids)[lane] : Id{-1};
  }

  // Lanes behind the last slot stand behind all experts.
  template <typename Id>
  __device__ __forceinline__ WarpSlots(const MetadataArgs& a, Id raw)
      : expert_(local_expert(a, checked_id(a, raw))),
        same_(__match_any_sync(kAllLanes, expert_)),
        before_(same_ & ((1u << (threadIdx.x & 31)) - 1u)),
        key_(2u * static_cast<unsigned>(expert_) + (before_ == 0)) {}

  // Of an expert: rows and scale tiles of those before it, and its own rows.
  struct Sums {
    int rows, tiles, count;
  };
  __device__ __forceinline__ Sums sums(int expert) const {
    // An expert of so few slots has one tile, which its first slot stands for.
    Sums sums{0, 0, 0};
    const unsigned begin = 2u * static_cast<unsigned>(expert), end = begin + 2;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const unsigned key = __shfl_sync(kAllLanes, key_, i);
      const unsigned before = key < begin, upto = key < end;
      sums.rows += before;
      sums.tiles += before & key;
      sums.count += upto;
    }
    sums.count -= sums.rows;
    return sums;
  }

  // Of a lane's own slot.
  __device__ __forceinline__ Place place() const {
    const Sums s = sums(expert_);
    const int rank = __popc(before_);
    return {s.rows + rank, expert_, s.tiles * 128 + rank};
  }

  // How many rows of a scale tile belong to an expert; own: a lane's slot.
  __device__ __forceinline__ int rows_of_tile(const MetadataArgs& a, const Place& own, int tile) const {
    const bool first = own.scale_row == 128 * tile && own.expert < static_cast<int>(a.num_experts);
    return __reduce_max_sync(kAllLanes, first ? __popc(same_) : 0);
  }

 private:
  const int expert_;
  const unsigned same_, before_;  // slots of the same expert; those before this one
  const unsigned key_;            // expert, and whether this is the first slot of it
};

class Slots {
 public:
  static constexpr int kAhead = 4;

  // shared: 16-byte aligned, of `shared_bytes`.
  __device__ __forceinline__ Slots(const MetadataArgs& a, uint32_t* shared)
      : a_(a),
        E_(static_cast<int>(a.num_experts)),
        R_(static_cast<int>(a.rows)),
        counts_(shared),
        experts_(reinterpret_cast<uint16_t*>(shared + count_words(E_))),
        lane_(threadIdx.x & 31) {}

  static int shared_bytes(int64_t experts, int64_t slots) {
    return 4 * count_words(static_cast<int>(experts)) + 2 * whole_steps(static_cast<int>(slots));
  }

  // Threads 0 to `threads` - 1 count the slots: all call this, a barrier follows, all call `count`, and another barrier
  // must follow before the counts are read. The first ids are on their way meanwhile.
  template <typename Id>
  __device__ __forceinline__ void prepare(int threads, Id (&ahead)[kAhead]) const {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int slot = threadIdx.x + i * threads;
      if (slot < R_) ahead[i] = static_cast<const Id*>(a_.topk_ids)[slot];
    }
    for (int i = threadIdx.x; i < count_words(E_) / 4; i += threads)
      reinterpret_cast<uint4*>(counts_)[i] = make_uint4(0, 0, 0, 0);
  }

  template <typename Id>
  __device__ __forceinline__ void count(int threads, const Id (&ahead)[kAhead]) const {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (i * threads >= R_) return;
      const int slot = threadIdx.x + i * threads;
      if (slot < R_) add(slot, checked_id(a_, ahead[i]));
    }
#pragma unroll 1
    for (int slot = threadIdx.x + kAhead * threads; slot < R_; slot += threads)
      add(slot, checked_id(a_, static_cast<const Id*>(a_.topk_ids)[slot]));
  }

  // The whole warp asks for one slot.
  __device__ __forceinline__ Place place(int slot) const {
    const int expert = experts_[slot];
    // Slots before this one that have its expert: eight a lane, those that differ counted in the halves of a word.
    const unsigned same = static_cast<unsigned>(expert) * 0x10001u;
    unsigned equal = 0;
    auto compare = [&](int x) {
      const uint4 e = *reinterpret_cast<const uint4*>(experts_ + x);
      const int before = slot - x;
      const unsigned differ = __vminu2((e.x ^ same) | ~low_halves(before), 0x00010001u) +
                              __vminu2((e.y ^ same) | ~low_halves(before - 2), 0x00010001u) +
                              __vminu2((e.z ^ same) | ~low_halves(before - 4), 0x00010001u) +
                              __vminu2((e.w ^ same) | ~low_halves(before - 6), 0x00010001u);
      equal += 0x00040004u - differ;
    };
    compare(8 * lane_);
#pragma unroll 1
    for (int x = kStep; x < slot; x += kStep) compare(x + 8 * lane_);
    const uint32_t before = sum_before(expert);
    const unsigned rank = __reduce_add_sync(kAllLanes, (equal & 0xffffu) + (equal >> 16));
    return {static_cast<int>((before & 0xffffu) + rank), expert, static_cast<int>((before >> 16) * 128 + rank)};
  }

  // The arrays of 32 experts, by one warp.
  __device__ __forceinline__ void write_experts(int group) const {
    const int e = 32 * group + lane_, count = e < E_ ? count_of(e) : 0;
    const uint32_t own = static_cast<uint32_t>(count | tiles_of(count) << 16);
    const uint32_t end = sum_before(32 * group) + inclusive_scan(own, lane_), begin = end - own;
    if (e < E_) write_expert(a_, e, static_cast<int>(begin & 0xffffu), static_cast<int>(begin >> 16), count);
  }

  // How many rows of a scale tile belong to an expert; asked by a whole warp.
  __device__ __forceinline__ int rows_of_tile(int tile) const {
    // Eight experts a lane: the one with the tile is in the lane whose experts' tiles hold it.
    int rows = 0, before = 0;
#pragma unroll 1
    for (int base = 0; base < E_; base += kStep) {
      const uint4 c = *reinterpret_cast<const uint4*>(counts_ + (base + 8 * lane_) / 2);
      const uint32_t words[4] = {c.x, c.y, c.z, c.w};
      int count[8], own = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        count[i] = base + 8 * lane_ + i < E_ ? static_cast<int>(words[i / 2] >> (16 * (i % 2)) & 0xffffu) : 0;
        own += tiles_of(count[i]);
      }
      int first = before + static_cast<int>(inclusive_scan(static_cast<uint32_t>(own), lane_)) - own;
      before = __shfl_sync(kAllLanes, first + own, 31);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int tiles = tiles_of(count[i]);
        if (tile >= first && tile < first + tiles) rows = min(128, count[i] - 128 * (tile - first));
        first += tiles;
      }
    }
    return __reduce_max_sync(kAllLanes, rows);
  }

 private:
  // A warp reads whole steps, whose end lies behind the last count and slot.
  static constexpr int kStep = 256;
  static __host__ __device__ __forceinline__ int whole_steps(int n) { return (n + kStep - 1) / kStep * kStep; }

  // Of the counts of E experts and of no expert, two in a word.
  static __host__ __device__ __forceinline__ int count_words(int experts) { return whole_steps(experts + 1) / 2; }

  // The lowest `count` halves of a word.
  static __device__ __forceinline__ uint32_t low_halves(int count) {
    uint32_t mask;  // shifts by more than 31 leave nothing
    asm("shr.u32 %0, %1, %2;" : "=r"(mask) : "r"(0xffffffffu), "r"(max(32 - 16 * count, 0)));
    return mask;
  }

  __device__ __forceinline__ int count_of(int expert) const {
    return reinterpret_cast<const uint16_t*>(counts_)[expert];
  }

  __device__ __forceinline__ void add(int slot, int id) const {
    const int expert = local_expert(a_, id);
    experts_[slot] = static_cast<uint16_t>(expert);
    atomicAdd(&counts_[expert / 2], expert & 1 ? 0x10000u : 1u);
  }

  // Rows of the experts before one in the low half, their scale tiles in the high one; eight experts a lane.
  __device__ __forceinline__ uint32_t sum_before(int expert) const {
    uint32_t rows = 0, tiles = 0;  // of even experts in the low halves, of odd ones in the high halves
    auto add = [&](uint32_t counts) {
      rows += counts;
      tiles += (counts + 0x007f007fu) >> 7 & 0x01ff01ffu;
    };
    auto add_eight = [&](int x) {
      const uint4 c = *reinterpret_cast<const uint4*>(counts_ + x / 2);
      const int before = expert - x;
      add(c.x & low_halves(before));
      add(c.y & low_halves(before - 2));
      add(c.z & low_halves(before - 4));
      add(c.w & low_halves(before - 6));
    };
    add_eight(8 * lane_);
#pragma unroll 1
    for (int x = kStep; x < expert; x += kStep) add_eight(x + 8 * lane_);
    const uint32_t sums = (rows + (rows >> 16) & 0xffffu) | (tiles + (tiles << 16) & 0xffff0000u);
    return __reduce_add_sync(kAllLanes, sums);
  }

  const MetadataArgs& a_;
  const int E_, R_;
  uint32_t* counts_;
  uint16_t* experts_;
  const int lane_;
};

}  // namespace mxfp4::cuda
