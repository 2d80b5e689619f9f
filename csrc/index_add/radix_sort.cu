// Makes a sorted index of any size, by a stable radix sort, least significant digits first: every block counts its share of the entries by
// digit, the counts become places, and every entry is put in its place. One cooperative kernel, since a launch for each step took longer
// than the steps. Nothing in global memory is atomic, so a repetition is bit-identical. Where the bucket sort can be tried, it goes first,
// and this kernel ends at once unless that one failed.
#include <cooperative_groups.h>

#include "index_add/block_sort.cuh"
#include "index_add/dispatch.cuh"
#include "index_add/routes.h"

namespace fusebackend::index_add {
namespace {

constexpr int kEach = RadixSortShape::kEach, kMaxDigitBits = RadixSortShape::kMaxDigitBits, kMaxBins = RadixSortShape::kMaxBins;
constexpr uint32_t kTile = RadixSortShape::kTile;

struct RadixSortArgs {
  Params p;
  SortedIndex<uint32_t> sorted_index;
  uint2 *pairs, *swap;  // (row, entry); each pass reads one and writes the other, the last pass writes pairs
  uint32_t* counts;     // [bin][block]: entries; then entries in the blocks before
  uint32_t* totals;     // [bin]
  uint32_t n, per_block;
  int passes, digit_bits;
  const uint32_t* needed;  // nullptr: always; else only if it is not 0
};

// (row, entry). Entries that add nothing get the row `rows` and so go to the end.
__device__ __forceinline__ uint2 load_pair(const Params& p, const uint2* from, uint32_t i) {
  if (from) return from[i];
  const int64_t row = target_row(p, load_index(p.index, i));
  return {row < 0 ? uint32_t(p.rows) : uint32_t(row), i};
}

__global__ void __launch_bounds__(kSortThreads, 2) radix_sort_kernel(const __grid_constant__ RadixSortArgs a) {
  __shared__ uint32_t start[kMaxBins], warp_sum[kSortWarps];
  __shared__ uint16_t digit_counts[kSortWarps][kMaxBins];  // entries of a digit in this warp so far; then in the warps before
  const Params& p = a.p;
  const cooperative_groups::grid_group grid = cooperative_groups::this_grid();
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, bins = 1u << a.digit_bits, blocks = gridDim.x;
  if (a.needed && *a.needed == 0) return;
  const uint32_t begin = min(a.n, blockIdx.x * a.per_block), end = min(a.n, begin + a.per_block);

  const uint2* from = nullptr;  // the indices themselves
  for (int pass = 0; pass < a.passes; ++pass) {
    const int shift = pass * a.digit_bits;
    auto digit = [&](uint32_t key) { return (key >> shift) & (bins - 1); };
    uint2* const to = (a.passes - pass) % 2 ? a.pairs : a.swap;

    // How many of each digit are in this block's share.
    for (uint32_t b = threadIdx.x; b < bins; b += kSortThreads) start[b] = 0;
    __syncthreads();
#pragma unroll 4
    for (uint32_t i = begin + threadIdx.x; i < end; i += kSortThreads) atomicAdd(&start[digit(load_pair(p, from, i).x)], 1u);
    __syncthreads();
    for (uint32_t b = threadIdx.x; b < bins; b += kSortThreads) a.counts[b * blocks + blockIdx.x] = start[b];
    grid.sync();

    // How many are in the blocks before: a warp for each digit.
    for (uint32_t b = warp * blocks + blockIdx.x; b < bins; b += kSortWarps * blocks) {
      constexpr int kAtOnce = 9;  // loads in flight
      uint32_t before = 0;
      for (uint32_t first = lane; first - lane < blocks; first += kAtOnce * 32) {
        uint32_t count[kAtOnce];
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e) count[e] = first + e * 32 < blocks ? a.counts[b * blocks + first + e * 32] : 0;
#pragma unroll
        for (int e = 0; e < kAtOnce; ++e) {
          const uint32_t sum = inclusive_scan_warp(count[e], lane);
          if (first + e * 32 < blocks) a.counts[b * blocks + first + e * 32] = before + sum - count[e];
          before += __shfl_sync(~0u, sum, 31);
        }
      }
      if (lane == 0) a.totals[b] = before;
    }
    grid.sync();

    // Where this block's entries of each digit begin: a scan over the digits' totals.
    constexpr int kBinsEach = kMaxBins / kSortThreads;
    uint32_t total[kBinsEach], sum = 0;
#pragma unroll
    for (int e = 0; e < kBinsEach; ++e) {
      const uint32_t b = threadIdx.x * kBinsEach + e;
      total[e] = b < bins ? a.totals[b] : 0;
      sum += total[e];
    }
    uint32_t scanned = inclusive_scan_warp(sum, lane);
    if (lane == 31) warp_sum[warp] = scanned;
    __syncthreads();
    scanned -= sum;
    for (uint32_t w = 0; w < warp; ++w) scanned += warp_sum[w];
#pragma unroll
    for (int e = 0; e < kBinsEach; ++e) {
      const uint32_t b = threadIdx.x * kBinsEach + e;
      if (b < bins) start[b] = scanned + a.counts[b * blocks + blockIdx.x];
      scanned += total[e];
    }

    for (uint32_t tile = begin; tile < end; tile += kTile) {
      for (uint32_t b = lane; b < bins; b += 32) digit_counts[warp][b] = 0;
      __syncwarp();
      // A warp has neighbouring entries.
      const uint32_t first = tile + warp * (32 * kEach) + lane;
      uint2 pair[kEach];
      uint32_t rank[kEach];
#pragma unroll
      for (int e = 0; e < kEach; ++e) pair[e] = first + e * 32 < end ? load_pair(p, from, first + e * 32) : uint2{0, 0};
#pragma unroll
      for (int e = 0; e < kEach; ++e) {
        const bool valid = first + e * 32 < end;
        const uint32_t d = digit(pair[e].x);
        const uint32_t same = lanes_of_digit<kMaxDigitBits>(d, kMaxDigitBits, valid);  // bits beyond the digit are 0
        const uint32_t earlier = __popc(same & ((1u << lane) - 1));
        rank[e] = digit_counts[warp][d] + earlier;
        __syncwarp();
        if (valid && earlier == 0) digit_counts[warp][d] = uint16_t(rank[e] + __popc(same));
        __syncwarp();
      }
      __syncthreads();
#pragma unroll
      for (int e = 0; e < kBinsEach; ++e) {
        const uint32_t b = threadIdx.x + e * kSortThreads;
        uint32_t before = 0;
        for (int w = 0; b < bins && w < kSortWarps; ++w) {
          const uint32_t count = digit_counts[w][b];
          digit_counts[w][b] = uint16_t(before);
          before += count;
        }
        total[e] = before;
      }
      __syncthreads();
#pragma unroll
      for (int e = 0; e < kEach; ++e)
        if (first + e * 32 < end) {
          const uint32_t d = digit(pair[e].x);
          to[start[d] + digit_counts[warp][d] + rank[e]] = pair[e];
        }
      __syncthreads();
#pragma unroll
      for (int e = 0; e < kBinsEach; ++e)
        if (const uint32_t b = threadIdx.x + e * kSortThreads; b < bins) start[b] += total[e];
    }
    from = to;
    grid.sync();
  }

  // The sorted index. Rows without entries, between those of two neighbouring pairs, begin where the second pair's row does; the last rows
  // begin behind all pairs.
  const uint32_t stride = blocks * kSortThreads;
  for (uint32_t k = blockIdx.x * kSortThreads + threadIdx.x; k - lane <= a.n; k += stride) {
    uint32_t fill = 0, gap = 0;
    if (k <= a.n) {
      const uint2 pair = k < a.n ? a.pairs[k] : uint2{uint32_t(p.rows), 0};
      fill = k > 0 ? a.pairs[k - 1].x + 1 : 0;
      gap = pair.x + 1 - fill;
      if (k < a.n) {
        a.sorted_index.entries[k] = pair.y;
        if (a.sorted_index.source_rows) a.sorted_index.source_rows[k] = uint32_t(looked_up_source_row(p, pair.y));
        if (k % kChunkEntries == 0) a.sorted_index.chunk_rows[k / kChunkEntries] = pair.x;
      }
    }
    constexpr uint32_t kFew = 4;
    if (gap <= kFew)
      for (uint32_t r = fill; r < fill + gap; ++r) a.sorted_index.row_begins[r] = k;
    for (unsigned many = __ballot_sync(~0u, gap > kFew); many; many &= many - 1) {
      const int source = __ffs(many) - 1;
      const uint32_t begin_row = __shfl_sync(~0u, fill, source), rows = __shfl_sync(~0u, gap, source);
      for (uint32_t r = lane; r < rows; r += 32) a.sorted_index.row_begins[begin_row + r] = k - lane + source;
    }
  }
}

}  // namespace

cudaError_t launch_sort(const Params& p, uint32_t* words, void* workspace, const Device& device, cudaStream_t stream) {
  const RadixSortShape shape = radix_sort_shape(p, device);
  char* const base = static_cast<char*>(workspace) + RadixSortShape::kFlagBytes;
  uint32_t* overflow = nullptr;
  if (bucket_sort_fits(p, device)) {
    overflow = static_cast<uint32_t*>(workspace);
    if (cudaError_t error = launch_bucket_sort(p, words, base, overflow, device, stream); error != cudaSuccess) return error;
  }
  const RadixSortArgs a{p, SortedIndex(p, words), reinterpret_cast<uint2*>(base), reinterpret_cast<uint2*>(base + shape.swap),
                        reinterpret_cast<uint32_t*>(base + shape.counts), reinterpret_cast<uint32_t*>(base + shape.totals),
                        uint32_t(p.n), shape.per_block, shape.passes, shape.digit_bits, overflow};
  cudaLaunchAttribute cooperative{};
  cooperative.id = cudaLaunchAttributeCooperative;
  cooperative.val.cooperative = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(shape.blocks);
  config.blockDim = dim3(kSortThreads);
  config.stream = stream;
  config.attrs = &cooperative;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, radix_sort_kernel, a);
}

}  // namespace fusebackend::index_add
