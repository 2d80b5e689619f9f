// kAtomicAdd of few entries, where launching takes most of the time: a thread for each vector of each entry. As little code and as few
// parameters as possible, since neither is in the caches when the kernel starts.
#include "index_add/dispatch.cuh"
#include "index_add/red.cuh"
#include "index_add/routes.h"

namespace fusebackend::index_add {
namespace {

template <typename T>
struct SmallArgs {
  // Read by every kernel
  T* out;
  const T* source;
  EntryVector index;
  int64_t rows, out_row_stride, source_row_stride;
  FastDiv columns;   // vectors of an entry
  uint32_t vectors;  // of all entries
  int out_stride, source_stride;
  Bounds bounds;
  // and by those that are not plain (Params::is_plain).
  bool has_ignore;
  float alpha;
  int64_t ignore, source_rows;
  bool source_wraps;
  const T* weight;
  EntryVector source_index;
};

template <typename T, int V, bool kPlain>
__global__ void __launch_bounds__(kThreads) atomic_add_small_kernel(const __grid_constant__ SmallArgs<T> a) {
  using A = Acc<T>;
  const uint32_t i = blockIdx.x * kThreads + threadIdx.x;
  if (i >= a.vectors) return;
  uint32_t n, c;
  a.columns.divmod(i, n, c);
  const int64_t index = load_index(a.index, n);
  int64_t from = n;
  A scale = A(1);
  if constexpr (!kPlain) {
    if (a.source_index.data) from = checked_row(load_index(a.source_index, n), a.source_rows, a.source_wraps);
    scale = A(a.alpha);
    if (a.weight) scale *= widen<A>(a.weight[n]);
  }
  const Vec<T, V> v = load_source<T, V>(a.source + from * a.source_row_stride + int64_t(c) * V * a.source_stride, true);
  const int64_t row = kPlain ? checked_row(index, a.rows, a.bounds == Bounds::kWrap) : target_row(a, index);
  if (!kPlain && row < 0) return;
  A sum[V];
#pragma unroll
  for (int e = 0; e < V; ++e) sum[e] = kPlain ? widen<A>(v.v[e]) : product(widen<A>(v.v[e]), scale);
  red_vector(a.out + row * a.out_row_stride + int64_t(c) * V * a.out_stride, sum);
}

}  // namespace

cudaError_t launch_small_atomic_add(const Params& p, int v, cudaStream_t stream) {
  const uint32_t columns = uint32_t(p.columns() / v), vectors = uint32_t(p.n) * columns;
  return dispatch(p.dtype, [&](auto type) {
    using T = decltype(type);
    const SmallArgs<T> a{static_cast<T*>(p.out), static_cast<const T*>(p.source), p.index, p.rows, p.out_row_stride, p.source_row_stride,
                         FastDiv(columns), vectors, int(p.dims[0].out_stride), int(p.dims[0].source_stride), p.bounds,
                         p.has_ignore, float(p.alpha), p.ignore, p.source_rows, p.source_wraps, static_cast<const T*>(p.weight.data),
                         p.source_index};
    return dispatch_width<T, kWidestRed<T>>(v, [&](auto width) {
      const auto kernel = p.is_plain() ? atomic_add_small_kernel<T, width, true> : atomic_add_small_kernel<T, width, false>;
      kernel<<<unsigned(ceil_div(vectors, kThreads)), kThreads, 0, stream>>>(a);
      return cudaGetLastError();
    });
  });
}

}  // namespace fusebackend::index_add
