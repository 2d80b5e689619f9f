// kAtomicAdd and kAtomicAddFp32: vector atomic additions straight into out, or into an fp32 copy of it. Neighbouring entries of one row are
// summed in registers first.
#include "index_add/combine_partials.cuh"
#include "index_add/dispatch.cuh"
#include "index_add/red.cuh"
#include "index_add/routes.h"

namespace fusebackend::index_add {
namespace {

constexpr int kTileEntries = AtomicAddTiles::kTileEntries;
constexpr int64_t kNowhere = INT64_MIN;  // the offset of an entry that adds nothing

struct AtomicAddArgs : BlockTiling {
  Params p;
  float* fp32_out;  // the fp32 copy of out, laid out as p says; nullptr: out itself
  bool prefetch;    // out is larger than the L2 cache
};

template <typename T, int V, int kLoads>
__global__ void __launch_bounds__(kThreads, sizeof(Acc<T>) == 8 ? 2 : 4) atomic_add_kernel(const __grid_constant__ AtomicAddArgs a) {
  using A = Acc<T>;
  struct alignas(16) Entry {
    int64_t to, from;  // offsets of the entry's row in out, or kNowhere, and in source
  };
  __shared__ Entry staged[kTileEntries];
  __shared__ A scales[kTileEntries];
  const Params& p = a.p;
  const unsigned row_block = blockIdx.x / unsigned(a.column_blocks), column_block = blockIdx.x % unsigned(a.column_blocks);
  const int group = threadIdx.x / unsigned(a.block_columns);
  const int64_t column = int64_t(column_block) * a.block_columns + threadIdx.x % unsigned(a.block_columns);
  const bool active = group < a.groups && column < a.columns, scaled = p.scales();
  const int tile_entries = a.groups * a.per_group, step = a.interleave ? a.groups : 1;

  int64_t out_offset = 0, source_offset = 0;
  if (active) column_offsets<V>(p, column, out_offset, source_offset);
  T* const out = static_cast<T*>(p.out) + out_offset;
  const T* const source = static_cast<const T*>(p.source) + source_offset;

  int64_t current = kNowhere;
  A sum[V];
  auto flush = [&] {
    if constexpr (kHalf<T>)
      if (a.fp32_out) return red_vector(a.fp32_out + out_offset + current, sum);
    red_vector(out + current, sum);
  };
  for (int64_t t = row_block; t < a.tiles; t += a.row_blocks) {
    const int64_t first = t * tile_entries;
    const int count = int(min(int64_t(tile_entries), p.n - first));
    __syncthreads();
    for (int k = threadIdx.x; k < count; k += kThreads) {
      const int64_t n = first + k, row = target_row(p, load_index(p.index, n));
      const int64_t from = source_row(p, n);
      staged[k] = {row < 0 ? kNowhere : row * p.out_row_stride, from * p.source_row_stride};
      if (scaled) scales[k] = factor_of<T>(p, n);
    }
    __syncthreads();
    if (!active) continue;
    const int begin = a.interleave ? group : group * a.per_group, end = a.interleave ? count : min(count, begin + a.per_group);

    // kLoads entries: all loads, then all sums. Past the end the last entry is loaded again, so that no load waits for a branch.
    auto batch = [&](int k0, auto whole) {
      Entry entry[kLoads];
      Vec<T, V> v[kLoads];
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        entry[u] = staged[whole ? k0 + u * step : min(k0 + u * step, end - 1)];
        v[u] = load_source<T, V>(source + entry[u].from, p.source_index.data);
        // Atomic additions are slow on lines that the L2 cache does not hold: a run's first entry fetches them beside the source.
        const bool first_of_run = entry[u].to != (u ? entry[u - 1].to : current);
        if (a.prefetch && first_of_run && entry[u].to != kNowhere) prefetch_l2(out + entry[u].to);
      }
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        const int k = k0 + u * step;
        const int64_t to = whole || k < end ? entry[u].to : kNowhere;
        if (to == kNowhere) continue;
        const bool same = to == current;
        if (!same) {
          if (current != kNowhere) flush();
          current = to;
        }
        const A scale = scaled ? scales[k] : A(1);
#pragma unroll
        for (int i = 0; i < V; ++i) {
          const A x = scaled ? product(widen<A>(v[u].v[i]), scale) : widen<A>(v[u].v[i]);
          sum[i] = same ? sum[i] + x : x;
        }
      }
    };
    int k0 = begin;
    for (; k0 + (kLoads - 1) * step < end; k0 += kLoads * step) batch(k0, std::true_type());
    if (k0 < end) batch(k0, std::false_type());
  }
  if (active && current != kNowhere) flush();
}

cudaError_t launch_tiled(const Params& p, int v, float* fp32_out, const Device& device, cudaStream_t stream) {
  AtomicAddArgs a{make_block_tiling(p, v, kTileEntries, AtomicAddTiles::kBlocksPerSm, device), p, fp32_out};
  a.prefetch = !fp32_out && p.rows * p.columns() * element_size(p.dtype) > device.l2_bytes;
  return dispatch(p.dtype, [&](auto type) {
    using T = decltype(type);
    return dispatch_width<T, kWidestRed<T>>(v, [&](auto width) {
      constexpr int V = decltype(width)::value, kLoads = V > 1 && V == kWidestRed<T> ? 4 : 8;  // in flight: of 16 bytes, or narrower
      atomic_add_kernel<T, V, kLoads><<<unsigned(a.row_blocks * a.column_blocks), kThreads, 0, stream>>>(a);
      return cudaGetLastError();
    });
  });
}

// The same problem with a dense [rows][columns] in the place of out.
Params onto_dense(const Params& p) {
  Params q = p;
  int64_t stride = 1;
  for (int d = p.n_dims - 1; d >= 0; --d) {
    q.dims[d].out_stride = stride;
    stride *= p.dims[d].size;
  }
  q.out_row_stride = stride;
  return q;
}

}  // namespace

cudaError_t launch_atomic_add(const Params& p, const Device& device, cudaStream_t stream) {
  const int v = atomic_add_width(p);
  if (wide_row_atomic_add_fits(p, v)) return launch_wide_row_atomic_add(p, v, device, stream);
  if (small_atomic_add_fits(p, v, device)) return launch_small_atomic_add(p, v, stream);
  return launch_tiled(p, v, nullptr, device, stream);
}

cudaError_t launch_atomic_add_fp32(const Params& p, void* workspace, const Device& device, cudaStream_t stream) {
  if (cudaError_t error = cudaMemsetAsync(workspace, 0, atomic_add_fp32_bytes(p), stream); error != cudaSuccess) return error;
  auto* const sums = static_cast<float*>(workspace);
  const cudaError_t error = launch_tiled(onto_dense(p), vector_width(p, false), sums, device, stream);
  return error == cudaSuccess ? combine_partials(p, sums, 1, device, stream) : error;
}

}  // namespace fusebackend::index_add
