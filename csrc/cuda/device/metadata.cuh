// Router ids to the arrays of the routed rows: a counting sort whose counters are one histogram a warp, each warp
// taking its own stretch of slots in order, so that ranks are stable whatever the warps' timing. Few slots: every CTA
// counts all (slots.cuh). More: a cluster of CTAs, or a launch that counts and one that places.
#pragma once
#include "../../args.h"
#include "../../layout.h"
#include "cluster.cuh"
#include "dependent_launch.cuh"
#include "experts.cuh"
#include "slots.cuh"

namespace mxfp4::cuda {

constexpr int kMetadataThreads = 1024;

__device__ __forceinline__ int32_t sum(const int32_t* values, int count, int stride) {
  int32_t result = 0;
#pragma unroll 8
  for (int i = 0; i < count; ++i) result += values[static_cast<int64_t>(i) * stride];
  return result;
}

// Lanes with the same expert, one ballot for each bit of the id: faster than match.any.
__device__ __forceinline__ unsigned same_expert(int expert, int bits) {
  unsigned mask = kAllLanes;
  for (int b = 0; b < bits; ++b) {
    const bool one = expert >> b & 1;
    const unsigned ballot = __ballot_sync(kAllLanes, one);
    mask &= one ? ballot : ~ballot;
  }
  return mask;
}

// The whole op for few slots. Warps take the experts in groups of 32, and then the slots.
template <typename Id>
__global__ void __launch_bounds__(256) metadata_few_kernel(const __grid_constant__ MetadataArgs a) {
  extern __shared__ __align__(16) uint32_t counters[];
  wait_for_prior_launch();
  const Slots slots(a, counters);
  Id ahead[Slots::kAhead];
  slots.prepare(blockDim.x, ahead);
  __syncthreads();
  slots.count(blockDim.x, ahead);
  __syncthreads();
  const int groups = (static_cast<int>(a.num_experts) + 31) / 32, tasks = groups + static_cast<int>(a.rows);
  const int warps = blockDim.x / 32;
#pragma unroll 1
  for (int i = blockIdx.x * warps + threadIdx.x / 32; i < tasks; i += gridDim.x * warps) {
    if (i < groups) {
      slots.write_experts(i);
    } else {
      const auto slot = static_cast<unsigned>(i - groups);
      const Place place = slots.place(static_cast<int>(slot));
      if (threadIdx.x % 32 == 0)
        write_slot(a, static_cast<int>(slot), static_cast<int>(slot / static_cast<unsigned>(a.topk)), place);
    }
  }
}

// ---- A cluster of CTAs, which add up each other's counts; not launched on a GPU without clusters ----

constexpr int kMostClusterExperts = kMetadataThreads;  // a thread each
constexpr int kClusterRounds = 4;                      // slots that a lane keeps
constexpr int kClusterSpan = kClusterRounds * kMetadataThreads;

// A CTA's slots in the order of the sorted rows, so that rows are written side by side.
struct SortedSlot {
  int32_t token, expert;
};

// followed: by a kernel of the same call. CTA c takes `span` slots from c * span on, each of its first `slot_warps`
// warps `stretch` of them, at most 32 * kClusterRounds; all are multiples of 32. Shared memory: SortedSlot[span], then
// int32 [slot_warps + 1][E].
template <typename Id>
__global__ void __launch_bounds__(kMetadataThreads, 1)
    metadata_cluster_kernel(const __grid_constant__ MetadataArgs a, const int span, const int stretch,
                            const int slot_warps, const bool followed) {
  extern __shared__ __align__(16) int32_t shared[];
  __shared__ int32_t warp_rows[32], warp_tiles[32], warp_own[32];
  wait_for_prior_launch();
  if (followed) launch_dependents();
  const int E = static_cast<int>(a.num_experts), tid = threadIdx.x, lane = tid & 31, warp = tid >> 5;
  const unsigned cta = cluster_rank(), ctas = gridDim.x;
  SortedSlot* sorted = reinterpret_cast<SortedSlot*>(shared);
  int32_t* histograms = shared + 2 * span;
  int32_t* counts = histograms + slot_warps * E;  // of this CTA, and then what leads from its order to the sorted rows
  int32_t* mine = histograms + warp * E;
  const int R = static_cast<int>(a.rows), cta_begin = min(static_cast<int>(cta) * span, R);
  const int cta_end = min(cta_begin + span, R);
  const int begin = warp < slot_warps ? min(cta_begin + warp * stretch, cta_end) : cta_end;
  const int end = min(begin + stretch, cta_end);

  // Each warp counts its slots; a lane keeps their experts and ranks.
  int expert[kClusterRounds], rank[kClusterRounds];
#pragma unroll
  for (int i = 0; i < kClusterRounds; ++i) {
    const int slot = begin + 32 * i + lane;
    expert[i] = slot < end ? expert_of<Id>(a, slot) : E;
  }
  if (warp < slot_warps) {
    for (int e = lane; e < E; e += 32) mine[e] = 0;
    __syncwarp();
    const int bits = 32 - __clz(E);
#pragma unroll
    for (int i = 0; i < kClusterRounds; ++i) {
      if (begin + 32 * i >= end) break;
      const unsigned same = same_expert(expert[i], bits), before = same & ((1u << lane) - 1u);
      rank[i] = expert[i] < E ? mine[expert[i]] + __popc(before) : 0;
      __syncwarp();
      if (expert[i] < E && before == 0) mine[expert[i]] = rank[i] + __popc(same);
      __syncwarp();
    }
  }
  __syncthreads();

  // A thread an expert. Its rows in this CTA, before each warp's and in all:
  int32_t own = 0;
  if (tid < E) {
#pragma unroll 8
    for (int w = 0; w < slot_warps; ++w) {
      const int32_t n = histograms[w * E + tid];
      histograms[w * E + tid] = own;
      own += n;
    }
    counts[tid] = own;
  }
  cluster_arrive();
  cluster_wait();
  int32_t count = 0, earlier = 0;  // of all CTAs, and of those before this one
  if (tid < E) {
#pragma unroll 8
    for (unsigned c = 0; c < ctas; ++c) {
      const int32_t n = read_of_cta(counts + tid, c);
      count += n;
      if (c < cta) earlier += n;
    }
  }
  cluster_arrive();  // the counts of the others are read
  const int32_t tiles = tiles_of(count);
  const int32_t rows_sum = inclusive_scan(count, lane), tiles_sum = inclusive_scan(tiles, lane);
  const int32_t own_sum = inclusive_scan(own, lane);
  if (lane == 31) warp_rows[warp] = rows_sum, warp_tiles[warp] = tiles_sum, warp_own[warp] = own_sum;
  __syncthreads();
  const int32_t lane_rows = warp_rows[lane], lane_own = warp_own[lane];  // of 32 warps
  const int32_t routed = __reduce_add_sync(kAllLanes, lane_rows), routed_here = __reduce_add_sync(kAllLanes, lane_own);
  const int32_t first_row = __reduce_add_sync(kAllLanes, lane < warp ? lane_rows : 0) + rows_sum - count;
  const int32_t first_own = __reduce_add_sync(kAllLanes, lane < warp ? lane_own : 0) + own_sum - own;
  const int32_t tiles_before = __reduce_add_sync(kAllLanes, lane < warp ? warp_tiles[lane] : 0);
  cluster_wait();  // nobody reads the counts any more
  if (tid < E) {
    counts[tid] = first_row + earlier - first_own;
    if (tid % ctas == cta) write_expert(a, tid, first_row, tiles_before + tiles_sum - tiles, count);
#pragma unroll 8
    for (int w = 0; w < slot_warps; ++w) histograms[w * E + tid] += first_own;
  }
  __syncthreads();

  const auto topk = static_cast<uint32_t>(a.topk);
#pragma unroll
  for (int i = 0; i < kClusterRounds; ++i) {
    const int slot = begin + 32 * i + lane;
    if (slot >= end) break;
    int32_t row = -1;
    if (expert[i] < E) {
      const int32_t place = mine[expert[i]] + rank[i];
      sorted[place] = {static_cast<int32_t>(static_cast<uint32_t>(slot) / topk), expert[i]};
      row = place + counts[expert[i]];
    }
    a.output_permutation[slot] = row;
  }
  __syncthreads();
  for (int i = tid; i < routed_here; i += kMetadataThreads) {
    const SortedSlot s = sorted[i];
    const int32_t row = i + counts[s.expert];
    a.input_permutation[row] = s.token;
    if (a.sorted_expert_ids != nullptr) a.sorted_expert_ids[row] = s.expert;
  }
  for (int row = max(cta_begin, routed) + tid; row < cta_end; row += kMetadataThreads) {
    a.input_permutation[row] = -1;
    if (a.sorted_expert_ids != nullptr) a.sorted_expert_ids[row] = -1;
  }
}

// ---- Two launches, and one CTA ----

// Who takes which slots: CTAs `span` slots each, their first `slot_warps` warps `stretch` each, all multiples of 32.
struct Shares {
  int64_t span, stretch;
  int slot_warps;
};

// counts[cta][E]: how many slots of each CTA of the next launch go to each expert.
template <typename Id>
__global__ void __launch_bounds__(kMetadataThreads, 1)
    count_experts_kernel(const __grid_constant__ MetadataArgs a, const Shares shares, int32_t* counts) {
  extern __shared__ __align__(16) int32_t shared[];
  wait_for_prior_launch();
  launch_dependents();
  const int E = static_cast<int>(a.num_experts);
  const int64_t begin = blockIdx.x * shares.span, end = min(begin + shares.span, a.rows);
  for (int e = threadIdx.x; e < E; e += blockDim.x) shared[e] = 0;
  __syncthreads();
  for (int64_t slot = begin + threadIdx.x; slot < end; slot += blockDim.x) {
    const int expert = expert_of<Id>(a, slot);
    if (expert < E) atomicAdd(&shared[expert], 1);
  }
  __syncthreads();
  for (int e = threadIdx.x; e < E; e += blockDim.x) counts[int64_t{blockIdx.x} * E + e] = shared[e];
}

// histograms: [slot_warps][E], in shared memory where that is large enough, else in `scratch` (then of a single CTA).
// counts: of count_experts_kernel where there are several CTAs, else null. followed: by a kernel of the same call.
template <typename Id, bool kShared>
__global__ void __launch_bounds__(kMetadataThreads, 1)
    metadata_kernel(const __grid_constant__ MetadataArgs a, const Shares shares, int32_t* scratch,
                    const int32_t* counts, const bool followed) {
  extern __shared__ __align__(16) int32_t shared[];
  __shared__ int32_t warp_rows[32], warp_tiles[32];
  if (counts == nullptr) wait_for_prior_launch();
  if (followed) launch_dependents();
  int32_t* histograms = shared;
  if constexpr (!kShared) histograms = scratch;
  const int E = static_cast<int>(a.num_experts), threads = blockDim.x, tid = threadIdx.x, lane = tid & 31,
            warp = tid >> 5;
  const int slot_warps = shares.slot_warps;
  const int64_t cta_begin = min(blockIdx.x * shares.span, a.rows), cta_end = min(cta_begin + shares.span, a.rows);
  const int64_t begin = warp < slot_warps ? min(cta_begin + warp * shares.stretch, cta_end) : cta_end;
  const int64_t end = min(begin + shares.stretch, cta_end);
  int32_t* mine = histograms + static_cast<int64_t>(warp) * E;

  for (int64_t i = tid; i < static_cast<int64_t>(slot_warps) * E; i += threads) histograms[i] = 0;
  __syncthreads();

  // Slots: each one's rank among those of its warp and expert, kept where its sorted row will be.
  const int bits = 32 - __clz(E);
  constexpr int kAhead = 4;  // ids loaded ahead of the ballots
  for (int64_t first = begin; first < end; first += 32 * kAhead) {
    int expert[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t slot = first + 32 * i + lane;
      expert[i] = slot < end ? expert_of<Id>(a, slot) : E;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + 32 * i >= end) break;
      const unsigned same = same_expert(expert[i], bits), before = same & ((1u << lane) - 1u);
      const bool routed = expert[i] < E;
      const int32_t rank = routed ? mine[expert[i]] : 0;
      __syncwarp();
      if (routed) a.output_permutation[first + 32 * i + lane] = rank + __popc(before);
      if (routed && before == 0) mine[expert[i]] = rank + __popc(same);
      __syncwarp();
    }
  }
  __syncthreads();

  wait_for_prior_launch();  // the counts
  // Experts: counts, their running sums, and for each warp the sorted row of its first slot of the expert.
  int32_t rows_before = 0, tiles_before = 0;  // of the experts of earlier rounds
  for (int base = 0; base < E; base += threads) {
    const int e = base + tid;
    int32_t count = 0, earlier = 0;  // of all CTAs, and of those before this one
    if (e < E) {
      if (counts == nullptr) {
        count = sum(histograms + e, slot_warps, E);
      } else {
#pragma unroll 8
        for (int cta = 0; cta < static_cast<int>(gridDim.x); ++cta) {
          const int32_t c = counts[static_cast<int64_t>(cta) * E + e];
          count += c;
          if (cta < static_cast<int>(blockIdx.x)) earlier += c;
        }
      }
    }
    const int32_t tiles = tiles_of(count);
    int32_t rows_sum = inclusive_scan(count, lane), tiles_sum = inclusive_scan(tiles, lane);
    if (lane == 31) warp_rows[warp] = rows_sum, warp_tiles[warp] = tiles_sum;
    __syncthreads();
    int32_t rows_all = 0, tiles_all = 0;
    for (int w = 0; w < threads / 32; ++w) {
      if (w == warp) rows_sum += rows_all, tiles_sum += tiles_all;
      rows_all += warp_rows[w], tiles_all += warp_tiles[w];
    }
    const int32_t first_row = rows_before + rows_sum - count, first_tile = tiles_before + tiles_sum - tiles;
    rows_before += rows_all, tiles_before += tiles_all;
    if (e < E) {
      int32_t next = first_row + earlier;
#pragma unroll 8
      for (int w = 0; w < slot_warps; ++w) {
        int32_t& h = histograms[static_cast<int64_t>(w) * E + e];
        const int32_t c = h;
        h = next;
        next += c;
      }
      if (blockIdx.x == 0) write_expert(a, e, first_row, first_tile, count);
    }
    __syncthreads();
  }

  const auto topk = static_cast<uint32_t>(a.topk);  // slots fit 31 bits, and 32-bit division is short
#pragma unroll 4
  for (int64_t slot = begin + lane; slot < end; slot += 32) {
    const int expert = expert_of<Id>(a, slot);
    if (expert == E) {
      a.output_permutation[slot] = -1;
      continue;
    }
    const int32_t row = mine[expert] + a.output_permutation[slot];
    a.output_permutation[slot] = row;
    a.input_permutation[row] = static_cast<int32_t>(static_cast<uint32_t>(slot) / topk);
    if (a.sorted_expert_ids != nullptr) a.sorted_expert_ids[row] = expert;
  }
  for (int64_t row = rows_before + int64_t{blockIdx.x} * threads + tid; row < a.rows; row += gridDim.x * threads) {
    a.input_permutation[row] = -1;
    if (a.sorted_expert_ids != nullptr) a.sorted_expert_ids[row] = -1;
  }
}

}  // namespace mxfp4::cuda
