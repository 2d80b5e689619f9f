// kTable: few rows that take many entries. Every thread sums into a table of its own in shared memory, so nothing is atomic, and the result
// does not depend on the order in which threads run.
#include "finish.cuh"
#include "overlap.cuh"
#include "walk.cuh"

namespace fusebackend::accumulate {
namespace {

constexpr int kTableEntries = 1024;  // that a block stages at once

template <typename T>
struct TableArgs : Walk {
  Params p;
  Acc<T>* partial;  // [row_block][row][columns * V]
};

template <typename T, int V, int U>
__global__ void __launch_bounds__(kThreads, sizeof(Acc<T>) == 8 ? 2 : 3) table_kernel(const __grid_constant__ TableArgs<T> a) {
  using A = Acc<T>;
  constexpr int kLane = V > 4 ? 4 : V, kSlots = V / kLane;  // elements of a table access
  using Slot = Vec<A, kLane>;
  __shared__ uint2 staged[kTableEntries];  // (place of the row in the table, source row)
  extern __shared__ uint4 table_raw[];
  Slot* const table = reinterpret_cast<Slot*>(table_raw);  // [row][V / kLane][thread]: free of bank conflicts whatever rows the lanes hold
  const Params& p = a.p;
  A* const scales = reinterpret_cast<A*>(table + p.rows * kSlots * kThreads);
  constexpr uint32_t kNowhere = ~0u;

  const unsigned row_block = blockIdx.x / unsigned(a.column_blocks), column_block = blockIdx.x % unsigned(a.column_blocks);
  const int group = threadIdx.x / unsigned(a.block_columns);
  const int64_t column = int64_t(column_block) * a.block_columns + threadIdx.x % unsigned(a.block_columns);
  const bool active = group < a.groups && column < a.columns, scaled = p.weight.data || p.alpha != 1.0;
  const int tile_entries = a.groups * a.per_group;

  Slot zero;
#pragma unroll
  for (int i = 0; i < kLane; ++i) zero.v[i] = A(0);
  for (int i = threadIdx.x; i < int(p.rows) * kSlots * kThreads; i += kThreads) table[i] = zero;
  let_next_kernel_set_up();  // the finishing kernel, which waits for this one's end
  int64_t out_offset = 0, source_offset = 0;
  if (active) column_offsets<V>(p, column, out_offset, source_offset);
  const T* const source = static_cast<const T*>(p.source) + source_offset;

  for (int64_t t = row_block; t < a.tiles; t += a.row_blocks) {
    const int64_t first = t * tile_entries;
    const int count = int(min(int64_t(tile_entries), p.n - first));
    __syncthreads();
    for (int k = threadIdx.x; k < count; k += kThreads) {
      const int64_t n = first + k, row = target_row(p, load_index(p.index, n));
      const int64_t from = p.source_index.data ? checked_row(load_index(p.source_index, n), p.source_rows, p.source_wraps) : n;
      staged[k] = {row < 0 ? kNowhere : uint32_t(row) * (kSlots * kThreads), uint32_t(from)};
      if (scaled) scales[k] = A(p.alpha) * (p.weight.data ? widen<A>(static_cast<const T*>(p.weight.data)[n * p.weight.stride]) : A(1));
    }
    __syncthreads();
    if (!active) continue;
    const int step = a.interleave ? a.groups : 1;
    const int begin = a.interleave ? group : group * a.per_group, end = a.interleave ? count : min(count, begin + a.per_group);
    if (begin >= end) continue;

    // U entries: all loads, then all sums. Past the end the last entry is loaded again, so that no load waits for a branch.
    const int last = begin + (end - 1 - begin) / step * step;
    for (int k0 = begin; k0 < end; k0 += U * step) {
      Vec<T, V> v[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const T* const from = source + int64_t(staged[min(k0 + u * step, last)].y) * p.source_row_stride;
        v[u] = p.source_index.data ? load_again<T, V>(from) : load_once<T, V>(from);
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int k = k0 + u * step;
        const uint32_t to = k < end ? staged[k].x : kNowhere;
        if (to == kNowhere) continue;
        const A scale = scaled ? scales[k] : A(1);
#pragma unroll
        for (int q = 0; q < kSlots; ++q) {
          Slot& slot = table[to + q * kThreads + threadIdx.x];
          Slot value = slot;
#pragma unroll
          for (int i = 0; i < kLane; ++i) {
            const A x = widen<A>(v[u].v[q * kLane + i]);
            value.v[i] += scaled ? x * scale : x;
          }
          slot = value;
        }
      }
    }
  }

  __syncthreads();
  const unsigned width = a.block_columns * kSlots;
  for (unsigned i = threadIdx.x; i < unsigned(p.rows) * width; i += kThreads) {
    const unsigned row = i / width, c = i % width / kSlots, q = i % kSlots;
    const int64_t at = (int64_t(column_block) * a.block_columns + c) * V + q * kLane;
    if (at >= a.columns * V) continue;
    Slot total = table[(row * kSlots + q) * kThreads + c];
    for (int g = 1; g < a.groups; ++g) {
      const Slot other = table[(row * kSlots + q) * kThreads + g * a.block_columns + c];
#pragma unroll
      for (int i = 0; i < kLane; ++i) total.v[i] += other.v[i];
    }
    *reinterpret_cast<Slot*>(a.partial + (row_block * p.rows + row) * a.columns * V + at) = total;
  }
}

// The widest vectors whose table of all rows still lets enough threads share a multiprocessor.
struct Table {
  int v = 0, blocks_per_sm = 0, bytes = 0, most = 0;
};
Table table_shape(const Params& p, const Device& device) {
  constexpr int kStaticBytes = kTableEntries * 8 + 1200;  // the staged tile, and what the system takes of each block's share
  const int acc = element_size(p.dtype) == 8 ? 8 : 4, widest = vector_width(p, false);
  const bool scaled = p.weight.data || p.alpha != 1.0;
  Table t;
  if (p.source_rows > UINT32_MAX) return t;
  for (int v : {8, 4, 2, 1}) {
    if (v > widest) continue;
    const size_t bytes = size_t(p.rows) * v * kThreads * acc + (scaled ? kTableEntries * acc : 0);
    const int blocks = int(size_t(device.shared_bytes) / (bytes + kStaticBytes)), most = device.shared_bytes_per_block - kStaticBytes;
    if (bytes <= size_t(most) && blocks > t.blocks_per_sm) t = {v, std::min(blocks, 4), int(bytes), most};
    if (t.blocks_per_sm >= 2) break;
  }
  return t;
}

Walk table_walk(const Params& p, const Table& t, const Device& device) { return make_walk(p, t.v, kTableEntries, t.blocks_per_sm, device); }

template <typename T, int V, int U>
cudaError_t launch_instance(const TableArgs<T>& a, const Table& t, cudaStream_t stream) {
  const auto kernel = table_kernel<T, V, U>;
  static SharedMemoryOptIn opt_in;
  if (t.bytes > 32 * 1024)  // beside the staged tile
    if (cudaError_t error = opt_in.ensure(kernel, t.most); error != cudaSuccess) return error;
  kernel<<<unsigned(a.row_blocks * a.column_blocks), kThreads, t.bytes, stream>>>(a);
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_width(const TableArgs<T>& a, const Table& t, cudaStream_t stream) {
  if constexpr (kWide<T> > 1)
    if (t.v == kWide<T>) return launch_instance<T, kWide<T>, 8>(a, t, stream);
  if constexpr (kWide<T> > 2)
    if (t.v == kWide<T> / 2) return launch_instance<T, kWide<T> / 2, 8>(a, t, stream);
  if constexpr (sizeof(T) == 2)
    if (t.v == 2) return launch_instance<T, 2, 8>(a, t, stream);
  return launch_instance<T, 1, 16>(a, t, stream);
}

}  // namespace

bool table_fits(const Params& p, const Device& device) { return table_shape(p, device).v > 0; }
bool table_pays(const Params& p, const Device& device) { return table_shape(p, device).blocks_per_sm >= 2; }

size_t table_bytes(const Params& p, const Device& device) {
  return size_t(table_walk(p, table_shape(p, device), device).row_blocks) * p.rows * p.columns() * (element_size(p.dtype) == 8 ? 8 : 4);
}

cudaError_t launch_table(const Params& p, void* workspace, const Device& device, cudaStream_t stream) {
  const Table t = table_shape(p, device);
  return dispatch(p.dtype, [&](auto type) {
    using T = decltype(type);
    const TableArgs<T> a{table_walk(p, t, device), p, static_cast<Acc<T>*>(workspace)};
    const cudaError_t error = launch_width<T>(a, t, stream);
    return error == cudaSuccess ? finish(p, a.partial, a.row_blocks, device, stream) : error;
  });
}

}  // namespace fusebackend::accumulate
