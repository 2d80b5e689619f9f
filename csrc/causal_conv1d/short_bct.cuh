// Short causal convolutions (2 to 4 taps) of (batch, channel, time) tensors. One block a channel; a thread takes 16 bytes of a row at a time
// and also loads the few samples before them, which its neighbours have just brought into L1.
#pragma once
#include "causal_conv1d/bct_rows.cuh"

namespace fusebackend::causal_conv1d {

constexpr int kHalo = 4;  // samples loaded before a thread's own: K-1 are used, 4 keep loads aligned

// UNROLL: items that a thread has in flight.
template <typename T, int K, int UNROLL, SiluMode SILU, RowAccess ACCESS>
__global__ void __launch_bounds__(kRowThreads) short_bct_forward(const ConvParams p, const RowItems items) {
  static_assert(K - 1 <= kHalo);
  constexpr int V = kVecSize<T>;
  const int64_t c = blockIdx.x;
  float w[K], bias;
  load_taps<T>(p, c, w, bias);
  const float shift = late_shift<T>(p.shift, bias);
  const T* xc = static_cast<const T*>(p.x) + c * p.x_stride.c;
  T* oc = static_cast<T*>(p.out) + c * p.out_stride.c;
  const uint32_t stride = gridDim.y * kRowThreads;
  for (uint32_t first = blockIdx.y * kRowThreads + threadIdx.x; first < items.count; first += UNROLL * stride) {
    float x[UNROLL][kHalo + V];
    uint32_t b[UNROLL];
    int t[UNROLL], len[UNROLL];
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      const uint32_t item = first + u * stride;
      len[u] = item < items.count ? static_cast<int>(p.in_len) : 0;
      b[u] = len[u] ? items.per_row.div(item) : 0;
      const T* row = xc + b[u] * p.x_stride.b;
      t[u] = static_cast<int>(item - b[u] * items.per_row.d) * V - row_misalignment<T, ACCESS>(row);
      load_samples<T, V, ACCESS>(row, t[u], len[u], x[u] + kHalo, items.masked_ends);
      load_samples<T, kHalo, ACCESS>(row, t[u] - kHalo, len[u], x[u], items.masked_ends);
    }
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
      float y[V];
#pragma unroll
      for (int e = 0; e < V; ++e) {
        y[e] = tap_sum(w, x[u] + kHalo - (K - 1) + e, bias);
        if constexpr (sizeof(T) == 4) y[e] += shift;
        if (applies_silu<SILU>(p.epilogue == Epilogue::kSilu)) y[e] = silu<T>(y[e]);
      }
      store_samples<T, V, ACCESS>(oc + b[u] * p.out_stride.b, t[u], len[u], y, items.masked_ends);
    }
  }
}

// dx, dw and db in one pass. The gradients of pre after a thread's own samples come from the next lane; lane 31 computes its gradients for
// lane 30 alone, and its item is the first of another warp.
template <typename T, int K, SiluMode SILU, RowAccess ACCESS>
__global__ void __launch_bounds__(kRowThreads, sizeof(T) == 2 && ACCESS != RowAccess::kAligned ? 4 : 0)
    short_bct_backward(const BackwardParams p, const RowItems items) {
  static_assert(K - 1 <= kHalo);
  constexpr int V = kVecSize<T>;
  const int64_t c = blockIdx.x;
  float w[K], bias;
  load_taps<T>(p, c, w, bias);
  const float shift = late_shift<T>(p.shift, bias);
  const T* xc = static_cast<const T*>(p.x) + c * p.x_stride.c;
  const T* dyc = static_cast<const T*>(p.dy) + c * p.dy_stride.c;
  T* dxc = static_cast<T*>(p.dx) + c * p.dx_stride.c;
  const int len = static_cast<int>(p.in_len);
  Sum<T> sums[K + 1] = {};  // dw, db
  constexpr int kItemsPerWarp = 31;
  const int lane = threadIdx.x & 31;
  const uint32_t stride = gridDim.y * (kRowThreads / 32) * kItemsPerWarp;
  for (uint32_t first = (blockIdx.y * (kRowThreads / 32) + threadIdx.x / 32) * kItemsPerWarp; first < items.count; first += stride) {
    const uint32_t item = first + lane;
    const bool valid = item < items.count;
    const uint32_t b = valid ? items.per_row.div(item) : 0;
    const T* xrow = xc + b * p.x_stride.b;
    const T* dyrow = dyc + b * p.dy_stride.b;
    const int t = static_cast<int>(item - b * items.per_row.d) * V - row_misalignment<T, ACCESS>(xrow), valid_len = valid ? len : 0;

    float x[kHalo + V], g[V + kHalo];  // x from t-kHalo, the gradient of pre from t
    load_samples<T, V, ACCESS>(xrow, t, valid_len, x + kHalo);
    load_samples<T, V, ACCESS>(dyrow, t, valid_len, g);
    load_samples<T, kHalo, ACCESS>(xrow, t - kHalo, valid_len, x);
    if (applies_silu<SILU>(p.silu)) {
#pragma unroll
      for (int e = 0; e < V; ++e) {
        const float pre = tap_sum(w, x + kHalo - (K - 1) + e, bias);
        // Outside of the row 0 * NaN would make NaN.
        g[e] = t + e >= 0 && t + e < valid_len ? silu_backward<T>(g[e], sizeof(T) == 4 ? pre + shift : pre) : 0.f;
      }
    }
#pragma unroll
    for (int e = 0; e < K - 1; ++e) {
      g[V + e] = __shfl_down_sync(0xffffffffu, g[e], 1);
    }
    // Past the row there is no gradient: the next lane is in another row, and zeros would make a NaN of a tap or a sample that is not finite.
    const auto in_row = [&](int i) { return ACCESS == RowAccess::kAligned ? i < V || t + V < len : t + i < len; };
    if (!valid || lane == kItemsPerWarp) continue;
    if (p.dx) {
      float dx[V];
#pragma unroll
      for (int e = 0; e < V; ++e) {
        dx[e] = 0.f;
#pragma unroll
        for (int k = 0; k < K; ++k) {
          if (in_row(e + (K - 1) - k)) dx[e] = fmaf(w[k], g[e + (K - 1) - k], dx[e]);
        }
      }
      store_samples<T, V, ACCESS>(dxc + b * p.dx_stride.b, t, len, dx);
    }
    Sum<T> samples[V + K - 1];
#pragma unroll
    for (int e = 0; e < V + K - 1; ++e) samples[e] = x[kHalo - (K - 1) + e];
#pragma unroll
    for (int e = 0; e < V; ++e) {
      if (!in_row(e)) continue;
      const Sum<T> ge = g[e];
#pragma unroll
      for (int k = 0; k < K; ++k) sums[k] = fma(ge, samples[e + k], sums[k]);
      sums[K] += ge;
    }
  }
  if (!p.dw && !p.db) return;
  block_sums(sums);
  if (threadIdx.x == 0) {
    if (gridDim.y > 1) {
      double* out = p.partial + (blockIdx.y * p.channels + c) * (K + 1);
#pragma unroll
      for (int k = 0; k <= K; ++k) out[k] = sums[k];
    } else {
      if (p.dw) {
#pragma unroll
        for (int k = 0; k < K; ++k) static_cast<T*>(p.dw)[c * K + k] = from_float<T>(static_cast<float>(sums[k]));
      }
      if (p.db) static_cast<T*>(p.db)[c] = from_float<T>(static_cast<float>(sums[K]));
    }
  }
}

}  // namespace fusebackend::causal_conv1d
