// Tiles of scores that are computed transposed: a warp has 16 keys, of which a lane has rows g and g + 8, and all 64 queries, of which it has
// 8j + 2c and the next one, for j from 0 to 7.
#pragma once

#include "attention/fragments.cuh"
#include "attention/heads.cuh"

namespace fusebackend::attention {

// From the scores of each query, its maximum where that is large. `t`: the lane's first query.
__device__ __forceinline__ void subtract_large_maxima(float (&scores)[8][4], const Arguments& a, const HeadIndex& index, int t) {
  const float2* statistics = index.statistics(a);
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int query = t + 8 * j + e;
      const float maximum = query < a.t ? statistics[query].x : 0.f;
      if (is_large(maximum)) scores[j][e] -= maximum, scores[j][2 + e] -= maximum;
    }
}

// No gradients of the scores of queries that have none (has_score_gradients). `t`: the lane's first query.
template <int kTiles>
__device__ __forceinline__ void clear_score_gradients(float (&gradients)[kTiles][4], const Arguments& a, const HeadIndex& index, int t) {
  const float2* statistics = index.statistics(a);
#pragma unroll
  for (int j = 0; j < kTiles; ++j)
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const int query = t + 8 * j + e;
      if (query < a.t && !has_score_gradients(statistics[query].y)) gradients[j][e] = gradients[j][2 + e] = 0.f;
    }
}

// Which of this lane's elements are kept. `words`: of the tile's 64 queries; `row`: of the lane's first key in the tile.
struct KeptQueries {
  const char* words;
  int shift;  // of 32 bits
  __device__ __forceinline__ KeptQueries(const char* words, int row) : words(words + row / 32 * 4), shift(row % 32) {}

  // Those of the scores [j]: [e] is bit e / 2 * 8 of word e % 2.
  struct Two {
    uint32_t word[2];
    __device__ __forceinline__ bool operator[](int e) const { return word[e % 2] >> (e / 2 * 8) & 1; }
  };
  __device__ __forceinline__ Two operator()(int j) const {
    const char* const from = words + (8 * j + 2 * (threadIdx.x % 4)) * int(sizeof(uint64_t));
    return {*reinterpret_cast<const uint32_t*>(from) >> shift, *reinterpret_cast<const uint32_t*>(from + sizeof(uint64_t)) >> shift};
  }
};

// Causal attention: -inf for keys behind the query. `t`: the lane's first query; `key`: its first key.
__device__ __forceinline__ void mask_transposed_scores(float (&scores)[8][4], int t, int key) {
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (key + e / 2 * 8 > t + 8 * j + e % 2) scores[j][e] = -INFINITY;
}

}  // namespace fusebackend::attention
