// The gradient of a bias that several heads share, for any length: a thread block computes a tile of 128 queries and 64 keys, and adds up what
// one head after another contributes, in registers.
#include "attention/flash.cuh"
#include "attention/launchers.h"
#include "attention/score_gradient.cuh"

namespace fusebackend::attention {
namespace {

template <int kD>
struct FlashBackwardBias {
  static constexpr int kTiles = kD == 128 ? 1 : 2, kWarps = 4, kThreads = 32 * kWarps, kQueries = 16 * kTiles * kWarps;
  static constexpr int kQueryTile = Tile<kD>::bytes(kQueries), kKeyTile = Tile<kD>::bytes(kKeys);
  static constexpr int kQ = 0, kGrad = kQueryTile, kK = 2 * kQueryTile, kV = kK + kKeyTile, kStage = kV + kKeyTile;
  static constexpr int kStages = kD == 128 ? 1 : 2, kBytes = kStages * kStage;
};

template <typename T, int kD>
__global__ __launch_bounds__(FlashBackwardBias<kD>::kThreads, kD == 128 ? 1 : 2) void attention_flash_backward_bias(
    const __grid_constant__ Arguments a, uint32_t query_tiles, uint32_t key_tiles) {
  using Layout = FlashBackwardBias<kD>;
  using Queries = Tile<kD>;
  using Keys = Tile<kD, Order::kByVector>;
  constexpr int kTiles = Layout::kTiles;
  extern __shared__ __align__(128) char shared[];
  const uint32_t shared0 = shared_address(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const int key = blockIdx.x % key_tiles * kKeys, first = blockIdx.x / key_tiles % query_tiles * Layout::kQueries;
  const uint32_t share = blockIdx.x / key_tiles / query_tiles;  // of the heads
  const uint32_t kept = share / a.chunks * a.inner;
  const uint32_t begin = kept + share % a.chunks * a.per_block, end = min(begin + a.per_block, kept + a.inner);
  const int first_row = 16 * kTiles * warp, t = first + first_row + g;

  const auto copy = [&](uint32_t head, int stage) {
    const HeadIndex index(a, head);
    const uint32_t to = shared0 + stage * Layout::kStage;
    Queries::template load<Layout::kQueries, Layout::kThreads>(to + Layout::kQ, rows_of<const T>(a.q, index), a.q.row, first, a.t, a.d);
    Queries::template load<Layout::kQueries, Layout::kThreads>(to + Layout::kGrad, rows_of<const T>(a.grad, index), a.grad.row, first, a.t, a.dv);
    Keys::template load<kKeys, Layout::kThreads>(to + Layout::kK, rows_of<const T>(a.k, index), a.k.row, key, a.s, a.d);
    Keys::template load<kKeys, Layout::kThreads>(to + Layout::kV, rows_of<const T>(a.v, index), a.v.row, key, a.s, a.dv);
  };
  float sum[kTiles][8][4] = {};
  if (!a.causal || key < first + Layout::kQueries) {
    copy(begin, 0);
    cp_async_commit();
    RowBiases<T, kTiles> biases;
    for (uint32_t head = begin; head < end; ++head) {
      const int stage = Layout::kStages == 2 ? (head - begin) & 1 : 0;
      const HeadIndex index(a, head);
      biases.prefetch(a, index, t, key + 8 * c);
      const QueryRows<kTiles> rows(a, index, t);
      cp_async_wait<0>();
      __syncthreads();
      if (Layout::kStages == 2 && head + 1 < end) copy(head + 1, stage ^ 1);
      cp_async_commit();
      const uint32_t from = shared0 + stage * Layout::kStage;
      float ds[kTiles][8][4];
      score_gradient<T, kD>(ds, a, index, biases, rows, from + Layout::kQ, from + Layout::kGrad, first_row, from + Layout::kK,
                            from + Layout::kV, t, first, key);
      if (Layout::kStages == 1 && head + 1 < end) {
        __syncthreads();
        copy(head + 1, 0);
        cp_async_commit();
      }
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[m][j][e] += ds[m][j][e];
    }
  }
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int query = t + 16 * m + e / 2 * 8, s = key + row_of<Order::kByVector>(j, 2 * c + e % 2);
        if (query < a.t && s < a.s) store_bias_gradient<T>(a, share, query, s, sum[m][j][e]);
      }
}

template <typename T, int kD>
cudaError_t launch(const Arguments& a, const HeadPlan& plan, cudaStream_t stream) {
  using Layout = FlashBackwardBias<kD>;
  const auto kernel = attention_flash_backward_bias<T, kD>;
  static SharedMemoryOptIn opt_in;
  if (const cudaError_t error = opt_in.ensure(kernel, Layout::kBytes); error != cudaSuccess) return error;
  const int64_t query_tiles = ceil_div(a.t, Layout::kQueries), key_tiles = ceil_div(a.s, kKeys), blocks = query_tiles * key_tiles * plan.blocks();
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  kernel<<<unsigned(blocks), Layout::kThreads, Layout::kBytes, stream>>>(a, uint32_t(query_tiles), uint32_t(key_tiles));
  return cudaGetLastError();
}

template <typename T>
cudaError_t launch_dim(const Arguments& a, const Backward& p, const HeadPlan& plan, cudaStream_t stream) {
  const int64_t d = std::max(p.size.d, p.size.dv);
  if (d <= 32) return launch<T, 32>(a, plan, stream);
  if (d <= 64) return launch<T, 64>(a, plan, stream);
  return launch<T, 128>(a, plan, stream);
}

}  // namespace

cudaError_t launch_flash_backward_bias(const Arguments& a, const Backward& p, const HeadPlan& plan, cudaStream_t stream) {
  return p.dtype == DType::kBFloat16 ? launch_dim<__nv_bfloat16>(a, p, plan, stream) : launch_dim<__half>(a, p, plan, stream);
}

}  // namespace fusebackend::attention
