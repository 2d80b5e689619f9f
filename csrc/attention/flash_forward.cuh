// Attention forward for any length: a thread block computes 64 or 128 queries of a head and walks along the keys in tiles of 64, with the
// maximum and the sum so far (Dao, FlashAttention-2, 2023). The next tiles of keys and values are copied meanwhile.
#pragma once

#include "attention/flash.cuh"
#include "attention/launchers.h"

namespace fusebackend::attention {
template <int kD, int kTiles, int kWarps>
struct FlashForward {
  static constexpr int kThreads = 32 * kWarps, kQueries = 16 * kTiles * kWarps;
  static constexpr int kStage = Tile<kD>::bytes(kKeys);  // of keys, and of values
  static constexpr int kK = Tile<kD>::bytes(kQueries), kV = kK + 2 * kStage, kBytes = kV + 2 * kStage;
};

template <typename T, int kD, int kTiles, int kWarps, int kBlocks, template <typename, int, int> typename Products>
__global__ __launch_bounds__(32 * kWarps, kBlocks) void attention_flash_forward(const __grid_constant__ Arguments a, uint32_t tiles) {
  using Layout = FlashForward<kD, kTiles, kWarps>;
  using Rows = Tile<kD>;
  using Product = Products<T, kD, kTiles>;
  constexpr int kThreads = Layout::kThreads;
  extern __shared__ __align__(1024) char shared[];
  const uint32_t shared0 = shared_address(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const HeadIndex index(a, blockIdx.x / tiles);
  // Of causal attention, the long ones first.
  const int first = int(a.causal ? tiles - 1 - blockIdx.x % tiles : blockIdx.x % tiles) * Layout::kQueries;
  const int first_row = 16 * kTiles * warp;  // of this warp
  const int t = first + first_row + g;       // the first of this lane's queries
  const T *k = rows_of<const T>(a.k, index), *v = rows_of<const T>(a.v, index);
  const int end = key_end(a, first + Layout::kQueries);

  const auto copy = [&](int key, int stage) {
    Rows::template load<kKeys, kThreads, Order::kByVector>(shared0 + Layout::kK + stage * Layout::kStage, k, a.k.row, key, a.s, a.d);
    Rows::template load<kKeys, kThreads, Order::kByVector>(shared0 + Layout::kV + stage * Layout::kStage, v, a.v.row, key, a.s, a.dv);
  };
  Rows::template load<Layout::kQueries, kThreads>(shared0, rows_of<const T>(a.q, index), a.q.row, first, a.t, a.d);
  copy(0, 0);
  cp_async_commit();

  RowBiases<T, kTiles> biases;
  biases.set_head(a, index, t, 8 * c);
  biases.prefetch(a, 8 * c, 0);
  float out[kTiles][kD / 8][4] = {};
  float maximum[kTiles][2], sum[kTiles][2] = {};
#pragma unroll
  for (int m = 0; m < kTiles; ++m) maximum[m][0] = maximum[m][1] = -INFINITY;

  for (int key = 0, stage = 0; key < end; key += kKeys, stage ^= 1) {
    cp_async_wait<0>();
    Product::publish();
    __syncthreads();
    if (key + kKeys < end) copy(key + kKeys, stage ^ 1);
    cp_async_commit();

    float p[kTiles][8][4];
    Product::start_scores(p, shared0, first_row, shared0 + Layout::kK + stage * Layout::kStage);
    Product::template wait<0>(p);
    biases.add(a, index, p, t, key + 8 * c);
    biases.prefetch(a, key + kKeys + 8 * c, key + kKeys);
    if (is_masked(a, first, key)) mask_scores(a, p, t, key);

#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float top = maximum[m][r];
#pragma unroll
        for (int j = 0; j < 8; ++j) top = fmaxf(top, fmaxf(p[m][j][2 * r], p[m][j][2 * r + 1]));
        top = quad_max(top);
        const bool none = top == -INFINITY;  // no key yet
        const float rescale = none ? 0.f : exp2_fast((maximum[m][r] - top) * kLog2e);
        float shift = none ? 0.f : -top * kLog2e;
        if (!none && is_large(top)) {
          shift = 0;
#pragma unroll
          for (int j = 0; j < 8; ++j) p[m][j][2 * r] -= top, p[m][j][2 * r + 1] -= top;
        }
        maximum[m][r] = top;
        float tile_sum = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int e = 2 * r; e < 2 * r + 2; ++e) {
            p[m][j][e] = exp2_fast(fmaf(p[m][j][e], kLog2e, shift));
            tile_sum += p[m][j][e];
          }
        sum[m][r] = fmaf(sum[m][r], rescale, tile_sum);
#pragma unroll
        for (int j = 0; j < kD / 8; ++j) out[m][j][2 * r] *= rescale, out[m][j][2 * r + 1] *= rescale;
      }
    if (a.kept) {
      const KeptKeys<kTiles> kept(a, index, t, key);
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) p[m][j][e] = kept(m, j, e) ? p[m][j][e] : 0.f;
    }
    typename Product::Packed packed;
    Product::start_sum(out, p, shared0 + Layout::kV + stage * Layout::kStage, packed);
    Product::template wait<0>(out);
    Product::release(packed);
  }

  float2* statistics = index.statistics(a);
#pragma unroll
  for (int m = 0; m < kTiles; ++m) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      sum[m][r] = quad_sum(sum[m][r]);
      const int query = t + 16 * m + 8 * r;
      if (c == 0 && query < a.t) statistics[query] = {maximum[m][r], __logf(sum[m][r])};
    }
    // The warp's queries make room for its results.
    store_rows<kD>(shared, first_row + 16 * m, out[m], a.kept_scale / sum[m][0], a.kept_scale / sum[m][1], rows_of<T>(a.out, index), a.out.row,
                   first + first_row + 16 * m, a.t, a.dv);
  }
}

template <typename T, int kD, int kTiles, int kWarps, int kBlocks, template <typename, int, int> typename Products>
cudaError_t launch_flash_forward_as(const Forward& p, cudaStream_t stream) {
  using Layout = FlashForward<kD, kTiles, kWarps>;
  const auto kernel = attention_flash_forward<T, kD, kTiles, kWarps, kBlocks, Products>;
  static SharedMemoryOptIn opt_in;
  if (const cudaError_t error = opt_in.ensure(kernel, Layout::kBytes); error != cudaSuccess) return error;
  const int64_t tiles = ceil_div(p.size.t, Layout::kQueries), blocks = tiles * p.size.heads();
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  kernel<<<unsigned(blocks), Layout::kThreads, Layout::kBytes, stream>>>(forward_arguments(p, plan_heads(p, -1, nullptr, 1)), uint32_t(tiles));
  return cudaGetLastError();
}

}  // namespace fusebackend::attention
