// Stable counting sorts in shared memory: ranks of entries by a digit, within a warp and then within a block of kSortThreads threads.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace fusebackend::accumulate {

constexpr int kSortThreads = 512, kWarps = kSortThreads / 32;

// The sum over the threads before this one. Every thread must call it.
__device__ __forceinline__ uint32_t scan_block(uint32_t value, uint32_t* warp_sums, uint32_t& total) {
  const uint32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  uint32_t sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint32_t other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();  // what was read of warp_sums before
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  uint32_t before = 0, all = 0;
#pragma unroll
  for (uint32_t w = 0; w < kWarps; ++w) {
    const uint32_t of_warp = warp_sums[w];
    before += w < warp ? of_warp : 0;
    all += of_warp;
  }
  total = all;
  return before + sum - value;
}

// A stable rank among the entries of a warp by their digit, of `bits` bits; `seen` counts those of a digit so far.
__device__ __forceinline__ uint32_t rank_in_warp(uint16_t* seen, uint32_t digit, int bits, bool valid) {
  uint32_t same = __ballot_sync(~0u, valid);
#pragma unroll 4
  for (int bit = 0; bit < bits; ++bit) {  // lanes with the same digit find each other by a vote on each of its bits
    const bool one = digit >> bit & 1;
    const uint32_t ones = __ballot_sync(~0u, one);
    same &= one ? ones : ~ones;
  }
  const uint32_t earlier = __popc(same & ((1u << threadIdx.x % 32) - 1));
  const uint32_t rank = valid ? seen[digit] + earlier : 0;
  __syncwarp();
  if (valid && earlier == 0) seen[digit] = uint16_t(rank + __popc(same));
  __syncwarp();
  return rank;
}

// seen[warp][digit], the counts of each warp, becomes the place of its first one; found(digit, place) for each digit. Every thread must call it.
template <typename Found>
__device__ __forceinline__ void counts_to_places(uint16_t* seen, uint32_t digits, uint32_t* warp_sums, Found found) {
  __syncthreads();
  const uint32_t each = (digits + kSortThreads - 1) / kSortThreads, first = threadIdx.x * each, last = min(first + each, digits);
  uint32_t count = 0, total;
  for (uint32_t d = first; d < last; ++d)
#pragma unroll
    for (int w = 0; w < kWarps; ++w) count += seen[w * digits + d];
  uint32_t place = scan_block(count, warp_sums, total);
  for (uint32_t d = first; d < last; ++d) {
    found(d, place);
    uint32_t of_warp[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) of_warp[w] = seen[w * digits + d];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      seen[w * digits + d] = uint16_t(place);
      place += of_warp[w];
    }
  }
  __syncthreads();
}

}  // namespace fusebackend::accumulate
