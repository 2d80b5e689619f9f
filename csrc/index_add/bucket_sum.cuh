// What the kernels of kBucketSum share: their arguments, and sums of source rows by a block whose entries are sorted.
#pragma once

#include "index_add/block_sort.cuh"
#include "index_add/compensated_sum.cuh"
#include "index_add/entries.cuh"
#include "index_add/overflow_rows.cuh"

namespace fusebackend::index_add {

constexpr uint32_t kNoRow = ~0u;

struct BucketSumArgs {
  Params p;
  FastDiv rows_per_bucket;
  uint32_t buckets, n;
  int digit_bits, digit_shift;  // of a bucket's number: the digit by which entries of overflowing buckets are sorted
  uint32_t in_order_tile;       // entries that an overflow block takes at once if the index is in order
  uint32_t* overflows;     // how many buckets overflow, or kIndexInOrder
  uint32_t* initialised;   // how many of them have their rows initialised for atomic additions
  uint32_t* bucket_sizes;  // [bucket]: how many entries it should hold
  uint2* bucket_entries;   // [bucket][capacity]: (entry, row within the bucket)
  uint32_t capacity;
  float* fp32_out;   // for overflowing buckets, [rows][columns * V], zeros where one overflows; nullptr: they are added to out
  uint32_t columns;  // of V elements
  uint32_t source_row_bytes;
  uint32_t block_columns, groups;  // a block has `groups` groups of block_columns threads,
  uint32_t column_blocks;          // and takes all columns in so many steps
  uint32_t prefetch_lines;  // of a row of `initial`, that are fetched into the L2 cache during the sort

  __device__ __forceinline__ bool initialises() const { return fp32_out || !p.in_place(); }  // the rows of overflowing buckets
  __host__ __device__ OverflowRows overflow_rows() const { return {overflows, bucket_sizes, rows_per_bucket, capacity}; }
};

// Not compensated: atomic additions are no more exact, and the compensation took a sixth more time.
template <typename T>
using PlainSum = Sum<T, false>;

// Sums of rows whose entries are split over several groups of threads.
template <typename T, int V>
struct SplitRows {
  PlainSum<T> sums[kSortThreads * V];  // the group's part of a row that began in an earlier group
  bool goes_on[kSortThreads];          // [group]: whether all its entries are of one row, which goes on in the next group
};

// Sums the source rows of a block's `count` entries, which are sorted by row: calls begin_row(row, offset in out) when a thread comes to a
// row, and write(row, column, offset in out, sum) at its end, once a row. `from` holds source rows that exist up to the next multiple of
// kLoadsInFlight.
template <typename T, int V, typename Row, typename BeginRow, typename Write>
__device__ __forceinline__ void sum_rows(const BucketSumArgs& a, const Row* rows, const uint32_t* from, const Acc<T>* scales,
                                         uint32_t count, SplitRows<T, V>& shared, BeginRow begin_row, Write write) {
  using A = Acc<T>;
  constexpr int U = kLoadsInFlight;
  using Load = uint4;  // not unpacked: 16-bit elements would take a register each
  static_assert(sizeof(Vec<T, V>) == sizeof(Load));
  const Params& p = a.p;
  const bool may_repeat = p.source_index.data;
  // A group of threads takes some of the entries, each thread a piece of the row.
  const uint32_t group = threadIdx.x / a.block_columns, lane = threadIdx.x % a.block_columns;
  const uint32_t per_group = ((count + a.groups - 1) / a.groups + U - 1) / U * U;
  const uint32_t begin = min(group * per_group, count), end = min(begin + per_group, count);
  for (uint32_t column_block = 0; column_block < a.column_blocks; ++column_block) {
    const uint32_t column = column_block * a.block_columns + lane;
    const bool busy = group < a.groups && column < a.columns && begin < end;
    int64_t out = 0, source_offset = 0;
    if (busy) column_offsets<V>(p, column, out, source_offset);
    const uint64_t source = reinterpret_cast<uint64_t>(static_cast<const T*>(p.source) + source_offset);
    PlainSum<T> sum[V]{};
    Row current = busy ? rows[begin] : 0;
    bool split = busy && begin > 0 && rows[begin - 1] == current;  // the row began in an earlier group
    auto keep_part = [&] {
#pragma unroll
      for (int i = 0; i < V; ++i) shared.sums[threadIdx.x * V + i] = sum[i];
    };
    if (busy && !split) begin_row(current, out);
    for (uint32_t k0 = begin; busy && k0 < end; k0 += U) {
      Load v[U];
      uint32_t entry[U];
      Row row_of[U];
      load_shared_vector(entry, from + k0);
      load_shared_vector(row_of, rows + k0);
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const auto* const at = reinterpret_cast<const Load*>(source + uint64_t(entry[u]) * a.source_row_bytes);
        v[u] = may_repeat ? __ldg(at) : __ldcs(at);
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (k0 + u >= end) break;
        if (const Row row = row_of[u]; row != current) {
          if (split)
            keep_part();
          else
            write(current, column, out, sum);
          split = false, current = row;
          begin_row(row, out);
#pragma unroll
          for (int i = 0; i < V; ++i) sum[i] = {};
        }
        const A factor = scales ? scales[k0 + u] : A(1);
        const Vec<T, V> x = reinterpret_cast<const Vec<T, V>&>(v[u]);
#pragma unroll
        for (int i = 0; i < V; ++i) sum[i].add(scales ? product(widen<A>(x.v[i]), factor) : widen<A>(x.v[i]));
      }
    }
    if (split) keep_part();
    const bool more = busy && end < count && rows[end] == current;
    if (lane == 0) shared.goes_on[group] = split && more;
    __syncthreads();
    if (busy && !split) {  // the group in which a row begins adds its parts up
      if (more)
        for (uint32_t g = group + 1;; ++g) {
#pragma unroll
          for (int i = 0; i < V; ++i) sum[i].add(shared.sums[(g * a.block_columns + lane) * V + i]);
          if (!shared.goes_on[g]) break;
        }
      write(current, column, out, sum);
    }
    __syncthreads();
  }
}

// Replaces the entries in `from` by their source rows, and looks up their factors, if they have any. Every thread must call it; any may
// read all of `from` afterwards.
template <typename T>
__device__ __forceinline__ void look_entries_up(const Params& p, uint32_t* from, Acc<T>* scales, uint32_t count) {
  __syncthreads();
  if (!scales && !p.source_index.data) return;
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < count; i += kSortThreads) {
    const uint32_t n = from[i];
    if (p.source_index.data) from[i] = uint32_t(looked_up_source_row(p, n));
    if (scales) scales[i] = factor_of<T>(p, n);
  }
  __syncthreads();
}

}  // namespace fusebackend::index_add
