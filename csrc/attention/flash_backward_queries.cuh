// Attention backward for any length, dq: a thread block computes 64 or 128 queries of a head, a warp 16, and walks along the keys in tiles of 64.
#pragma once

#include "attention/flash.cuh"
#include "attention/launchers.h"
#include "attention/score_gradient.cuh"

namespace fusebackend::attention {
template <int kD, int kWarps>
struct FlashBackwardQueries {
  static constexpr int kThreads = 32 * kWarps, kQueries = 16 * kWarps;
  static constexpr int kTile = Tile<kD>::bytes(kKeys);
  static constexpr int kQ = 0, kGrad = Tile<kD>::bytes(kQueries), kStages = 2 * kGrad;
  static constexpr int kK = 0, kV = kTile, kStage = 2 * kTile;  // of a stage
  static constexpr int kBytes = kStages + 2 * kStage;
};

template <typename T, int kD, int kWarps, int kBlocks, template <typename, int, int> typename Products>
__global__ __launch_bounds__(32 * kWarps, kBlocks) void attention_flash_backward_queries(const __grid_constant__ Arguments a, uint32_t tiles) {
  using Layout = FlashBackwardQueries<kD, kWarps>;
  using Rows = Tile<kD>;
  using Product = Products<T, kD, 1>;
  constexpr int kThreads = Layout::kThreads, kQueries = Layout::kQueries;
  extern __shared__ __align__(1024) char shared[];
  const uint32_t shared0 = shared_address(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const HeadIndex index(a, blockIdx.x / tiles);
  const int first = int(a.causal ? tiles - 1 - blockIdx.x % tiles : blockIdx.x % tiles) * kQueries;
  const int t = first + 16 * warp + g;  // the first of this lane's two queries
  const T *k = rows_of<const T>(a.k, index), *v = rows_of<const T>(a.v, index);
  const int end = key_end(a, first + kQueries);

  const auto copy = [&](int key, int stage) {
    const uint32_t to = shared0 + Layout::kStages + stage * Layout::kStage;
    Rows::template load<kKeys, kThreads, Order::kByVector>(to + Layout::kK, k, a.k.row, key, a.s, a.d);
    Rows::template load<kKeys, kThreads, Order::kByVector>(to + Layout::kV, v, a.v.row, key, a.s, a.dv);
  };
  Rows::template load<kQueries, kThreads>(shared0 + Layout::kQ, rows_of<const T>(a.q, index), a.q.row, first, a.t, a.d);
  Rows::template load<kQueries, kThreads>(shared0 + Layout::kGrad, rows_of<const T>(a.grad, index), a.grad.row, first, a.t, a.dv);
  copy(0, 0);
  cp_async_commit();
  const QueryRows<1> rows(a, index, t);

  float dq[1][kD / 8][4] = {};
  RowBiases<T, 1> biases;
  biases.set_head(a, index, t, 8 * c);
  biases.prefetch(a, 8 * c, 0);
  for (int key = 0, stage = 0; key < end; key += kKeys, stage ^= 1) {
    cp_async_wait<0>();
    Product::publish();
    __syncthreads();
    if (key + kKeys < end) copy(key + kKeys, stage ^ 1);
    cp_async_commit();
    const uint32_t k_tile = shared0 + Layout::kStages + stage * Layout::kStage + Layout::kK, v_tile = k_tile + Layout::kV;
    float ds[1][8][4];
    score_gradient<Product, true>(ds, a, index, biases, rows, shared0 + Layout::kQ, shared0 + Layout::kGrad, 16 * warp, k_tile, v_tile, t, first, key);
    typename Product::Packed packed;
    Product::start_sum(dq, ds, k_tile, packed);
    Product::template wait<0>(dq);
    Product::release(packed);
  }
  store_rows<kD>(shared + Layout::kQ, 16 * warp, dq[0], a.scale, a.scale, rows_of<T>(a.dq, index), a.dq.row, first + 16 * warp, a.t, a.d);
}

template <typename T, int kD, int kWarps, int kBlocks, template <typename, int, int> typename Products>
cudaError_t launch_flash_backward_queries_as(const Arguments& a, const Backward& p, cudaStream_t stream) {
  using Layout = FlashBackwardQueries<kD, kWarps>;
  const auto kernel = attention_flash_backward_queries<T, kD, kWarps, kBlocks, Products>;
  static SharedMemoryOptIn opt_in;
  if (const cudaError_t error = opt_in.ensure(kernel, Layout::kBytes); error != cudaSuccess) return error;
  const int64_t tiles = ceil_div(p.size.t, Layout::kQueries), blocks = tiles * p.size.heads();
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  kernel<<<unsigned(blocks), Layout::kThreads, Layout::kBytes, stream>>>(a, uint32_t(tiles));
  return cudaGetLastError();
}

}  // namespace fusebackend::attention
