// Adds partial sums up, and what out starts from: rounded once.
#include "index_add/combine_partials.cuh"

#include "common/programmatic_launch.cuh"
#include "index_add/compensated_sum.cuh"
#include "index_add/dispatch.cuh"

namespace fusebackend::index_add {
namespace {

constexpr int kManySplitsThreads = 32;  // that share the partial sums of an element, where these are many

template <typename T, int kSharing>  // threads that share an element's partial sums
__global__ void __launch_bounds__(kThreads) combine_partials_kernel(const __grid_constant__ Params p, const Acc<T>* partial,
                                                                    int64_t splits, int64_t columns, const OverflowRows rows) {
  using A = Acc<T>;
  constexpr int kElements = kThreads / kSharing;
  const int64_t total = p.rows * columns, at = int64_t(blockIdx.x) * kElements + threadIdx.x % kElements, row = quotient(at, columns);
  wait_for_previous_kernel();
  if (kSharing == 1 && (at >= total || !rows.any() || !rows.has(row))) return;
  const bool writes = at < total && threadIdx.x < kElements;
  int64_t out = 0, source;
  T held{};
  if (writes) {
    column_offsets<1>(p, at - row * columns, out, source);
    out += row * p.out_row_stride;
    if (p.initial) held = static_cast<const T*>(p.initial)[out];  // loaded beside the partial sums, not after them
  }
  Sum<T> sum{};
  constexpr int kLoads = kSharing > 1 ? 12 : 1;  // in flight
  for (int64_t s = threadIdx.x / kElements; at < total && s < splits; s += kSharing * kLoads) {
    A x[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) x[u] = s + u * kSharing < splits ? partial[(s + u * kSharing) * total + at] : A(0);
#pragma unroll
    for (int u = 0; u < kLoads; ++u) sum.add(x[u]);
  }
  if constexpr (kSharing > 1) {
    __shared__ Sum<T> sums[kThreads / 32][kElements];
#pragma unroll
    for (int step = kElements; step < 32; step *= 2) sum.add_other_lane(~0u, step);
    if (threadIdx.x % 32 < kElements) sums[threadIdx.x / 32][threadIdx.x % 32] = sum;
    __syncthreads();
    if (writes)
#pragma unroll
      for (int w = 1; w < kThreads / 32; ++w) sum.add(sums[w][threadIdx.x]);
  }
  if (!writes) return;
  if (p.initial) sum.add(widen<A>(held));
  static_cast<T*>(p.out)[out] = narrow<T>(sum.total());
}

}  // namespace

cudaError_t combine_partials(const Params& p, const void* partial, int64_t splits, const Device& device, cudaStream_t stream,
                             const OverflowRows& rows) {
  const int64_t columns = p.columns(), total = p.rows * columns;
  return dispatch(p.dtype, [&](auto type) {
    using T = decltype(type);
    const bool few = splits <= 4 && has_vector_red(p.dtype);  // other types come with many splits only
    auto kernel = combine_partials_kernel<T, kManySplitsThreads>;
    if constexpr (kWidestRed<T> > 1)
      if (few) kernel = combine_partials_kernel<T, 1>;
    const unsigned blocks = unsigned(ceil_div(total, few ? kThreads : kThreads / kManySplitsThreads));
    return launch_dependent(kernel, blocks, kThreads, 0, device.has_dependent_launch(), stream, p, static_cast<const Acc<T>*>(partial),
                            splits, columns, rows);
  });
}

}  // namespace fusebackend::index_add
