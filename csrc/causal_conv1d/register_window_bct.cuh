// Some tens of taps on (batch, channel, time) tensors, all in registers: a thread takes 16 bytes of results and loads the window of samples
// under them 16 bytes at a time; its neighbours bring the same lines into L1.
//
// Taps are padded by zeros: in front, so that windows begin at a 16-byte boundary, and behind, to the template's TAPS. A zero tap that meets
// an inf makes a NaN, so results that are NaN are computed again, one by one.
#pragma once
#include "causal_conv1d/bct_rows.cuh"
#include "causal_conv1d/direct_sums.cuh"
#include "common/channel_epilogue.cuh"

namespace fusebackend::causal_conv1d {

// Zero taps in front of the first: a thread's window begins `left + front_zeros` samples before its results.
__host__ __device__ constexpr int front_zeros(int64_t left, int vec) { return static_cast<int>((vec - left % vec) % vec); }

template <typename T, int N, RowAccess ACCESS>
__device__ __forceinline__ void load_window(const T* row, int t, int len, float* out) {
  constexpr int V = kVecSize<T>;
#pragma unroll
  for (int i = 0; i < N; i += V) load_samples<T, V, ACCESS>(row, t + i, len, out + i);
}

// Samples of a thread's window, and items that a thread has in flight: few taps leave registers for two.
template <typename T, int TAPS>
constexpr int kWindowSize = (kVecSize<T> + TAPS + kVecSize<T> - 1) / kVecSize<T> * kVecSize<T>;
template <typename T, int TAPS>
constexpr int kItemsInFlight = kWindowSize<T, TAPS> > 32 ? 1 : 2;

// A result is one chain of fused multiply-adds in ATen's order, see shared_tile_forward.cuh.
template <typename T, int TAPS, bool LAST_TAP_FIRST, RowAccess ACCESS>
__global__ void __launch_bounds__(kRowThreads, TAPS > 16 ? 2 : 3) register_window_bct_forward(const ConvParams p, const RowItems items) {
  constexpr int V = kVecSize<T>, kSamples = kWindowSize<T, TAPS>, kUnroll = kItemsInFlight<T, TAPS>;
  __shared__ StagedAffine affine;
  const int64_t c = blockIdx.x;
  if (p.epilogue == Epilogue::kChannel) {
    if (threadIdx.x == 0) affine.numbers = affine_of<T>(p.after, c);
    __syncthreads();
  }
  const int taps = static_cast<int>(p.taps), left = static_cast<int>(p.left), zeros = front_zeros(p.left, V);
  const T* wc = static_cast<const T*>(p.w) + c * p.w_stride.c;
  float w[TAPS];
#pragma unroll
  for (int j = 0; j < TAPS; ++j) w[j] = j >= zeros && j < zeros + taps ? to_float(wc[(j - zeros) * p.w_stride.k]) : 0.f;
  float bias = load_bias<T>(p, c);
  const float shift = late_shift<T>(p.shift, bias);
  const T* xc = static_cast<const T*>(p.x) + c * p.x_stride.c;
  T* oc = static_cast<T*>(p.out) + c * p.out_stride.c;
  const uint32_t stride = gridDim.y * kRowThreads;
  for (uint32_t first = blockIdx.y * kRowThreads + threadIdx.x; first < items.count; first += kUnroll * stride) {
    float x[kUnroll][kSamples];
    uint32_t b[kUnroll];
    int t[kUnroll], out_len[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const uint32_t item = first + u * stride;
      const bool valid = item < items.count;
      out_len[u] = valid ? static_cast<int>(p.out_len) : 0;
      b[u] = valid ? items.per_row.div(item) : 0;
      const T* row = xc + b[u] * p.x_stride.b;
      t[u] = static_cast<int>(item - b[u] * items.per_row.d) * V - row_misalignment<T, ACCESS>(row);
      load_window<T, kSamples, ACCESS>(row, t[u] - left - zeros, valid ? static_cast<int>(p.in_len) : 0, x[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float y[V];
      bool any_nan = false;
#pragma unroll
      for (int e = 0; e < V; ++e) {
        y[e] = bias;
#pragma unroll
        for (int i = 0; i < TAPS; ++i) {
          const int j = LAST_TAP_FIRST ? TAPS - 1 - i : i;
          y[e] = fmaf(w[j], x[u][e + j], y[e]);
        }
        any_nan = any_nan || y[e] != y[e];
      }
      if (any_nan) {
#pragma unroll
        for (int e = 0; e < V; ++e)
          y[e] = direct_sum(xc + b[u] * p.x_stride.b, static_cast<int>(p.in_len), wc, p.w_stride.k, taps, t[u] + e - left, bias, p.skips_padding);
      }
      float dy[V];
      if (p.epilogue == Epilogue::kSiluGrad)
        load_samples<T, V, ACCESS>(row_of<T>(p.dy, p.dy_stride, b[u], c), t[u], out_len[u], dy);
#pragma unroll
      for (int e = 0; e < V; ++e) {
        if constexpr (sizeof(T) == 4) y[e] += shift;
        if (p.epilogue == Epilogue::kSilu) y[e] = silu<T>(y[e]);
        if (p.epilogue == Epilogue::kSiluGrad) y[e] = silu_backward<T>(dy[e], y[e]);
      }
      if (p.epilogue == Epilogue::kChannel) finish<T>(y, p.after, affine.get());
      store_samples<T, V, ACCESS>(oc + b[u] * p.out_stride.b, t[u], out_len[u], y);
    }
  }
}

// dw and db. A thread sums TAPS taps, those from blockIdx.z * TAPS on, over its samples. fp32: the products of one item are added up first,
// these sums are added up in fp32, and threads' sums in double, which rounds less than eager mode's chains over many samples.
template <typename T, int TAPS, RowAccess ACCESS>
__global__ void __launch_bounds__(kRowThreads, TAPS > 24 ? 1 : 2)
    register_window_bct_weight_grad(const WeightGradParams p, const RowItems items) {
  constexpr int V = kVecSize<T>, kSamples = kWindowSize<T, TAPS>;
  const int64_t c = blockIdx.x;
  const int taps = static_cast<int>(p.taps), left = static_cast<int>(p.left), zeros = front_zeros(p.left, V), chunk = blockIdx.z * TAPS;
  const T* xc = static_cast<const T*>(p.x) + c * p.x_stride.c;
  const T* gc = static_cast<const T*>(p.g) + c * p.g_stride.c;
  const int in_len = static_cast<int>(p.in_len), out_len = static_cast<int>(p.out_len);
  float sums[TAPS] = {};
  Sum<T> db = 0;
  for (uint32_t item = blockIdx.y * kRowThreads + threadIdx.x; item < items.count; item += gridDim.y * kRowThreads) {
    const uint32_t b = items.per_row.div(item);
    const T* row = xc + b * p.x_stride.b;
    const int t = static_cast<int>(item - b * items.per_row.d) * V - row_misalignment<T, ACCESS>(row);
    float x[kSamples], g[V];
    load_window<T, kSamples, ACCESS>(row, t - left - zeros + chunk, in_len, x);
    load_samples<T, V, ACCESS>(gc + b * p.g_stride.b, t, out_len, g);
    if (ACCESS != RowAccess::kAligned && (t < 0 || t + V > out_len)) {  // a gradient outside of the row must not meet an inf
#pragma unroll
      for (int e = 0; e < V; ++e) {
        if (t + e < 0 || t + e >= out_len) continue;
#pragma unroll
        for (int j = 0; j < TAPS; ++j) sums[j] = fmaf(g[e], x[e + j], sums[j]);
      }
    } else {
#pragma unroll
      for (int j = 0; j < TAPS; ++j) {
        float item_sum = g[0] * x[j];
#pragma unroll
        for (int e = 1; e < V; ++e) item_sum = fmaf(g[e], x[e + j], item_sum);
        sums[j] += item_sum;
      }
    }
#pragma unroll
    for (int e = 0; e < V; ++e) db += g[e];
  }
  Sum<T> wide[TAPS + 1];
#pragma unroll
  for (int j = 0; j < TAPS; ++j) wide[j] = sums[j];
  wide[TAPS] = db;
  block_sums(wide);
  double* out = p.partial + (blockIdx.y * p.channels + c) * (p.taps + 1);
#pragma unroll
  for (int j = 0; j <= TAPS; ++j) {
    if (threadIdx.x == j) {
      const int k = chunk + j - zeros;
      if (j < TAPS && k >= 0 && k < taps) out[k] = wide[j];
      if (j == TAPS && chunk == 0) out[taps] = wide[j];
    }
  }
}

}  // namespace fusebackend::causal_conv1d
