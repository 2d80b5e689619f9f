// The second kernel of the routes that sum into scratch: brings the partial sums and what out starts from together, rounded once.
#pragma once

#include "dispatch.cuh"
#include "left.cuh"
#include "overlap.cuh"
#include "twosum.cuh"

namespace fusebackend::accumulate {

constexpr int kSharing = 32;  // threads that share the partial sums of an element

// out[row, column] = initial + sum over splits of partial[split][row][column], rounded once. kSplits threads share an element's splits.
template <typename T, int kSplits>
__global__ void __launch_bounds__(kThreads) finish_kernel(const __grid_constant__ Params p, const Acc<T>* partial, int64_t splits,
                                                          int64_t columns, const LeftOver left) {
  using A = Acc<T>;
  __shared__ Sum<T> sums[kThreads];
  constexpr int kElements = kThreads / kSplits;
  const int64_t total = p.rows * columns, at = int64_t(blockIdx.x) * kElements + threadIdx.x % kElements;
  wait_for_previous_kernel();
  if (kSplits == 1 && (at >= total || !left.any() || !left.has(at / columns))) return;
  Sum<T> sum{};
  if (at < total)
#pragma unroll 8
    for (int64_t s = threadIdx.x / kElements; s < splits; s += kSplits) sum.add(partial[s * total + at]);
  if constexpr (kSplits > 1) {
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x >= kElements) return;
    sum = {};
#pragma unroll
    for (int s = 0; s < kSplits; ++s) sum.add(sums[s * kElements + threadIdx.x]);
  }
  if (at >= total) return;
  const int64_t row = at / columns;
  int64_t out, source;
  column_offsets<1>(p, at - row * columns, out, source);
  out += row * p.out_row_stride;
  if (p.initial) sum.add(widen<A>(static_cast<const T*>(p.initial)[out]));
  static_cast<T*>(p.out)[out] = narrow<T>(sum.total());
}

// Set up while the kernel before it runs, where the architecture can do that: it waits by itself.
template <typename T>
cudaError_t finish(const Params& p, const Acc<T>* partial, int64_t splits, const Device& device, cudaStream_t stream, const LeftOver& left = {}) {
  const int64_t columns = p.columns(), total = p.rows * columns;
  const unsigned blocks = unsigned(ceil_div(total, splits > 4 ? kThreads / kSharing : kThreads));
  if (splits > 4) return launch_overlapped(finish_kernel<T, kSharing>, blocks, kThreads, 0, device.major, stream, p, partial, splits, columns, left);
  return launch_overlapped(finish_kernel<T, 1>, blocks, kThreads, 0, device.major, stream, p, partial, splits, columns, left);
}

}  // namespace fusebackend::accumulate
