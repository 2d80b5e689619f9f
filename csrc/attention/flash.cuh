// What the kernels for long sequences share: biases of tiles of scores, read in vectors from global memory.
//
// Their biases have contiguous rows, aligned and padded to vectors of 8 elements, or one column (aligned_biases in launch_cuda.cpp sees to it).
#pragma once

#include "attention/fragments.cuh"
#include "attention/heads.cuh"

namespace fusebackend::attention {

constexpr int kKeys = 64;  // of a tile

// Eight adjacent elements of a bias.
template <typename T>
struct BiasVector {
  float x[8];
  __device__ __forceinline__ void unpack(const uint4& v) {
    const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = Half2<T>::unpack(words[i]);
      x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
  }
  __device__ __forceinline__ void load(const HeadBias& bias, const char* row, int column) {
    if (bias.column == 0) {
      const float one = bias.is_fp32 ? __ldg(reinterpret_cast<const float*>(row)) : Half2<T>::widen(__ldg(reinterpret_cast<const uint16_t*>(row)));
#pragma unroll
      for (float& y : x) y = one;
    } else if (bias.is_fp32) {
      const float4* from = reinterpret_cast<const float4*>(row) + column / 4;
      const float4 a = __ldg(from), b = __ldg(from + 1);
      x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    } else {
      unpack(__ldg(reinterpret_cast<const uint4*>(row) + column / 8));
    }
  }
};

// The biases of a warp's rows of scores whose columns are in Order::kByVector: of each 16 rows, a lane has rows g and g + 8, and of each 32
// keys the eight from 8c on. One bias (Arguments::early) is loaded before the scores are computed.
template <typename T, int kTiles>
struct RowBiases {
  uint4 early[kTiles][2][2];
  const char* rows[kTiles][2];  // of the bias that is loaded ahead, at the lane's queries and first key

  // The row of a bias at the query `t`, which may be past the end.
  static __device__ __forceinline__ const char* row(const Arguments& a, const HeadIndex& index, int b, int t) {
    const HeadBias& bias = a.bias[b];
    return bias.data + ((index.offset(bias) + int64_t(min(t, a.t - 1)) * bias.row) << (bias.is_fp32 ? 2 : 1));
  }

  // `t`: the lane's first row; `key`: the lane's first key in the first tile.
  __device__ __forceinline__ void set_head(const Arguments& a, const HeadIndex& index, int t, int key) {
    if (a.early < 0) return;
    const char* const first = row(a, index, a.early, 0) + key * 2;
    const int64_t row_stride = a.bias[a.early].row;
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) rows[m][r] = first + int64_t(min(t + 16 * m + 8 * r, a.t - 1)) * row_stride * 2;
  }
  // `key`: the lane's first key in this tile, `tile` the number of keys before it.
  __device__ __forceinline__ void prefetch(const Arguments& a, int key, int tile) {
    if (a.early < 0) return;
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int i = 0; i < 2; ++i)
          early[m][r][i] = key + 32 * i < a.s ? __ldg(reinterpret_cast<const uint4*>(rows[m][r] + tile * 2) + 4 * i) : uint4{};
  }

  // scores * scale + biases
  __device__ __forceinline__ void add(const Arguments& a, const HeadIndex& index, float (&scores)[kTiles][8][4], int t, int key) const {
    if (a.early >= 0) {
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            BiasVector<T> v;
            v.unpack(early[m][r][i]);
#pragma unroll
            for (int n = 0; n < 8; ++n) {
              float& score = scores[m][4 * i + n / 2][2 * r + n % 2];
              score = fmaf(score, a.scale, v.x[n]);
            }
          }
    } else {
#pragma unroll
      for (int m = 0; m < kTiles; ++m)
#pragma unroll
        for (int j = 0; j < 8; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) scores[m][j][e] *= a.scale;
    }
#pragma unroll 1
    for (int b = 0; b < a.biases; ++b) {
      if (b == a.early) continue;
      const HeadBias& bias = a.bias[b];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (key + 32 * i >= a.s) continue;
        BiasVector<T> v;
        if (bias.row == 0) v.load(bias, row(a, index, b, 0), key + 32 * i);
#pragma unroll
        for (int m = 0; m < kTiles; ++m)
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            if (bias.row != 0) v.load(bias, row(a, index, b, t + 16 * m + 8 * r), key + 32 * i);
#pragma unroll
            for (int n = 0; n < 8; ++n) scores[m][4 * i + n / 2][2 * r + n % 2] += v.x[n];
          }
      }
    }
  }
};

// -inf in place of scores of keys that do not exist, or that a query does not see.
template <int kTiles>
__device__ __forceinline__ void mask_scores(const Arguments& a, float (&scores)[kTiles][8][4], int t, int first_key) {
  const int c = threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < kTiles; ++m)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int query = t + 16 * m + 8 * r, last = a.causal ? min(query, a.s - 1) : a.s - 1;
#pragma unroll
      for (int j = 0; j < 8; ++j)
#pragma unroll
        for (int e = 0; e < 2; ++e)
          if (first_key + row_at<Order::kByVector>(8 * j + 2 * c + e) > last) scores[m][j][2 * r + e] = -INFINITY;
    }
}

// Which keys of a tile are kept, of a lane's queries, where keys are in Order::kByVector. `t`: the lane's first query; `key`: the tile's first key.
template <int kTiles>
struct KeptKeys {
  uint64_t words[kTiles][2];

  __device__ __forceinline__ KeptKeys(const Arguments& a, const HeadIndex& index, int t, int key) {
    const uint64_t* const from = index.kept(a, key);
#pragma unroll
    for (int m = 0; m < kTiles; ++m)
#pragma unroll
      for (int r = 0; r < 2; ++r) words[m][r] = __ldg(from + min(t + 16 * m + 8 * r, a.t - 1)) >> (8 * (threadIdx.x % 4));
  }
  // Of the score [m][j][e].
  __device__ __forceinline__ bool operator()(int m, int j, int e) const { return words[m][e / 2] >> (j / 4 * 32 + j % 4 * 2 + e % 2) & 1; }
};

// Whether a tile of scores holds some that mask_scores changes.
__device__ __forceinline__ bool is_masked(const Arguments& a, int first_query, int first_key) {
  return first_key + kKeys > a.s || (a.causal && first_key + kKeys - 1 > first_query);
}

// The end of the keys that queries before `end` see.
__device__ __forceinline__ int key_end(const Arguments& a, int end) { return a.causal ? min(a.s, end) : a.s; }

}  // namespace fusebackend::attention
