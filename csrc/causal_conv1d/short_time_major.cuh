// Short causal kernels on time-contiguous rows: one block a channel, a thread takes 16 bytes of one row at a time and also
// loads the few samples before them (backward: and after them), which the neighbouring lanes have just brought into L1.
//
// Rows may start anywhere: a thread's samples begin at a 16-byte boundary of memory, not at a multiple of 8 in t, and the
// two ends of a row are masked. All tensors must share that misalignment, else access is by element.
#pragma once
#include "device.cuh"

namespace fusebackend::conv1d {

template <typename T>
constexpr int kVecElems = 16 / sizeof(T);

constexpr int kShortThreads = 256;

constexpr int kHalo = 4;  // samples loaded beside a thread's own; 4 keep them aligned

// kWhole: every vector is aligned and lies inside its row or outside, so that loads are predicated and need no branches.
enum class Access : int { kWhole, kVector, kElement };

// vectors: see ShortRows.
template <typename T, int N, Access ACCESS>
__device__ __forceinline__ void load_samples(const T* row, int t, int len, float* out, bool vectors = true) {
  if constexpr (ACCESS == Access::kWhole) {
    Vec<T, N> raw = {};
    if (static_cast<unsigned>(t) < static_cast<unsigned>(len)) raw = *reinterpret_cast<const Vec<T, N>*>(row + t);
    unpack<T, N>(raw, out);
  } else if (ACCESS == Access::kVector && vectors && t >= 0 && t + N <= len) {
    unpack<T, N>(*reinterpret_cast<const Vec<T, N>*>(row + t), out);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = t + i >= 0 && t + i < len ? to_float(row[t + i]) : 0.f;
  }
}

template <typename T, int N, Access ACCESS>
__device__ __forceinline__ void store_samples(T* row, int t, int len, const float* in, bool vectors = true) {
  if constexpr (ACCESS == Access::kWhole) {
    if (static_cast<unsigned>(t) < static_cast<unsigned>(len)) *reinterpret_cast<Vec<T, N>*>(row + t) = pack<T, N>(in);
  } else if (ACCESS == Access::kVector && vectors && t >= 0 && t + N <= len) {
    *reinterpret_cast<Vec<T, N>*>(row + t) = pack<T, N>(in);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (t + i >= 0 && t + i < len) row[t + i] = from_float<T>(in[i]);
    }
  }
}

struct ShortRows {
  FastDiv per_row;  // threads' worth of samples in one row
  int64_t items;    // batch * per_row
  // Whether access is Access::kVector. The forward kernel of that asks it all the same: then it takes 48 registers instead of 64, and
  // 0.6 of the time for 16 bits (CUDA 13.0, H200).
  bool vectors;
};

template <typename T, Access ACCESS>
__device__ __forceinline__ int row_shift(const T* row) {
  return ACCESS == Access::kVector ? static_cast<int>((reinterpret_cast<uintptr_t>(row) / sizeof(T)) % kVecElems<T>) : 0;
}

// U: rounds in flight.
template <typename T, int K, int U, Silu SILU, Access ACCESS>
__global__ void __launch_bounds__(kShortThreads) short_time_major_forward(const ConvParams p, const ShortRows rows) {
  static_assert(K - 1 <= kHalo);
  constexpr int V = kVecElems<T>;
  const int64_t c = blockIdx.x;
  float w[K], bias;
  load_taps<T, K>(p.w, p.bias, c, p.w_c, p.w_k, p.bias_c, w, bias);
  const float shift = late_shift<T>(p.shift, bias);
  const T* xc = static_cast<const T*>(p.x) + c * p.xs.c;
  T* oc = static_cast<T*>(p.out) + c * p.outs.c;
  const uint32_t stride = gridDim.y * kShortThreads;
  for (uint32_t first = blockIdx.y * kShortThreads + threadIdx.x; first < rows.items; first += U * stride) {
    float x[U][kHalo + V];
    uint32_t b[U];
    int t[U], len[U];
#pragma unroll
    for (int u = 0; u < U; ++u) {
      const uint32_t item = first + u * stride;
      len[u] = item < rows.items ? static_cast<int>(p.in_len) : 0;
      b[u] = len[u] ? rows.per_row.div(item) : 0;
      const T* row = xc + b[u] * p.xs.b;
      t[u] = static_cast<int>(item - b[u] * rows.per_row.d) * V - row_shift<T, ACCESS>(row);
      load_samples<T, V, ACCESS>(row, t[u], len[u], x[u] + kHalo, rows.vectors);
      load_samples<T, kHalo, ACCESS>(row, t[u] - kHalo, len[u], x[u], rows.vectors);
    }
#pragma unroll
    for (int u = 0; u < U; ++u) {
      float y[V];
#pragma unroll
      for (int e = 0; e < V; ++e) {
        y[e] = bias;
#pragma unroll
        for (int k = 0; k < K; ++k) y[e] = fmaf(w[k], x[u][kHalo - (K - 1) + e + k], y[e]);
        if constexpr (sizeof(T) == 4) y[e] += shift;
        if (silu_follows<SILU>(p.epilogue == Epilogue::kSilu)) y[e] = silu<T>(y[e]);
      }
      store_samples<T, V, ACCESS>(oc + b[u] * p.outs.b, t[u], len[u], y, rows.vectors);
    }
  }
}

// The sum of each of N values over the block, in a fixed order; valid in thread 0.
template <int N, typename S>
__device__ __forceinline__ void sums_in_order(S (&v)[N]) {
  constexpr int kWarps = kShortThreads / 32;
  __shared__ S warp_sums[kWarps][N];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int n = 0; n < N; ++n) {
#pragma unroll
    for (int o = 16; o; o >>= 1) v[n] += __shfl_down_sync(0xffffffffu, v[n], o);
    if (lane == 0) warp_sums[warp][n] = v[n];
  }
  __syncthreads();
  if (threadIdx.x < N) {
    S s = 0;
    for (int i = 0; i < kWarps; ++i) s += warp_sums[i][threadIdx.x];
    warp_sums[0][threadIdx.x] = s;
  }
  __syncthreads();
#pragma unroll
  for (int n = 0; n < N; ++n) v[n] = warp_sums[0][n];
}

template <typename T, int K, Silu SILU, Access ACCESS>
__global__ void __launch_bounds__(kShortThreads) short_time_major_backward(const BackwardParams p, const ShortRows rows) {
  static_assert(K - 1 <= kHalo);
  constexpr int V = kVecElems<T>;
  const int64_t c = blockIdx.x;
  float w[K], bias;
  load_taps<T, K>(p.w, p.bias, c, p.w_c, p.w_k, p.bias_c, w, bias);
  const float shift = late_shift<T>(p.shift, bias);
  const T* xc = static_cast<const T*>(p.x) + c * p.xs.c;
  const T* dyc = static_cast<const T*>(p.dy) + c * p.dys.c;
  T* dxc = static_cast<T*>(p.dx) + c * p.dxs.c;
  const int len = static_cast<int>(p.in_len);
  Sum<T> sums[K + 1] = {};  // dw, db
  // The gradients after a thread's own are its neighbour's: the last lane only lends them, and a warp owns 31 items.
  constexpr int kOwn = 31;
  const int lane = threadIdx.x & 31;
  const uint32_t stride = gridDim.y * (kShortThreads / 32) * kOwn;
  for (uint32_t first = (blockIdx.y * (kShortThreads / 32) + threadIdx.x / 32) * kOwn; first < rows.items; first += stride) {
    const uint32_t item = first + lane;
    const bool there = item < rows.items;
    const uint32_t b = there ? rows.per_row.div(item) : 0;
    const T* xrow = xc + b * p.xs.b;
    const T* dyrow = dyc + b * p.dys.b;
    const int t = static_cast<int>(item - b * rows.per_row.d) * V - row_shift<T, ACCESS>(xrow), mine = there ? len : 0;

    float x[kHalo + V], g[V + kHalo];  // x from t-kHalo, the gradient of pre from t
    load_samples<T, V, ACCESS>(xrow, t, mine, x + kHalo);
    load_samples<T, V, ACCESS>(dyrow, t, mine, g);
    load_samples<T, kHalo, ACCESS>(xrow, t - kHalo, mine, x);
    if (silu_follows<SILU>(p.silu)) {
#pragma unroll
      for (int e = 0; e < V; ++e) {
        float pre = bias;
#pragma unroll
        for (int k = 0; k < K; ++k) pre = fmaf(w[k], x[kHalo - (K - 1) + e + k], pre);
        g[e] = t + e >= 0 && t + e < mine ? silu_backward<T>(g[e], sizeof(T) == 4 ? pre + shift : pre) : 0.f;  // outside, 0 * NaN would leak in
      }
    }
#pragma unroll
    for (int e = 0; e < K - 1; ++e) {
      const float next = __shfl_down_sync(0xffffffffu, g[e], 1);
      g[V + e] = t + V < len ? next : 0.f;  // else the neighbour is in another row
    }
    if (!there || lane == kOwn) continue;
    if (p.dx) {
      float dx[V];
#pragma unroll
      for (int e = 0; e < V; ++e) {
        dx[e] = 0.f;
#pragma unroll
        for (int k = 0; k < K; ++k) dx[e] = fmaf(w[k], g[e + (K - 1) - k], dx[e]);
      }
      store_samples<T, V, ACCESS>(dxc + b * p.dxs.b, t, len, dx);
    }
    Sum<T> samples[V + K - 1];
#pragma unroll
    for (int e = 0; e < V + K - 1; ++e) samples[e] = x[kHalo - (K - 1) + e];
#pragma unroll
    for (int e = 0; e < V; ++e) {
      const Sum<T> ge = g[e];
#pragma unroll
      for (int k = 0; k < K; ++k) sums[k] = fma(ge, samples[e + k], sums[k]);
      sums[K] += ge;
    }
  }
  if (!p.dw && !p.db) return;
  sums_in_order(sums);
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

}  // namespace fusebackend::conv1d
