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
#pragma unroll
    for (int j = 0; j < kTiles; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = 16 * warp + g + e / 2 * 8, column = 8 * j + 2 * c + e % 2;
        const int t = kTransposed ? column : row, s = kTransposed ? row : column;
        const bool inside = t < a.t && s < a.s && !(a.causal && s > t);
        float x = inside ? 0.f : -INFINITY;
        if (inside) {
#pragma unroll 1
          for (int b = 0; b < a.biases; ++b) {
            const HeadBias& bias = a.bias[b];
            const int64_t at = index.offset(bias) + int64_t(t) * bias.row + s * bias.column;
            x += bias.is_fp32 ? __ldg(reinterpret_cast<const float*>(bias.data) + at)
                              : Half2<T>::widen(__ldg(reinterpret_cast<const uint16_t*>(bias.data) + at));
          }
        }
        sum[j][e] = x;
      }
    }
  }
};

}  // namespace fusebackend::attention
