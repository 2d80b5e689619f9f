// The walk that the CUDA routes share. A block stages a tile of entries in shared memory, checked and turned into offsets once; then each
// thread owns one column (V neighbouring elements) and walks its share of the tile. Runs of equal rows are summed in registers, and what a
// finished run does with its sum is the route:
//   kReduce   reduce it into global memory (out, or a wider scratch copy of it);
//   kTable    add it to the thread's own table of all rows in shared memory, summed over the block at the end: under contention;
//   kSegment  the entries come sorted by row: store it, or hand a run cut by the range's ends to the next kernel: deterministic;
//   kOwn      the block sorts its tile, which is all there is, and the thread owns its column of out: plain loads and stores,
//             deterministic.
#pragma once

#include <cassert>
#include <type_traits>

#include "../common/cuda_common.cuh"
#include "accumulate.h"
#include "reduction.cuh"

namespace fusebackend::accumulate {

constexpr int kThreads = 256;
constexpr int kMaxOwn = 256;             // entries that a block sorts by itself
constexpr int64_t kNowhere = INT64_MIN;  // the offset of an entry that is to be ignored

enum class Flush { kReduce, kTable, kSegment, kOwn };

// Entries that a block stages at once: few where shared memory is wanted for the table, many where runs should not be cut.
template <Flush kFlush>
constexpr int kTile = kFlush == Flush::kSegment ? 2048 : kFlush == Flush::kReduce ? 512 : 256;

template <typename T> struct AccOf { using type = int32_t; };
template <> struct AccOf<double> { using type = double; };
template <> struct AccOf<float> { using type = float; };
template <> struct AccOf<__half> { using type = float; };
template <> struct AccOf<__nv_bfloat16> { using type = float; };
template <> struct AccOf<int64_t> { using type = int64_t; };
template <typename T> using Acc = typename AccOf<T>::type;

template <typename A, typename T> __device__ __forceinline__ A widen(T x) { return A(x); }
template <> __device__ __forceinline__ float widen<float, __half>(__half x) { return __half2float(x); }
template <> __device__ __forceinline__ float widen<float, __nv_bfloat16>(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename T, typename A> __device__ __forceinline__ T narrow(A x) { return T(x); }
template <> __device__ __forceinline__ __half narrow<__half, float>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16, float>(float x) { return __float2bfloat16_rn(x); }

// How the grid covers entries and columns: a block has `groups` row groups of `block_columns` threads. It takes every row_blocks-th tile of
// groups * per_group entries; a group walks per_group neighbours of the tile, or, for slices under 128 bytes, every groups-th entry, so
// that a warp reads whole lines.
struct Walk {
  int64_t columns;  // of V elements
  int64_t tiles, row_blocks;
  int block_columns, groups, column_blocks, per_group;
  bool interleave;
};

// The sorted order of kSegment, and where runs cut by the ends of a group's range leave their sums.
template <typename A>
struct Sorted {
  const uint32_t* keys;
  const uint32_t* positions;
  A* cut;  // [tile * groups + group][head, tail][columns * V]
};

template <typename Out>
struct Args {
  Params p;
  Walk walk;
  Out* out;  // what runs are flushed to: out, a scratch copy, or partial tables
  Sorted<Acc<Out>> sorted;
  bool prefetch = false;  // kReduce: out is larger than the L2 cache
};

__device__ __forceinline__ int64_t load_index(const RowVector& v, int64_t i) {
  return v.is64 ? __ldg(static_cast<const long long*>(v.data) + i * v.stride) : __ldg(static_cast<const int*>(v.data) + i * v.stride);
}

// Out of range stops the kernel as PyTorch's own assertion does, before anything is read or written there.
__device__ __forceinline__ int64_t checked_row(int64_t row, int64_t rows, bool wrap_negative) {
  if (wrap_negative && row < 0) row += rows;
  assert(row >= 0 && row < rows && "index out of bounds");
  return row;
}

// The row of out that an index means, or -1 for none.
template <typename P>  // Params, or a smaller struct with the same members
__device__ __forceinline__ int64_t target_row(const P& p, int64_t index) {
  if (p.has_ignore && index == p.ignore) return -1;
  if (p.bounds == Bounds::kDrop) return index >= 0 && index < p.rows ? index : -1;
  return checked_row(index, p.rows, p.bounds == Bounds::kWrap);
}

// Source rows are read once, so they should leave the caches first; gathered rows are read again.
template <int kBytes> struct Word;
template <> struct Word<16> { using type = uint4; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<4> { using type = unsigned; };
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<1> { using type = unsigned char; };

template <typename T, int V>
__device__ __forceinline__ Vec<T, V> load_once(const T* p) {
  using W = typename Word<sizeof(T) * V>::type;
  const W w = __ldcs(reinterpret_cast<const W*>(p));
  return reinterpret_cast<const Vec<T, V>&>(w);
}
template <typename T, int V>
__device__ __forceinline__ Vec<T, V> load_again(const T* p) {
  using W = typename Word<sizeof(T) * V>::type;
  const W w = __ldg(reinterpret_cast<const W*>(p));
  return reinterpret_cast<const Vec<T, V>&>(w);
}

// Offsets of column c (in units of V elements along the last dimension) in out and source.
template <int V>
__device__ __forceinline__ void column_offsets(const Params& p, int64_t c, int64_t& out, int64_t& source) {
  out = source = 0;
  for (int d = p.n_dims - 1; d >= 0; --d) {
    const int64_t size = d == p.n_dims - 1 ? p.dims[d].size / V : p.dims[d].size, step = d == p.n_dims - 1 ? V : 1;
    int64_t i = c;
    if (d > 0) {
      const int64_t q = (c | size) >> 32 ? c / size : int64_t(uint32_t(c) / uint32_t(size));
      i = c - q * size;
      c = q;
    }
    out += i * step * p.dims[d].out_stride;
    source += i * step * p.dims[d].source_stride;
  }
}

struct alignas(16) Entry {
  int64_t to;    // offset of the entry's row in out (in the table), or kNowhere
  int64_t from;  // offset of its row in source
};

template <typename A, int kEntries>
struct Tile {
  Entry entry[kEntries];
  A scale[kEntries];
};

// Fills `tile` with entries [first, first + count).
template <typename T, Flush kFlush, typename Out, typename A, int kEntries>
__device__ __forceinline__ void stage(Tile<A, kEntries>& tile, const Args<Out>& a, int64_t first, int count, int64_t row_stride) {
  const Params& p = a.p;
  for (int k = threadIdx.x; k < count; k += kThreads) {
    int64_t n = first + k, row;
    if constexpr (kFlush == Flush::kSegment) {
      row = a.sorted.keys[n] < p.rows ? int64_t(a.sorted.keys[n]) : -1;  // ignored entries sort last
      n = a.sorted.positions[n];
    } else {
      row = target_row(p, load_index(p.index, n));
    }
    tile.entry[k].to = row < 0 ? kNowhere : row * row_stride;
    tile.entry[k].from = (p.source_index.data ? checked_row(load_index(p.source_index, n), p.source_rows, true) : n) * p.source_row_stride;
    if (p.weight.data)
      tile.scale[k] = A(p.alpha) * widen<A>(static_cast<const T*>(p.weight.data)[n * p.weight.stride]);
    else if (p.alpha != 1.0)
      tile.scale[k] = A(p.alpha);
  }
}

// Sorts the staged entries by offset, stably: each thread finds its entry's rank.
template <typename A, int kEntries>
__device__ __forceinline__ void sort_tile(Tile<A, kEntries>& tile, int count) {
  static_assert(kMaxOwn <= kThreads && kMaxOwn <= kTile<Flush::kOwn>);
  const int k = threadIdx.x;
  int rank = 0;
  Entry entry{};
  A scale = A(0);
  if (k < count) {
    entry = tile.entry[k], scale = tile.scale[k];
    for (int j = 0; j < count; ++j) rank += tile.entry[j].to < entry.to || (tile.entry[j].to == entry.to && j < k);
  }
  __syncthreads();
  if (k < count) tile.entry[rank] = entry, tile.scale[rank] = scale;
}

template <typename T, typename Out, int V, int U, Flush kFlush>
__global__ void __launch_bounds__(kThreads) scatter_kernel(const __grid_constant__ Args<Out> a) {
  using A = Acc<Out>;
  constexpr int kLane = V > 4 ? 4 : V;  // elements of a table access
  using Slot = Vec<A, kLane>;
  __shared__ Tile<A, kTile<kFlush>> tile;
  extern __shared__ uint4 table_raw[];
  Slot* const table = reinterpret_cast<Slot*>(table_raw);  // [row][V / kLane][thread]: free of bank conflicts whatever rows the lanes hold

  const Params& p = a.p;
  const Walk& w = a.walk;
  const unsigned row_block = blockIdx.x / unsigned(w.column_blocks), column_block = blockIdx.x % unsigned(w.column_blocks);
  const int group = threadIdx.x / unsigned(w.block_columns);
  const int64_t column = int64_t(column_block) * w.block_columns + threadIdx.x % unsigned(w.block_columns);
  const bool active = group < w.groups && column < w.columns;
  const int tile_entries = w.groups * w.per_group;
  const bool scaled = p.weight.data || p.alpha != 1.0;

  if constexpr (kFlush == Flush::kTable) {
    Slot zero;
#pragma unroll
    for (int i = 0; i < kLane; ++i) zero.v[i] = A(0);
    for (int i = threadIdx.x; i < int(p.rows) * (V / kLane) * kThreads; i += kThreads) table[i] = zero;
  }

#if __CUDA_ARCH__ >= 900
  // The finishing kernel may be set up meanwhile; it waits for this one's end.
  if (kFlush == Flush::kTable) asm volatile("griddepcontrol.launch_dependents;");
#endif

  int64_t out_offset = 0, source_offset = 0;
  if (active) column_offsets<V>(p, column, out_offset, source_offset);
  Out* const out = a.out + out_offset;
  const T* const source = static_cast<const T*>(p.source) + source_offset;

  int64_t current = kNowhere, t, first;
  int begin, end;
  A sum[V];
  bool in_head = false;  // kSegment: the present run began before this group's range

  auto flush = [&](bool at_end) {
    if (current == kNowhere) return;
    if constexpr (kFlush == Flush::kReduce) {
      red_vector(out + current, sum);
    } else if constexpr (kFlush == Flush::kOwn) {
      Vec<Out, V> value;
#pragma unroll
      for (int i = 0; i < V; ++i) value.v[i] = narrow<Out>(sum[i]);
      *reinterpret_cast<Vec<Out, V>*>(out + current) = value;
    } else {
      const uint32_t* const next = a.sorted.keys + first + end;
      const bool in_tail = at_end && first + end < p.n && *next == next[-1] && *next < p.rows;
      if (in_head || in_tail) {
        A* cut = a.sorted.cut + ((t * w.groups + group) * 2 + (in_head ? 0 : 1)) * w.columns * V + column * V;
#pragma unroll
        for (int i = 0; i < V; ++i) cut[i] = sum[i];
      } else {
        Vec<Out, V>& target = *reinterpret_cast<Vec<Out, V>*>(out + current);
        Vec<Out, V> value = target;
#pragma unroll
        for (int i = 0; i < V; ++i) value.v[i] = narrow<Out>(widen<A>(value.v[i]) + sum[i]);
        target = value;
      }
      in_head = false;
    }
  };

  for (t = row_block; t < w.tiles; t += w.row_blocks) {
    first = t * tile_entries;
    const int count = int(min(int64_t(tile_entries), p.n - first));
    __syncthreads();
    stage<T, kFlush>(tile, a, first, count, kFlush == Flush::kTable ? V / kLane * kThreads : p.out_row_stride);
    __syncthreads();
    if constexpr (kFlush == Flush::kOwn) {
      sort_tile(tile, count);
      __syncthreads();
    }
    if (!active) continue;

    const int step = w.interleave ? w.groups : 1;
    begin = w.interleave ? group : group * w.per_group;
    end = w.interleave ? count : min(count, begin + w.per_group);
    if constexpr (kFlush == Flush::kSegment)
      in_head = first + begin > 0 && begin < end && a.sorted.keys[first + begin - 1] == a.sorted.keys[first + begin];

    // U entries: all loads, then all sums. Past the end the last entry is loaded again, so that no load waits for a branch.
    auto batch = [&](int k0, auto whole) {
      Entry entry[U];
      Vec<T, V> v[U];
      [[maybe_unused]] Vec<Out, V> held[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int k = whole ? k0 + u * step : min(k0 + u * step, end - 1);
        entry[u] = tile.entry[k];
        v[u] = p.source_index.data ? load_again<T, V>(source + entry[u].from) : load_once<T, V>(source + entry[u].from);
        if constexpr (kFlush == Flush::kReduce) {
          // Reductions are slow on lines that the L2 cache does not hold: a run's first entry fetches them beside the source.
          const bool first_of_run = entry[u].to != (u ? entry[u - 1].to : current);
          if (a.prefetch && first_of_run && entry[u].to != kNowhere) asm volatile("prefetch.global.L2 [%0];" ::"l"(out + entry[u].to));
        }
        if constexpr (kFlush == Flush::kOwn) {
          // A run's first entry brings what out holds.
          const bool first_of_run = k == 0 || tile.entry[k - 1].to != entry[u].to;
          if (first_of_run && entry[u].to != kNowhere) held[u] = *reinterpret_cast<const Vec<Out, V>*>(out + entry[u].to);
        }
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int k = k0 + u * step;
        const int64_t to = whole || k < end ? entry[u].to : kNowhere;
        if (to == kNowhere) continue;
        A x[V];
        const A scale = scaled ? tile.scale[k] : A(1);
#pragma unroll
        for (int i = 0; i < V; ++i) {
          x[i] = widen<A>(v[u].v[i]);
          if (scaled) x[i] *= scale;
        }
        if constexpr (kFlush == Flush::kTable) {
#pragma unroll
          for (int q = 0; q < V / kLane; ++q) {
            Slot& slot = table[int(to) + q * kThreads + threadIdx.x];
            Slot value = slot;
#pragma unroll
            for (int i = 0; i < kLane; ++i) value.v[i] += x[q * kLane + i];
            slot = value;
          }
        } else {
          const bool same = to == current;
          if (!same) {
            flush(false);
            current = to;
          }
#pragma unroll
          for (int i = 0; i < V; ++i) {
            if constexpr (kFlush == Flush::kOwn)
              sum[i] = (same ? sum[i] : widen<A>(held[u].v[i])) + x[i];
            else
              sum[i] = same ? sum[i] + x[i] : x[i];
          }
        }
      }
    };
    int k0 = begin;
    for (; k0 + (U - 1) * step < end; k0 += U * step) batch(k0, std::true_type());
    if (k0 < end) batch(k0, std::false_type());
    if constexpr (kFlush == Flush::kSegment) {
      flush(true);
      current = kNowhere;
    }
  }
  if (active && (kFlush == Flush::kReduce || kFlush == Flush::kOwn)) flush(true);

  if constexpr (kFlush == Flush::kTable) {
    __syncthreads();
    // One partial table a block: [row_block][row][columns * V].
    constexpr int kSlots = V / kLane;
    const unsigned width = w.block_columns * kSlots;
    for (unsigned i = threadIdx.x; i < unsigned(p.rows) * width; i += kThreads) {
      const unsigned row = i / width, c = i % width / kSlots, q = i % kSlots;
      const int64_t at = (int64_t(column_block) * w.block_columns + c) * V + q * kLane;
      if (at >= w.columns * V) continue;
      Slot total = table[(row * kSlots + q) * kThreads + c];
      for (int g = 1; g < w.groups; ++g) {
        const Slot other = table[(row * kSlots + q) * kThreads + g * w.block_columns + c];
#pragma unroll
        for (int i = 0; i < kLane; ++i) total.v[i] += other.v[i];
      }
      *reinterpret_cast<Slot*>(a.out + (row_block * p.rows + row) * w.columns * V + at) = total;
    }
  }
}

}  // namespace fusebackend::accumulate
