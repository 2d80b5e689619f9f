// kBucketSum: much to read and several entries a row. Atomic additions go through the L2 cache at less than half of memory's speed. So one
// kernel puts the entries into buckets of neighbouring rows; in the next, each block sorts a bucket in shared memory, sums the source rows
// in registers and writes each row once. A bucket may overflow, as with an uneven index: then blocks that come last sort its entries tile
// by tile and add the sums of runs atomically. They do the same, without sorting, if neighbouring entries are mostly of one row. The host
// never waits for the index to be inspected: blocks without work end at once.
#include "common/programmatic_launch.cuh"
#include "index_add/bucket_overflow.cuh"
#include "index_add/combine_partials.cuh"
#include "index_add/dispatch.cuh"
#include "index_add/routes.h"
#include "index_add/zero_fill.cuh"

namespace fusebackend::index_add {
namespace {

constexpr int kBlocksPerSm = BucketSumShape::kBlocksPerSm, kFillEach = BucketSumShape::kFillEach, kSumEach = BucketSumShape::kSumEach;
constexpr int kCounters = BucketSumShape::kCounters, kMaxStaticSharedBytes = BucketSumShape::kMaxStaticSharedBytes;
constexpr int64_t kMaxBlockColumns = 128;

// Whether neighbouring entries are mostly of one row, by a sample that is the same in every block.
__device__ __forceinline__ bool is_in_order(const Params& p, uint32_t n) {
  constexpr uint32_t kSamples = 128;
  const uint32_t i = uint32_t(uint64_t(n - 1) * threadIdx.x / kSamples);
  return __syncthreads_count(threadIdx.x < kSamples && load_index(p.index, i) == load_index(p.index, i + 1)) > kSamples * 5 / 8;
}

// Sorts a tile of entries by bucket and appends them to the buckets.
__global__ void __launch_bounds__(kSortThreads, 3) fill_buckets_kernel(const __grid_constant__ BucketSumArgs a) {
  constexpr uint32_t kFilled = kSortThreads * kFillEach;
  extern __shared__ uint32_t places[];           // [bucket]: how many entries the tile has of it; then how many come before these
  uint32_t* const goes_to = places + a.buckets;  // [bucket]: the place of the tile's first one in the bucket less that in the tile
  __shared__ uint2 staged[kFilled];
  __shared__ uint32_t warp_sums[kSortWarps];
  const Params& p = a.p;
  const uint32_t first = blockIdx.x * kFilled, count = min(kFilled, a.n - first);
  int64_t index[kFillEach];
#pragma unroll
  for (int e = 0; e < kFillEach; ++e) index[e] = load_index(p.index, first + min(threadIdx.x + e * kSortThreads, count - 1));
  for (uint32_t i = threadIdx.x; i < a.buckets; i += kSortThreads) places[i] = 0;
  const bool in_order = is_in_order(p, a.n);
  launch_dependents();
  if (in_order) {
    wait_for_previous_kernel();
    if (blockIdx.x == 0 && threadIdx.x == 0) *a.overflows = kIndexInOrder;
    return;
  }
  uint32_t row[kFillEach], rank[kFillEach];
#pragma unroll
  for (int e = 0; e < kFillEach; ++e) {
    const int64_t target = threadIdx.x + e * kSortThreads < count ? target_row(p, index[e]) : -1;
    row[e] = uint32_t(target);
    if (target >= 0) rank[e] = atomicAdd(&places[a.rows_per_bucket.div(row[e])], 1u);
  }
  const uint32_t kept = counts_to_offsets(places, a.buckets, warp_sums);
  wait_for_previous_kernel();  // which wrote the zeros
  for (uint32_t b = threadIdx.x; b < a.buckets; b += kSortThreads) {
    const uint32_t here = (b + 1 < a.buckets ? places[b + 1] : kept) - places[b];
    if (here == 0) continue;
    const uint32_t before = atomicAdd(a.bucket_sizes + b, here);
    goes_to[b] = before - places[b];
    if (before <= a.capacity && before + here > a.capacity) atomicAdd(a.overflows, 1u);
  }
  __syncthreads();
#pragma unroll
  for (int e = 0; e < kFillEach; ++e)
    if (row[e] != kNoRow) {
      uint32_t bucket, local;
      a.rows_per_bucket.divmod(row[e], bucket, local);
      staged[places[bucket] + rank[e]] = {first + threadIdx.x + e * kSortThreads, row[e]};
    }
  __syncthreads();
#pragma unroll
  for (int e = 0; e < kFillEach; ++e)
    if (const uint32_t i = threadIdx.x + e * kSortThreads; i < kept) {
      const uint2 entry = staged[i];
      uint32_t bucket, local;
      a.rows_per_bucket.divmod(entry.y, bucket, local);
      if (const uint32_t to = goes_to[bucket] + i; to < a.capacity) a.bucket_entries[size_t(bucket) * a.capacity + to] = {entry.x, local};
    }
}

template <typename T, int V>
__global__ void __launch_bounds__(kSortThreads, kBlocksPerSm) sum_buckets_kernel(const __grid_constant__ BucketSumArgs a) {
  using A = Acc<T>;
  extern __shared__ uint4 shared[];
  __shared__ SplitRows<T, V> split_rows;
  __shared__ uint32_t warp_sums[kSortWarps];
  const Params& p = a.p;
  if (blockIdx.x >= a.buckets) {
    wait_for_previous_kernel();
    launch_dependents();
    return sum_overflow<T, V>(a, reinterpret_cast<uint32_t*>(shared), split_rows, warp_sums);
  }
  const uint32_t bucket = blockIdx.x, rows_per_bucket = a.rows_per_bucket.d, first_row = bucket * rows_per_bucket;
  const uint32_t rows = min(rows_per_bucket, uint32_t(p.rows) - first_row);
  auto* const from = reinterpret_cast<uint32_t*>(shared);               // [capacity], sorted by row
  auto* const row_of = reinterpret_cast<uint16_t*>(from + a.capacity);  // [capacity]
  A* const scales = p.scales() ? reinterpret_cast<A*>(row_of + a.capacity) : nullptr;                 // [capacity]
  auto* const begins = reinterpret_cast<uint32_t*>(row_of + a.capacity) + (scales ? a.capacity : 0);  // [row within the bucket]
  for (uint32_t i = threadIdx.x; i < rows_per_bucket; i += kSortThreads) begins[i] = 0;
  const uint32_t group = threadIdx.x / a.block_columns, lane_column = threadIdx.x % a.block_columns;
  wait_for_previous_kernel();
  launch_dependents();
  const uint32_t count = a.bucket_sizes[bucket];
  if (*a.overflows == kIndexInOrder || count > a.capacity) {  // left to atomic additions, onto what is initialised here
    if (!a.initialises()) return;
    for (uint32_t c = lane_column; c < a.columns; c += a.block_columns) {
      int64_t out_offset, unused;
      column_offsets<V>(p, c, out_offset, unused);
      for (uint32_t row = first_row + group; group < a.groups && row < first_row + rows; row += a.groups) {
        const int64_t at = row * p.out_row_stride + out_offset;
        if (a.fp32_out) {
          *reinterpret_cast<Vec<float, V>*>(a.fp32_out + (int64_t(row) * a.columns + c) * V) = Vec<float, V>{};
        } else {
          *reinterpret_cast<Vec<T, V>*>(static_cast<T*>(p.out) + at) =
              p.initial ? *reinterpret_cast<const Vec<T, V>*>(static_cast<const T*>(p.initial) + at) : Vec<T, V>{};
        }
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(a.initialised, 1u);
    }
    return;
  }
  if (count == 0 && p.in_place()) return;

  for (uint32_t i = threadIdx.x; i < rows * a.prefetch_lines; i += kSortThreads)
    prefetch_l2(static_cast<const char*>(p.initial) + (first_row + i / a.prefetch_lines) * p.out_row_stride * int64_t(sizeof(T)) +
                i % a.prefetch_lines * 128);

  // Sort by row, not stably.
  __syncthreads();
  {
    const uint2* const list = a.bucket_entries + size_t(bucket) * a.capacity;
    uint32_t entry[kSumEach], row_rank[kSumEach];  // both parts below 2^16
#pragma unroll
    for (int e = 0; e < kSumEach; ++e)
      if (const uint32_t i = threadIdx.x + e * kSortThreads; i < count) {
        const uint2 found = list[i];
        entry[e] = found.x, row_rank[e] = found.y;
      }
#pragma unroll
    for (int e = 0; e < kSumEach; ++e)
      if (threadIdx.x + e * kSortThreads < count) row_rank[e] |= atomicAdd(&begins[row_rank[e]], 1u) << 16;
    counts_to_offsets(begins, rows_per_bucket, warp_sums);
    if (const uint32_t i = count + threadIdx.x; threadIdx.x < kLoadsInFlight && i < a.capacity) from[i] = 0;
#pragma unroll
    for (int e = 0; e < kSumEach; ++e)
      if (threadIdx.x + e * kSortThreads < count) {
        const uint32_t row = row_rank[e] & 0xffff, place = begins[row] + (row_rank[e] >> 16);
        row_of[place] = uint16_t(row);
        from[place] = entry[e];
      }
    look_entries_up<T>(p, from, scales, count);
  }

  Vec<T, V> held{};
  const int64_t base = first_row * p.out_row_stride;
  auto begin_row = [&](uint32_t row, int64_t offset) {
    if (p.initial) held = *reinterpret_cast<const Vec<T, V>*>(static_cast<const T*>(p.initial) + base + row * p.out_row_stride + offset);
  };
  auto write = [&](uint32_t row, uint32_t, int64_t offset, PlainSum<T>(&sum)[V]) {
    write_sums<T, V>(static_cast<T*>(p.out) + base + row * p.out_row_stride + offset, sum, p.initial, held);
  };
  sum_rows<T, V>(a, row_of, from, scales, count, split_rows, begin_row, write);
  if (p.in_place() || group >= a.groups) return;
  for (uint32_t c = lane_column; c < a.columns; c += a.block_columns) {
    int64_t offset, unused;
    column_offsets<V>(p, c, offset, unused);
    for (uint32_t row = group; row < rows; row += a.groups)
      if (begins[row] == (row + 1 < rows_per_bucket ? begins[row + 1] : count)) {
        PlainSum<T> none[V]{};
        begin_row(row, offset);
        write(row, c, offset, none);
      }
  }
}

}  // namespace

cudaError_t launch_bucket_sum(const Params& p, void* workspace, const Device& device, cudaStream_t stream) {
  const BucketSumShape s = bucket_sum_shape(p, device);
  char* const base = static_cast<char*>(workspace);
  auto* const counters = reinterpret_cast<uint32_t*>(base);
  if (cudaError_t error = zero_fill(counters, s.buckets + kCounters, device.sm_count, stream); error != cudaSuccess) return error;
  return dispatch_vector_red(p.dtype, [&](auto type) {
    using T = decltype(type);
    constexpr int V = kWidest<T>;
    BucketSumArgs a{p, FastDiv(s.rows_per_bucket), s.buckets, uint32_t(p.n)};
    a.digit_bits = s.digit_bits();
    a.digit_shift = bit_width(s.buckets - 1) - a.digit_bits;
    a.overflows = counters;
    a.initialised = counters + 1;
    a.bucket_sizes = counters + kCounters;
    a.capacity = s.capacity;
    a.bucket_entries = reinterpret_cast<uint2*>(base + s.bucket_entries);
    a.fp32_out = s.bytes > s.fp32_out ? reinterpret_cast<float*>(base + s.fp32_out) : nullptr;
    a.columns = uint32_t(p.columns() / V);
    a.source_row_bytes = uint32_t(p.source_row_stride * int64_t(sizeof(T)));
    a.column_blocks = uint32_t(ceil_div(a.columns, kMaxBlockColumns));
    a.block_columns = uint32_t(ceil_div(a.columns, a.column_blocks));
    a.groups = kSortThreads / a.block_columns;
    if (p.initial && p.n_dims == 1 && a.columns % 8 == 0) a.prefetch_lines = a.columns / 8;
    const int64_t at_once = int64_t(device.sm_count) * kBlocksPerSm;
    a.in_order_tile = uint32_t(ceil_div(p.n, at_once * ceil_div(p.n, at_once * kOverflowTile)));
    const unsigned overflow_blocks = unsigned(std::min(ceil_div(p.n, a.in_order_tile), at_once));
    static SharedMemoryOptIn fill_opt_in, sum_opt_in;
    const auto kernel = sum_buckets_kernel<T, V>;
    if (cudaError_t error = fill_opt_in.ensure(fill_buckets_kernel, int(BucketSumShape::kMaxBuckets) * 8); error != cudaSuccess) return error;
    if (cudaError_t error = sum_opt_in.ensure(kernel, device.shared_bytes_per_block - kMaxStaticSharedBytes); error != cudaSuccess)
      return error;
    const bool overlap = device.has_dependent_launch();
    const unsigned fill_blocks = unsigned(ceil_div(p.n, kSortThreads * kFillEach));
    cudaError_t error = launch_dependent(fill_buckets_kernel, fill_blocks, kSortThreads, s.buckets * 8, overlap, stream, a);
    if (error == cudaSuccess)
      error = launch_dependent(kernel, s.buckets + overflow_blocks, kSortThreads, bucket_sum_shared_bytes(p, s), overlap, stream, a);
    if (error == cudaSuccess && a.fp32_out) error = combine_partials(p, a.fp32_out, 1, device, stream, a.overflow_rows());
    return error;
  });
}

}  // namespace fusebackend::index_add
