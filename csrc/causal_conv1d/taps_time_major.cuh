// Some taps (5 to some tens) on time-contiguous rows, all in registers: a thread takes 16 bytes of results and loads the window
// of samples that they see, 16 bytes at a time, which its neighbours bring into L1 as well.
//
// Taps are padded by zeros, in front so that windows begin at a 16-byte boundary, and behind to a multiple of four. A zero
// tap that meets an inf makes a NaN: results that are NaN are made again, one by one.
#pragma once
#include "short_time_major.cuh"

namespace fusebackend::conv1d {

// Zero taps in front of the first: window i of a thread begins `left + lead` samples before its results.
template <typename T>
__host__ __device__ constexpr int lead_of(int64_t left) {
  constexpr int V = kVecElems<T>;
  return static_cast<int>((V - left % V) % V);
}

template <typename T, int N, Access ACCESS>
__device__ __forceinline__ void load_window(const T* row, int t, int len, float* out) {
  constexpr int V = kVecElems<T>;
#pragma unroll
  for (int i = 0; i < N; i += V) load_samples<T, V, ACCESS>(row, t + i, len, out + i);
}

// The sum at t, from device memory.
template <typename T>
__device__ __noinline__ float one_sum(const T* x, const T* w, int64_t w_k, int taps, int t, int len, float bias) {
  float y = bias;
  for (int k = 0; k < taps; ++k) {
    if (t + k >= 0 && t + k < len) y = fmaf(to_float(w[k * w_k]), to_float(x[t + k]), y);
  }
  return y;
}

// Rounds in flight: few taps leave registers for several.
template <typename T, int TAPS>
constexpr int kSamplesOf = (kVecElems<T> + TAPS + kVecElems<T> - 1) / kVecElems<T> * kVecElems<T>;
template <typename T, int TAPS>
constexpr int kRounds = kSamplesOf<T, TAPS> > 32 ? 1 : 2;

// One chain of fused multiply-adds a result, in ATen's order: see window.cu. DOWN: from the last tap to the first.
template <typename T, int TAPS, bool DOWN, Access ACCESS>
__global__ void __launch_bounds__(kShortThreads, TAPS > 16 ? 2 : 3) taps_time_major_forward(const ConvParams p, const ShortRows rows) {
  constexpr int V = kVecElems<T>, kSamples = kSamplesOf<T, TAPS>, U = kRounds<T, TAPS>;
  const int64_t c = blockIdx.x;
  const int taps = static_cast<int>(p.taps), left = static_cast<int>(p.left), lead = lead_of<T>(p.left);
  const T* wc = static_cast<const T*>(p.w) + c * p.w_c;
  float w[TAPS];
#pragma unroll
  for (int j = 0; j < TAPS; ++j) w[j] = j >= lead && j < lead + taps ? to_float(wc[(j - lead) * p.w_k]) : 0.f;
  float bias = p.bias ? to_float(static_cast<const T*>(p.bias)[c * p.bias_c]) : 0.f;
  const float shift = late_shift<T>(p.shift, bias);
  const T* xc = static_cast<const T*>(p.x) + c * p.xs.c;
  T* oc = static_cast<T*>(p.out) + c * p.outs.c;
  const uint32_t stride = gridDim.y * kShortThreads;
  for (uint32_t first = blockIdx.y * kShortThreads + threadIdx.x; first < rows.items; first += U * stride) {
    float x[U][kSamples];
    uint32_t b[U];
    int t[U], out_len[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const uint32_t item = first + u * stride;
      const bool there = item < rows.items;
      out_len[u] = there ? static_cast<int>(p.out_len) : 0;
      b[u] = there ? rows.per_row.div(item) : 0;
      const T* row = xc + b[u] * p.xs.b;
      t[u] = static_cast<int>(item - b[u] * rows.per_row.d) * V - row_shift<T, ACCESS>(row);
      load_window<T, kSamples, ACCESS>(row, t[u] - left - lead, there ? static_cast<int>(p.in_len) : 0, x[u]);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      float y[V];
      bool bad = false;
#pragma unroll
      for (int e = 0; e < V; ++e) {
        y[e] = bias;
#pragma unroll
        for (int i = 0; i < TAPS; ++i) {
          const int j = DOWN ? TAPS - 1 - i : i;
          y[e] = fmaf(w[j], x[u][e + j], y[e]);
        }
        bad = bad || y[e] != y[e];
      }
      if (bad) {
#pragma unroll
        for (int e = 0; e < V; ++e) y[e] = one_sum<T>(xc + b[u] * p.xs.b, wc, p.w_k, taps, t[u] + e - left, static_cast<int>(p.in_len), bias);
      }
      float dy[V];
      if (p.epilogue == Epilogue::kSiluGrad)
        load_samples<T, V, ACCESS>(static_cast<const T*>(p.dy) + b[u] * p.dys.b + c * p.dys.c, t[u], out_len[u], dy);
#pragma unroll
      for (int e = 0; e < V; ++e) {
        if constexpr (sizeof(T) == 4) y[e] += shift;
        if (p.epilogue == Epilogue::kSilu) y[e] = silu<T>(y[e]);
        if (p.epilogue == Epilogue::kSiluGrad) y[e] = silu_backward<T>(dy[e], y[e]);
      }
      store_samples<T, V, ACCESS>(oc + b[u] * p.outs.b, t[u], out_len[u], y);
    }
  }
}

// dw and db: a thread adds up TAPS taps, those from blockIdx.z * TAPS, over its samples. In fp32, what a few samples add up to is
// added to a sum of such sums, and threads' sums in double: that rounds less than eager mode's chains of many samples do.
template <typename T, int TAPS, Access ACCESS>
__global__ void __launch_bounds__(kShortThreads, TAPS > 24 ? 1 : 2) taps_time_major_weight_grad(const WeightGradParams p, const ShortRows rows) {
  constexpr int V = kVecElems<T>, kSamples = kSamplesOf<T, TAPS>;
  const int64_t c = blockIdx.x;
  const int taps = static_cast<int>(p.taps), left = static_cast<int>(p.left), lead = lead_of<T>(p.left), chunk = blockIdx.z * TAPS;
  const T* xc = static_cast<const T*>(p.x) + c * p.xs.c;
  const T* gc = static_cast<const T*>(p.g) + c * p.gs.c;
  const int in_len = static_cast<int>(p.in_len), out_len = static_cast<int>(p.out_len);
  float sums[TAPS] = {};
  Sum<T> db = 0;  // one number a channel: exact, see bind_cuda.cpp
  for (uint32_t item = blockIdx.y * kShortThreads + threadIdx.x; item < rows.items; item += gridDim.y * kShortThreads) {
    const uint32_t b = rows.per_row.div(item);
    const T* row = xc + b * p.xs.b;
    const int t = static_cast<int>(item - b * rows.per_row.d) * V - row_shift<T, ACCESS>(row);
    float x[kSamples], g[V];
    load_window<T, kSamples, ACCESS>(row, t - left - lead + chunk, in_len, x);
    load_samples<T, V, ACCESS>(gc + b * p.gs.b, t, out_len, g);
    if (ACCESS != Access::kWhole && (t < 0 || t + V > out_len)) {  // a gradient that is not there must not meet an inf
#pragma unroll
      for (int e = 0; e < V; ++e) {
        if (t + e < 0 || t + e >= out_len) continue;
#pragma unroll
        for (int j = 0; j < TAPS; ++j) sums[j] = fmaf(g[e], x[e + j], sums[j]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < TAPS; ++j) {
        float few = g[0] * x[j];
#pragma unroll
        for (int e = 1; e < V; ++e) few = fmaf(g[e], x[e + j], few);
        sums[j] += few;
      }
    }
#pragma unroll
    for (int e = 0; e < V; ++e) db += g[e];
  }
  Sum<T> wide[TAPS + 1];
#pragma unroll
  for (int j = 0; j < TAPS; ++j) wide[j] = sums[j];
  wide[TAPS] = db;
  sums_in_order(wide);
  double* out = p.partial + (blockIdx.y * p.channels + c) * (p.taps + 1);
#pragma unroll
  for (int j = 0; j <= TAPS; ++j) {
    if (threadIdx.x == j) {
      const int k = chunk + j - lead;
      if (j < TAPS && k >= 0 && k < taps) out[k] = wide[j];
      if (j == TAPS && chunk == 0) out[taps] = wide[j];
    }
  }
}

}  // namespace fusebackend::conv1d
