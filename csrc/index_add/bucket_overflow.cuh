// The last blocks of kBucketSum's second kernel, which add atomically what its buckets can't hold.
#pragma once

#include "index_add/bucket_sum.cuh"
#include "index_add/red.cuh"

namespace fusebackend::index_add {

constexpr int kOverflowEach = BucketSumShape::kOverflowEach, kMaxDigitBits = BucketSumShape::kMaxDigitBits;
constexpr uint32_t kOverflowTile = BucketSumShape::kOverflowTile;

// Sums neighbouring entries of one row and adds the sums atomically: of entries of overflowing buckets, sorted by row tile by tile, or of
// all entries if the index is in order. Only the last blocks may do this: those of buckets, for which they wait, have all begun by then.
template <typename T, int V>
__device__ __forceinline__ void sum_overflow(const BucketSumArgs& a, uint32_t* shared, SplitRows<T, V>& split_rows, uint32_t* warp_sums) {
  using A = Acc<T>;
  const Params& p = a.p;
  const uint32_t overflows = *a.overflows;
  if (overflows == 0) return;
  const OverflowRows overflow_rows = a.overflow_rows();
  uint32_t* const rows = shared;                // [kOverflowTile]
  uint32_t* const from = rows + kOverflowTile;  // [kOverflowTile]
  A* const scales = p.scales() ? reinterpret_cast<A*>(from + kOverflowTile) : nullptr;  // [kOverflowTile]
  uint32_t* const counts = from + (scales ? 2 : 1) * kOverflowTile;    // [row of a bucket]
  uint16_t* const digit_counts = reinterpret_cast<uint16_t*>(counts);  // or [warp][digit]
  const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32, digits = ((a.buckets - 1) >> a.digit_shift) + 1;
  uint16_t* const my_counts = digit_counts + warp * digits;
  auto local_row = [&](uint32_t row) { return row - a.rows_per_bucket.div(row) * a.rows_per_bucket.d; };
  auto digit = [&](uint32_t row) { return a.rows_per_bucket.div(row) >> a.digit_shift; };
  if (threadIdx.x == 0 && a.initialises()) {
    const uint32_t wanted = overflows == kIndexInOrder ? a.buckets : overflows;
    while (*static_cast<volatile uint32_t*>(a.initialised) < wanted) __nanosleep(100);
    __threadfence();
  }

  const uint32_t tile = overflows == kIndexInOrder ? a.in_order_tile : kOverflowTile;
  for (uint32_t first = (blockIdx.x - a.buckets) * tile; first < a.n; first += (gridDim.x - a.buckets) * tile) {
    __syncthreads();
    const uint32_t count = min(tile, a.n - first);
    int64_t index[kOverflowEach];
#pragma unroll
    for (int e = 0; e < kOverflowEach; ++e) index[e] = load_index(p.index, first + min(threadIdx.x + e * kSortThreads, count - 1));
    uint32_t row[kOverflowEach], kept = count;
#pragma unroll
    for (int e = 0; e < kOverflowEach; ++e) {
      const int64_t target = threadIdx.x + e * kSortThreads < count ? target_row(p, index[e]) : -1;
      row[e] = target >= 0 && overflow_rows.has(target) ? uint32_t(target) : kNoRow;
    }
    if (overflows == kIndexInOrder) {
#pragma unroll
      for (int e = 0; e < kOverflowEach; ++e) {
        const uint32_t i = threadIdx.x + e * kSortThreads;
        rows[i] = row[e], from[i] = i < count ? first + i : 0;
      }
    } else {  // sorted by row within the bucket, not stably; then, stably, by bucket
      uint32_t entry[kOverflowEach], rank[kOverflowEach];
      for (uint32_t i = threadIdx.x; i < a.rows_per_bucket.d; i += kSortThreads) counts[i] = 0;
      __syncthreads();
#pragma unroll
      for (int e = 0; e < kOverflowEach; ++e)
        if (row[e] != kNoRow) rank[e] = atomicAdd(&counts[local_row(row[e])], 1u);
      kept = counts_to_offsets(counts, a.rows_per_bucket.d, warp_sums);
      if (kept == 0) continue;
#pragma unroll
      for (int e = 0; e < kOverflowEach; ++e)
        if (row[e] != kNoRow) {
          const uint32_t to = counts[local_row(row[e])] + rank[e];
          rows[to] = row[e], from[to] = first + threadIdx.x + e * kSortThreads;
        }
      __syncthreads();
      for (uint32_t i = threadIdx.x; i < digits * (kSortWarps / 2); i += kSortThreads) counts[i] = 0;
      __syncthreads();
#pragma unroll
      for (int e = 0; e < kOverflowEach; ++e) {
        const uint32_t i = (warp * kOverflowEach + e) * 32 + lane;
        row[e] = i < kept ? rows[i] : kNoRow;
        entry[e] = from[i];
        rank[e] = rank_in_warp(my_counts, i < kept ? digit(row[e]) : 0, a.digit_bits, i < kept);
      }
      digit_counts_to_places(digit_counts, digits, warp_sums, [](uint32_t, uint32_t) {});
#pragma unroll
      for (int e = 0; e < kOverflowEach; ++e)
        if (row[e] != kNoRow) {
          const uint32_t to = my_counts[digit(row[e])] + rank[e];
          rows[to] = row[e], from[to] = entry[e];
        }
      if (const uint32_t i = kept + threadIdx.x; threadIdx.x < kLoadsInFlight && i < kOverflowTile) from[i] = 0;
    }
    look_entries_up<T>(p, from, scales, kept);
    auto add = [&](uint32_t row, uint32_t column, int64_t offset, PlainSum<T>(&sum)[V]) {
      if (row == kNoRow) return;
      A total[V];
#pragma unroll
      for (int i = 0; i < V; ++i) total[i] = sum[i].total();
      if (a.fp32_out)
        red_vector(a.fp32_out + (int64_t(row) * a.columns + column) * V, total);
      else
        red_vector(static_cast<T*>(p.out) + row * p.out_row_stride + offset, total);
    };
    sum_rows<T, V>(a, rows, from, scales, kept, split_rows, [](uint32_t, int64_t) {}, add);
  }
}

}  // namespace fusebackend::index_add
