// A stable counting sort of each row of the index: where each bin begins, and then the places (place_of) of its sources, in their order.
// A block sorts one row, a warp consecutive sources of it.
#pragma once

#include "index_add/block_sort.cuh"
#include "index_add/entries.cuh"
#include "row_scatter/row_scatter.h"

namespace fusebackend::row_scatter {

constexpr int kHeld = kSortWarpSources / 32;  // sources of a thread that are loaded at once

struct SortedRows {
  uint16_t* words;
  int64_t row_words, begin_words;

  __device__ uint16_t* begins(int64_t row) const { return words + row * row_words; }
  __device__ uint16_t* places(int64_t row) const { return begins(row) + begin_words; }
};

struct SortParams {
  index_add::EntryVector index;  // of the first row
  Dims own;
  int sources, bins, digit_bits;
  SortedRows sorted;
};

// counts: [warps][bins], shared.
__global__ void __launch_bounds__(kMostSortWarps * 32) row_scatter_sort(const __grid_constant__ SortParams p) {
  extern __shared__ uint16_t counts[];
  __shared__ uint32_t warp_sums[kMostSortWarps];
  launch_dependents();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int64_t row = blockIdx.x, row_begin = offsets_of(p.own, row).index;
  for (int i = threadIdx.x; i < warps * p.bins; i += blockDim.x) counts[i] = 0;
  __syncthreads();

  const int share = int(round_up(ceil_div(p.sources, warps), 32)), first = warp * share, last = min(first + share, p.sources);
  uint16_t* const own_counts = counts + warp * p.bins;
  index_add::EntryVector index = p.index;
  index.data = static_cast<const char*>(index.data) + row_begin * (index.is64 ? 8 : 4);
  // Of kHeld sources at once the indices are loaded, and kept if a thread has no more of them.
  uint32_t bins[kHeld], ranks[kHeld];
  const auto rank_sources = [&](int begin) {
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int source = begin + k * 32 + lane;
      bins[k] = source < last ? uint32_t(index_add::checked_row(index_add::load_index(index, source), p.bins, false)) : 0;
    }
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      if (begin + k * 32 >= last) break;
      ranks[k] = index_add::rank_in_warp(own_counts, bins[k], p.digit_bits, begin + k * 32 + lane < last);
    }
  };
  for (int begin = first; begin < last; begin += kHeld * 32) rank_sources(begin);
  __syncthreads();

  // Counts become places: bin after bin, and in a bin warp after warp.
  const int each = int(ceil_div(p.bins, blockDim.x)), begin = min(int(threadIdx.x) * each, p.bins), end = min(begin + each, p.bins);
  uint32_t sum = 0;
  for (int b = begin; b < end; ++b)
    for (int w = 0; w < warps; ++w) sum += counts[w * p.bins + b];
  const uint32_t inclusive = index_add::inclusive_scan_warp(sum, lane);
  if (lane == 31) warp_sums[warp] = inclusive;
  __syncthreads();
  uint32_t place = inclusive - sum;
  for (int w = 0; w < warp; ++w) place += warp_sums[w];
  uint16_t* const begins = p.sorted.begins(row);
  for (int b = begin; b < end; ++b) {
    begins[b] = uint16_t(place);
    for (int w = 0; w < warps; ++w) {
      const uint32_t count = counts[w * p.bins + b];
      counts[w * p.bins + b] = uint16_t(place);
      place += count;
    }
  }
  if (threadIdx.x == 0) begins[p.bins] = uint16_t(p.sources);
  __syncthreads();

  uint16_t* const places = p.sorted.places(row);
  // The sum reads rows in whole vectors: what fills them up is written too.
  for (int i = p.bins + 1 + threadIdx.x; i < int(p.sorted.begin_words); i += blockDim.x) begins[i] = 0;
  for (int i = p.sources + threadIdx.x; i < int(p.sorted.row_words - p.sorted.begin_words); i += blockDim.x) places[i] = 0;
  const bool held = share <= kHeld * 32;
  for (int begin = first; begin < last; begin += kHeld * 32) {
    if (!held) rank_sources(begin);  // from the places on
#pragma unroll
    for (int k = 0; k < kHeld; ++k) {
      const int source = begin + k * 32 + lane;
      if (source < last) places[ranks[k] + (held ? own_counts[bins[k]] : 0)] = uint16_t(place_of(source));
    }
  }
}

}  // namespace fusebackend::row_scatter
