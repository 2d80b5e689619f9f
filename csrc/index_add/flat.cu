// Small work, where launching is most of the time: a thread for each piece of each entry, straight into out. As little code and as few
// parameters as will do, since neither is in the caches when the kernel starts.
#include "dispatch.cuh"
#include "launch.h"

namespace fusebackend::accumulate {
namespace {

constexpr int kFlatThreads = 256;

template <typename T>
struct FlatArgs {
  // Read by every kernel
  T* out;
  const T* source;
  RowVector index;
  int64_t rows, out_row_stride, source_row_stride;
  FastDiv columns;
  uint32_t pieces;
  int out_stride, source_stride;
  Bounds bounds;
  // and by those that are not plain.
  bool has_ignore;
  float alpha;
  int64_t ignore, source_rows;
  bool source_wraps;
  const T* weight;
  RowVector source_index;
};

// kPlain: no weight, alpha, gather or padding.
template <typename T, int V, bool kPlain>
__global__ void __launch_bounds__(kFlatThreads) flat_kernel(const __grid_constant__ FlatArgs<T> a) {
  using A = Acc<T>;
  const uint32_t i = blockIdx.x * kFlatThreads + threadIdx.x;
  if (i >= a.pieces) return;
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
  const Vec<T, V> v = load_again<T, V>(a.source + from * a.source_row_stride + int64_t(c) * V * a.source_stride);
  const int64_t row = kPlain ? checked_row(index, a.rows, a.bounds == Bounds::kWrap) : target_row(a, index);
  if (!kPlain && row < 0) return;
  A sum[V];
#pragma unroll
  for (int e = 0; e < V; ++e) sum[e] = kPlain ? widen<A>(v.v[e]) : widen<A>(v.v[e]) * scale;
  red_vector(a.out + row * a.out_row_stride + int64_t(c) * V * a.out_stride, sum);
}

template <typename T, int V>
cudaError_t launch_instance(const Params& p, cudaStream_t stream) {
  const uint32_t columns = uint32_t(p.columns() / V), pieces = uint32_t(p.n) * columns;
  const FlatArgs<T> a{static_cast<T*>(p.out), static_cast<const T*>(p.source), p.index, p.rows, p.out_row_stride, p.source_row_stride,
                      FastDiv(columns), pieces, int(p.dims[0].out_stride), int(p.dims[0].source_stride), p.bounds,
                      p.has_ignore, float(p.alpha), p.ignore, p.source_rows, p.source_wraps, static_cast<const T*>(p.weight.data), p.source_index};
  const bool plain = !p.weight.data && p.alpha == 1.0 && !p.source_index.data && !p.has_ignore && p.bounds != Bounds::kDrop;
  const unsigned blocks = unsigned(ceil_div(pieces, kFlatThreads));
  const auto kernel = plain ? flat_kernel<T, V, true> : flat_kernel<T, V, false>;
  kernel<<<blocks, kFlatThreads, 0, stream>>>(a);
  return cudaGetLastError();
}

}  // namespace

bool flat_fits(const Params& p, int v, const Device& device) {
  // Nothing is summed before it is reduced here, so many entries, which might all meet in one row, are left to the walk.
  constexpr int64_t kMaxEntries = 4096, kPiecesPerSm = 4096, kMaxStride = 1 << 30, kExactInFloat = 1 << 24;
  return p.n_dims == 1 && p.n <= kMaxEntries && p.n * p.columns() / v <= device.sm_count * kPiecesPerSm && p.dims[0].out_stride < kMaxStride &&
         p.dims[0].source_stride < kMaxStride && p.weight.stride == 1 && double(float(p.alpha)) == p.alpha &&
         (is_floating(p.dtype) || (p.alpha >= -kExactInFloat && p.alpha <= kExactInFloat));
}

cudaError_t launch_flat(const Params& p, int v, cudaStream_t stream) {
  return dispatch(p.dtype, [&](auto type) {
    using T = decltype(type);
    if constexpr (kReduced<T> > 1)
      if (v == kReduced<T>) return launch_instance<T, kReduced<T>>(p, stream);
    if constexpr (kHalf<T>)
      if (v == 2) return launch_instance<T, 2>(p, stream);
    return launch_instance<T, 1>(p, stream);
  });
}

}  // namespace fusebackend::accumulate
