// Attention backward for any length on GPUs of compute capability 9.0, dq and the gradient of a bias, of stored gradients of scores: a thread
// block computes 64 queries of the heads of a share, which share the bias, and walks along the keys in tiles of 64, and of each along the
// heads. The sums for dq of all heads stay in registers, those of the bias's gradient until a tile is done. Tensor cores add the heads up, in
// fp32: the sum is the product of the stored gradients with the identity.
#pragma once

#include "attention/launchers.h"
#include "attention/products_sm90.cuh"
#include "attention/stored_gradients_sm90.cuh"
#include "common/bulk_copy_sm90.cuh"
#include "common/programmatic_launch.cuh"

namespace fusebackend::attention {

// Two warpgroups have kHeads heads each. A stage is a tile of stored gradients and the keys to it, of one warpgroup.
template <int kD, int kBlocks>
struct StoredBackward {
  static constexpr int kThreads = 256, kKeyTile = Tile<kD>::bytes(64), kStage = kGradientTile + kKeyTile;
  static constexpr int kStageCount = kBlocks == 1 ? 5 : 3, kAhead = kStageCount - 2;  // stages that are being copied
  static constexpr int kIdentity = 2 * kStageCount * kStage, kExchange = kIdentity + kGradientTile;
  static constexpr int kBytes = kExchange + 64 * 64 * int(sizeof(float));
};

// Two adjacent keys' elements of the gradient of the bias, of those that exist.
template <typename T>
__device__ __forceinline__ void store_bias_gradients(const Arguments& a, int64_t sum, int t, int s, float x, float y) {
  if (t >= a.t || s >= a.s) return;
  const int64_t at = (sum * a.t + t) * a.s + s;
  if (a.s % 2 == 0 && a.partial_sums) {
    *reinterpret_cast<float2*>(a.partial_sums + at) = {x, y};
  } else if (a.s % 2 == 0 && !a.bias_gradient_is_fp32) {
    *reinterpret_cast<uint32_t*>(static_cast<T*>(a.bias_gradient) + at) = Half2<T>::pack(x, y);
  } else {
    store_bias_gradient<T>(a, sum, t, s, x);
    if (s + 1 < a.s) store_bias_gradient<T>(a, sum, t, s + 1, y);
  }
}

template <typename T, int kD, int kHeads, int kBlocks>
__global__ __launch_bounds__(256, kBlocks) void attention_stored_backward(const __grid_constant__ Arguments a, uint32_t query_tiles,
                                                                                const StoredHeads stored) {
  using Layout = StoredBackward<kD, kBlocks>;
  using Rows = Tile<kD>;
  using Gradients = Tile<64>;
  constexpr int kStageCount = Layout::kStageCount, kAhead = Layout::kAhead, kThreads = 128;  // of a warpgroup
  extern __shared__ __align__(1024) char shared[];
  __shared__ const T* keys[2][kHeads];
  launch_dependents();
  const uint32_t shared0 = shared_address(shared);
  const int group = threadIdx.x / kThreads, thread = threadIdx.x % kThreads, warp = thread / 32, lane = thread % 32, g = lane / 4, c = lane % 4;
  // The heads that were stored last are read first: some of them are still cached.
  const uint32_t local_share = gridDim.x / query_tiles - 1 - blockIdx.x / query_tiles, share = stored.first_share + local_share;
  const int query_tile = blockIdx.x % query_tiles, first = query_tile * 64;
  const int heads = int(share_end(a, share) - share_begin(a, share)) - group * kHeads;  // from the warpgroup's first on
  const int key_tiles = (a.s + 63) / 64, end = a.causal ? min(key_tiles, query_tile + 1) : key_tiles;
  if (thread < kHeads)
    keys[group][thread] = thread < heads ? rows_of<const T>(a.k, HeadIndex(a, share_begin(a, share) + group * kHeads + thread))
                                         : reinterpret_cast<const T*>(a.k.data);
  for (int i = threadIdx.x; i < 64 * Gradients::kVectors; i += 2 * kThreads) {
    const int row = i / Gradients::kVectors, vector = i % Gradients::kVectors;
    const auto pair = [&](int first_column) { return Half2<T>::pack(row == first_column ? 1.f : 0.f, row == first_column + 1 ? 1.f : 0.f); };
    *reinterpret_cast<uint4*>(shared + Layout::kIdentity + Gradients::offset(row, vector)) =
        uint4{pair(vector * 8), pair(vector * 8 + 2), pair(vector * 8 + 4), pair(vector * 8 + 6)};
  }
  fence_async_proxy();
  wait_for_previous_kernel();
  __syncthreads();

  const uint32_t stages = shared0 + group * kStageCount * Layout::kStage;
  const int64_t slot = int64_t(local_share) * a.per_block + group * kHeads, head_stride = int64_t(stored.key_tiles) * query_tiles * kGradientTile;
  const char* const gradients = gradient_tile(stored, a, slot, 0, query_tile) + thread * 16;
  const auto copy = [&](int step, int stage) {
    const int h = step % kHeads, tile = step / kHeads;
    if (tile < end) {
      const bool exists = h < heads;  // else zeros
      const uint32_t to = stages + stage * Layout::kStage;
      const char* const from = gradients + h * head_stride + int64_t(tile) * query_tiles * kGradientTile;
      constexpr int kPass = kThreads * 16;
#pragma unroll
      for (int i = 0; i < kGradientTile / kPass; ++i) cp_async_16_or_zero(to + thread * 16 + i * kPass, from + i * kPass, exists);
      Rows::template load<64, kThreads>(to + kGradientTile, keys[group][h], a.k.row, tile * 64, exists ? a.s : 0, a.d, thread);
    }
    cp_async_commit();
  };
#pragma unroll
  for (int i = 0; i < kAhead; ++i) copy(i, i);

  float dq[kHeads][kD / 8][4] = {}, sum[8][4];
  const uint64_t identity = wgmma::descriptor<Gradients::kPitch>(shared0 + Layout::kIdentity);
  float4* const exchange = reinterpret_cast<float4*>(shared + Layout::kExchange);
  int stage = 0;
  for (int tile = 0; tile < end; ++tile) {
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      // The products of the step two before are done, so that its stage can be filled; this step's tiles are there.
      wgmma::wait<1>();
      cp_async_wait<kAhead - 1>();
      fence_async_proxy();
      asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "n"(kThreads) : "memory");
      copy(tile * kHeads + h + kAhead, stage < 2 ? stage + kStageCount - 2 : stage - 2);
      const uint64_t left = wgmma::descriptor<Gradients::kPitch>(stages + stage * Layout::kStage),
                     right = wgmma::descriptor<Rows::kPitch>(stages + stage * Layout::kStage + kGradientTile);
      constexpr int kLeft = 16 * Gradients::kPitch >> 4, kRight = 16 * Rows::kPitch >> 4;
      wgmma::fence();
      if (h == 0) wgmma::sum_transposed<T, false>(sum, left, identity);
      else wgmma::sum_transposed<T, true>(sum, left, identity);
#pragma unroll
      for (int k = 1; k < 4; ++k) wgmma::sum_transposed<T, true>(sum, left + k * kLeft, identity + k * kLeft);
#pragma unroll
      for (int k = 0; k < 4; ++k) wgmma::sum_transposed<T, true>(dq[h], left + k * kLeft, right + k * kRight);
      wgmma::commit();
      stage = stage + 1 == kStageCount ? 0 : stage + 1;
    }
    wgmma::wait<0>();
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(sum[j][e])::"memory");
    // Each warpgroup stores half of the columns, and gives the other half to the other.
    if (tile > 0) __syncthreads();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float(&low)[4] = sum[j];
      const float(&high)[4] = sum[j + 4];
      exchange[(group * 4 + j) * kThreads + thread] =
          group == 0 ? float4{high[0], high[1], high[2], high[3]} : float4{low[0], low[1], low[2], low[3]};
    }
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float4 other = exchange[((group ^ 1) * 4 + j) * kThreads + thread];
      const float(&low)[4] = sum[j];
      const float(&high)[4] = sum[j + 4];
      const float mine[4] = {group ? high[0] : low[0], group ? high[1] : low[1], group ? high[2] : low[2], group ? high[3] : low[3]};
      const int row = 16 * warp + g, s = tile * 64 + 32 * group + 8 * j + 2 * c;
      store_bias_gradients<T>(a, share, first + row_at<Order::kByVector>(row), s, mine[0] + other.x, mine[1] + other.y);
      store_bias_gradients<T>(a, share, first + row_at<Order::kByVector>(row + 8), s, mine[2] + other.z, mine[3] + other.w);
    }
  }
  // Keys that none of the queries see.
  for (int s = end * 64 + threadIdx.x; s < a.s; s += 2 * kThreads)
    for (int t = first; t < min(first + 64, a.t); ++t) store_bias_gradient<T>(a, share, t, s, 0.f);
  cp_async_wait<0>();
  wgmma::wait<0>();
  __syncthreads();
#pragma unroll
  for (int h = 0; h < kHeads; ++h) {
#pragma unroll
    for (int j = 0; j < kD / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(dq[h][j][e])::"memory");
    if (h >= heads) continue;
    const HeadIndex index(a, share_begin(a, share) + group * kHeads + h);
    store_rows<kD, Order::kByVector>(shared + group * Layout::kKeyTile, 16 * warp, dq[h], a.scale, a.scale, rows_of<T>(a.dq, index), a.dq.row,
                                     first + row_at<Order::kByVector>(16 * warp), a.t, a.d);
  }
}

}  // namespace fusebackend::attention
