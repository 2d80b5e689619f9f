// Short causal convolutions (2 to 4 taps) from (batch, time, channel) to (batch, channel, time), any dtype and alignment of the result: as in
// short_btc.cuh, but the results of a warp's strip go through shared memory, which transposes them.
#pragma once
#include "causal_conv1d/short_btc.cuh"

namespace fusebackend::causal_conv1d {

// A thread has kTransposeChannels, so a warp has 64.
template <typename T>
constexpr int kTransposeLen = 128 / sizeof(T);  // samples of a strip
template <typename T>
constexpr int kTransposePitch = kTransposeLen<T> + 4 / sizeof(T);  // of a channel in shared memory: one word more, so that banks differ

template <typename T, int K, SiluMode SILU>
__global__ void __launch_bounds__(kStripThreads) short_btc_to_bct_forward(const ConvParams p, const Strips strips) {
  constexpr int V = kTransposeChannels, kLen = kTransposeLen<T>, kPitch = kTransposePitch<T>, kUnroll = 8, kWord = 4 / sizeof(T);
  __shared__ __align__(16) T tiles[kStripThreads / 32][32 * V * kPitch];
  T* tile = tiles[threadIdx.y];
  const uint32_t strip_block = strips.channel_blocks.div(blockIdx.x);
  const int64_t c0 = static_cast<int64_t>(blockIdx.x - strip_block * strips.channel_blocks.d) * 32 * V, c = c0 + threadIdx.x * V;
  const bool valid = c < p.channels;
  const int len = static_cast<int>(p.in_len), channels = static_cast<int>(min(int64_t{32 * V}, p.channels - c0));
  float w[K][V], bias[V], window[K][V];
  if (valid) load_taps<T>(p, c, w, bias);
  const float shift = late_shift<T>(p.shift, bias);
  const bool word_aligned = (p.out_stride.b | p.out_stride.c) % (4 / sizeof(T)) == 0 && reinterpret_cast<uintptr_t>(p.out) % 4 == 0;
  for (uint32_t strip = strip_block * blockDim.y + threadIdx.y; strip < strips.count; strip += strips.blocks * blockDim.y) {
    const uint32_t b = strips.per_row.div(strip);
    const int t0 = (strip - b * strips.per_row.d) * kLen, count = min(kLen, len - t0);
    if (valid) {
      const T* row = static_cast<const T*>(p.x) + b * p.x_stride.b + c;
      load_window<T, K, V>(row, t0, p.x_stride.t, window);
      for (int i = 0; i < count; i += kUnroll) {
        Vec<T, V> raw[kUnroll];
        float results[V][kUnroll];
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          raw[u] = {};
          if (i + u < count) raw[u] = *reinterpret_cast<const Vec<T, V>*>(row + (t0 + i + u) * p.x_stride.t);
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
          unpack<T, V>(raw[u], window[K - 1]);
#pragma unroll
          for (int v = 0; v < V; ++v) {
            float y = tap_sum(w, window, v, bias[v]);
            if constexpr (sizeof(T) == 4) y += shift;
            if (applies_silu<SILU>(p.epilogue == Epilogue::kSilu)) y = silu<T>(y);
            results[v][u] = y;
          }
          slide<K, V>(window);
        }
        // 4 bytes at a time: words of neighbouring channels fall in different banks.
#pragma unroll
        for (int v = 0; v < V; ++v) {
#pragma unroll
          for (int u = 0; u < kUnroll; u += kWord)
            *reinterpret_cast<Vec<T, kWord>*>(tile + (threadIdx.x * V + v) * kPitch + i + u) = pack<T, kWord>(results[v] + u);
        }
      }
    }
    __syncwarp();
    T* out = static_cast<T*>(p.out) + b * p.out_stride.b + c0 * p.out_stride.c + t0;
    const int lane_t = threadIdx.x * kWord;
    if (word_aligned && count == kLen) {
#pragma unroll 8
      for (int r = 0; r < channels; ++r)
        *reinterpret_cast<uint32_t*>(out + r * p.out_stride.c + lane_t) = *reinterpret_cast<const uint32_t*>(tile + r * kPitch + lane_t);
    } else {
      for (int r = 0; r < channels; ++r) {
#pragma unroll
        for (int j = 0; j < kWord; ++j) {
          if (lane_t + j < count) out[r * p.out_stride.c + lane_t + j] = tile[r * kPitch + lane_t + j];
        }
      }
    }
    __syncwarp();
  }
}

}  // namespace fusebackend::causal_conv1d
