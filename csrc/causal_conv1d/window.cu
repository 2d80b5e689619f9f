// Any taps, any strides, any device: tiles of x and w in shared memory as fp32, FFMA on register windows.
// Used for 5 to 15 taps, for few that are not causal, for one or two long rows, and where there are no tensor cores.
#include <algorithm>

#include "conv1d_cuda.h"
#include "device_limits.h"
#include "device.cuh"

namespace fusebackend::conv1d {
namespace {

constexpr int kElems = 8;       // samples a thread, and taps a step
constexpr int kTapBlock = 512;  // taps staged at a time

// Lanes read 8 neighbouring floats each: four words of padding every 32 spread the 16-byte reads over all banks.
__host__ __device__ constexpr int padded(int i) { return i + (i / 32) * 4; }

__device__ __forceinline__ void read8(const float* tile, int i, float* out) {
  const float4 a = *reinterpret_cast<const float4*>(tile + padded(i));
  const float4 b = *reinterpret_cast<const float4*>(tile + padded(i + 4));
  out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
  out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
}

// tile[i] <- row[start + i], zero outside [0, len).
template <typename T, int THREADS>
__device__ __forceinline__ void stage(float* tile, const T* row, int start, int count, int len, int64_t stride) {
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += THREADS) {
    const int t = start + i;
    tile[padded(i)] = t >= 0 && t < len ? to_float(row[t * stride]) : 0.f;
  }
}

// One block: THREADS * 8 outputs of one row.
template <typename T, int THREADS>
__global__ void __launch_bounds__(THREADS) window_forward(const ConvParams p, const uint32_t tiles) {
  constexpr int kTile = THREADS * kElems;
  __shared__ __align__(16) float xs[padded(kTile + kTapBlock) + 4];
  __shared__ __align__(16) float ws[kTapBlock];
  const int64_t row = blockIdx.x / tiles;
  const int64_t b = row / p.channels, c = row - b * p.channels;
  const int t0 = static_cast<int>(blockIdx.x - row * tiles) * kTile, mine = threadIdx.x * kElems;
  const int in_len = static_cast<int>(p.in_len), out_len = static_cast<int>(p.out_len);
  const int taps = static_cast<int>(p.taps), left = static_cast<int>(p.left);
  const T* x = static_cast<const T*>(p.x) + b * p.xs.b + c * p.xs.c;
  const T* w = static_cast<const T*>(p.w) + c * p.w_c;

  float acc[kElems] = {};
  // Taps that meet x at all, for some output of the tile.
  const int first = max(0, left - (t0 + kTile - 1)), last = min(taps, in_len + left - t0);
  for (int k0 = first / kElems * kElems; k0 < last; k0 += kTapBlock) {
    const int count = min(kTapBlock, last - k0), whole = count / kElems * kElems;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += THREADS) ws[i] = to_float(w[(k0 + i) * p.w_k]);
    stage<T, THREADS>(xs, x, t0 - left + k0, kTile + count - 1, in_len, p.xs.t);
    __syncthreads();
    // The same for the samples of this warp: skip steps in which all of its products are with padding.
    const int warp_t0 = t0 + (mine & ~(32 * kElems - 1)), warp_t1 = warp_t0 + 32 * kElems - 1;
    const int lo = min(whole, max(0, (left - warp_t1 - k0) / kElems * kElems));
    const int hi = min(whole, (max(0, in_len + left - warp_t0 - k0) + kElems - 1) / kElems * kElems);
    float win[2 * kElems];
    read8(xs, mine + lo, win);
    int k = lo;
    for (; k < hi; k += kElems) {
      float wk[kElems];
      *reinterpret_cast<float4*>(wk) = *reinterpret_cast<const float4*>(ws + k);
      *reinterpret_cast<float4*>(wk + 4) = *reinterpret_cast<const float4*>(ws + k + 4);
      read8(xs, mine + k + kElems, win + kElems);
#pragma unroll
      for (int j = 0; j < kElems; ++j) {
#pragma unroll
        for (int e = 0; e < kElems; ++e) acc[e] = fmaf(wk[j], win[e + j], acc[e]);
      }
#pragma unroll
      for (int e = 0; e < kElems; ++e) win[e] = win[e + kElems];
    }
    for (k = whole; k < count; ++k) {  // the last taps one by one: a tap that is not there must not meet an inf
      const float wk = ws[k];
#pragma unroll
      for (int e = 0; e < kElems; ++e) acc[e] = fmaf(wk, xs[padded(mine + k + e)], acc[e]);
    }
  }
  __syncthreads();
#pragma unroll
  for (int e = 0; e < kElems; ++e) xs[padded(mine + e)] = acc[e];
  __syncthreads();

  const float bias = static_cast<float>(p.shift) + (p.bias ? to_float(static_cast<const T*>(p.bias)[c * p.bias_c]) : 0.f);
  const T* dy = static_cast<const T*>(p.dy) + b * p.dys.b + c * p.dys.c;
  T* out = static_cast<T*>(p.out) + b * p.outs.b + c * p.outs.c;
#pragma unroll 4
  for (int i = threadIdx.x; i < min(kTile, out_len - t0); i += THREADS) {
    float y = xs[padded(i)] + bias;
    if (p.epilogue == Epilogue::kSilu) y = silu(y);
    if (p.epilogue == Epilogue::kSiluGrad) y = to_float(dy[(t0 + i) * p.dys.t]) * silu_grad(y);
    out[(t0 + i) * p.outs.t] = from_float<T>(y);
  }
}

// One block: 8 * kChunks taps of one channel. A thread owns 8 taps and every kSlices-th group of 8 samples.
constexpr int kGradThreads = 256, kGradTile = 1024;

template <typename T, int CHUNKS>
__global__ void __launch_bounds__(kGradThreads) window_weight_grad(const WeightGradParams p, const int tiles) {
  constexpr int kSlices = kGradThreads / CHUNKS, kTaps = CHUNKS * kElems;
  __shared__ __align__(16) float xs[padded(kGradTile + kTaps) + 4];
  __shared__ __align__(16) float gs[padded(kGradTile)];
  const int64_t c = blockIdx.x;
  const int k0 = blockIdx.z * kTaps;
  const int in_len = static_cast<int>(p.in_len), out_len = static_cast<int>(p.out_len), left = static_cast<int>(p.left);
  const int chunk = threadIdx.x % CHUNKS, slice = threadIdx.x / CHUNKS;

  float acc[kElems] = {}, db = 0.f;
  for (int64_t item = blockIdx.y; item < p.batch * tiles; item += p.splits) {
    const int64_t b = item / tiles;
    const int t0 = static_cast<int>(item - b * tiles) * kGradTile;
    const int count = min(kGradTile, out_len - t0), rounded = (count + kElems - 1) / kElems * kElems;
    // Nothing of x is in reach: only db wants this tile.
    const bool reach = t0 + count - 1 - left + k0 + kTaps - 1 >= 0 && t0 - left + k0 < in_len;
    if (!reach && blockIdx.z) continue;
    __syncthreads();
    stage<T, kGradThreads>(gs, static_cast<const T*>(p.g) + b * p.gs.b + c * p.gs.c, t0, rounded, out_len, p.gs.t);
    stage<T, kGradThreads>(xs, static_cast<const T*>(p.x) + b * p.xs.b + c * p.xs.c, t0 - left + k0, rounded + kTaps,
                           in_len, p.xs.t);
    __syncthreads();
    for (int t = slice * kElems; t < rounded; t += kSlices * kElems) {
      float g[kElems], win[2 * kElems];
      read8(gs, t, g);
      read8(xs, t + chunk * kElems, win);
      read8(xs, t + chunk * kElems + kElems, win + kElems);
#pragma unroll
      for (int e = 0; e < kElems; ++e) {
        if (t + e >= count) break;  // a gradient that is not there must not meet an inf
#pragma unroll
        for (int j = 0; j < kElems; ++j) acc[j] = fmaf(g[e], win[e + j], acc[j]);
        db += g[e];
      }
    }
  }
  // Sum the slices in order.
  constexpr int kWidth = kTaps + CHUNKS;
  float* sums = xs;
  static_assert(kWidth * 8 <= padded(kGradTile), "eight slices at a time");
  float total = 0.f, total_db = 0.f;
  for (int s0 = 0; s0 < kSlices; s0 += 8) {
    __syncthreads();
    if (slice >= s0 && slice < s0 + 8) {
#pragma unroll
      for (int j = 0; j < kElems; ++j) sums[(slice - s0) * kWidth + chunk * kElems + j] = acc[j];
      if (chunk == 0) sums[(slice - s0) * kWidth + kTaps] = db;
    }
    __syncthreads();
    for (int s = 0; s < min(8, kSlices - s0); ++s) {
      if (threadIdx.x < kTaps) total += sums[s * kWidth + threadIdx.x];
      if (threadIdx.x == 0) total_db += sums[s * kWidth + kTaps];
    }
  }
  float* out = p.partial + (blockIdx.y * p.channels + c) * (p.taps + 1);
  if (threadIdx.x < kTaps && k0 + threadIdx.x < p.taps) out[k0 + threadIdx.x] = total;
  if (threadIdx.x == 0 && blockIdx.z == 0) out[p.taps] = total_db;
}

template <typename T, int THREADS>
cudaError_t forward(const ConvParams& p, cudaStream_t stream) {
  const int64_t tiles = (p.out_len + THREADS * kElems - 1) / (THREADS * kElems), blocks = p.batch * p.channels * tiles;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  window_forward<T, THREADS><<<static_cast<unsigned>(blocks), THREADS, 0, stream>>>(p, static_cast<uint32_t>(tiles));
  return cudaGetLastError();
}

template <typename T, int CHUNKS>
cudaError_t weight_grad(const WeightGradParams& p, cudaStream_t stream) {
  const int tap_blocks = static_cast<int>((p.taps + CHUNKS * kElems - 1) / (CHUNKS * kElems));
  const int tiles = static_cast<int>((p.out_len + kGradTile - 1) / kGradTile);
  window_weight_grad<T, CHUNKS><<<dim3(static_cast<unsigned>(p.channels), p.splits, tap_blocks), kGradThreads, 0, stream>>>(p, tiles);
  const cudaError_t e = cudaGetLastError();
  if (e != cudaSuccess) return e;
  return launch_reduce_partials(p.partial, p.splits, p.channels, p.taps, p.dw, p.db, p.dtype, stream);
}

}  // namespace

cudaError_t launch_window_forward(const ConvParams& p, cudaStream_t stream) {
  return dispatch_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    if (p.out_len <= 32 * kElems) return forward<T, 32>(p, stream);
    if (p.out_len <= 64 * kElems) return forward<T, 64>(p, stream);
    return forward<T, 128>(p, stream);
  });
}

int window_weight_grad_splits(const WeightGradParams& p) {
  const int64_t items = p.batch * ((p.out_len + kGradTile - 1) / kGradTile);
  const int64_t blocks = p.channels * ((p.taps + 8 * 32 - 1) / (8 * 32));
  return static_cast<int>(std::clamp<int64_t>((sm_count() * 16 + blocks - 1) / blocks, 1, std::clamp<int64_t>(items, 1, 4096)));
}

cudaError_t launch_window_weight_grad(const WeightGradParams& p, cudaStream_t stream) {
  return dispatch_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    if (p.taps <= 8) return weight_grad<T, 1>(p, stream);
    if (p.taps <= 32) return weight_grad<T, 4>(p, stream);
    if (p.taps <= 64) return weight_grad<T, 8>(p, stream);
    return weight_grad<T, 16>(p, stream);
  });
}

}  // namespace fusebackend::conv1d
