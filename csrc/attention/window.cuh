// What the forward and the backward kernel for short windows share on the device.
#pragma once

#include "attention/fragments.cuh"
#include "attention/heads.cuh"

namespace fusebackend::attention {

constexpr int kWindowThreads = 128;  // a warp has 16 of the 64 rows

// The sum of the biases at a lane's elements of a warp's 16 rows of scores (of their transpose, if kTransposed), and -inf where there are no
// scores. Loaded when it changes.
template <typename T, int kTiles, bool kTransposed>
struct WindowBiases {
  float sum[kTiles][4];
  int64_t offset[kMaxBiases];

  __device__ __forceinline__ void load(const Arguments& a, const HeadIndex& index, bool first) {
    bool changed = first;
#pragma unroll
    for (int b = 0; b < kMaxBiases; ++b) {
      if (b >= a.biases) break;
      const int64_t now = index.offset(a.bias[b]);
      changed |= now != offset[b];
      offset[b] = now;
    }
    if (!changed) return;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    const auto place = [&](int j, int e, int& t, int& s) {
      const int row = 16 * warp + g + e / 2 * 8, column = 8 * j + 2 * c + e % 2;
      t = kTransposed ? column : row, s = kTransposed ? row : column;
      return t < a.t && s < a.s && !(a.causal && s > t);
    };
    int t, s;
#pragma unroll
    for (int j = 0; j < kTiles; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[j][e] = place(j, e, t, s) ? 0.f : -INFINITY;
#pragma unroll 1
    for (int b = 0; b < a.biases; ++b) {
      const HeadBias& bias = a.bias[b];
      const int64_t base = index.offset(bias);
      // All elements at once: one would wait for another otherwise.
      if (bias.is_fp32) {
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (place(j, e, t, s)) sum[j][e] += __ldg(reinterpret_cast<const float*>(bias.data) + base + t * bias.row + s * bias.column);
      } else {
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (place(j, e, t, s))
              sum[j][e] += Half2<T>::widen(__ldg(reinterpret_cast<const uint16_t*>(bias.data) + base + t * bias.row + s * bias.column));
      }
    }
  }
};

}  // namespace fusebackend::attention
