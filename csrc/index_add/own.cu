// kOwn: few entries, wide slices. A block sorts the entries by itself; each thread owns columns of out, which it reads and writes once a run of
// equal rows, with plain loads and stores. Deterministic, and so of use to floats only.
#include "dispatch.cuh"
#include "twosum.cuh"

namespace fusebackend::accumulate {
namespace {

template <typename T>
struct OwnArgs {
  Params p;
  int64_t columns;  // of V elements
  unsigned column_blocks;  // that run side by side
  int per_split;           // entries of a block
};

template <typename T, int V, int U>
__global__ void __launch_bounds__(kThreads) own_kernel(const __grid_constant__ OwnArgs<T> a) {
  using A = Acc<T>;
  __shared__ int64_t row[kMaxOwn], from[kMaxOwn], unsorted[kMaxOwn];
  __shared__ A scale[kMaxOwn];
  static_assert(kMaxOwn <= kThreads);
  const Params& p = a.p;
  const int k = threadIdx.x, n = int(p.n);
  if (k < n) unsorted[k] = target_row(p, load_index(p.index, k));
  __syncthreads();
  if (k < n) {  // each thread finds its entry's rank
    const int64_t mine = unsorted[k];
    int rank = 0;
    for (int j = 0; j < n; ++j) rank += unsorted[j] < mine || (unsorted[j] == mine && j < k);
    row[rank] = mine;
    from[rank] = p.source_index.data ? checked_row(load_index(p.source_index, k), p.source_rows, p.source_wraps) : k;
    scale[rank] = A(p.alpha) * (p.weight.data ? widen<A>(static_cast<const T*>(p.weight.data)[k * p.weight.stride]) : A(1));
  }
  __syncthreads();
  // The runs that begin in this block's share; entries that are left out come first.
  const unsigned split = blockIdx.x / a.column_blocks;
  int begin = split * a.per_split, end = min(n, begin + a.per_split);
  while (begin < end && (row[begin] < 0 || (begin > 0 && row[begin] == row[begin - 1]))) ++begin;
  if (begin >= end) return;
  while (end < n && row[end] == row[end - 1]) ++end;

  for (int64_t column = int64_t(blockIdx.x % a.column_blocks) * kThreads + threadIdx.x; column < a.columns;
       column += int64_t(a.column_blocks) * kThreads) {
    int64_t out_offset, source_offset;
    column_offsets<V>(p, column, out_offset, source_offset);
    T* const out = static_cast<T*>(p.out) + out_offset;
    const T* const source = static_cast<const T*>(p.source) + source_offset;
    Sum<T> sum[V];
    auto flush = [&](int64_t to) {
      write_sums<T, V>(out + to * p.out_row_stride, sum);
    };
    for (int k0 = begin; k0 < end; k0 += U) {
      Vec<T, V> v[U], held[U];
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int e = min(k0 + u, end - 1);
        v[u] = load_once<T, V>(source + from[e] * p.source_row_stride);
        if (e == begin || row[e] != row[e - 1]) held[u] = *reinterpret_cast<const Vec<T, V>*>(out + row[e] * p.out_row_stride);
      }
#pragma unroll
      for (int u = 0; u < U; ++u) {
        const int e = k0 + u;
        if (e >= end) break;
        if (e == begin || row[e] != row[e - 1]) {
          if (e > begin) flush(row[e - 1]);
#pragma unroll
          for (int i = 0; i < V; ++i) sum[i] = {}, sum[i].add(widen<A>(held[u].v[i]));
        }
        const A factor = scale[e];
#pragma unroll
        for (int i = 0; i < V; ++i) sum[i].add(widen<A>(v[u].v[i]) * factor);
      }
    }
    flush(row[end - 1]);
  }
}

}  // namespace

cudaError_t launch_own(const Params& p, const Device& device, cudaStream_t stream) {
  constexpr int64_t kAtOnce = 4, kBlocksPerSm = 4;
  const int v = vector_width(p, true);
  const int64_t columns = p.columns() / v, running = int64_t(device.sm_count) * kBlocksPerSm;
  const int64_t column_blocks = std::min(ceil_div(columns, kThreads), running);
  const int64_t splits = std::min(ceil_div(p.n, kAtOnce), std::max<int64_t>(running / column_blocks, 1)), per_split = ceil_div(p.n, splits);
  const unsigned blocks = unsigned(column_blocks * ceil_div(p.n, per_split));
  return dispatch_floating(p.dtype, [&](auto type) {
    using T = decltype(type);
    const OwnArgs<T> a{p, columns, unsigned(column_blocks), int(per_split)};
    if (v == kWide<T>) own_kernel<T, kWide<T>, kAtOnce><<<blocks, kThreads, 0, stream>>>(a);
    if constexpr (kHalf<T>)
      if (v == 2) own_kernel<T, 2, kAtOnce><<<blocks, kThreads, 0, stream>>>(a);
    if (v == 1) own_kernel<T, 1, kAtOnce><<<blocks, kThreads, 0, stream>>>(a);
    return cudaGetLastError();
  });
}

}  // namespace fusebackend::accumulate
