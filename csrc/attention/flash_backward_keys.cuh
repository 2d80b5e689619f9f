// Attention backward for any length, dk and dv: a thread block computes 64 keys of a head, a warp 16, and walks along the queries in tiles of
// 64. Scores are computed transposed, so that probabilities and their gradients are the left operands of dv and dk as they stand in
// registers. Of a bias that several heads share, a block may sum the gradient too, in shared memory: then it computes one head after another.
#pragma once

#include "attention/flash.cuh"
#include "attention/launchers.h"
#include "attention/transposed_scores.cuh"
#include "common/device_properties.h"

namespace fusebackend::attention {
template <int kD>
struct FlashBackwardKeys {
  static constexpr int kThreads = 2 * kKeys, kQueries = 64;
  static_assert(kQueries == kRowSumTile);
  static constexpr int kTile = Tile<kD>::bytes(64), kSumBytes = kQueries / kRowSumQueries * int(sizeof(RowSums));
  static constexpr int kK = 0, kV = kTile, kStages = 2 * kTile;
  static constexpr int kQ = 0, kGrad = kTile, kStage = 2 * kTile;  // of a stage
  static constexpr int kSums = kStages + 2 * kStage;
  static constexpr int kBiasTile = kSums + 2 * kSumBytes, kBiasTileBytes = Tile<kKeys>::bytes(kQueries);
  static constexpr int kBiasSums = kBiasTile + 2 * kBiasTileBytes;
};

using BiasTile = Tile<kKeys>;  // a row a query

// scores * scale + biases, of transposed scores. One bias (Arguments::early) is in shared memory. `t`: the lane's first query; `key`: its
// first key, of which the second is 8 further on.
template <typename T>
__device__ __forceinline__ void add_transposed_biases(float (&scores)[8][4], const Arguments& a, const HeadIndex& index, uint32_t bias_tile,
                                                      int t, int key) {
  if (a.early >= 0) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      // Matrices of 8 queries: j and j + 1, each with the warp's first and second 8 keys.
      uint32_t pairs[4];
      ldmatrix_transposed(pairs, bias_tile + BiasTile::offset(8 * j + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2));
#pragma unroll
      for (int x = 0; x < 4; ++x) {
        const float2 pair = Half2<T>::unpack(pairs[x]);
        float(&s)[4] = scores[j + x / 2];
        s[x % 2 * 2] = fmaf(s[x % 2 * 2], a.scale, pair.x);
        s[x % 2 * 2 + 1] = fmaf(s[x % 2 * 2 + 1], a.scale, pair.y);
      }
    }
  } else {
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) scores[j][e] *= a.scale;
  }
#pragma unroll 1
  for (int b = 0; b < a.biases; ++b) {
    if (b == a.early) continue;
    const HeadBias& bias = a.bias[b];
    const int64_t first = index.offset(bias);
    const auto load = [&](int query, int k) {
      const int64_t at = first + int64_t(min(query, a.t - 1)) * bias.row + (bias.column == 0 ? 0 : min(k, a.s - 1));
      return bias.is_fp32 ? __ldg(reinterpret_cast<const float*>(bias.data) + at)
                          : Half2<T>::widen(__ldg(reinterpret_cast<const uint16_t*>(bias.data) + at));
    };
    float upper = load(t, key), lower = load(t, key + 8);
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (bias.row != 0) upper = load(t + 8 * j + e, key), lower = load(t + 8 * j + e, key + 8);
        scores[j][e] += upper;
        scores[j][2 + e] += lower;
      }
  }
}

template <typename T, int kD, int kBlocks, template <typename, int, int> typename Products>
__global__ __launch_bounds__(FlashBackwardKeys<kD>::kThreads, kBlocks) void attention_flash_backward_keys(
    const __grid_constant__ Arguments a, uint32_t key_tiles, bool sums_bias) {
  using Layout = FlashBackwardKeys<kD>;
  using Rows = Tile<kD>;
  using Product = Products<T, kD, 1>;
  constexpr int kThreads = Layout::kThreads, kQueries = Layout::kQueries;
  extern __shared__ __align__(1024) char shared[];
  const uint32_t shared0 = shared_address(shared);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const uint32_t share = blockIdx.x / key_tiles;  // of the heads
  const int first = blockIdx.x % key_tiles * kKeys;
  const int key = first + 16 * warp + g;  // the first of this lane's two, the other is 8 further on
  const uint32_t kept = share / a.chunks * a.inner;
  const uint32_t begin = kept + share % a.chunks * a.per_block, end = min(begin + a.per_block, kept + a.inner);
  const int query_tiles = a.padded_t / kQueries, first_tile = a.causal ? min(first / kQueries, query_tiles) : 0;
  float4* const bias_sums = reinterpret_cast<float4*>(shared + Layout::kBiasSums);

  for (uint32_t head = begin; head < end; ++head) {
    const HeadIndex index(a, head);
    const T *q = rows_of<const T>(a.q, index), *grad = rows_of<const T>(a.grad, index);
    const auto copy = [&](int tile, int stage) {
      const uint32_t to = shared0 + Layout::kStages + stage * Layout::kStage;
      Rows::template load<kQueries, kThreads>(to + Layout::kQ, q, a.q.row, tile * kQueries, a.t, a.d);
      Rows::template load<kQueries, kThreads>(to + Layout::kGrad, grad, a.grad.row, tile * kQueries, a.t, a.dv);
      if (a.early >= 0) {
        const HeadBias& bias = a.bias[a.early];
        BiasTile::template load<kQueries, kThreads>(shared0 + Layout::kBiasTile + stage * Layout::kBiasTileBytes,
                                                    reinterpret_cast<const T*>(bias.data) + index.offset(bias) + first, int(bias.row),
                                                    tile * kQueries, a.t, a.s - first);
      }
      const RowSums* sums = index.row_sums(a) + tile * (kQueries / kRowSumQueries);
      if (threadIdx.x < Layout::kSumBytes / 16)
        cp_async_16(shared0 + Layout::kSums + stage * Layout::kSumBytes + threadIdx.x * 16, reinterpret_cast<const char*>(sums) + threadIdx.x * 16);
    };
    if (head != begin) __syncthreads();  // the last head's results are in the keys' place
    Rows::template load<kKeys, kThreads>(shared0 + Layout::kK, rows_of<const T>(a.k, index), a.k.row, first, a.s, a.d);
    Rows::template load<kKeys, kThreads>(shared0 + Layout::kV, rows_of<const T>(a.v, index), a.v.row, first, a.s, a.dv);
    if (first_tile < query_tiles) copy(first_tile, 0);
    cp_async_commit();

    const int* const special_tiles = a.special_tiles + index.head(a) * query_tiles;
    int is_special_next = first_tile < query_tiles ? __ldg(special_tiles + first_tile) : 0;  // read ahead: the branch would wait for it
    float dk[1][kD / 8][4] = {}, dv[1][kD / 8][4] = {};
    for (int tile = first_tile, stage = 0; tile < query_tiles; ++tile, stage ^= 1) {
      const int t = tile * kQueries + 2 * c;  // the first of this lane's queries
      cp_async_wait<0>();
      Product::publish();
      __syncthreads();
      if (tile + 1 < query_tiles) copy(tile + 1, stage ^ 1);
      cp_async_commit();
      const int is_special_now = is_special_next;
      if (tile + 1 < query_tiles) is_special_next = __ldg(special_tiles + tile + 1);
      const char* const sums = shared + Layout::kSums + stage * Layout::kSumBytes;
      const uint32_t q_tile = shared0 + Layout::kStages + stage * Layout::kStage + Layout::kQ, grad_tile = q_tile + Layout::kGrad;

      float scores[1][8][4], score_gradients[1][8][4];
      auto &p = scores[0], &dp = score_gradients[0];
      Product::start_scores(scores, shared0 + Layout::kK, 16 * warp, q_tile);
      Product::start_scores(score_gradients, shared0 + Layout::kV, 16 * warp, grad_tile);
      Product::template wait<1>(scores);
      add_transposed_biases<T>(p, a, index, shared0 + Layout::kBiasTile + stage * Layout::kBiasTileBytes, t, key);
      if (is_special_now) subtract_large_maxima(p, a, index, t);
      if (a.causal && tile * kQueries < first + kKeys) mask_transposed_scores(p, t, key);
      Product::template wait<0>(score_gradients);
      // In global memory: in shared memory there would be room for one block less.
      const KeptQueries kept(reinterpret_cast<const char*>(index.kept(a, first) + tile * kQueries), 16 * warp + g);
      if (a.kept) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const KeptQueries::Two keeps = kept(j);
#pragma unroll
          for (int e = 0; e < 4; ++e) dp[j][e] = keeps[e] ? dp[j][e] * a.kept_scale : 0.f;
        }
      }
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float4 two = *reinterpret_cast<const float4*>(sums + (4 * j + c) * sizeof(RowSums));
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          p[j][e] = exp2_fast(fmaf(p[j][e], kLog2e, -(e % 2 ? two.y : two.x)));
          dp[j][e] = p[j][e] * (dp[j][e] - (e % 2 ? two.w : two.z));
        }
      }
      if (is_special_now) clear_score_gradients(dp, a, index, t);
      if (sums_bias) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          float4& sum = bias_sums[(tile * 8 + j) * kThreads + threadIdx.x];
          if (head == begin) sum = {dp[j][0], dp[j][1], dp[j][2], dp[j][3]};
          else sum = {sum.x + dp[j][0], sum.y + dp[j][1], sum.z + dp[j][2], sum.w + dp[j][3]};
        }
      }
      if (a.kept) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const KeptQueries::Two keeps = kept(j);
#pragma unroll
          for (int e = 0; e < 4; ++e) p[j][e] = keeps[e] ? p[j][e] : 0.f;
        }
      }
      typename Product::Packed packed[2];
      Product::start_sum(dv, scores, grad_tile, packed[0]);
      Product::start_sum(dk, score_gradients, q_tile, packed[1]);
      Product::template wait<0>(dv);
      Product::template wait<0>(dk);
      Product::release(packed[0]);
      Product::release(packed[1]);
    }
    cp_async_wait<0>();
    if (first_tile >= query_tiles) __syncthreads();  // the copy of keys and values has not been waited for
    // Only this warp reads its rows of keys and values.
    store_rows<kD>(shared + Layout::kK, 16 * warp, dk[0], a.scale, a.scale, rows_of<T>(a.dk, index), a.dk.row,
                                   first + 16 * warp, a.s, a.d);
    store_rows<kD>(shared + Layout::kV, 16 * warp, dv[0], a.kept_scale, a.kept_scale, rows_of<T>(a.dv_out, index), a.dv_out.row,
                                   first + 16 * warp, a.s, a.dv);
  }

  if (sums_bias) {
    for (int tile = 0; tile < query_tiles; ++tile)
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float4 sum = tile < first_tile ? float4{} : bias_sums[(tile * 8 + j) * kThreads + threadIdx.x];
        const int t = tile * kQueries + 8 * j + 2 * c;
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (t + e % 2 < a.t && key + e / 2 * 8 < a.s)
            store_bias_gradient<T>(a, share, t + e % 2, key + e / 2 * 8, e == 0 ? sum.x : e == 1 ? sum.y : e == 2 ? sum.z : sum.w);
      }
  }
}

template <typename T, int kD, int kBlocks, template <typename, int, int> typename Products>
cudaError_t launch_flash_backward_keys_as(const Arguments& a, const HeadPlan& plan, bool sums_bias, cudaStream_t stream) {
  using Layout = FlashBackwardKeys<kD>;
  const auto kernel = attention_flash_backward_keys<T, kD, kBlocks, Products>;
  static SharedMemoryOptIn opt_in;
  const int most = std::min(Layout::kBiasSums + kMaxBiasSumBytes, max_shared_bytes());
  if (const cudaError_t error = opt_in.ensure(kernel, most); error != cudaSuccess) return error;
  const int bytes = Layout::kBiasSums + (sums_bias ? a.padded_t * kKeys * int(sizeof(float)) : 0);
  const int64_t key_tiles = ceil_div(a.s, kKeys), blocks = key_tiles * plan.blocks();
  if (blocks > INT32_MAX || bytes > most) return cudaErrorInvalidConfiguration;
  kernel<<<unsigned(blocks), Layout::kThreads, bytes, stream>>>(a, uint32_t(key_tiles), sums_bias);
  return cudaGetLastError();
}

}  // namespace fusebackend::attention
