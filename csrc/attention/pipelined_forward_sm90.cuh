// Attention forward for any length on GPUs of compute capability 9.0: as flash_forward.cuh, but tiles are copied by the tensor memory
// accelerator, those of the bias as well, and the product with values runs behind the scores of the next keys, while these become
// probabilities. For biases that stages_biases (routes.h) accepts.
#pragma once

#include "attention/flash.cuh"
#include "attention/launchers.h"
#include "attention/products_sm90.cuh"
#include "attention/tensor_maps_sm90.cuh"
#include "common/bulk_copy_sm90.cuh"
#include "common/mbarrier_sm90.cuh"

namespace fusebackend::attention {

struct ForwardMaps {
  HeadMap q, k, v, bias;
};

// kGroups: warpgroups of a block, each of which has 64 queries.
template <int kD, int kGroups, int kStageCount>
struct PipelinedForward {
  static constexpr int kThreads = 128 * kGroups, kQueries = 64 * kGroups;
  static constexpr int kTile = Tile<kD>::bytes(64), kBiasTile = Tile<kKeys>::bytes(64), kKeyBias = kKeys * int(sizeof(float));
  static constexpr int kK = 0, kV = kTile, kBias = 2 * kTile, kStage = kBias + kGroups * kBiasTile;  // of a stage
  static constexpr int kStages = kGroups * kTile, kKeyBiases = kStages + kStageCount * kStage;
  static constexpr int kBarriers = kKeyBiases + kStageCount * kKeyBias, kBytes = kBarriers + Stages<kStageCount>::kBytes;
};

// A warp's 16 rows, from `row` on, of a tile of a bias in shared memory: pairs of elements as scores has them, in plain order.
__device__ __forceinline__ void read_tile(uint32_t (&pairs)[4][4], uint32_t tile, int row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < 4; ++j) ldmatrix(pairs[j], tile + Tile<kKeys>::offset(row + lane % 16, 2 * j + lane / 16));
}

// Adds them to scale * scores.
template <typename T>
__device__ __forceinline__ void scale_and_add(float (&scores)[8][4], float scale, const uint32_t (&pairs)[4][4]) {
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int x = 0; x < 4; ++x) {
      const float2 pair = Half2<T>::unpack(pairs[j][x]);
      float(&s)[4] = scores[2 * j + x / 2];
      s[x % 2 * 2] = fmaf(s[x % 2 * 2], scale, pair.x);
      s[x % 2 * 2 + 1] = fmaf(s[x % 2 * 2 + 1], scale, pair.y);
    }
  }
}

// As mask_scores, of keys in plain order.
__device__ __forceinline__ void mask_plain_scores(const Arguments& a, float (&scores)[8][4], int t, int first_key) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int query = t + 8 * r, last = a.causal ? min(query, a.s - 1) : a.s - 1;
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 2; ++e)
        if (first_key + 8 * j + 2 * c + e > last) scores[j][2 * r + e] = -INFINITY;
  }
}

// kDrops: with dropout.
template <typename T, int kD, int kGroups, int kStageCount, int kBlocks, bool kDrops>
__global__ __launch_bounds__(128 * kGroups, kBlocks) void attention_pipelined_forward(const __grid_constant__ Arguments a, uint32_t tiles,
                                                                                       const StagedBiases staged,
                                                                                       const __grid_constant__ ForwardMaps maps) {
  using Layout = PipelinedForward<kD, kGroups, kStageCount>;
  using Rows = Tile<kD>;
  using Product = WgmmaProducts<T, kD, 1>;
  extern __shared__ __align__(1024) char shared[];
  const uint32_t shared0 = shared_address(shared);
  const Stages<kStageCount> stages = {shared0 + Layout::kBarriers};
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
  const HeadIndex index(a, blockIdx.x / tiles);
  // Of causal attention, the long ones first.
  const int first = int(a.causal ? tiles - 1 - blockIdx.x % tiles : blockIdx.x % tiles) * Layout::kQueries;
  const int t = first + 16 * warp + g;  // the first of this lane's queries, the other is 8 further on
  const int end = key_end(a, first + Layout::kQueries);
  const bool wide_keys = staged.keys >= 0 && a.bias[staged.keys].is_fp32;
  const int key_shift = wide_keys ? 2 : 1;  // log2 of an element's bytes
  const char* const key_bias = staged.keys < 0 ? nullptr : a.bias[staged.keys].data + (index.offset(a.bias[staged.keys]) << key_shift);

  const auto stage_of = [&](int stage) { return shared0 + Layout::kStages + stage * Layout::kStage; };
  // What a stage consists of is copied by one thread each of so many warps: one thread would keep its warp, and so the others, waiting.
  constexpr int kParts = 3 + kGroups;
  const auto copy = [&](int part, int key, int stage) {
    const uint32_t to = stage_of(stage), barrier = stages.full(stage);
    // What lies behind the last key, up to a vector, can be read (has_vectors).
    const uint32_t key_bytes = key_bias ? uint32_t(min(kKeys, (a.s - key + 7) / 8 * 8)) << key_shift : 0;
    if (part == 0) {
      mbarrier::expect_bytes(barrier, 2 * Layout::kTile + (staged.tile < 0 ? 0 : kGroups * Layout::kBiasTile) + key_bytes);
      load_tile(to + Layout::kK, maps.k, barrier, key, 0, index);
    } else if (part == 1) {
      load_tile(to + Layout::kV, maps.v, barrier, key, 0, index);
    } else if (part < kParts - 1) {
      const int i = part - 2;
      if (staged.tile >= 0) load_tile(to + Layout::kBias + i * Layout::kBiasTile, maps.bias, barrier, first + 64 * i, key, index);
    } else if (key_bias) {
      copy_bytes(shared0 + Layout::kKeyBiases + stage * Layout::kKeyBias, key_bias + (int64_t(key) << key_shift), key_bytes, barrier);
    }
  };
  if (threadIdx.x == 0) {
    stages.init(4 * kGroups);
    mbarrier::expect_bytes(stages.once(), kGroups * Layout::kTile);
    for (int i = 0; i < kGroups; ++i) load_tile(shared0 + i * Layout::kTile, maps.q, stages.once(), first + 64 * i, 0, index);
  }
  __syncthreads();
  const bool copies = lane == 0 && warp < kParts;
  if (copies)
    for (int i = 0; i < kStageCount; ++i)
      if (i * kKeys < end) copy(warp, i * kKeys, i);

  float out[1][kD / 8][4] = {};
  float maximum[2] = {-INFINITY, -INFINITY}, sum[2] = {};
  typename Product::Packed packed;
  const auto start_scores = [&](float(&scores)[1][8][4], int stage) {
    Product::start_scores(scores, shared0, 64 * group, stage_of(stage) + Layout::kK);
  };
  const auto start_sum = [&](int stage) {
    const uint64_t right = wgmma::descriptor<Rows::kPitch>(stage_of(stage) + Layout::kV);
    wgmma::fence();
#pragma unroll
    for (int x = 0; x < 4; ++x) wgmma::sum<T>(out[0], packed.left[x], right + x * (16 * Rows::kPitch >> 4));
    wgmma::commit();
  };
  uint32_t bias[4][4];  // read before the scores are there
  const auto read_bias = [&](int stage) {
    if (staged.tile >= 0) read_tile(bias, stage_of(stage) + Layout::kBias + group * Layout::kBiasTile, 16 * (warp % 4));
  };
  // Products to probabilities, relative to the maximum so far; `rescale`: of what was summed before.
  const auto exponentiate = [&](float(&scores)[1][8][4], float(&rescale)[2], int key, int stage) {
    auto& p = scores[0];
    if (staged.tile >= 0) {
      scale_and_add<T>(p, a.scale, bias);
    } else {
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) p[j][e] *= a.scale;
    }
    if (key_bias) {
      const char* const from = shared + Layout::kKeyBiases + stage * Layout::kKeyBias;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 x = wide_keys ? reinterpret_cast<const float2*>(from)[4 * j + c]
                                   : Half2<T>::unpack(reinterpret_cast<const uint32_t*>(from)[4 * j + c]);
        p[j][0] += x.x, p[j][1] += x.y, p[j][2] += x.x, p[j][3] += x.y;
      }
    }
    if (is_masked(a, first, key)) mask_plain_scores(a, p, t, key);
    float top[2] = {maximum[0], maximum[1]}, shift[2];
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int r = 0; r < 2; ++r) top[r] = fmaxf(top[r], fmaxf(p[j][2 * r], p[j][2 * r + 1]));
    bool any_large = false;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      top[r] = quad_max(top[r]);
      const bool none = top[r] == -INFINITY;  // no key yet
      rescale[r] = none ? 0.f : exp2_fast((maximum[r] - top[r]) * kLog2e);
      shift[r] = none ? 0.f : -top[r] * kLog2e;
      maximum[r] = top[r];
      any_large |= !none && is_large(top[r]);
    }
    if (any_large) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (top[r] == -INFINITY || !is_large(top[r])) continue;
        shift[r] = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) p[j][2 * r] -= top[r], p[j][2 * r + 1] -= top[r];
      }
    }
    float tile_sum[2] = {};
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        p[j][e] = exp2_fast(fmaf(p[j][e], kLog2e, shift[e / 2]));
        tile_sum[e / 2] += p[j][e];
      }
#pragma unroll
    for (int r = 0; r < 2; ++r) sum[r] = fmaf(sum[r], rescale[r], tile_sum[r]);
  };
  const uint64_t* const words = kDrops ? index.kept(a, 0) : nullptr;
  uint64_t kept[2];  // of the lane's queries, from its first key on
  const auto read_kept = [&](int key) {
    if constexpr (kDrops) {
#pragma unroll
      for (int r = 0; r < 2; ++r) kept[r] = __ldg(words + key / kWordKeys * a.padded_t + min(t + 8 * r, a.t - 1)) >> (2 * c);
    }
  };
  const auto drop = [&](float(&scores)[1][8][4]) {
    if constexpr (kDrops) {
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) scores[0][j][e] = kept[e / 2] >> (8 * j + e % 2) & 1 ? scores[0][j][e] : 0.f;
    }
  };
  const auto pack = [&](const float(&scores)[1][8][4]) {
#pragma unroll
    for (int x = 0; x < 4; ++x) pack_left<T>(packed.left[x], scores[0], x);
  };

  Place<kStageCount> place;
  {
    mbarrier::wait(stages.once(), 0);
    mbarrier::wait(stages.full(0), 0);
    float scores[1][8][4], rescale[2];
    start_scores(scores, 0);
    read_bias(0);
    read_kept(0);
    Product::template wait<0>(scores);
    exponentiate(scores, rescale, 0, 0);
    drop(scores);
    pack(scores);
  }
#pragma unroll 1
  for (int key = kKeys; key < end; key += kKeys) {
    const int before = place.stage;
    place.next();
    mbarrier::wait(stages.full(place.stage), place.parity);
    float scores[1][8][4], rescale[2];
    start_scores(scores, place.stage);
    start_sum(before);
    // Into the stage of the keys two tiles before, once all warps are done with them.
    read_bias(place.stage);
    read_kept(key);
    if (copies && key >= 2 * kKeys && key + (kStageCount - 2) * kKeys < end) {
      stages.wait_until_free(place.stage_two_before(), place.parity_two_before());
      copy(warp, key + (kStageCount - 2) * kKeys, place.stage_two_before());
    }
    Product::template wait<1>(scores);
    exponentiate(scores, rescale, key, place.stage);
    drop(scores);
    Product::template wait<0>(out);
    Product::release(packed);
    __syncwarp();
    if (lane == 0) mbarrier::arrive(stages.free(before));
#pragma unroll
    for (int j = 0; j < kD / 8; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) out[0][j][e] *= rescale[e / 2];
    pack(scores);
  }
  start_sum(place.stage);
  Product::template wait<0>(out);
  Product::release(packed);
  __syncthreads();

  float2* const statistics = index.statistics(a);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    sum[r] = quad_sum(sum[r]);
    if (c == 0 && t + 8 * r < a.t) statistics[t + 8 * r] = {maximum[r], __logf(sum[r])};
  }
  // The warp's queries make room for its results.
  store_rows<kD>(shared, 16 * warp, out[0], (kDrops ? a.kept_scale : 1.f) / sum[0], (kDrops ? a.kept_scale : 1.f) / sum[1], rows_of<T>(a.out, index), a.out.row, first + 16 * warp, a.t, a.dv);
}

}  // namespace fusebackend::attention
