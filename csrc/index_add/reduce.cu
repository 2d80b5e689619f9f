// kReduce and kWide: vector reductions straight into out, or, for kWide, into an fp32 copy of it. Runs of equal rows are summed in registers
// first.
#include "finish.cuh"
#include "walk.cuh"

namespace fusebackend::accumulate {
namespace {

constexpr int kReduceEntries = 512;      // that a block stages at once
constexpr int64_t kNowhere = INT64_MIN;  // the offset of an entry that is to be ignored

struct ReduceArgs : Walk {
  Params p;
  float* scratch;  // the fp32 copy of out, laid out as p says; nullptr: out itself
  bool prefetch;   // out is larger than the L2 cache
};

template <typename T, int V, int U>
__global__ void __launch_bounds__(kThreads, sizeof(Acc<T>) == 8 ? 2 : 4) reduce_kernel(const __grid_constant__ ReduceArgs a) {
  using A = Acc<T>;
  struct alignas(16) Entry {
    int64_t to, from;  // offsets of the entry's row in out, or kNowhere, and in source
  };
  __shared__ Entry staged[kReduceEntries];
  __shared__ A scales[kReduceEntries];
  const Params& p = a.p;
  const unsigned row_block = blockIdx.x / unsigned(a.column_blocks), column_block = blockIdx.x % unsigned(a.column_blocks);
  const int group = threadIdx.x / unsigned(a.block_columns);
  const int64_t column = int64_t(column_block) * a.block_columns + threadIdx.x % unsigned(a.block_columns);
  const bool active = group < a.groups && column < a.columns, scaled = p.weight.data || p.alpha != 1.0;
  const int tile_entries = a.groups * a.per_group, step = a.interleave ? a.groups : 1;

  int64_t out_offset = 0, source_offset = 0;
  if (active) column_offsets<V>(p, column, out_offset, source_offset);
  T* const out = static_cast<T*>(p.out) + out_offset;
  const T* const source = static_cast<const T*>(p.source) + source_offset;

  int64_t current = kNowhere;
  A sum[V];
  auto flush = [&] {
    if constexpr (kHalf<T>)
      if (a.scratch) return red_vector(a.scratch + out_offset + current, sum);
    red_vector(out + current, sum);
  };
  for (int64_t t = row_block; t < a.tiles; t += a.row_blocks) {
    const int64_t first = t * tile_entries;
    const int count = int(min(int64_t(tile_entries), p.n - first));
    __syncthreads();
    for (int k = threadIdx.x; k < count; k += kThreads) {
      const int64_t n = first + k, row = target_row(p, load_index(p.index, n));
      const int64_t from = p.source_index.data ? checked_row(load_index(p.source_index, n), p.source_rows, p.source_wraps) : n;
      staged[k] = {row < 0 ? kNowhere : row * p.out_row_stride, from * p.source_row_stride};
      if (scaled) scales[k] = A(p.alpha) * (p.weight.data ? widen<A>(static_cast<const T*>(p.weight.data)[n * p.weight.stride]) : A(1));
    }
    __syncthreads();
    if (!active) continue;
    const int begin = a.interleave ? group : group * a.per_group, end = a.interleave ? count : min(count, begin + a.per_group);

    // U entries: all loads, then all sums. Past the end the last entry is loaded again, so that no load waits for a branch.
    auto batch = [&](int k0, auto whole) {
      Entry entry[U];
      Vec<T, V> v[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        entry[u] = staged[whole ? k0 + u * step : min(k0 + u * step, end - 1)];
        v[u] = p.source_index.data ? load_again<T, V>(source + entry[u].from) : load_once<T, V>(source + entry[u].from);
        // Reductions are slow on lines that the L2 cache does not hold: a run's first entry fetches them beside the source.
        const bool first_of_run = entry[u].to != (u ? entry[u - 1].to : current);
        if (a.prefetch && first_of_run && entry[u].to != kNowhere) asm volatile("prefetch.global.L2 [%0];" ::"l"(out + entry[u].to));
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
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
          const A x = scaled ? widen<A>(v[u].v[i]) * scale : widen<A>(v[u].v[i]);
          sum[i] = same ? sum[i] + x : x;
        }
      }
    };
    int k0 = begin;
    for (; k0 + (U - 1) * step < end; k0 += U * step) batch(k0, std::true_type());
    if (k0 < end) batch(k0, std::false_type());
  }
  if (active && current != kNowhere) flush();
}

// Four 16-byte loads or eight narrower ones in flight a thread.
cudaError_t walk(const Params& p, int v, float* scratch, const Device& device, cudaStream_t stream) {
  constexpr int kBlocksPerSm = 4;
  ReduceArgs a{make_walk(p, v, kReduceEntries, kBlocksPerSm, device), p, scratch};
  a.prefetch = !scratch && p.rows * p.columns() * element_size(p.dtype) > device.l2_bytes;
  return dispatch(p.dtype, [&](auto type) {
    using T = decltype(type);
    auto kernel = reduce_kernel<T, 1, 8>;
    if constexpr (kReduced<T> > 1)
      if (v == kReduced<T>) kernel = reduce_kernel<T, kReduced<T>, 4>;
    if constexpr (kHalf<T>)
      if (v == 2) kernel = reduce_kernel<T, 2, 8>;
    kernel<<<unsigned(a.row_blocks * a.column_blocks), kThreads, 0, stream>>>(a);
    return cudaGetLastError();
  });
}

// The same slice as p, laid out [rows][columns] in a replacement of out.
Params onto_scratch(const Params& p) {
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

cudaError_t launch_reduce(const Params& p, const Device& device, cudaStream_t stream) {
  const int v = has_vector_reds(p.dtype) ? vector_width(p, true) : 1;
  if (rows_fit(p, v)) return launch_rows(p, v, device, stream);
  if (flat_fits(p, v, device)) return launch_flat(p, v, stream);
  return walk(p, v, nullptr, device, stream);
}

size_t wide_bytes(const Params& p) { return size_t(p.rows) * p.columns() * sizeof(float); }

cudaError_t launch_wide(const Params& p, void* workspace, const Device& device, cudaStream_t stream) {
  if (cudaError_t error = cudaMemsetAsync(workspace, 0, wide_bytes(p), stream); error != cudaSuccess) return error;
  auto* const scratch = static_cast<float*>(workspace);
  const cudaError_t error = walk(onto_scratch(p), vector_width(p, false), scratch, device, stream);
  return error == cudaSuccess ? finish(p, scratch, 1, device, stream) : error;
}

}  // namespace fusebackend::accumulate
