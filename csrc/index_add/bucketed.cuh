// What the kernels of kBucketed have in common: their arguments, and sums of source rows by a block whose entries are sorted.
#pragma once

#include "left.cuh"
#include "twosum.cuh"

namespace fusebackend::accumulate {

constexpr uint32_t kNoRow = ~0u;

struct BucketedArgs {
  Params p;
  FastDiv rows_each;  // of a bucket
  uint32_t buckets, n;
  int digit_bits, digit_shift;  // of a bucket's number, by which what is left is sorted
  uint32_t even_tile;  // entries that the last blocks take at once if they take all of them: as many tiles each
  uint32_t* left;    // how many buckets are left to the last blocks, or kInOrder
  uint32_t* ready;   // how many of them have been initialised for these
  uint32_t* filled;  // [bucket]: how many entries it has
  uint2* lists;      // [bucket][most]: (entry, row within the bucket)
  uint32_t most;     // entries of a bucket
  float* scratch;    // for what is left, [rows][columns * V], zeros where anything is; nullptr: it goes straight into out
  uint32_t columns;  // of V elements
  uint32_t source_row_bytes;
  uint32_t block_columns, groups, column_blocks;  // a block has `groups` groups of block_columns threads, for so many columns at a time
  uint32_t prefetched;  // lines of a row of initial, fetched into the L2 cache during the sort

  __device__ __forceinline__ bool initialises() const { return scratch || !p.in_place(); }  // what is left to reductions
  __host__ __device__ LeftOver left_over() const { return {left, filled, rows_each, most}; }
};

// Plain sums: reductions are no more exact, and keeping what rounding loses took a sixth more time.
template <typename T>
using PlainSum = Sum<T, false>;

// Sums of rows that go on from the group of threads before.
template <typename T, int V>
struct Heads {
  PlainSum<T> sums[kSortThreads * V];
  bool goes_on[kSortThreads];  // [group]: whether all that the group has is of one row, which goes on in the next group
};

// Each of some counts becomes the sum of those before it; returns the sum of all. Every thread must call it.
__device__ __forceinline__ uint32_t scan_counts(uint32_t* counts, uint32_t size, uint32_t* warp_sums) {
  const uint32_t each = (size + kSortThreads - 1) / kSortThreads, begin = min(threadIdx.x * each, size), end = min(begin + each, size);
  uint32_t sum = 0, total;
  __syncthreads();
  for (uint32_t i = begin; i < end; ++i) sum += counts[i];
  uint32_t before = scan_block(sum, warp_sums, total);
  for (uint32_t i = begin; i < end; ++i) {
    const uint32_t here = counts[i];
    counts[i] = before;
    before += here;
  }
  __syncthreads();
  return total;
}

// Sums the source rows of a block's entries, which are sorted by row: look(row, offset in out) when a thread comes to a row,
// write(row, column, offset in out, sum) at its end, once a row. `from` names rows of source past its end too, as far as a multiple of kBatch.
template <typename T, int V, typename Row, typename Look, typename Write>
__device__ __forceinline__ void sum_rows(const BucketedArgs& a, const Row* rows, const uint32_t* from, const Acc<T>* scales, uint32_t count,
                                         Heads<T, V>& shared, Look look, Write write) {
  using A = Acc<T>;
  constexpr int U = kBatch;
  using Load = uint4;   // as they come: taken apart, 16-bit elements would hold a register each
  static_assert(sizeof(Vec<T, V>) == sizeof(Load));
  const Params& p = a.p;
  const bool again = p.source_index.data;
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
    bool head = busy && begin > 0 && rows[begin - 1] == current;  // of a row that goes on from the group before
    auto put_head = [&] {
#pragma unroll
      for (int i = 0; i < V; ++i) shared.sums[threadIdx.x * V + i] = sum[i];
    };
    if (busy && !head) look(current, out);
    for (uint32_t k0 = begin; busy && k0 < end; k0 += U) {
      Load v[U];
      uint32_t entry[U];
      Row row_of[U];
      load_batch(entry, from + k0);
      load_batch(row_of, rows + k0);
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const auto* const at = reinterpret_cast<const Load*>(source + uint64_t(entry[u]) * a.source_row_bytes);
        v[u] = again ? __ldg(at) : __ldcs(at);
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        if (k0 + u >= end) break;
        if (const Row row = row_of[u]; row != current) {
          if (head)
            put_head();
          else
            write(current, column, out, sum);
          head = false, current = row;
          look(row, out);
#pragma unroll
          for (int i = 0; i < V; ++i) sum[i] = {};
        }
        const A factor = scales ? scales[k0 + u] : A(1);
        const Vec<T, V> x = reinterpret_cast<const Vec<T, V>&>(v[u]);
#pragma unroll
        for (int i = 0; i < V; ++i) sum[i].add(scales ? widen<A>(x.v[i]) * factor : widen<A>(x.v[i]));
      }
    }
    if (head) put_head();
    const bool more = busy && end < count && rows[end] == current;
    if (lane == 0) shared.goes_on[group] = head && more;
    __syncthreads();
    if (busy && !head) {  // the group in which a row begins brings its parts together
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

// Which source row each entry is, and what it is multiplied by. Every thread must call it; all of them may read `from` afterwards.
template <typename T>
__device__ __forceinline__ void look_up(const Params& p, uint32_t* from, Acc<T>* scales, uint32_t count) {
  using A = Acc<T>;
  __syncthreads();
  if (!scales && !p.source_index.data) return;
#pragma unroll 4
  for (uint32_t i = threadIdx.x; i < count; i += kSortThreads) {
    const uint32_t n = from[i];
    if (p.source_index.data) from[i] = uint32_t(checked_row(load_index(p.source_index, n), p.source_rows, p.source_wraps));
    if (scales) scales[i] = A(p.alpha) * (p.weight.data ? widen<A>(static_cast<const T*>(p.weight.data)[n * p.weight.stride]) : A(1));
  }
  __syncthreads();
}

}  // namespace fusebackend::accumulate
