// The second kernel of the routes that sum into scratch: brings the partial sums and what out starts from together, rounded once.
#include "finish.cuh"
#include "overlap.cuh"
#include "twosum.cuh"

namespace fusebackend::accumulate {
namespace {

constexpr int kSharing = 32;  // threads that share the partial sums of an element

// out[row, column] = initial + sum over splits of partial[split][row][column], rounded once. kSplits threads share an element's splits.
template <typename T, int kSplits>
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ Params p, const Acc<T>* partial, int64_t splits,
                                                          int64_t columns, const LeftOver left) {
  using A = Acc<T>;
  constexpr int kElements = kThreads / kSplits;
  const int64_t total = p.rows * columns, at = int64_t(blockIdx.x) * kElements + threadIdx.x % kElements, row = quotient(at, columns);
  wait_for_previous_kernel();
  if (kSplits == 1 && (at >= total || !left.any() || !left.has(row))) return;
  const bool writes = at < total && threadIdx.x < kElements;
  int64_t out = 0, source;
  T held{};
  if (writes) {
    column_offsets<1>(p, at - row * columns, out, source);
    out += row * p.out_row_stride;
    if (p.initial) held = static_cast<const T*>(p.initial)[out];  // beside the partial sums, not after them
  }
  Sum<T> sum{};
  constexpr int U = kSplits > 1 ? 12 : 1;  // loads in flight
  for (int64_t s = threadIdx.x / kElements; at < total && s < splits; s += kSplits * U) {
    A x[U];
#pragma unroll
    for (int u = 0; u < U; ++u) x[u] = s + u * kSplits < splits ? partial[(s + u * kSplits) * total + at] : A(0);
#pragma unroll
    for (int u = 0; u < U; ++u) sum.add(x[u]);
  }
  if constexpr (kSplits > 1) {
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

cudaError_t finish(const Params& p, const void* partial, int64_t splits, const Device& device, cudaStream_t stream, const LeftOver& left) {
  const int64_t columns = p.columns(), total = p.rows * columns;
  return dispatch(p.dtype, [&](auto type) {
    using T = decltype(type);
    const bool alone = splits <= 4 && has_vector_reds(p.dtype);  // others have no single sums, so they do without that kernel
    auto kernel = finish_kernel<T, kSharing>;
    if constexpr (kReduced<T> > 1)
      if (alone) kernel = finish_kernel<T, 1>;
    const unsigned blocks = unsigned(ceil_div(total, alone ? kThreads : kThreads / kSharing));
    return launch_overlapped(kernel, blocks, kThreads, 0, device.major, stream, p, static_cast<const Acc<T>*>(partial), splits, columns, left);
  });
}

}  // namespace fusebackend::accumulate
