// Short causal kernels on channel-contiguous tensors, (batch, time, channel) in memory: a thread owns V neighbouring
// channels and marches along a strip of time with the last K-1 samples in registers.
#pragma once
#include "device.cuh"

namespace fusebackend::conv1d {

constexpr int kStripThreads = 128;

struct Strips {
  FastDiv per_row;         // strips in one batch row
  FastDiv channel_blocks;  // blockIdx.x = strip block * channel_blocks + channel block
  int64_t count;           // batch * per_row
  int len;                 // samples a strip
  int blocks;              // strip blocks; a thread strides over the strips by blocks * blockDim.y
};

template <typename T, int K, int V>
__device__ __forceinline__ void load_channel_taps(const void* w_, const void* bias_, int64_t c, int64_t w_c, int64_t w_k,
                                                  int64_t bias_c, float (&w)[K][V], float (&bias)[V]) {
#pragma unroll
  for (int v = 0; v < V; ++v) {
    const T* wc = static_cast<const T*>(w_) + (c + v) * w_c;
#pragma unroll
    for (int k = 0; k < K; ++k) w[k][v] = to_float(wc[k * w_k]);
    bias[v] = (bias_ ? to_float(static_cast<const T*>(bias_)[(c + v) * bias_c]) : 0.f);
  }
}

// win[0..K-2] <- the K-1 samples before t.
template <typename T, int K, int V>
__device__ __forceinline__ void load_window(const T* row, int t, int64_t stride, float (&win)[K][V]) {
#pragma unroll
  for (int k = 0; k < K - 1; ++k) {
    const int ti = t - (K - 1) + k;
    Vec<T, V> raw = {};
    if (ti >= 0) raw = *reinterpret_cast<const Vec<T, V>*>(row + ti * stride);
#pragma unroll
    for (int v = 0; v < V; ++v) win[k][v] = to_float(raw.v[v]);
  }
}

template <int K, int V>
__device__ __forceinline__ void slide(float (&win)[K][V]) {
#pragma unroll
  for (int k = 0; k < K - 1; ++k) {
#pragma unroll
    for (int v = 0; v < V; ++v) win[k][v] = win[k + 1][v];
  }
}

template <typename T, int K, int V, int U, Silu SILU>
__global__ void __launch_bounds__(kStripThreads) short_channel_major_forward(const ConvParams p, const Strips strips) {
  const uint32_t strip_block = strips.channel_blocks.div(blockIdx.x);
  const int64_t c = ((blockIdx.x - strip_block * strips.channel_blocks.d) * 32 + threadIdx.x) * V;
  if (c >= p.channels) return;
  float w[K][V], bias[V], win[K][V];
  load_channel_taps<T, K, V>(p.w, p.bias, c, p.w_c, p.w_k, p.bias_c, w, bias);
  const float shift = late_shift<T>(p.shift, bias);
  for (uint32_t strip = strip_block * blockDim.y + threadIdx.y; strip < strips.count; strip += strips.blocks * blockDim.y) {
    const uint32_t b = strips.per_row.div(strip);
    const int t0 = (strip - b * strips.per_row.d) * strips.len;
    const int t1 = min(t0 + strips.len, static_cast<int>(p.in_len));
    const T* row = static_cast<const T*>(p.x) + b * p.xs.b + c;
    T* orow = static_cast<T*>(p.out) + b * p.outs.b + c;
    load_window<T, K, V>(row, t0, p.xs.t, win);
    auto step = [&](const Vec<T, V>& raw, int t) {
      float y[V];
      unpack<T, V>(raw, win[K - 1]);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        y[v] = bias[v];
#pragma unroll
        for (int k = 0; k < K; ++k) y[v] = fmaf(w[k][v], win[k][v], y[v]);
        if constexpr (sizeof(T) == 4) y[v] += shift;
        if (silu_follows<SILU>(p.epilogue == Epilogue::kSilu)) y[v] = silu<T>(y[v]);
      }
      *reinterpret_cast<Vec<T, V>*>(orow + t * p.outs.t) = pack<T, V>(y);
      slide<K, V>(win);
    };
    int t = t0;
    for (; t + U <= t1; t += U) {
      Vec<T, V> raw[U];
#pragma unroll
      for (int u = 0; u < U; ++u) raw[u] = *reinterpret_cast<const Vec<T, V>*>(row + (t + u) * p.xs.t);
#pragma unroll
      for (int u = 0; u < U; ++u) step(raw[u], t + u);
    }
    for (; t < t1; ++t) step(*reinterpret_cast<const Vec<T, V>*>(row + t * p.xs.t), t);
  }
}

// Results as (batch, channel, time): a warp's strip of 32 * 2 channels goes through shared memory, so that rows of it are stored whole.
constexpr int kTurnChannels = 2;
template <typename T>
constexpr int kTurnLen = 128 / sizeof(T);  // samples a strip
template <typename T>
constexpr int kTurnPitch = kTurnLen<T> + 4 / sizeof(T);  // of a channel's row: one word more, for the banks

template <typename T, int K, Silu SILU>
__global__ void __launch_bounds__(kStripThreads) short_turned_forward(const ConvParams p, const Strips strips) {
  constexpr int V = kTurnChannels, kLen = kTurnLen<T>, kPitch = kTurnPitch<T>, U = 8, kWord = 4 / sizeof(T);
  __shared__ __align__(16) T tiles[kStripThreads / 32][32 * V * kPitch];
  T* tile = tiles[threadIdx.y];
  const uint32_t strip_block = strips.channel_blocks.div(blockIdx.x);
  const int64_t c0 = static_cast<int64_t>(blockIdx.x - strip_block * strips.channel_blocks.d) * 32 * V, c = c0 + threadIdx.x * V;
  const bool mine = c < p.channels;
  const int len = static_cast<int>(p.in_len), rows = static_cast<int>(min(int64_t{32 * V}, p.channels - c0));
  float w[K][V], bias[V], win[K][V];
  if (mine) load_channel_taps<T, K, V>(p.w, p.bias, c, p.w_c, p.w_k, p.bias_c, w, bias);
  const float shift = late_shift<T>(p.shift, bias);
  const bool words = (p.outs.b | p.outs.c) % (4 / sizeof(T)) == 0 && reinterpret_cast<uintptr_t>(p.out) % 4 == 0;
  for (uint32_t strip = strip_block * blockDim.y + threadIdx.y; strip < strips.count; strip += strips.blocks * blockDim.y) {
    const uint32_t b = strips.per_row.div(strip);
    const int t0 = (strip - b * strips.per_row.d) * kLen, count = min(kLen, len - t0);
    if (mine) {
      const T* row = static_cast<const T*>(p.x) + b * p.xs.b + c;
      load_window<T, K, V>(row, t0, p.xs.t, win);
      for (int i = 0; i < count; i += U) {
        Vec<T, V> raw[U];
        float results[V][U];
#pragma unroll
        for (int u = 0; u < U; ++u) {
          raw[u] = {};
          if (i + u < count) raw[u] = *reinterpret_cast<const Vec<T, V>*>(row + (t0 + i + u) * p.xs.t);
        }
#pragma unroll
        for (int u = 0; u < U; ++u) {
          unpack<T, V>(raw[u], win[K - 1]);
#pragma unroll
          for (int v = 0; v < V; ++v) {
            float y = bias[v];
#pragma unroll
            for (int k = 0; k < K; ++k) y = fmaf(w[k][v], win[k][v], y);
            if constexpr (sizeof(T) == 4) y += shift;
            if (silu_follows<SILU>(p.epilogue == Epilogue::kSilu)) y = silu<T>(y);
            results[v][u] = y;
          }
          slide<K, V>(win);
        }
        // 4 bytes at a time: words of neighbouring rows fall in different banks.
#pragma unroll
        for (int v = 0; v < V; ++v) {
#pragma unroll
          for (int u = 0; u < U; u += kWord)
            *reinterpret_cast<Vec<T, kWord>*>(tile + (threadIdx.x * V + v) * kPitch + i + u) = pack<T, kWord>(results[v] + u);
        }
      }
    }
    __syncwarp();
    T* out = static_cast<T*>(p.out) + b * p.outs.b + c0 * p.outs.c + t0;
    const int at = threadIdx.x * kWord;
    if (words && count == kLen) {
#pragma unroll 8
      for (int r = 0; r < rows; ++r) *reinterpret_cast<uint32_t*>(out + r * p.outs.c + at) = *reinterpret_cast<const uint32_t*>(tile + r * kPitch + at);
    } else {
      for (int r = 0; r < rows; ++r) {
#pragma unroll
        for (int j = 0; j < kWord; ++j) {
          if (at + j < count) out[r * p.outs.c + at + j] = tile[r * kPitch + at + j];
        }
      }
    }
    __syncwarp();
  }
}

// Runs K-1 samples past its strip, for the gradients that reach back into it; dw and db take only the strip's own.
template <typename T, int K, int V, int U, Silu SILU>
__global__ void __launch_bounds__(kStripThreads) short_channel_major_backward(const BackwardParams p,
                                                                              const Strips strips) {
  const uint32_t strip_block = strips.channel_blocks.div(blockIdx.x);
  const int64_t c0 = (blockIdx.x - strip_block * strips.channel_blocks.d) * 32 * V, c = c0 + threadIdx.x * V;
  Sum<T> dw[K + 1][V] = {};  // the last is db
  if (c < p.channels) {
    const int len = static_cast<int>(p.in_len);
    float w[K][V], bias[V], win[K][V], g[K][V];  // g[j]: the gradient of pre at t-(K-1)+j
    load_channel_taps<T, K, V>(p.w, p.bias, c, p.w_c, p.w_k, p.bias_c, w, bias);
    const float shift = late_shift<T>(p.shift, bias);
    for (uint32_t strip = strip_block * blockDim.y + threadIdx.y; strip < strips.count; strip += strips.blocks * blockDim.y) {
      const uint32_t b = strips.per_row.div(strip);
      const int t0 = (strip - b * strips.per_row.d) * strips.len;
      const int t1 = min(t0 + strips.len, len);
      const T* row = static_cast<const T*>(p.x) + b * p.xs.b + c;
      const T* dyrow = static_cast<const T*>(p.dy) + b * p.dys.b + c;
      T* dxrow = static_cast<T*>(p.dx) + b * p.dxs.b + c;
#pragma unroll
      for (int k = 0; k < K; ++k) {
#pragma unroll
        for (int v = 0; v < V; ++v) g[k][v] = 0.f;
      }
      load_window<T, K, V>(row, t0, p.xs.t, win);
      // One sample; own: of this strip, else one of those after it.
      auto step = [&](const Vec<T, V>& xraw, const Vec<T, V>& dyraw, int t, bool own) {
        float dx[V];
        unpack<T, V>(xraw, win[K - 1]);
        unpack<T, V>(dyraw, g[K - 1]);
#pragma unroll
        for (int v = 0; v < V; ++v) {
          if (silu_follows<SILU>(p.silu)) {
            float pre = bias[v];
#pragma unroll
            for (int k = 0; k < K; ++k) pre = fmaf(w[k][v], win[k][v], pre);
            g[K - 1][v] = silu_backward<T>(g[K - 1][v], sizeof(T) == 4 ? pre + shift : pre);
          }
          dx[v] = 0.f;
#pragma unroll
          for (int k = 0; k < K; ++k) dx[v] = fmaf(w[k][v], g[K - 1 - k][v], dx[v]);
          if (own) {
#pragma unroll
            for (int k = 0; k < K; ++k) dw[k][v] = fma(Sum<T>(g[K - 1][v]), Sum<T>(win[k][v]), dw[k][v]);
            dw[K][v] += g[K - 1][v];
          }
        }
        const int s = t - (K - 1);
        if (p.dx && s >= t0) *reinterpret_cast<Vec<T, V>*>(dxrow + s * p.dxs.t) = pack<T, V>(dx);
        slide<K, V>(win);
        slide<K, V>(g);
      };
      auto load = [](const T* from) { return *reinterpret_cast<const Vec<T, V>*>(from); };
      int t = t0;
      for (; t + U <= t1; t += U) {
        Vec<T, V> xraw[U], dyraw[U];
#pragma unroll
        for (int u = 0; u < U; ++u) {
          xraw[u] = load(row + (t + u) * p.xs.t);
          dyraw[u] = load(dyrow + (t + u) * p.dys.t);
        }
#pragma unroll
        for (int u = 0; u < U; ++u) step(xraw[u], dyraw[u], t + u, true);
      }
      for (; t < t1 + K - 1; ++t) {
        Vec<T, V> xraw = {}, dyraw = {};
        if (t < len) {
          xraw = load(row + t * p.xs.t), dyraw = load(dyrow + t * p.dys.t);
        } else {  // no gradient here, whatever pre is
#pragma unroll
          for (int k = 0; k < K - 1; ++k) {
#pragma unroll
            for (int v = 0; v < V; ++v) win[k][v] = 0.f;
          }
        }
        step(xraw, dyraw, t, t < t1);
      }
    }
  }
  if (!p.dw && !p.db) return;
  // Sum the block's strips in order, then leave one partial a block.
  constexpr int kRows = kStripThreads / 32;
  __shared__ Sum<T> sums[kRows][32 * V];
#pragma unroll
  for (int k = 0; k <= K; ++k) {
    __syncthreads();
#pragma unroll
    for (int v = 0; v < V; ++v) sums[threadIdx.y][v * 32 + threadIdx.x] = dw[k][v];
    __syncthreads();
    for (int i = threadIdx.y * 32 + threadIdx.x; i < 32 * V; i += kStripThreads) {
      double total = 0;
#pragma unroll
      for (int r = 0; r < kRows; ++r) total += sums[r][i];
      const int64_t ch = c0 + (i & 31) * V + i / 32;
      if (ch < p.channels) p.partial[(strip_block * p.channels + ch) * (K + 1) + k] = total;
    }
  }
}

}  // namespace fusebackend::conv1d
