// Attention backward for any length on GPUs of compute capability 9.0, dk and dv: as flash_backward_keys.cuh, but tiles are copied by the tensor
// memory accelerator, and the products with queries and gradients run behind the scores of the next queries, while these become
// probabilities. The gradients of scores may be stored, for dq and for the gradient of a bias: then they are computed once. For biases that
// stages_tile_bias (routes.h) accepts.
#pragma once

#include "attention/flash.cuh"
#include "attention/launchers.h"
#include "attention/products_sm90.cuh"
#include "attention/stored_gradients_sm90.cuh"
#include "attention/tensor_maps_sm90.cuh"
#include "attention/transposed_scores.cuh"
#include "common/bulk_copy_sm90.cuh"
#include "common/mbarrier_sm90.cuh"
#include "common/programmatic_launch.cuh"

namespace fusebackend::attention {

struct KeyMaps {
  HeadMap q, grad, k, v, bias;
};

// kGroups: warpgroups of a block, each of which has 64 keys.
// kDrops: with dropout.
template <int kD, int kGroups, int kStageCount, bool kDrops>
struct PipelinedBackwardKeys {
  static constexpr int kThreads = 128 * kGroups, kBlockKeys = 64 * kGroups, kQueries = 64;
  static_assert(kQueries == kRowSumTile && kQueries == kStoredTile);
  static constexpr int kTile = Tile<kD>::bytes(64), kBiasTile = Tile<64>::bytes(kQueries), kRowSums = kQueries / kRowSumQueries * int(sizeof(RowSums));
  static constexpr int kK = 0, kV = kGroups * kTile, kStages = 2 * kGroups * kTile;
  static constexpr int kQ = 0, kGrad = kTile, kBias = 2 * kTile, kStage = kBias + kGroups * kBiasTile;  // of a stage
  static constexpr int kKept = kDrops ? kGroups * kQueries * int(sizeof(uint64_t)) : 0;
  static constexpr int kSums = kStages + kStageCount * kStage, kKeptWords = kSums + kStageCount * kRowSums;
  static constexpr int kBarriers = kKeptWords + kStageCount * kKept;
  static constexpr int kBytes = kBarriers + Stages<kStageCount>::kBytes;
};

// Adds a tile of a bias in shared memory, a row a query, to scale * transposed scores; the warp has the 16 keys from `key` on.
template <typename T>
__device__ __forceinline__ void scale_and_add_transposed_tile(float (&scores)[8][4], float scale, uint32_t tile, int key) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    // Matrices of 8 queries: j and j + 1, each with the warp's first and second 8 keys.
    uint32_t pairs[4];
    ldmatrix_transposed(pairs, tile + Tile<64>::offset(8 * j + lane / 16 * 8 + lane % 8, key / 8 + lane / 8 % 2));
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const float2 pair = Half2<T>::unpack(pairs[x]);
      float(&s)[4] = scores[j + x / 2];
      s[x % 2 * 2] = fmaf(s[x % 2 * 2], scale, pair.x);
      s[x % 2 * 2 + 1] = fmaf(s[x % 2 * 2 + 1], scale, pair.y);
    }
  }
}

// `tile_bias`: the bias that differs between queries, none if negative.
template <typename T, int kD, int kGroups, int kStageCount, int kBlocks, bool kStores, bool kDrops>
__global__ __launch_bounds__(128 * kGroups, kBlocks) void attention_pipelined_backward_keys(const __grid_constant__ Arguments a, uint32_t key_blocks,
                                                                                             int tile_bias, const StoredHeads stored,
                                                                                             const __grid_constant__ KeyMaps maps) {
  using Layout = PipelinedBackwardKeys<kD, kGroups, kStageCount, kDrops>;
  using Rows = Tile<kD>;
  using Product = WgmmaProducts<T, kD, 1>;
  constexpr int kQueries = Layout::kQueries;
  extern __shared__ __align__(1024) char shared[];
  const uint32_t shared0 = shared_address(shared);
  const Stages<kStageCount> stages = {shared0 + Layout::kBarriers};
  launch_dependents();
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const uint32_t slot = blockIdx.x / key_blocks, share = stored.first_share + slot / a.per_block;
  const uint32_t head = share_begin(a, share) + slot % a.per_block;
  if (head >= share_end(a, share)) return;
  const HeadIndex index(a, head);
  const int first = blockIdx.x % key_blocks * Layout::kBlockKeys;
  const int key = first + 16 * warp + g;  // the first of this lane's two, the other is 8 further on
  const int query_tiles = a.padded_t / kQueries, first_tile = a.causal ? min(first / kQueries, query_tiles) : 0;
  const RowSums* const row_sums = index.row_sums(a);
  const uint64_t* const kept = kDrops ? index.kept(a, first) : nullptr;

  const auto stage_of = [&](int stage) { return shared0 + Layout::kStages + stage * Layout::kStage; };
  // What a stage consists of is copied by one thread each of so many warps: one thread would keep its warp, and so the others, waiting.
  constexpr int kParts = 3 + kGroups;
  const auto copy = [&](int part, int tile, int stage) {
    const uint32_t to = stage_of(stage), barrier = stages.full(stage);
    if (part == 0) {
      mbarrier::expect_bytes(barrier, 2 * Layout::kTile + (tile_bias < 0 ? 0 : kGroups * Layout::kBiasTile) + Layout::kRowSums + Layout::kKept);
      load_tile(to + Layout::kQ, maps.q, barrier, tile * kQueries, 0, index);
    } else if (part == 1) {
      load_tile(to + Layout::kGrad, maps.grad, barrier, tile * kQueries, 0, index);
    } else if (part < kParts - 1) {
      const int i = part - 2;
      if (tile_bias >= 0) load_tile(to + Layout::kBias + i * Layout::kBiasTile, maps.bias, barrier, tile * kQueries, first + 64 * i, index);
    } else {
      copy_bytes(shared0 + Layout::kSums + stage * Layout::kRowSums, row_sums + tile * (kQueries / kRowSumQueries), Layout::kRowSums, barrier);
      if constexpr (kDrops) {
        static_assert(kGroups == 1);
        copy_bytes(shared0 + Layout::kKeptWords + stage * Layout::kKept, kept + tile * kQueries, Layout::kKept, barrier);
      }
    }
  };
  if (threadIdx.x == 0) stages.init(4 * kGroups);
  wait_for_previous_kernel();
  if (threadIdx.x == 0) {
    mbarrier::expect_bytes(stages.once(), 2 * kGroups * Layout::kTile);
    for (int i = 0; i < kGroups; ++i) {
      load_tile(shared0 + Layout::kK + i * Layout::kTile, maps.k, stages.once(), first + 64 * i, 0, index);
      load_tile(shared0 + Layout::kV + i * Layout::kTile, maps.v, stages.once(), first + 64 * i, 0, index);
    }
  }
  __syncthreads();
  const bool copies = lane == 0 && warp < kParts;
  if (copies)
    for (int i = 0; i < kStageCount; ++i)
      if (first_tile + i < query_tiles) copy(warp, first_tile + i, i);

  // What the biases that all queries share add to this lane's keys; -inf for keys that do not exist.
  float key_bias[2] = {};
  bool adds_key_bias = first + Layout::kBlockKeys > a.s;
  for (int b = 0; b < a.biases; ++b) {
    if (b == tile_bias) continue;
    adds_key_bias = true;
    const int64_t offset = index.offset(a.bias[b]);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t at = offset + (a.bias[b].column == 0 ? 0 : min(key + 8 * r, a.s - 1));
      key_bias[r] += a.bias[b].is_fp32 ? __ldg(reinterpret_cast<const float*>(a.bias[b].data) + at)
                                       : Half2<T>::widen(__ldg(reinterpret_cast<const uint16_t*>(a.bias[b].data) + at));
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r)
    if (key + 8 * r >= a.s) key_bias[r] = -INFINITY;

  const int* const special_tiles = a.special_tiles + index.head(a) * query_tiles;
  int is_special = 0, is_special_next = first_tile < query_tiles ? __ldg(special_tiles + first_tile) : 0;  // read ahead: the branch would wait for it
  // This lane's first 16 bytes of a stored tile: eight queries of its first key. The second key is 8 rows further on, with the same swizzle.
  const int row = 16 * (warp % 4) + g, vector0 = Tile<64>::offset(row, c), vector1 = Tile<64>::offset(row, c + 4);
  char* gradients = kStores ? gradient_tile(stored, a, slot, first / 64 + group, first_tile) : nullptr;

  float dk[1][kD / 8][4] = {}, dv[1][kD / 8][4] = {};
  typename Product::Packed packed[2];  // probabilities, and gradients of scores
  const auto start_scores = [&](float(&p)[1][8][4], float(&dp)[1][8][4], int stage) {
    const uint64_t keys = wgmma::descriptor<Rows::kPitch>(shared0 + Layout::kK + group * Layout::kTile),
                   values = wgmma::descriptor<Rows::kPitch>(shared0 + Layout::kV + group * Layout::kTile),
                   queries = wgmma::descriptor<Rows::kPitch>(stage_of(stage) + Layout::kQ),
                   grads = wgmma::descriptor<Rows::kPitch>(stage_of(stage) + Layout::kGrad);
    wgmma::fence();
    wgmma::scores<T, false>(p[0], keys, queries);
#pragma unroll
    for (int k = 1; k < kD / 16; ++k) wgmma::scores<T, true>(p[0], keys + k * (32 >> 4), queries + k * (32 >> 4));
    wgmma::commit();
    wgmma::scores<T, false>(dp[0], values, grads);
#pragma unroll
    for (int k = 1; k < kD / 16; ++k) wgmma::scores<T, true>(dp[0], values + k * (32 >> 4), grads + k * (32 >> 4));
    wgmma::commit();
  };
  const auto start_sums = [&](int stage) {
    const uint64_t queries = wgmma::descriptor<Rows::kPitch>(stage_of(stage) + Layout::kQ),
                   grads = wgmma::descriptor<Rows::kPitch>(stage_of(stage) + Layout::kGrad);
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma::sum<T>(dv[0], packed[0].left[k], grads + k * (16 * Rows::kPitch >> 4));
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma::sum<T>(dk[0], packed[1].left[k], queries + k * (16 * Rows::kPitch >> 4));
    wgmma::commit();
  };
  const auto finish_sums = [&] {
    Product::template wait<0>(dv);
    Product::template wait<0>(dk);
    Product::release(packed[0]);
    Product::release(packed[1]);
  };
  // Of this lane's queries 8j + 2c and the next. Either kind is read when it is needed: both would not fit into registers.
  const auto row_sums_of = [&](int stage, int j) {
    return reinterpret_cast<const RowSums*>(shared + Layout::kSums + stage * Layout::kRowSums) + 4 * j + c;
  };
  // Products to probabilities.
  const auto exponentiate = [&](float(&p)[8][4], int tile, int stage) {
    const int t = tile * kQueries + 2 * c;  // the first of this lane's queries
    is_special = is_special_next;
    if (tile + 1 < query_tiles) is_special_next = __ldg(special_tiles + tile + 1);
    if (tile_bias >= 0) {
      scale_and_add_transposed_tile<T>(p, a.scale, stage_of(stage) + Layout::kBias + group * Layout::kBiasTile, 16 * (warp % 4));
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) p[j][e] *= a.scale;
    }
    if (adds_key_bias) {
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) p[j][e] += key_bias[e / 2];
    }
    if (is_special) subtract_large_maxima(p, a, index, t);
    if (a.causal && tile * kQueries < first + Layout::kBlockKeys) mask_transposed_scores(p, t, key);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 log2_sum = *reinterpret_cast<const float2*>(row_sums_of(stage, j)->log2_sum);
#pragma unroll
      for (int e = 0; e < 4; ++e) p[j][e] = exp2_fast(fmaf(p[j][e], kLog2e, -(e % 2 ? log2_sum.y : log2_sum.x)));
    }
  };
  // Products to gradients of scores, and probabilities to those that are kept.
  const auto differentiate = [&](float(&p)[8][4], float(&dp)[8][4], int tile, int stage) {
    const KeptQueries kept_queries(shared + Layout::kKeptWords + stage * Layout::kKept, 16 * (warp % 4) + g);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 delta = *reinterpret_cast<const float2*>(row_sums_of(stage, j)->delta);
      KeptQueries::Two keeps;
      if constexpr (kDrops) keeps = kept_queries(j);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if constexpr (kDrops) dp[j][e] = keeps[e] ? dp[j][e] * a.kept_scale : 0.f;
        dp[j][e] = p[j][e] * (dp[j][e] - (e % 2 ? delta.y : delta.x));
        if constexpr (kDrops) p[j][e] = keeps[e] ? p[j][e] : 0.f;
      }
    }
    if (is_special) clear_score_gradients(dp, a, index, tile * kQueries + 2 * c);
  };
  const auto pack_and_store = [&](const float(&p)[8][4], const float(&dp)[8][4]) {
#pragma unroll
    for (int k = 0; k < 4; ++k) pack_left<T>(packed[0].left[k], p, k), pack_left<T>(packed[1].left[k], dp, k);
    if (kStores) {
      const auto& x = packed[1].left;
      constexpr int kSecondKey = 8 * Tile<64>::kPitch;
      __stcg(reinterpret_cast<uint4*>(gradients + vector0), uint4{x[0][0], x[0][2], x[1][0], x[1][2]});
      __stcg(reinterpret_cast<uint4*>(gradients + vector1), uint4{x[2][0], x[2][2], x[3][0], x[3][2]});
      __stcg(reinterpret_cast<uint4*>(gradients + kSecondKey + vector0), uint4{x[0][1], x[0][3], x[1][1], x[1][3]});
      __stcg(reinterpret_cast<uint4*>(gradients + kSecondKey + vector1), uint4{x[2][1], x[2][3], x[3][1], x[3][3]});
      gradients += kGradientTile;
    }
  };

  mbarrier::wait(stages.once(), 0);
  if (first_tile < query_tiles) {
    Place<kStageCount> place;
    {
      mbarrier::wait(stages.full(0), 0);
      float scores[1][8][4], score_gradients[1][8][4];
      start_scores(scores, score_gradients, 0);
      Product::template wait<1>(scores);
      exponentiate(scores[0], first_tile, 0);
      Product::template wait<0>(score_gradients);
      differentiate(scores[0], score_gradients[0], first_tile, 0);
      pack_and_store(scores[0], score_gradients[0]);
    }
#pragma unroll 1
    for (int tile = first_tile + 1; tile < query_tiles; ++tile) {
      const int before = place.stage;
      place.next();
      mbarrier::wait(stages.full(place.stage), place.parity);
      float scores[1][8][4], score_gradients[1][8][4];
      start_scores(scores, score_gradients, place.stage);
      start_sums(before);
      // Into the stage of the tile two before, once all warps are done with it.
      if (copies && tile >= first_tile + 2 && tile + kStageCount - 2 < query_tiles) {
        stages.wait_until_free(place.stage_two_before(), place.parity_two_before());
        copy(warp, tile + kStageCount - 2, place.stage_two_before());
      }
      Product::template wait<2>(scores);
      exponentiate(scores[0], tile, place.stage);
      Product::template wait<1>(score_gradients);
      differentiate(scores[0], score_gradients[0], tile, place.stage);
      finish_sums();
      __syncwarp();
      if (lane == 0) mbarrier::arrive(stages.free(before));
      pack_and_store(scores[0], score_gradients[0]);
    }
    start_sums(place.stage);
    finish_sums();
  }
  __syncthreads();
  // Only this warp reads its rows of keys and values.
  store_rows<kD>(shared + Layout::kK, 16 * warp, dk[0], a.scale, a.scale, rows_of<T>(a.dk, index), a.dk.row, first + 16 * warp, a.s, a.d);
  store_rows<kD>(shared + Layout::kV, 16 * warp, dv[0], kDrops ? a.kept_scale : 1.f, kDrops ? a.kept_scale : 1.f, rows_of<T>(a.dv_out, index),
                 a.dv_out.row, first + 16 * warp, a.s, a.dv);
}

}  // namespace fusebackend::attention
