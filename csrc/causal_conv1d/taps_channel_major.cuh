// Some taps (5 to some tens) on channel-contiguous tensors, (batch, time, channel) in memory: a thread makes 16 neighbouring results
// of V channels, and walks along the taps with the 16 samples under each of them in registers.
#pragma once
#include "device.cuh"

namespace fusebackend::conv1d {

constexpr int kSpan = 16;  // results a thread
constexpr int kTapStep = 8;
constexpr int kSpanWarps = 4;

// Where a warp's work lies: all lanes have the same spans of time, each its own channels.
struct Spans {
  FastDiv per_row;         // spans in one batch row
  FastDiv channel_blocks;  // blockIdx.x = block of spans * channel_blocks + channel block
  uint32_t count;          // batch * per_row
  int len;                 // samples a span
  int blocks;              // blocks of spans; they stride over the spans
};

// V elements as they lie in memory, in whole registers.
template <int BYTES>
using Raw = std::conditional_t<BYTES == 8, uint2, std::conditional_t<BYTES == 4, uint32_t, uint16_t>>;

template <typename T, int V>
__device__ __forceinline__ Raw<V * sizeof(T)> load_channels(const T* row, int t, int len, int64_t stride) {
  Raw<V * sizeof(T)> raw = {};
  if (static_cast<unsigned>(t) < static_cast<unsigned>(len)) raw = *reinterpret_cast<const Raw<V * sizeof(T)>*>(row + t * stride);
  return raw;
}
template <typename T, int V>
__device__ __forceinline__ void unpack(const Raw<V * sizeof(T)>& raw, float (&out)[V]) {
  unpack<T, V>(*reinterpret_cast<const Vec<T, V>*>(&raw), out);
}

// DOWN: from the last tap to the first, and from the last of the 8 results to the first, which makes it the same walk. One
// chain of fused multiply-adds a result, in ATen's order: see window.cu.
template <typename T, int V, bool DOWN>
__global__ void __launch_bounds__(32 * kSpanWarps, 4) taps_channel_major_forward(const ConvParams p, const Spans spans) {
  extern __shared__ __align__(16) float taps_shared[];  // [step][32 * V]
  const uint32_t span_block = spans.channel_blocks.div(blockIdx.x);
  const int64_t c0 = static_cast<int64_t>(blockIdx.x - span_block * spans.channel_blocks.d) * 32 * V, c = c0 + threadIdx.x * V;
  const int taps = static_cast<int>(p.taps), left = static_cast<int>(p.left);
  const int in_len = static_cast<int>(p.in_len), out_len = static_cast<int>(p.out_len);
  for (int k = threadIdx.y; k < taps; k += kSpanWarps) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int64_t ch = c0 + v * 32 + threadIdx.x;
      taps_shared[((DOWN ? taps - 1 - k : k) * V + v) * 32 + threadIdx.x] = ch < p.channels ? to_float(static_cast<const T*>(p.w)[ch * p.w_c + k * p.w_k]) : 0.f;
    }
  }
  __syncthreads();
  if (c >= p.channels) return;
  float bias[V];
#pragma unroll
  for (int v = 0; v < V; ++v) bias[v] = p.bias ? to_float(static_cast<const T*>(p.bias)[(c + v) * p.bias_c]) : 0.f;
  const float shift = late_shift<T>(p.shift, bias);
  constexpr int kStep = DOWN ? -1 : 1;
  for (uint32_t span = span_block * kSpanWarps + threadIdx.y; span < spans.count; span += spans.blocks * kSpanWarps) {
    const uint32_t b = spans.per_row.div(span);
    const int t0 = static_cast<int>(span - b * spans.per_row.d) * kSpan;
    const T* row = static_cast<const T*>(p.x) + b * p.xs.b + c;
    int position = t0 - left + (DOWN ? kSpan - 1 + taps - 1 : 0);
    float acc[kSpan][V], win[kSpan + kTapStep][V];
    Raw<V * sizeof(T)> next[kTapStep];  // a step's samples are under way while the step before it is made
#pragma unroll
    for (int r = 0; r < kSpan; ++r) {
#pragma unroll
      for (int v = 0; v < V; ++v) acc[r][v] = bias[v];
      unpack<T, V>(load_channels<T, V>(row, position + kStep * r, in_len, p.xs.t), win[r]);
    }
    position += kStep * kSpan;
#pragma unroll
    for (int r = 0; r < kTapStep; ++r) next[r] = load_channels<T, V>(row, position + kStep * r, in_len, p.xs.t);
    for (int first = 0; first < taps; first += kTapStep) {
      position += kStep * kTapStep;
#pragma unroll
      for (int r = 0; r < kTapStep; ++r) {
        unpack<T, V>(next[r], win[kSpan + r]);
        if (first + kTapStep < taps) next[r] = load_channels<T, V>(row, position + kStep * r, in_len, p.xs.t);
      }
      auto multiply = [&](int j) {
        const auto w = *reinterpret_cast<const Vec<float, V>*>(taps_shared + ((first + j) * 32 + threadIdx.x) * V);
#pragma unroll
        for (int r = 0; r < kSpan; ++r) {
#pragma unroll
          for (int v = 0; v < V; ++v) acc[r][v] = fmaf(w.v[v], win[r + j][v], acc[r][v]);
        }
      };
      if (first + kTapStep <= taps) {
#pragma unroll
        for (int j = 0; j < kTapStep; ++j) multiply(j);
      } else {
#pragma unroll
        for (int j = 0; j < kTapStep - 1; ++j) {
          if (first + j < taps) multiply(j);
        }
      }
#pragma unroll
      for (int r = 0; r < kSpan; ++r) {
#pragma unroll
        for (int v = 0; v < V; ++v) win[r][v] = win[r + kTapStep][v];
      }
    }
#pragma unroll
    for (int r = 0; r < kSpan; ++r) {
      const int t = t0 + (DOWN ? kSpan - 1 - r : r);
      if (t >= out_len) continue;
      float dy[V];
      if (p.epilogue == Epilogue::kSiluGrad)
        unpack<T, V>(load_channels<T, V>(static_cast<const T*>(p.dy) + b * p.dys.b + c, t, out_len, p.dys.t), dy);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        float& y = acc[r][v];
        if constexpr (sizeof(T) == 4) y += shift;
        if (p.epilogue == Epilogue::kSilu) y = silu<T>(y);
        if (p.epilogue == Epilogue::kSiluGrad) y = silu_backward<T>(dy[v], y);
      }
      *reinterpret_cast<Vec<T, V>*>(static_cast<T*>(p.out) + b * p.outs.b + c + t * p.outs.t) = pack<T, V>(acc[r]);
    }
  }
}

// A warp adds up 8 taps, those from 8 * (warp of all warps); the samples under a tap slide by as time goes on. Sums of sums in fp32
// for a span, and of spans in double: see taps_time_major.cuh.
template <typename T, int V>
__global__ void __launch_bounds__(32 * kSpanWarps, sizeof(T) == 4 ? 3 : 4) taps_channel_major_weight_grad(const WeightGradParams p, const Spans spans) {
  const uint32_t span_block = spans.channel_blocks.div(blockIdx.x);
  const int64_t c = (static_cast<int64_t>(blockIdx.x - span_block * spans.channel_blocks.d) * 32 + threadIdx.x) * V;
  const int k0 = static_cast<int>(blockIdx.y * kSpanWarps + threadIdx.y) * kTapStep;
  const int taps = static_cast<int>(p.taps), in_len = static_cast<int>(p.in_len), out_len = static_cast<int>(p.out_len);
  if (c >= p.channels || (k0 >= taps && k0 > 0)) return;
  Sum<T> total[kTapStep][V] = {}, db[V] = {};
  for (uint32_t span = span_block; span < spans.count; span += spans.blocks) {
    const uint32_t b = spans.per_row.div(span);
    const int t0 = static_cast<int>(span - b * spans.per_row.d) * spans.len, t1 = min(out_len, t0 + spans.len);
    const T* row = static_cast<const T*>(p.x) + b * p.xs.b + c;
    const T* g_row = static_cast<const T*>(p.g) + b * p.gs.b + c;
    int position = t0 - static_cast<int>(p.left) + k0;
    float win[2 * kTapStep][V], sums[kTapStep][V] = {};
    Raw<V * sizeof(T)> next_x[kTapStep], next_g[kTapStep];
#pragma unroll
    for (int r = 0; r < kTapStep; ++r) {
      unpack<T, V>(load_channels<T, V>(row, position + r, in_len, p.xs.t), win[r]);
      next_x[r] = load_channels<T, V>(row, position + kTapStep + r, in_len, p.xs.t);
      next_g[r] = load_channels<T, V>(g_row, t0 + r, t1, p.gs.t);
    }
    for (int t = t0; t < t1; t += kTapStep) {
      position += kTapStep;
      float g[kSpan][V];
#pragma unroll
      for (int r = 0; r < kTapStep; ++r) {
        unpack<T, V>(next_g[r], g[r]);
        unpack<T, V>(next_x[r], win[kTapStep + r]);
        if (t + kTapStep < t1) {
          next_x[r] = load_channels<T, V>(row, position + kTapStep + r, in_len, p.xs.t);
          next_g[r] = load_channels<T, V>(g_row, t + kTapStep + r, t1, p.gs.t);
        }
      }
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (t + kTapStep <= t1) {
#pragma unroll
          for (int j = 0; j < kTapStep; ++j) {
            float few = g[0][v] * win[j][v];
#pragma unroll
            for (int r = 1; r < kTapStep; ++r) few = fmaf(g[r][v], win[r + j][v], few);
            sums[j][v] += few;
          }
        } else {
#pragma unroll
          for (int r = 0; r < kTapStep; ++r) {
            if (t + r >= t1) continue;  // a gradient that is not there must not meet an inf
#pragma unroll
            for (int j = 0; j < kTapStep; ++j) sums[j][v] = fmaf(g[r][v], win[r + j][v], sums[j][v]);
          }
        }
        if (k0 == 0) {
#pragma unroll
          for (int r = 0; r < kTapStep; ++r) db[v] += g[r][v];
        }
      }
#pragma unroll
      for (int r = 0; r < kTapStep; ++r) {
#pragma unroll
        for (int v = 0; v < V; ++v) win[r][v] = win[kTapStep + r][v];
      }
    }
#pragma unroll
    for (int j = 0; j < kTapStep; ++j) {
#pragma unroll
      for (int v = 0; v < V; ++v) total[j][v] += sums[j][v];
    }
  }
#pragma unroll
  for (int v = 0; v < V; ++v) {
    double* out = p.partial + (span_block * p.channels + c + v) * (p.taps + 1);
#pragma unroll
    for (int j = 0; j < kTapStep; ++j) {
      if (k0 + j < taps) out[k0 + j] = total[j][v];
    }
    if (k0 == 0) out[taps] = db[v];
  }
}

}  // namespace fusebackend::conv1d
