// kThreadTables: few rows that take many entries. Every thread sums its columns of all rows in a table of its own in shared memory, so
// nothing is atomic and the result does not depend on the order in which threads run.
#include "common/programmatic_launch.cuh"
#include "index_add/combine_partials.cuh"
#include "index_add/dispatch.cuh"
#include "index_add/routes.h"

namespace fusebackend::index_add {
namespace {

constexpr int kTileEntries = ThreadTablesShape::kTileEntries;

template <typename T>
struct ThreadTablesArgs : BlockTiling {
  Params p;
  Acc<T>* partial;  // [row_block][row][columns * V]
};

template <typename T, int V, int kLoads>
__global__ void __launch_bounds__(kThreads, sizeof(Acc<T>) == 8 ? 2 : 3)
    thread_tables_kernel(const __grid_constant__ ThreadTablesArgs<T> a) {
  using A = Acc<T>;
  constexpr int kSlotElements = V > 4 ? 4 : V, kSlots = V / kSlotElements;  // of one access to the table; of a vector
  using Slot = Vec<A, kSlotElements>;
  __shared__ uint2 staged[kTileEntries];  // (slot of the row in the table, source row)
  extern __shared__ uint4 table_raw[];
  Slot* const table = reinterpret_cast<Slot*>(table_raw);  // [row][slot][thread]: no bank conflicts, whatever rows the lanes add to
  const Params& p = a.p;
  A* const scales = reinterpret_cast<A*>(table + p.rows * kSlots * kThreads);
  constexpr uint32_t kNowhere = ~0u;

  const unsigned row_block = blockIdx.x / unsigned(a.column_blocks), column_block = blockIdx.x % unsigned(a.column_blocks);
  const int group = threadIdx.x / unsigned(a.block_columns);
  const int64_t column = int64_t(column_block) * a.block_columns + threadIdx.x % unsigned(a.block_columns);
  const bool active = group < a.groups && column < a.columns, scaled = p.scales();
  const int tile_entries = a.groups * a.per_group;

  Slot zero;
#pragma unroll
  for (int i = 0; i < kSlotElements; ++i) zero.v[i] = A(0);
  for (int i = threadIdx.x; i < int(p.rows) * kSlots * kThreads; i += kThreads) table[i] = zero;
  launch_dependents();  // the kernel that combines the partial sums
  int64_t out_offset = 0, source_offset = 0;
  if (active) column_offsets<V>(p, column, out_offset, source_offset);
  const T* const source = static_cast<const T*>(p.source) + source_offset;

  for (int64_t t = row_block; t < a.tiles; t += a.row_blocks) {
    const int64_t first = t * tile_entries;
    const int count = int(min(int64_t(tile_entries), p.n - first));
    __syncthreads();
    for (int k = threadIdx.x; k < count; k += kThreads) {
      const int64_t n = first + k, row = target_row(p, load_index(p.index, n));
      const int64_t from = source_row(p, n);
      staged[k] = {row < 0 ? kNowhere : uint32_t(row) * (kSlots * kThreads), uint32_t(from)};
      if (scaled) scales[k] = factor_of<T>(p, n);
    }
    __syncthreads();
    if (!active) continue;
    const int step = a.interleave ? a.groups : 1;
    const int begin = a.interleave ? group : group * a.per_group, end = a.interleave ? count : min(count, begin + a.per_group);
    if (begin >= end) continue;

    // kLoads entries: all loads, then all sums. Past the end the last entry is loaded again, so that no load waits for a branch.
    const int last = begin + (end - 1 - begin) / step * step;
    for (int k0 = begin; k0 < end; k0 += kLoads * step) {
      Vec<T, V> v[kLoads];
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        const T* const from = source + int64_t(staged[min(k0 + u * step, last)].y) * p.source_row_stride;
        v[u] = load_source<T, V>(from, p.source_index.data);
      }
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        const int k = k0 + u * step;
        const uint32_t to = k < end ? staged[k].x : kNowhere;
        if (to == kNowhere) continue;
        const A scale = scaled ? scales[k] : A(1);
#pragma unroll
        for (int q = 0; q < kSlots; ++q) {
          Slot& slot = table[to + q * kThreads + threadIdx.x];
          Slot value = slot;
#pragma unroll
          for (int i = 0; i < kSlotElements; ++i) {
            const A x = widen<A>(v[u].v[q * kSlotElements + i]);
            value.v[i] += scaled ? product(x, scale) : x;
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
    const int64_t at = (int64_t(column_block) * a.block_columns + c) * V + q * kSlotElements;
    if (at >= a.columns * V) continue;
    Slot total = table[(row * kSlots + q) * kThreads + c];
    for (int g = 1; g < a.groups; ++g) {
      const Slot other = table[(row * kSlots + q) * kThreads + g * a.block_columns + c];
#pragma unroll
      for (int i = 0; i < kSlotElements; ++i) total.v[i] += other.v[i];
    }
    *reinterpret_cast<Slot*>(a.partial + (row_block * p.rows + row) * a.columns * V + at) = total;
  }
}

template <typename T, int V>
cudaError_t launch_instance(const ThreadTablesArgs<T>& a, const ThreadTablesShape& s, cudaStream_t stream) {
  const auto kernel = thread_tables_kernel<T, V, V == 1 ? 16 : 8>;
  static SharedMemoryOptIn opt_in;
  constexpr int kWithoutOptIn = 32 * 1024;  // beside the staged tile
  if (s.shared_bytes > kWithoutOptIn)
    if (cudaError_t error = opt_in.ensure(kernel, s.max_shared_bytes); error != cudaSuccess) return error;
  kernel<<<unsigned(a.row_blocks * a.column_blocks), kThreads, s.shared_bytes, stream>>>(a);
  return cudaGetLastError();
}

template <typename T, int V>  // V is the width, or more
cudaError_t launch_width(const ThreadTablesArgs<T>& a, const ThreadTablesShape& s, cudaStream_t stream) {
  if constexpr (V > 1)
    if (s.v < V) return launch_width<T, V / 2>(a, s, stream);
  return launch_instance<T, V>(a, s, stream);
}

}  // namespace

cudaError_t launch_thread_tables(const Params& p, void* workspace, const Device& device, cudaStream_t stream) {
  const ThreadTablesShape s = thread_tables_shape(p, device);
  return dispatch(p.dtype, [&](auto type) {
    using T = decltype(type);
    const ThreadTablesArgs<T> a{thread_tables_tiling(p, s, device), p, static_cast<Acc<T>*>(workspace)};
    const cudaError_t error = launch_width<T, kWidest<T>>(a, s, stream);
    return error == cudaSuccess ? combine_partials(p, a.partial, a.row_blocks, device, stream) : error;
  });
}

}  // namespace fusebackend::index_add
