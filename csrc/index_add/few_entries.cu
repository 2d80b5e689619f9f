// kFewEntries: few entries, wide rows. Every block sorts all entries; each thread then reads and writes its columns of out once for each
// run of entries of one row, with plain loads and stores. Deterministic, which only floats need.
#include "index_add/compensated_sum.cuh"
#include "index_add/dispatch.cuh"
#include "index_add/routes.h"

namespace fusebackend::index_add {
namespace {

struct FewEntriesArgs {
  Params p;
  int64_t columns;         // of V elements
  unsigned column_blocks;  // that run side by side
  int entries_per_block;
};

template <typename T, int V, int kLoads>
__global__ void __launch_bounds__(kThreads) few_entries_kernel(const __grid_constant__ FewEntriesArgs a) {
  using A = Acc<T>;
  __shared__ int64_t row[kMaxFewEntries], from[kMaxFewEntries], unsorted[kMaxFewEntries];
  __shared__ A scale[kMaxFewEntries];
  static_assert(kMaxFewEntries <= kThreads);
  const Params& p = a.p;
  const int k = threadIdx.x, n = int(p.n);
  if (k < n) unsorted[k] = target_row(p, load_index(p.index, k));
  __syncthreads();
  if (k < n) {  // each thread finds the rank of its entry
    const int64_t mine = unsorted[k];
    int rank = 0;
    for (int j = 0; j < n; ++j) rank += unsorted[j] < mine || (unsorted[j] == mine && j < k);
    row[rank] = mine;
    from[rank] = source_row(p, k);
    scale[rank] = factor_of<T>(p, k);
  }
  __syncthreads();
  // The runs that begin in this block's share; entries that add nothing come first.
  const unsigned share = blockIdx.x / a.column_blocks;
  int begin = share * a.entries_per_block, end = min(n, begin + a.entries_per_block);
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
    auto flush = [&](int64_t to) { write_sums<T, V>(out + to * p.out_row_stride, sum); };
    for (int k0 = begin; k0 < end; k0 += kLoads) {
      Vec<T, V> v[kLoads], held[kLoads];
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        const int e = min(k0 + u, end - 1);
        v[u] = load_source<T, V>(source + from[e] * p.source_row_stride, false);
        if (e == begin || row[e] != row[e - 1]) held[u] = *reinterpret_cast<const Vec<T, V>*>(out + row[e] * p.out_row_stride);
      }
#pragma unroll
      for (int u = 0; u < kLoads; ++u) {
        const int e = k0 + u;
        if (e >= end) break;
        if (e == begin || row[e] != row[e - 1]) {
          if (e > begin) flush(row[e - 1]);
#pragma unroll
          for (int i = 0; i < V; ++i) sum[i] = {}, sum[i].add(widen<A>(held[u].v[i]));
        }
        const A factor = scale[e];
#pragma unroll
        for (int i = 0; i < V; ++i) sum[i].add(product(widen<A>(v[u].v[i]), factor));
      }
    }
    flush(row[end - 1]);
  }
}

}  // namespace

cudaError_t launch_few_entries(const Params& p, const Device& device, cudaStream_t stream) {
  constexpr int kLoads = FewEntriesShape::kLoads;
  const int v = vector_width(p, true);
  const FewEntriesShape s = few_entries_shape(p, device);
  const FewEntriesArgs a{p, s.columns, unsigned(s.column_blocks), int(s.share)};
  return dispatch_floating(p.dtype, [&](auto type) {
    using T = decltype(type);
    return dispatch_width<T>(v, [&](auto width) {
      few_entries_kernel<T, width, kLoads><<<unsigned(s.column_blocks * s.shares), kThreads, 0, stream>>>(a);
      return cudaGetLastError();
    });
  });
}

}  // namespace fusebackend::index_add
