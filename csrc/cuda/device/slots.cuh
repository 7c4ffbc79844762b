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

// The expert here of a router's id or -1; num_experts if it has none.
__device__ __forceinline__ int local_expert(const MetadataArgs& a, int id) {
  if (a.has_expert_map && id >= 0) id = a.expert_map[id];
  return static_cast<int>(min(static_cast<unsigned>(id), static_cast<unsigned>(a.num_experts)));
}

template <typename Id>
__device__ __forceinline__ int expert_of(const MetadataArgs& a, int64_t slot) {
  return local_expert(a, checked_id(a, static_cast<const Id*>(a.topk_ids)[slot]));
}

__device__ __forceinline__ int tiles_of(int count) { return (count + 127) >> 7; }

__device__ __forceinline__ uint32_t inclusive_scan(uint32_t value, int lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t earlier = __shfl_up_sync(kAllLanes, value, step);
    if (lane >= step) value += earlier;
  }
  return value;
}

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
    return 4 * count_words(static_cast<int>(experts)) + 2 * ((static_cast<int>(slots) + 7) / 8 * 8);
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

  struct Place {
    int row;     // of the sorted rows; of a slot without an expert, one behind those that have one
    int expert;  // num_experts without one
    int scale_row;
  };

  // The whole warp asks for one slot.
  __device__ __forceinline__ Place place(int slot) const {
    const int expert = experts_[slot];
    // Slots before this one that have its expert: eight a lane, those that differ counted in the halves of a word.
    const unsigned same = static_cast<unsigned>(expert) * 0x10001u;
    unsigned equal = 0;
#pragma unroll 1
    for (int x = 8 * lane_; x < slot; x += 256) {
      const uint4 e = *reinterpret_cast<const uint4*>(experts_ + x);
      const int before = slot - x;
      const unsigned differ = __vminu2((e.x ^ same) | ~low_halves(before), 0x00010001u) +
                              __vminu2((e.y ^ same) | ~low_halves(before - 2), 0x00010001u) +
                              __vminu2((e.z ^ same) | ~low_halves(before - 4), 0x00010001u) +
                              __vminu2((e.w ^ same) | ~low_halves(before - 6), 0x00010001u);
      equal += 0x00040004u - differ;
    }
    const uint32_t before = sum_before(expert);
    const unsigned rank = __reduce_add_sync(kAllLanes, (equal & 0xffffu) + (equal >> 16));
    return {static_cast<int>((before & 0xffffu) + rank), expert, static_cast<int>((before >> 16) * 128 + rank)};
  }

  // What the permutations say of a slot.
  __device__ __forceinline__ void write(int slot, const Place& p) const {
    const bool routed = p.expert < E_;
    a_.output_permutation[slot] = routed ? p.row : -1;
    a_.input_permutation[p.row] =
        routed ? static_cast<int>(static_cast<unsigned>(slot) / static_cast<unsigned>(a_.topk)) : -1;
    if (a_.sorted_expert_ids != nullptr) a_.sorted_expert_ids[p.row] = routed ? p.expert : -1;
  }

  // The arrays of 32 experts, by one warp.
  __device__ __forceinline__ void write_experts(int group) const {
    const int e = 32 * group + lane_, count = e < E_ ? count_of(e) : 0;
    const uint32_t own = static_cast<uint32_t>(count | tiles_of(count) << 16);
    const uint32_t end = sum_before(32 * group) + inclusive_scan(own, lane_), begin = end - own;
    if (e >= E_) return;
    a_.expert_offsets[e] = static_cast<int>(begin & 0xffffu);
    if (a_.blockscale_offsets != nullptr) a_.blockscale_offsets[e] = static_cast<int>(begin >> 16) * 128;
    int32_t* sizes1 = a_.problem_sizes1 + 3 * e;
    int32_t* sizes2 = a_.problem_sizes2 + 3 * e;
    sizes1[0] = count, sizes1[1] = a_.n1, sizes1[2] = a_.k;
    sizes2[0] = count, sizes2[1] = a_.k, sizes2[2] = a_.n;
    if (e != E_ - 1) return;
    a_.expert_offsets[E_] = static_cast<int>(end & 0xffffu);
    if (a_.blockscale_offsets != nullptr) a_.blockscale_offsets[E_] = static_cast<int>(end >> 16) * 128;
  }

  // How many rows of a scale tile belong to an expert; asked by a whole warp.
  __device__ __forceinline__ int rows_of_tile(int tile) const {
    const int share = (E_ + 31) / 32, first = lane_ * share, last = min(first + share, E_);
    int own = 0;
#pragma unroll 1
    for (int e = first; e < last; ++e) own += tiles_of(count_of(e));
    int before = static_cast<int>(inclusive_scan(static_cast<uint32_t>(own), lane_)) - own, rows = 0;
    if (tile >= before && tile < before + own) {
      int e = first;
#pragma unroll 1
      while (tile >= before + tiles_of(count_of(e))) before += tiles_of(count_of(e++));
      rows = min(128, count_of(e) - 128 * (tile - before));
    }
    return __reduce_max_sync(kAllLanes, rows);
  }

 private:
  // Of the counts of E experts and of no expert, two in a word, in whole 16 bytes.
  static __host__ __device__ __forceinline__ int count_words(int experts) { return (experts + 8) / 8 * 4; }

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
#pragma unroll 1
    for (int x = 8 * lane_; x < expert; x += 256) {
      const uint4 c = *reinterpret_cast<const uint4*>(counts_ + x / 2);
      const int before = expert - x;
      add(c.x & low_halves(before));
      add(c.y & low_halves(before - 2));
      add(c.z & low_halves(before - 4));
      add(c.w & low_halves(before - 6));
    }
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
