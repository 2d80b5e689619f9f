// Stable counting sorts in shared memory by a block of kSortThreads threads: ranks by digit within a warp, then within the block.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "index_add/shapes.h"

namespace fusebackend::index_add {

__device__ __forceinline__ uint32_t inclusive_scan_warp(uint32_t sum, uint32_t lane) {
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  return sum;
}

// The sum over the threads before this one; `total` is the sum over all. Every thread must call it. warp_sums: [kSortWarps], shared.
__device__ __forceinline__ uint32_t exclusive_scan_block(uint32_t value, uint32_t* warp_sums, uint32_t& total) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32, sum = inclusive_scan_warp(value, lane);
  __syncthreads();  // warp_sums may still be read by an earlier scan
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  uint32_t before = 0, all = 0;
#pragma unroll
  for (uint32_t w = 0; w < kSortWarps; ++w) {
    const uint32_t of_warp = warp_sums[w];
    before += w < warp ? of_warp : 0;
    all += of_warp;
  }
  total = all;
  return before + sum - value;
}

// Replaces each of `size` counts by the sum of those before it; returns the sum of all. Every thread must call it.
__device__ __forceinline__ uint32_t counts_to_offsets(uint32_t* counts, uint32_t size, uint32_t* warp_sums) {
  const uint32_t each = (size + kSortThreads - 1) / kSortThreads, begin = min(threadIdx.x * each, size), end = min(begin + each, size);
  uint32_t sum = 0, total;
  __syncthreads();
  for (uint32_t i = begin; i < end; ++i) sum += counts[i];
  uint32_t before = exclusive_scan_block(sum, warp_sums, total);
  for (uint32_t i = begin; i < end; ++i) {
    const uint32_t here = counts[i];
    counts[i] = before;
    before += here;
  }
  __syncthreads();
  return total;
}

// The lanes of the warp whose digit, of `bits` bits, is this lane's: found by a vote on each bit.
template <int kUnroll = 4>
__device__ __forceinline__ uint32_t lanes_of_digit(uint32_t digit, int bits, bool valid) {
  uint32_t same = __ballot_sync(~0u, valid);
#pragma unroll kUnroll
  for (int bit = 0; bit < bits; ++bit) {
    const bool one = digit >> bit & 1;
    const uint32_t ones = __ballot_sync(~0u, one);
    same &= one ? ones : ~ones;
  }
  return same;
}

// A stable rank among the warp's entries of one digit. digit_counts[digit]: entries of the warp so far; counts this one.
__device__ __forceinline__ uint32_t rank_in_warp(uint16_t* digit_counts, uint32_t digit, int bits, bool valid) {
  const uint32_t same = lanes_of_digit<>(digit, bits, valid);
  const uint32_t earlier = __popc(same & ((1u << threadIdx.x % 32) - 1));
  const uint32_t rank = valid ? digit_counts[digit] + earlier : 0;
  __syncwarp();
  if (valid && earlier == 0) digit_counts[digit] = uint16_t(rank + __popc(same));
  __syncwarp();
  return rank;
}

// Replaces digit_counts[warp][digit] by the place of the warp's first entry of that digit in the block, and calls found(digit, place of the
// block's first). Every thread must call it.
template <typename Found>
__device__ __forceinline__ void digit_counts_to_places(uint16_t* digit_counts, uint32_t digits, uint32_t* warp_sums, Found found) {
  __syncthreads();
  const uint32_t each = (digits + kSortThreads - 1) / kSortThreads, first = threadIdx.x * each, last = min(first + each, digits);
  uint32_t count = 0, total;
  for (uint32_t d = first; d < last; ++d)
#pragma unroll
    for (int w = 0; w < kSortWarps; ++w) count += digit_counts[w * digits + d];
  uint32_t place = exclusive_scan_block(count, warp_sums, total);
  for (uint32_t d = first; d < last; ++d) {
    found(d, place);
    uint32_t of_warp[kSortWarps];
#pragma unroll
    for (int w = 0; w < kSortWarps; ++w) of_warp[w] = digit_counts[w * digits + d];
#pragma unroll
    for (int w = 0; w < kSortWarps; ++w) {
      digit_counts[w * digits + d] = uint16_t(place);
      place += of_warp[w];
    }
  }
  __syncthreads();
}

}  // namespace fusebackend::index_add
