// Some tens of taps on (batch, time, channel) tensors: a thread takes a span of 16 results of V neighbouring channels, and goes along the taps
// with the 16 samples under each of them in registers.
#pragma once
#include "causal_conv1d/direct_sums.cuh"
#include "common/channel_epilogue.cuh"

namespace fusebackend::causal_conv1d {

constexpr int kSpan = 16;    // results of a thread
constexpr int kTapStep = 8;  // taps between two shifts of the window
constexpr int kSpanWarps = 4;

// How rows are cut into spans of time, and spans shared among blocks. All lanes of a warp have the same spans, each its own channels.
struct Spans {
  FastDiv per_row;         // spans of one batch entry
  FastDiv channel_blocks;  // blockIdx.x = span block * channel_blocks + channel block
  uint32_t count;          // batch * per_row
  int len;                 // samples of a span
  int blocks;              // span blocks, which take the spans in turn
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

// A result is one chain of fused multiply-adds in ATen's order, see shared_tile_forward.cuh. LAST_TAP_FIRST: taps and results are both taken
// from the last to the first, so the window moves as in the other direction.
template <typename T, int V, bool LAST_TAP_FIRST>
__global__ void __launch_bounds__(32 * kSpanWarps, 4) register_window_btc_forward(const ConvParams p, const Spans spans) {
  extern __shared__ __align__(16) float taps_shared[];  // [tap, in the order of use][32 * V channels]
  const uint32_t span_block = spans.channel_blocks.div(blockIdx.x);
  const int64_t c0 = static_cast<int64_t>(blockIdx.x - span_block * spans.channel_blocks.d) * 32 * V, c = c0 + threadIdx.x * V;
  const int taps = static_cast<int>(p.taps), left = static_cast<int>(p.left);
  const int in_len = static_cast<int>(p.in_len), out_len = static_cast<int>(p.out_len);
  for (int k = threadIdx.y; k < taps; k += kSpanWarps) {
#pragma unroll
    for (int v = 0; v < V; ++v) {
      const int64_t ch = c0 + v * 32 + threadIdx.x;
      taps_shared[((LAST_TAP_FIRST ? taps - 1 - k : k) * V + v) * 32 + threadIdx.x] =
          ch < p.channels ? to_float(static_cast<const T*>(p.w)[ch * p.w_stride.c + k * p.w_stride.k]) : 0.f;
    }
  }
  __syncthreads();
  if (c >= p.channels) return;
  float bias[V];
#pragma unroll
  for (int v = 0; v < V; ++v) bias[v] = load_bias<T>(p, c + v);
  const float shift = late_shift<T>(p.shift, bias);
  constexpr int kStep = LAST_TAP_FIRST ? -1 : 1;
  for (uint32_t span = span_block * kSpanWarps + threadIdx.y; span < spans.count; span += spans.blocks * kSpanWarps) {
    const uint32_t b = spans.per_row.div(span);
    const int t0 = static_cast<int>(span - b * spans.per_row.d) * kSpan;
    const T* row = static_cast<const T*>(p.x) + b * p.x_stride.b + c;
    int position = t0 - left + (LAST_TAP_FIRST ? kSpan - 1 + taps - 1 : 0);
    float acc[kSpan][V], window[kSpan + kTapStep][V];
    Raw<V * sizeof(T)> next[kTapStep];  // a step's samples are loaded during the step before
#pragma unroll
    for (int r = 0; r < kSpan; ++r) {
#pragma unroll
      for (int v = 0; v < V; ++v) acc[r][v] = bias[v];
      unpack<T, V>(load_channels<T, V>(row, position + kStep * r, in_len, p.x_stride.t), window[r]);
    }
    position += kStep * kSpan;
#pragma unroll
    for (int r = 0; r < kTapStep; ++r) next[r] = load_channels<T, V>(row, position + kStep * r, in_len, p.x_stride.t);
    for (int first = 0; first < taps; first += kTapStep) {
      position += kStep * kTapStep;
#pragma unroll
      for (int r = 0; r < kTapStep; ++r) {
        unpack<T, V>(next[r], window[kSpan + r]);
        if (first + kTapStep < taps) next[r] = load_channels<T, V>(row, position + kStep * r, in_len, p.x_stride.t);
      }
      auto multiply = [&](int j) {
        const auto w = *reinterpret_cast<const Vec<float, V>*>(taps_shared + ((first + j) * 32 + threadIdx.x) * V);
#pragma unroll
        for (int r = 0; r < kSpan; ++r) {
#pragma unroll
          for (int v = 0; v < V; ++v) acc[r][v] = fmaf(w.v[v], window[r + j][v], acc[r][v]);
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
        for (int v = 0; v < V; ++v) window[r][v] = window[r + kTapStep][v];
      }
    }
    if (p.skips_padding && (t0 < left || t0 + kSpan - 1 - left + taps > in_len)) {
      bool any_nan = false;
#pragma unroll
      for (int r = 0; r < kSpan; ++r) {
#pragma unroll
        for (int v = 0; v < V; ++v) any_nan = any_nan || acc[r][v] != acc[r][v];
      }
      if (any_nan) {
        for (int t = t0; t < min(out_len, t0 + kSpan); ++t) {
          for (int v = 0; v < V; ++v) {
            const T* w = static_cast<const T*>(p.w) + (c + v) * p.w_stride.c;
            const float sum = direct_sum(row + v, p.x_stride.t, in_len, w, p.w_stride.k, taps, t - left, 0.f, true);
            static_cast<T*>(p.out)[b * p.out_stride.b + c + v + t * p.out_stride.t] = from_float<T>(sum);
          }
        }
        continue;
      }
    }
    if (p.epilogue == Epilogue::kChannel) {
      ChannelAffine affine[V];
#pragma unroll
      for (int v = 0; v < V; ++v) affine[v] = affine_of<T>(p.after, c + v);
      if constexpr (sizeof(T) == 4) {
#pragma unroll
        for (int r = 0; r < kSpan; ++r) {
#pragma unroll
          for (int v = 0; v < V; ++v) acc[r][v] += shift;
        }
      }
      finish<T>(acc, p.after, affine);
    }
#pragma unroll
    for (int r = 0; r < kSpan; ++r) {
      const int t = t0 + (LAST_TAP_FIRST ? kSpan - 1 - r : r);
      if (t >= out_len) continue;
      float dy[V];
      if (p.epilogue == Epilogue::kSiluGrad)
        unpack<T, V>(load_channels<T, V>(static_cast<const T*>(p.dy) + b * p.dy_stride.b + c, t, out_len, p.dy_stride.t), dy);
#pragma unroll
      for (int v = 0; v < V; ++v) {
        float& y = acc[r][v];
        if (sizeof(T) == 4 && p.epilogue != Epilogue::kChannel) y += shift;
        if (p.epilogue == Epilogue::kSilu) y = silu<T>(y);
        if (p.epilogue == Epilogue::kSiluGrad) y = silu_backward<T>(dy[v], y);
      }
      *reinterpret_cast<Vec<T, V>*>(static_cast<T*>(p.out) + b * p.out_stride.b + c + t * p.out_stride.t) = pack<T, V>(acc[r]);
    }
  }
}

// dw and db. A warp sums 8 taps, those from 8 * (index of the warp in grid dimension y) on, while the samples under them slide by. Sums of 8
// products are added up in fp32 over a span, and spans in double, as in register_window_bct.cuh.
template <typename T, int V>
__global__ void __launch_bounds__(32 * kSpanWarps, sizeof(T) == 4 ? 3 : 4)
    register_window_btc_weight_grad(const WeightGradParams p, const Spans spans) {
  const uint32_t span_block = spans.channel_blocks.div(blockIdx.x);
  const int64_t c = (static_cast<int64_t>(blockIdx.x - span_block * spans.channel_blocks.d) * 32 + threadIdx.x) * V;
  const int k0 = static_cast<int>(blockIdx.y * kSpanWarps + threadIdx.y) * kTapStep;
  const int taps = static_cast<int>(p.taps), in_len = static_cast<int>(p.in_len), out_len = static_cast<int>(p.out_len);
  if (c >= p.channels || (k0 >= taps && k0 > 0)) return;
  Sum<T> total[kTapStep][V] = {}, db[V] = {};
  for (uint32_t span = span_block; span < spans.count; span += spans.blocks) {
    const uint32_t b = spans.per_row.div(span);
    const int t0 = static_cast<int>(span - b * spans.per_row.d) * spans.len, t1 = min(out_len, t0 + spans.len);
    const T* row = static_cast<const T*>(p.x) + b * p.x_stride.b + c;
    const T* g_row = static_cast<const T*>(p.g) + b * p.g_stride.b + c;
    int position = t0 - static_cast<int>(p.left) + k0;
    float window[2 * kTapStep][V], sums[kTapStep][V] = {};
    Raw<V * sizeof(T)> next_x[kTapStep], next_g[kTapStep];
#pragma unroll
    for (int r = 0; r < kTapStep; ++r) {
      unpack<T, V>(load_channels<T, V>(row, position + r, in_len, p.x_stride.t), window[r]);
      next_x[r] = load_channels<T, V>(row, position + kTapStep + r, in_len, p.x_stride.t);
      next_g[r] = load_channels<T, V>(g_row, t0 + r, t1, p.g_stride.t);
    }
    for (int t = t0; t < t1; t += kTapStep) {
      position += kTapStep;
      float g[kSpan][V];
#pragma unroll
      for (int r = 0; r < kTapStep; ++r) {
        unpack<T, V>(next_g[r], g[r]);
        unpack<T, V>(next_x[r], window[kTapStep + r]);
        if (t + kTapStep < t1) {
          next_x[r] = load_channels<T, V>(row, position + kTapStep + r, in_len, p.x_stride.t);
          next_g[r] = load_channels<T, V>(g_row, t + kTapStep + r, t1, p.g_stride.t);
        }
      }
#pragma unroll
      for (int v = 0; v < V; ++v) {
        if (t + kTapStep <= t1) {
#pragma unroll
          for (int j = 0; j < kTapStep; ++j) {
            float step_sum = g[0][v] * window[j][v];
#pragma unroll
            for (int r = 1; r < kTapStep; ++r) step_sum = fmaf(g[r][v], window[r + j][v], step_sum);
            sums[j][v] += step_sum;
          }
        } else {
#pragma unroll
          for (int r = 0; r < kTapStep; ++r) {
            if (t + r >= t1) continue;  // a gradient outside of the row must not meet an inf
#pragma unroll
            for (int j = 0; j < kTapStep; ++j) sums[j][v] = fmaf(g[r][v], window[r + j][v], sums[j][v]);
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
        for (int v = 0; v < V; ++v) window[r][v] = window[kTapStep + r][v];
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

}  // namespace fusebackend::causal_conv1d
