// The gradient of a bias that several heads share, for any length: a thread block computes a tile of 128 queries and 64 keys, and adds up what
// one head after another contributes, in registers.
#pragma once

#include "attention/flash.cuh"
#include "attention/launchers.h"
#include "attention/score_gradient.cuh"

namespace fusebackend::attention {
template <int kD, int kTiles, int kWarps>
struct FlashBackwardBias {
  static constexpr int kThreads = 32 * kWarps, kQueries = 16 * kTiles * kWarps;
  static constexpr int kQueryTile = Tile<kD>::bytes(kQueries), kKeyTile = Tile<kD>::bytes(kKeys);
  static constexpr int kQ = 0, kGrad = kQueryTile, kK = 2 * kQueryTile, kV = kK + kKeyTile, kStage = kV + kKeyTile;
  static constexpr int kStages = kD == 128 ? 1 : 2, kBytes = kStages * kStage;
};

template <typename T, int kD, int kTiles, int kWarps, int kBlocks, template <typename, int, int> typename Products>
__global__ __launch_bounds__(32 * kWarps, kBlocks) void attention_flash_backward_bias(const __grid_constant__ Arguments a, uint32_t query_tiles,
                                                                                      uint32_t key_tiles) {
  using Layout = FlashBackwardBias<kD, kTiles, kWarps>;
  using Rows = Tile<kD>;
  using Product = Products<T, kD, kTiles>;
  extern __shared__ __align__(1024) char shared[];
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
    Rows::template load<Layout::kQueries, Layout::kThreads>(to + Layout::kQ, rows_of<const T>(a.q, index), a.q.row, first, a.t, a.d);
    Rows::template load<Layout::kQueries, Layout::kThreads>(to + Layout::kGrad, rows_of<const T>(a.grad, index), a.grad.row, first, a.t, a.dv);
    Rows::template load<kKeys, Layout::kThreads, Order::kByVector>(to + Layout::kK, rows_of<const T>(a.k, index), a.k.row, key, a.s, a.d);
    Rows::template load<kKeys, Layout::kThreads, Order::kByVector>(to + Layout::kV, rows_of<const T>(a.v, index), a.v.row, key, a.s, a.dv);
  };
  float sum[kTiles][8][4] = {};
  if (!a.causal || key < first + Layout::kQueries) {
    copy(begin, 0);
    cp_async_commit();
    RowBiases<T, kTiles> biases;
    int64_t bias_offset = 0;  // of the bias that is loaded ahead
    for (uint32_t head = begin; head < end; ++head) {
      const int stage = Layout::kStages == 2 ? (head - begin) & 1 : 0;
      const HeadIndex index(a, head);
      const int64_t offset = a.early < 0 ? 0 : index.offset(a.bias[a.early]);
      if (head == begin || offset != bias_offset) {
        biases.set_head(a, index, t, key + 8 * c);
        biases.prefetch(a, key + 8 * c, 0);
      }
      bias_offset = offset;
      const QueryRows<kTiles> rows(a, index, t);
      cp_async_wait<0>();
      Product::publish();
      __syncthreads();
      if (Layout::kStages == 2 && head + 1 < end) copy(head + 1, stage ^ 1);
      cp_async_commit();
      const uint32_t from = shared0 + stage * Layout::kStage;
      float ds[kTiles][8][4];
      score_gradient<Product, false>(ds, a, index, biases, rows, from + Layout::kQ, from + Layout::kGrad, first_row, from + Layout::kK,
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
        const int query = t + 16 * m + e / 2 * 8, s = key + row_at<Order::kByVector>(8 * j + 2 * c + e % 2);
        if (query < a.t && s < a.s) store_bias_gradient<T>(a, share, query, s, sum[m][j][e]);
      }
}

template <typename T, int kD, int kTiles, int kWarps, int kBlocks, template <typename, int, int> typename Products>
cudaError_t launch_flash_backward_bias_as(const Arguments& a, const HeadPlan& plan, cudaStream_t stream) {
  using Layout = FlashBackwardBias<kD, kTiles, kWarps>;
  const auto kernel = attention_flash_backward_bias<T, kD, kTiles, kWarps, kBlocks, Products>;
  static SharedMemoryOptIn opt_in;
  if (const cudaError_t error = opt_in.ensure(kernel, Layout::kBytes); error != cudaSuccess) return error;
  const int64_t query_tiles = ceil_div(a.t, Layout::kQueries), key_tiles = ceil_div(a.s, kKeys), blocks = query_tiles * key_tiles * plan.blocks();
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  kernel<<<unsigned(blocks), Layout::kThreads, Layout::kBytes, stream>>>(a, uint32_t(query_tiles), uint32_t(key_tiles));
  return cudaGetLastError();
}

}  // namespace fusebackend::attention
