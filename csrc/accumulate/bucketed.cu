// kBucketed: much to read and several entries a row. Reductions go through the L2 cache at less than half of memory's speed; so one kernel puts
// the entries into buckets of neighbouring rows, and in the next each block sorts a bucket in shared memory, sums the source rows in registers
// and writes each row once. If a bucket holds more than a block can, as with an uneven index, blocks that come last sort its entries tile by tile and
// reduce the sums of equal rows; so they do, without sorting, where neighbouring entries are mostly of one row. Nobody waits for the index to
// be looked at: blocks that have nothing to do end at once.
#include "finish.cuh"
#include "overlap.cuh"
#include "rank.cuh"
#include "twosum.cuh"

namespace fusebackend::accumulate {
namespace {

constexpr int kBlocksPerSm = 2;
constexpr int kFillEach = 8, kTileEach = 4;  // entries of a thread, of the first kernel and of the last blocks
constexpr uint32_t kTile = kSortThreads * kTileEach;  // that one of these takes at once, at most
constexpr int kMaxDigitBits = 10;                     // of what it sorts them by
constexpr uint32_t kMaxBuckets = 4096, kMaxRowsEach = 4096, kNoRow = ~0u;
constexpr uint32_t kFewerEntries = kMostEntries * 3 / 4;  // of a bucket, where that makes no more rounds: a large one is waited for
constexpr int64_t kMaxPieces = 128;  // of a row that a group of threads takes at once
constexpr int kStaticBytes = 24 * 1024;  // more than the second kernel has of static shared memory

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

// Whether neighbouring entries are mostly of one row, as far as a sample shows: the same one in every block.
__device__ __forceinline__ bool is_in_order(const Params& p, uint32_t n) {
  constexpr uint32_t kSamples = 128;
  const uint32_t i = uint32_t(uint64_t(n - 1) * threadIdx.x / kSamples);
  return __syncthreads_count(threadIdx.x < kSamples && load_index(p.index, i) == load_index(p.index, i + 1)) > kSamples * 5 / 8;
}

// A tile's entries, sorted by bucket, go to the ends of the buckets' lists.
__global__ void __launch_bounds__(kSortThreads, 3) fill_kernel(const __grid_constant__ BucketedArgs a) {
  constexpr uint32_t kFilled = kSortThreads * kFillEach;
  extern __shared__ uint32_t places[];           // [bucket]: how many entries the tile has of it; then how many are before these
  uint32_t* const goes_to = places + a.buckets;  // [bucket]: where the tile's first one goes in the list, less its place in the tile
  __shared__ uint2 staged[kFilled];
  __shared__ uint32_t warp_sums[kWarps];
  const Params& p = a.p;
  const uint32_t first = blockIdx.x * kFilled, count = min(kFilled, a.n - first);
  int64_t index[kFillEach];
#pragma unroll
  for (int e = 0; e < kFillEach; ++e) index[e] = load_index(p.index, first + min(threadIdx.x + e * kSortThreads, count - 1));
  for (uint32_t i = threadIdx.x; i < a.buckets; i += kSortThreads) places[i] = 0;
  const bool in_order = is_in_order(p, a.n);
  let_next_kernel_set_up();
  if (in_order) {
    wait_for_previous_kernel();
    if (blockIdx.x == 0 && threadIdx.x == 0) *a.left = kInOrder;
    return;
  }
  uint32_t row[kFillEach], rank[kFillEach];
#pragma unroll
  for (int e = 0; e < kFillEach; ++e) {
    const int64_t target = threadIdx.x + e * kSortThreads < count ? target_row(p, index[e]) : -1;
    row[e] = uint32_t(target);
    if (target >= 0) rank[e] = atomicAdd(&places[a.rows_each.div(row[e])], 1u);
  }
  const uint32_t kept = scan_counts(places, a.buckets, warp_sums);
  wait_for_previous_kernel();  // which cleared the counts
  for (uint32_t b = threadIdx.x; b < a.buckets; b += kSortThreads) {
    const uint32_t here = (b + 1 < a.buckets ? places[b + 1] : kept) - places[b];
    if (here == 0) continue;
    const uint32_t before = atomicAdd(a.filled + b, here);
    goes_to[b] = before - places[b];
    if (before <= a.most && before + here > a.most) atomicAdd(a.left, 1u);
  }
  __syncthreads();
#pragma unroll
  for (int e = 0; e < kFillEach; ++e)
    if (row[e] != kNoRow) {
      uint32_t bucket, local;
      a.rows_each.divmod(row[e], bucket, local);
      staged[places[bucket] + rank[e]] = {first + threadIdx.x + e * kSortThreads, row[e]};
    }
  __syncthreads();
#pragma unroll
  for (int e = 0; e < kFillEach; ++e)
    if (const uint32_t i = threadIdx.x + e * kSortThreads; i < kept) {
      const uint2 entry = staged[i];
      uint32_t bucket, local;
      a.rows_each.divmod(entry.y, bucket, local);
      if (const uint32_t to = goes_to[bucket] + i; to < a.most) a.lists[size_t(bucket) * a.most + to] = {entry.x, local};
    }
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

template <typename T, int V>
__global__ void __launch_bounds__(kSortThreads, kBlocksPerSm) bucketed_kernel(const __grid_constant__ BucketedArgs a) {
  using A = Acc<T>;
  extern __shared__ uint4 shared[];
  __shared__ Heads<T, V> heads;
  __shared__ uint32_t warp_sums[kWarps];
  const Params& p = a.p;
  if (blockIdx.x >= a.buckets) {
    wait_for_previous_kernel();
    let_next_kernel_set_up();
    return sum_left_over<T, V>(a, reinterpret_cast<uint32_t*>(shared), heads, warp_sums);
  }
  const uint32_t bucket = blockIdx.x, rows_each = a.rows_each.d, first_row = bucket * rows_each, rows = min(rows_each, uint32_t(p.rows) - first_row);
  auto* const from = reinterpret_cast<uint32_t*>(shared);                 // [most], by row
  auto* const row_of = reinterpret_cast<uint16_t*>(from + a.most);  // the same
  A* const scales = p.weight.data || p.alpha != 1.0 ? reinterpret_cast<A*>(row_of + a.most) : nullptr;  // the same
  auto* const begins = reinterpret_cast<uint32_t*>(row_of + a.most) + (scales ? a.most : 0);      // [row]
  for (uint32_t i = threadIdx.x; i < rows_each; i += kSortThreads) begins[i] = 0;
  const uint32_t group = threadIdx.x / a.block_columns, lane_column = threadIdx.x % a.block_columns;
  wait_for_previous_kernel();
  let_next_kernel_set_up();
  const uint32_t count = a.filled[bucket];
  if (*a.left == kInOrder || count > a.most) {  // left to reductions, for which out or scratch is initialised
    if (!a.initialises()) return;
    for (uint32_t c = lane_column; c < a.columns; c += a.block_columns) {
      int64_t out_offset, unused;
      column_offsets<V>(p, c, out_offset, unused);
      for (uint32_t row = first_row + group; group < a.groups && row < first_row + rows; row += a.groups) {
        const int64_t at = row * p.out_row_stride + out_offset;
        if (a.scratch) {
          *reinterpret_cast<Vec<float, V>*>(a.scratch + (int64_t(row) * a.columns + c) * V) = Vec<float, V>{};
        } else {
          *reinterpret_cast<Vec<T, V>*>(static_cast<T*>(p.out) + at) =
              p.initial ? *reinterpret_cast<const Vec<T, V>*>(static_cast<const T*>(p.initial) + at) : Vec<T, V>{};
        }
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      atomicAdd(a.ready, 1u);
    }
    return;
  }
  if (count == 0 && p.in_place()) return;

  for (uint32_t i = threadIdx.x; i < rows * a.prefetched; i += kSortThreads)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(p.initial) +
                                                  (first_row + i / a.prefetched) * p.out_row_stride * int64_t(sizeof(T)) + i % a.prefetched * 128));

  // Sort by row; the order within a row is chance.
  __syncthreads();
  {
    const uint2* const list = a.lists + size_t(bucket) * a.most;
    uint32_t entry[kPartEach], row_rank[kPartEach];  // both parts below 2^16
#pragma unroll
    for (int e = 0; e < kPartEach; ++e)
      if (const uint32_t i = threadIdx.x + e * kSortThreads; i < count) {
        const uint2 found = list[i];
        entry[e] = found.x, row_rank[e] = found.y;
      }
#pragma unroll
    for (int e = 0; e < kPartEach; ++e)
      if (threadIdx.x + e * kSortThreads < count) row_rank[e] |= atomicAdd(&begins[row_rank[e]], 1u) << 16;
    scan_counts(begins, rows_each, warp_sums);
    if (const uint32_t i = count + threadIdx.x; threadIdx.x < kBatch && i < a.most) from[i] = 0;
#pragma unroll
    for (int e = 0; e < kPartEach; ++e)
      if (threadIdx.x + e * kSortThreads < count) {
        const uint32_t row = row_rank[e] & 0xffff, place = begins[row] + (row_rank[e] >> 16);
        row_of[place] = uint16_t(row);
        from[place] = entry[e];
      }
    look_up<T>(p, from, scales, count);
  }

  Vec<T, V> held{};
  const int64_t base = first_row * p.out_row_stride;
  auto look = [&](uint32_t row, int64_t offset) {
    if (p.initial) held = *reinterpret_cast<const Vec<T, V>*>(static_cast<const T*>(p.initial) + base + row * p.out_row_stride + offset);
  };
  auto write = [&](uint32_t row, uint32_t, int64_t offset, PlainSum<T>(&sum)[V]) {
    write_sums<T, V>(static_cast<T*>(p.out) + base + row * p.out_row_stride + offset, sum, p.initial, held);
  };
  sum_rows<T, V>(a, row_of, from, scales, count, heads, look, write);
  if (p.in_place() || group >= a.groups) return;
  for (uint32_t c = lane_column; c < a.columns; c += a.block_columns) {
    int64_t offset, unused;
    column_offsets<V>(p, c, offset, unused);
    for (uint32_t row = group; row < rows; row += a.groups)
      if (begins[row] == (row + 1 < rows_each ? begins[row + 1] : count)) {
        PlainSum<T> none[V]{};
        look(row, offset);
        write(row, c, offset, none);
      }
  }
}

constexpr int kCounters = 2;  // `left` and `ready`, before those of buckets

struct Shape {
  uint32_t rows_each, buckets, most;
  size_t lists, scratch, bytes;  // where they lie in the workspace
};

size_t align(size_t bytes) { return (bytes + 255) / 256 * 256; }

// Entries of a bucket, so that few hold more than `most`.
constexpr int64_t average(int64_t most) { return most * 3 / 4; }

// As many rows to a bucket as make a whole number of rounds of the blocks that run at once.
Shape shape_of(const Params& p, const Device& device) {
  const int64_t at_once = int64_t(device.sm_count) * kBlocksPerSm;
  auto rounds = [&](int64_t most) { return ceil_div(p.n, at_once * average(most)); };
  const int64_t round = rounds(kMostEntries);
  const bool rounded_once = is_half(p.dtype) && (p.precise || p.n >= 16 * p.rows);
  Shape s{};
  s.most = rounds(kFewerEntries) == round ? kFewerEntries : kMostEntries;
  s.rows_each = uint32_t(std::max<int64_t>(ceil_div(p.rows, at_once * round), 1));
  s.buckets = uint32_t(ceil_div(p.rows, int64_t(s.rows_each)));
  s.lists = align((s.buckets + kCounters) * sizeof(uint32_t));
  s.scratch = s.lists + align(size_t(s.buckets) * s.most * sizeof(uint2));
  s.bytes = s.scratch + (rounded_once ? wide_bytes(p) : 0);
  return s;
}

int digit_bits(const Shape& s) {
  int bits = 0;
  while (s.buckets > 1u << bits && bits < kMaxDigitBits) ++bits;
  return bits;
}

int shared_bytes(const Params& p, const Shape& s) {
  const bool scaled = p.weight.data || p.alpha != 1.0;
  const uint32_t bucket = s.most * (scaled ? 10 : 6) + s.rows_each * 4;
  const uint32_t left = kTile * (scaled ? 12 : 8) + std::max((1u << digit_bits(s)) * kWarps * 2, s.rows_each * 4);
  return int(std::max(bucket, left));
}

}  // namespace

bool bucketed_fits(const Params& p, const Device& device) {
  const bool type = p.dtype == DType::kFloat32 || is_half(p.dtype);
  if (!type || p.n < 2 || p.n > INT32_MAX || p.rows == 0 || p.rows > INT32_MAX || p.source_rows > UINT32_MAX) return false;
  if (vector_width(p, true) * element_size(p.dtype) != 16 || p.source_row_stride * element_size(p.dtype) > int64_t(UINT32_MAX)) return false;
  const Shape s = shape_of(p, device);
  const int most = std::min(device.shared_bytes_per_block, device.shared_bytes / kBlocksPerSm) - kStaticBytes;
  return s.buckets <= kMaxBuckets && s.rows_each <= kMaxRowsEach && p.n / s.buckets <= average(s.most) && shared_bytes(p, s) <= most;
}

size_t bucketed_bytes(const Params& p, const Device& device) { return shape_of(p, device).bytes; }

cudaError_t launch_bucketed(const Params& p, void* workspace, const Device& device, cudaStream_t stream) {
  const Shape s = shape_of(p, device);
  char* const base = static_cast<char*>(workspace);
  auto* const counters = reinterpret_cast<uint32_t*>(base);
  if (cudaError_t error = clear(counters, s.buckets + kCounters, stream); error != cudaSuccess) return error;
  auto run = [&](auto type) {
    using T = decltype(type);
    constexpr int V = kWide<T>;
    BucketedArgs a{p, FastDiv(s.rows_each), s.buckets, uint32_t(p.n)};
    a.digit_bits = digit_bits(s);
    while (s.buckets > 1u << (a.digit_bits + a.digit_shift)) ++a.digit_shift;
    a.left = counters;
    a.ready = counters + 1;
    a.filled = counters + kCounters;
    a.most = s.most;
    a.lists = reinterpret_cast<uint2*>(base + s.lists);
    a.scratch = s.bytes > s.scratch ? reinterpret_cast<float*>(base + s.scratch) : nullptr;
    a.columns = uint32_t(p.columns() / V);
    a.source_row_bytes = uint32_t(p.source_row_stride * int64_t(sizeof(T)));
    a.column_blocks = uint32_t(ceil_div(a.columns, kMaxPieces));
    a.block_columns = uint32_t(ceil_div(a.columns, a.column_blocks));
    a.groups = kSortThreads / a.block_columns;
    if (p.initial && p.n_dims == 1 && a.columns % 8 == 0) a.prefetched = a.columns / 8;
    static SharedMemoryOptIn fill_opt_in, opt_in;
    const auto kernel = bucketed_kernel<T, V>;
    if (cudaError_t error = fill_opt_in.ensure(fill_kernel, int(kMaxBuckets) * 8); error != cudaSuccess) return error;
    if (cudaError_t error = opt_in.ensure(kernel, device.shared_bytes_per_block - kStaticBytes); error != cudaSuccess) return error;
    const unsigned fill_blocks = unsigned(ceil_div(p.n, kSortThreads * kFillEach));
    cudaError_t error = launch_overlapped(fill_kernel, fill_blocks, kSortThreads, int(s.buckets) * 8, device.major, stream, a);
    const int64_t at_once = int64_t(device.sm_count) * kBlocksPerSm;
    a.even_tile = uint32_t(ceil_div(p.n, at_once * ceil_div(p.n, at_once * kTile)));
    const unsigned last_blocks = unsigned(std::min(ceil_div(p.n, a.even_tile), at_once));
    if (error == cudaSuccess)
      error = launch_overlapped(kernel, s.buckets + last_blocks, kSortThreads, shared_bytes(p, s), device.major, stream, a);
    if (error == cudaSuccess && a.scratch) error = finish(p, a.scratch, 1, device, stream, a.left_over());
    return error;
  };
  if (p.dtype == DType::kFloat32) return run(float());
  return p.dtype == DType::kFloat16 ? run(__half()) : run(__nv_bfloat16());
}

}  // namespace fusebackend::accumulate
