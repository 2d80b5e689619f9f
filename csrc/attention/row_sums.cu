// Of each query, what the backward kernels need (RowSums): the logarithm of its sum, and the sum of grad * out. A thread block computes a tile
// of kRowSumTile queries of a head, four lanes a query.
#include "attention/fragments.cuh"
#include "attention/heads.cuh"
#include "attention/launchers.h"
#include "common/programmatic_launch.cuh"

namespace fusebackend::attention {
namespace {

constexpr int kLanes = 4;  // of a query

template <typename T>
__global__ __launch_bounds__(kLanes * kRowSumTile) void attention_row_sums(const __grid_constant__ Arguments a, uint32_t tiles) {
  launch_dependents();
  const HeadIndex index(a, blockIdx.x / tiles);
  const int tile = blockIdx.x % tiles, t = tile * kRowSumTile + threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
  const T *grad = rows_of<const T>(a.grad, index) + int64_t(t) * a.grad.row, *out = rows_of<const T>(a.out, index) + int64_t(t) * a.out.row;
  float log2_sum = INFINITY, delta = 0;  // of queries that do not exist: their probabilities are 0
  bool large = false, special = false;
  if (t < a.t) {
    const float2 s = __ldg(index.statistics(a) + t);
    const float log_sum = unmarked(s.y);
    large = is_large(s.x);
    special = large || !has_score_gradients(s.y);
    log2_sum = (large ? log_sum : s.x + log_sum) * kLog2e;
    for (int i = lane; i < a.dv / 8; i += kLanes) {
      const uint4 x = __ldg(reinterpret_cast<const uint4*>(grad) + i), y = __ldg(reinterpret_cast<const uint4*>(out) + i);
      const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const float2 u = Half2<T>::unpack(xs[w]), v = Half2<T>::unpack(ys[w]);
        delta = fmaf(u.x, v.x, fmaf(u.y, v.y, delta));
      }
    }
  }
  delta = quad_sum(delta);
  if (lane == 0) {
    RowSums& sums = const_cast<RowSums*>(index.row_sums(a))[t / kRowSumQueries];
    sums.log2_sum[t % kRowSumQueries] = log2_sum, sums.delta[t % kRowSumQueries] = delta;
  }
  const bool any_special = __syncthreads_or(special);
  if (threadIdx.x == 0) const_cast<int*>(a.special_tiles)[index.head(a) * tiles + tile] = any_special;
}

}  // namespace

cudaError_t launch_row_sums(const Arguments& a, DType dtype, int64_t heads, cudaStream_t stream) {
  const int64_t tiles = a.padded_t / kRowSumTile, blocks = tiles * heads;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  if (dtype == DType::kBFloat16) attention_row_sums<__nv_bfloat16><<<unsigned(blocks), kLanes * kRowSumTile, 0, stream>>>(a, uint32_t(tiles));
  else attention_row_sums<__half><<<unsigned(blocks), kLanes * kRowSumTile, 0, stream>>>(a, uint32_t(tiles));
  return cudaGetLastError();
}

}  // namespace fusebackend::attention
