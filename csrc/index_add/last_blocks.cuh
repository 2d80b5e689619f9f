// The last blocks of kBucketed's second kernel, which reduce what its buckets leave.
#pragma once

#include "bucketed.cuh"
#include "reduction.cuh"

namespace fusebackend::accumulate {

constexpr int kTileEach = 4;                          // entries of a thread
constexpr uint32_t kTile = kSortThreads * kTileEach;  // that a block takes at once, at most
constexpr int kMaxDigitBits = 10;                     // of what it sorts them by

// What did not fit, sorted by row tile by tile, or all of an index in order: reductions of the sums of neighbours of one row. The last blocks do it:
// those of buckets have all begun then, so they may be waited for.
template <typename T, int V>
__device__ __forceinline__ void sum_left_over(const BucketedArgs& a, uint32_t* shared, Heads<T, V>& heads, uint32_t* warp_sums) {
  using A = Acc<T>;
  const Params& p = a.p;
  const uint32_t left = *a.left;
  if (left == 0) return;
  const LeftOver left_over = a.left_over();
  uint32_t* const rows = shared;        // [kTile]
  uint32_t* const from = rows + kTile;  // the same
  A* const scales = p.weight.data || p.alpha != 1.0 ? reinterpret_cast<A*>(from + kTile) : nullptr;  // the same
  uint32_t* const counts = from + (scales ? 2 : 1) * kTile;        // [row of a bucket]
  uint16_t* const seen = reinterpret_cast<uint16_t*>(counts);      // or [warp][digit]
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, digits = ((a.buckets - 1) >> a.digit_shift) + 1;
  uint16_t* const mine = seen + warp * digits;
  auto local_row = [&](uint32_t row) { return row - a.rows_each.div(row) * a.rows_each.d; };
  auto digit = [&](uint32_t row) { return a.rows_each.div(row) >> a.digit_shift; };
  if (threadIdx.x == 0 && a.initialises()) {
    const uint32_t wanted = left == kInOrder ? a.buckets : left;
    while (*static_cast<volatile uint32_t*>(a.ready) < wanted) __nanosleep(100);
    __threadfence();
  }

  const uint32_t tile = left == kInOrder ? a.even_tile : kTile;
  for (uint32_t first = (blockIdx.x - a.buckets) * tile; first < a.n; first += (gridDim.x - a.buckets) * tile) {
    __syncthreads();
    const uint32_t count = min(tile, a.n - first);
    int64_t index[kTileEach];
#pragma unroll
    for (int e = 0; e < kTileEach; ++e) index[e] = load_index(p.index, first + min(threadIdx.x + e * kSortThreads, count - 1));
    uint32_t row[kTileEach], kept = count;
#pragma unroll
    for (int e = 0; e < kTileEach; ++e) {
      const int64_t target = threadIdx.x + e * kSortThreads < count ? target_row(p, index[e]) : -1;
      row[e] = target >= 0 && left_over.has(target) ? uint32_t(target) : kNoRow;
    }
    if (left == kInOrder) {
#pragma unroll
      for (int e = 0; e < kTileEach; ++e) {
        const uint32_t i = threadIdx.x + e * kSortThreads;
        rows[i] = row[e], from[i] = i < count ? first + i : 0;
      }
    } else {  // by their rows within the buckets, in any order; then, without changing that one, by bucket
      uint32_t entry[kTileEach], rank[kTileEach];
      for (uint32_t i = threadIdx.x; i < a.rows_each.d; i += kSortThreads) counts[i] = 0;
      __syncthreads();
#pragma unroll
      for (int e = 0; e < kTileEach; ++e)
        if (row[e] != kNoRow) rank[e] = atomicAdd(&counts[local_row(row[e])], 1u);
      kept = scan_counts(counts, a.rows_each.d, warp_sums);
      if (kept == 0) continue;
#pragma unroll
      for (int e = 0; e < kTileEach; ++e)
        if (row[e] != kNoRow) {
          const uint32_t to = counts[local_row(row[e])] + rank[e];
          rows[to] = row[e], from[to] = first + threadIdx.x + e * kSortThreads;
        }
      __syncthreads();
      for (uint32_t i = threadIdx.x; i < digits * (kWarps / 2); i += kSortThreads) counts[i] = 0;
      __syncthreads();
#pragma unroll
      for (int e = 0; e < kTileEach; ++e) {
        const uint32_t i = (warp * kTileEach + e) * 32 + lane;
        row[e] = i < kept ? rows[i] : kNoRow;
        entry[e] = from[i];
        rank[e] = rank_in_warp(mine, i < kept ? digit(row[e]) : 0, a.digit_bits, i < kept);
      }
      counts_to_places(seen, digits, warp_sums, [](uint32_t, uint32_t) {});
#pragma unroll
      for (int e = 0; e < kTileEach; ++e)
        if (row[e] != kNoRow) {
          const uint32_t to = mine[digit(row[e])] + rank[e];
          rows[to] = row[e], from[to] = entry[e];
        }
      if (const uint32_t i = kept + threadIdx.x; threadIdx.x < kBatch && i < kTile) from[i] = 0;
    }
    look_up<T>(p, from, scales, kept);
    auto reduce = [&](uint32_t row, uint32_t column, int64_t offset, PlainSum<T>(&sum)[V]) {
      if (row == kNoRow) return;
      A total[V];
#pragma unroll
      for (int i = 0; i < V; ++i) total[i] = sum[i].total();
      if (a.scratch)
        red_vector(a.scratch + (int64_t(row) * a.columns + column) * V, total);
      else
        red_vector(static_cast<T*>(p.out) + row * p.out_row_stride + offset, total);
    };
    sum_rows<T, V>(a, rows, from, scales, kept, heads, [](uint32_t, int64_t) {}, reduce);
  }
}

}  // namespace fusebackend::accumulate
