// Short causal convolutions (2 to 4 taps) of (batch, time, channel) tensors. A thread takes V neighbouring channels and goes along a strip
// of time with the last K-1 samples in registers.
#pragma once
#include "causal_conv1d/device_math.cuh"

namespace fusebackend::causal_conv1d {

constexpr int kStripThreads = 128;  // of a block: 32 lanes side by side in channels, the warps each on strips of their own

// How rows are cut into strips of time, and strips shared among blocks.
struct Strips {
  FastDiv per_row;         // strips of one batch entry
  FastDiv channel_blocks;  // blockIdx.x = strip block * channel_blocks + channel block
  int64_t count;           // batch * per_row
  int len;                 // samples of a strip
  int blocks;              // strip blocks; a warp takes every blocks * blockDim.y-th strip
};

// The taps and biases of V channels. Params: ConvParams or BackwardParams.
template <typename T, int K, int V, typename Params>
__device__ __forceinline__ void load_taps(const Params& p, int64_t c, float (&w)[K][V], float (&bias)[V]) {
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const T* wc = static_cast<const T*>(p.w) + (c + v) * p.w_stride.c;
#pragma unroll
    for (int k = 0; k < K; ++k) w[k][v] = to_float(wc[k * p.w_stride.k]);
    bias[v] = load_bias<T>(p, c + v);
  }
}

// start + sum_k w[k] * x[k] of channel v.
template <int K, int V>
__device__ __forceinline__ float tap_sum(const float (&w)[K][V], const float (&x)[K][V], int v, float start) {
#pragma unroll
  for (int k = 0; k < K; ++k) start = fmaf(w[k][v], x[k][v], start);
  return start;
}

// window[0..K-2] <- the K-1 samples before t.
template <typename T, int K, int V>
__device__ __forceinline__ void load_window(const T* row, int t, int64_t stride, float (&window)[K][V]) {
#pragma unroll
  for (int k = 0; k < K - 1; ++k) {
    const int ti = t - (K - 1) + k;
    Vec<T, V> raw = {};
    if (ti >= 0) raw = *reinterpret_cast<const Vec<T, V>*>(row + ti * stride);
#pragma unroll
    for (int v = 0; v < V; ++v) window[k][v] = to_float(raw.v[v]);
  }
}

template <int K, int V>
__device__ __forceinline__ void slide(float (&window)[K][V]) {
#pragma unroll
  for (int k = 0; k < K - 1; ++k) {
#pragma unroll
    for (int v = 0; v < V; ++v) window[k][v] = window[k + 1][v];
  }
}

template <typename T, int K, int V, int UNROLL, SiluMode SILU>
__global__ void __launch_bounds__(kStripThreads) short_btc_forward(const ConvParams p, const Strips strips) {
  const uint32_t strip_block = strips.channel_blocks.div(blockIdx.x);
  const int64_t c = ((blockIdx.x - strip_block * strips.channel_blocks.d) * 32 + threadIdx.x) * V;
  if (c >= p.channels) return;
  float w[K][V], bias[V], window[K][V];
  load_taps<T>(p, c, w, bias);
  const float shift = late_shift<T>(p.shift, bias);
  for (uint32_t strip = strip_block * blockDim.y + threadIdx.y; strip < strips.count; strip += strips.blocks * blockDim.y) {
    const uint32_t b = strips.per_row.div(strip);
    const int t0 = (strip - b * strips.per_row.d) * strips.len;
    const int t1 = min(t0 + strips.len, static_cast<int>(p.in_len));
    const T* row = static_cast<const T*>(p.x) + b * p.x_stride.b + c;
    T* out_row = static_cast<T*>(p.out) + b * p.out_stride.b + c;
    load_window<T, K, V>(row, t0, p.x_stride.t, window);
    auto step = [&](const Vec<T, V>& raw, int t) {
      float y[V];
      unpack<T, V>(raw, window[K - 1]);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        y[v] = tap_sum(w, window, v, bias[v]);
        if constexpr (sizeof(T) == 4) y[v] += shift;
        if (applies_silu<SILU>(p.epilogue == Epilogue::kSilu)) y[v] = silu<T>(y[v]);
      }
      *reinterpret_cast<Vec<T, V>*>(out_row + t * p.out_stride.t) = pack<T, V>(y);
      slide<K, V>(window);
    };
    int t = t0;
    for (; t + UNROLL <= t1; t += UNROLL) {
      Vec<T, V> raw[UNROLL];
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) raw[u] = *reinterpret_cast<const Vec<T, V>*>(row + (t + u) * p.x_stride.t);
#pragma unroll
      for (int u = 0; u < UNROLL; ++u) step(raw[u], t + u);
    }
    for (; t < t1; ++t) step(*reinterpret_cast<const Vec<T, V>*>(row + t * p.x_stride.t), t);
  }
}

// dx, dw and db in one pass. A strip's loop runs K-1 samples past its end, since the gradients there reach back into it; dw and db take
// only the strip's samples. One partial sum of dw and db a strip block.
template <typename T, int K, int V, int UNROLL, SiluMode SILU>
__global__ void __launch_bounds__(kStripThreads, K == 3 && V > 1 && sizeof(T) == 2 ? 5 : 0)
    short_btc_backward(const BackwardParams p, const Strips strips) {
  const uint32_t strip_block = strips.channel_blocks.div(blockIdx.x);
  const int64_t c0 = (blockIdx.x - strip_block * strips.channel_blocks.d) * 32 * V, c = c0 + threadIdx.x * V;
  Sum<T> dw[K + 1][V] = {};  // the last is db
  if (c < p.channels) {
    const int len = static_cast<int>(p.in_len);
    float w[K][V], bias[V];
    load_taps<T>(p, c, w, bias);
    const float shift = late_shift<T>(p.shift, bias);
    for (uint32_t strip = strip_block * blockDim.y + threadIdx.y; strip < strips.count; strip += strips.blocks * blockDim.y) {
      const uint32_t b = strips.per_row.div(strip);
      const int t0 = (strip - b * strips.per_row.d) * strips.len;
      const int t1 = min(t0 + strips.len, len);
      const T* row = static_cast<const T*>(p.x) + b * p.x_stride.b + c;
      const T* dy_row = static_cast<const T*>(p.dy) + b * p.dy_stride.b + c;
      T* dx_row = static_cast<T*>(p.dx) + b * p.dx_stride.b + c;
      float window[K][V], g[K][V] = {};  // g[j]: the gradient of pre at t-(K-1)+j
      load_window<T, K, V>(row, t0, p.x_stride.t, window);
      auto step = [&](const Vec<T, V>& x_raw, const Vec<T, V>& dy_raw, int t, bool in_strip) {
        float dx[V];
        unpack<T, V>(x_raw, window[K - 1]);
        unpack<T, V>(dy_raw, g[K - 1]);
#pragma unroll
        for (int v = 0; v < V; ++v) {
          if (applies_silu<SILU>(p.silu)) {
            const float pre = tap_sum(w, window, v, bias[v]);
            g[K - 1][v] = silu_backward<T>(g[K - 1][v], sizeof(T) == 4 ? pre + shift : pre);
          }
          dx[v] = 0.f;
#pragma unroll
          for (int k = 0; k < K; ++k) {
            if (in_strip || k > t - len) dx[v] = fmaf(w[k][v], g[K - 1 - k][v], dx[v]);  // past the row there is no gradient
          }
          if (in_strip) {
#pragma unroll
            for (int k = 0; k < K; ++k) dw[k][v] = fma(Sum<T>(g[K - 1][v]), Sum<T>(window[k][v]), dw[k][v]);
            dw[K][v] += g[K - 1][v];
          }
        }
        const int t_dx = t - (K - 1);
        if (p.dx && t_dx >= t0) *reinterpret_cast<Vec<T, V>*>(dx_row + t_dx * p.dx_stride.t) = pack<T, V>(dx);
        slide<K, V>(window);
        slide<K, V>(g);
      };
      auto load = [](const T* from) { return *reinterpret_cast<const Vec<T, V>*>(from); };
      int t = t0;
      for (; t + UNROLL <= t1; t += UNROLL) {
        Vec<T, V> x_raw[UNROLL], dy_raw[UNROLL];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
          x_raw[u] = load(row + (t + u) * p.x_stride.t);
          dy_raw[u] = load(dy_row + (t + u) * p.dy_stride.t);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) step(x_raw[u], dy_raw[u], t + u, true);
      }
      for (; t < t1 + K - 1; ++t) {
        Vec<T, V> x_raw = {}, dy_raw = {};
        if (t < len) x_raw = load(row + t * p.x_stride.t), dy_raw = load(dy_row + t * p.dy_stride.t);
        step(x_raw, dy_raw, t, t < t1);
      }
    }
  }
  if (!p.dw && !p.db) return;
  // The warps' sums are added in their order.
  constexpr int kWarps = kStripThreads / 32;
  __shared__ Sum<T> sums[kWarps][32 * V];
#pragma unroll
  for (int k = 0; k <= K; ++k) {
    __syncthreads();
#pragma unroll
    for (int v = 0; v < V; ++v) sums[threadIdx.y][v * 32 + threadIdx.x] = dw[k][v];
    __syncthreads();
    for (int i = threadIdx.y * 32 + threadIdx.x; i < 32 * V; i += kStripThreads) {
      double total = 0;
#pragma unroll
      for (int r = 0; r < kWarps; ++r) total += sums[r][i];
      const int64_t ch = c0 + (i & 31) * V + i / 32;
      if (ch < p.channels) p.partial[(strip_block * p.channels + ch) * (K + 1) + k] = total;
    }
  }
}

}  // namespace fusebackend::causal_conv1d
