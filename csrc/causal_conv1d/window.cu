// Any taps, any strides, any device: tiles of x and w in shared memory as fp32, FFMA on register windows.
// Used for 5 to some tens of taps, for few that are not causal, for one row, and where there are no tensor cores.
//
// An output is one chain of fused multiply-adds that begins with the bias, in the order of ATen's depthwise kernels: up
// the taps forwards, and for the gradient of x, whose taps come reversed, down. So fp32 results are the same bits, and those of
// sums in double are correctly rounded.
#include <algorithm>

#include "conv1d_cuda.h"
#include "device_limits.h"
#include "device.cuh"

namespace fusebackend::conv1d {
namespace {

constexpr int kElems = 8;       // samples a thread, and taps a step
constexpr int kTapBlock = 512;  // taps staged at a time
constexpr int kMaxThreads = 128;
constexpr int kWindow = 2 * kElems + 4;  // samples a step reads, from an aligned one on: kElems + 7 and up to 3 before

// Lanes read 8 neighbouring numbers each: 16 bytes of padding every 128 spread the 16-byte reads over all banks.
template <typename S>
__host__ __device__ constexpr int padded(int i) {
  constexpr int kLine = 128 / sizeof(S);
  return i + i / kLine * (16 / static_cast<int>(sizeof(S)));
}

// N numbers from tile[i] on; i is a multiple of 4, as N is.
template <int N, typename S>
__device__ __forceinline__ void read(const S* tile, int i, S* out) {
  constexpr int kVec = 16 / sizeof(S);
#pragma unroll
  for (int j = 0; j < N; j += kVec)
    *reinterpret_cast<Vec<S, kVec>*>(out + j) = *reinterpret_cast<const Vec<S, kVec>*>(tile + padded<S>(i + j));
}

// How many samples before row[start] a 16-byte boundary lies; 0 where rows are read element by element anyway.
template <typename T>
__device__ __forceinline__ int misalignment(const T* row, int start, int64_t stride) {
  return stride == 1 ? static_cast<int>(reinterpret_cast<uintptr_t>(row + start) / sizeof(T) % (16 / sizeof(T))) : 0;
}

// tile[i] <- row[start + i] for i < count, zero outside [0, len). Rows of stride 1 must start at a 16-byte boundary.
template <typename T, typename S>
__device__ __forceinline__ void stage(S* tile, const T* row, int start, int count, int len, int64_t stride) {
  if (stride == 1) {
    constexpr int V = 16 / sizeof(T);
#pragma unroll 2
    for (int i = threadIdx.x * V; i < count; i += blockDim.x * V) {
      const int t = start + i;
      alignas(16) S wide[V];
      if (t >= 0 && t + V <= len) {
        const auto raw = *reinterpret_cast<const Vec<T, V>*>(row + t);
        if constexpr (sizeof(T) == 8) {
#pragma unroll
          for (int j = 0; j < V; ++j) wide[j] = raw.v[j];
        } else {
          float v[V];
          unpack<T, V>(raw, v);
#pragma unroll
          for (int j = 0; j < V; ++j) wide[j] = v[j];
        }
      } else {
#pragma unroll
        for (int j = 0; j < V; ++j) wide[j] = t + j >= 0 && t + j < len ? S(to_float(row[t + j])) : S(0);
      }
      constexpr int kVec = 16 / sizeof(S);
#pragma unroll
      for (int j = 0; j < V; j += kVec) *reinterpret_cast<Vec<S, kVec>*>(tile + padded<S>(i + j)) = *reinterpret_cast<Vec<S, kVec>*>(wide + j);
    }
  } else {
#pragma unroll 4
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
      const int t = start + i;
      tile[padded<S>(i)] = t >= 0 && t < len ? S(to_float(row[t * stride])) : S(0);
    }
  }
}

// f(offset) with the offset, 0 to 3, as a constant: it says which registers of a window are meant.
template <typename F>
__device__ __forceinline__ void with_offset(int offset, F&& f) {
  switch (offset) {
    case 0: return f(std::integral_constant<int, 0>{});
    case 1: return f(std::integral_constant<int, 1>{});
    case 2: return f(std::integral_constant<int, 2>{});
    default: return f(std::integral_constant<int, 3>{});
  }
}

// One block: 8 outputs a thread, of one row. DOWN: from the last tap to the first. X: what x is stored as; OUT: the results;
// T: the rest. Sums are of type A.
template <typename X, typename OUT, typename T, typename A, bool DOWN>
__global__ void __launch_bounds__(kMaxThreads) window_forward(const ConvParams p, const uint32_t tiles) {
  extern __shared__ __align__(16) char shared[];
  A* ws = reinterpret_cast<A*>(shared);
  A* xs = ws + kTapBlock;
  const int tile = blockDim.x * kElems;
  const uint32_t row = blockIdx.x / tiles, channels = static_cast<uint32_t>(p.channels);
  const int64_t b = row / channels, c = row % channels;
  const int t0 = static_cast<int>(blockIdx.x - row * tiles) * tile, mine = threadIdx.x * kElems;
  const int in_len = static_cast<int>(p.in_len), out_len = static_cast<int>(p.out_len);
  const int taps = static_cast<int>(p.taps), left = static_cast<int>(p.left);
  const X* x = static_cast<const X*>(p.x) + b * p.xs.b + c * p.xs.c;
  const T* w = static_cast<const T*>(p.w) + c * p.w_c;

  A acc[kElems];
  const A bias = p.bias ? to_float(static_cast<const T*>(p.bias)[c * p.bias_c]) : 0.f;
#pragma unroll
  for (int e = 0; e < kElems; ++e) acc[e] = bias;
  // Taps that meet x at all, for some output of the tile.
  const int first = max(0, left - (t0 + tile - 1)) / kElems * kElems, last = min(taps, in_len + left - t0);
  const int blocks = last > first ? (last - first + kTapBlock - 1) / kTapBlock : 0;
  for (int block = 0; block < blocks; ++block) {
    const int k0 = first + (DOWN ? blocks - 1 - block : block) * kTapBlock;
    const int count = min(kTapBlock, last - k0), whole = count / kElems * kElems;
    const int start = t0 - left + k0, shift = misalignment(x, start, p.xs.t);
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) ws[i] = to_float(w[(k0 + i) * p.w_k]);
    stage(xs, x, start - shift, shift + tile + count - 1, in_len, p.xs.t);
    __syncthreads();
    // The same for the samples of this warp: skip steps in which all of its products are with padding.
    const int warp_t0 = t0 + (mine & ~(32 * kElems - 1)), warp_t1 = warp_t0 + 32 * kElems - 1;
    const int lo = min(whole, max(0, (left - warp_t1 - k0) / kElems * kElems));
    const int hi = min(whole, (max(0, in_len + left - warp_t0 - k0) + kElems - 1) / kElems * kElems);
    with_offset(shift % 4, [&](auto offset) {
      constexpr int O = decltype(offset)::value;
      const int base = mine + shift - O;
      alignas(16) A win[kWindow];
      auto rest = [&] {  // the last taps: one that is not there must not meet an inf
        read<kWindow>(xs, base + whole, win);
#pragma unroll
        for (int i = 0; i < kElems - 1; ++i) {
          const int j = DOWN ? kElems - 2 - i : i;
          if (whole + j < count) {
            const A wk = ws[whole + j];
#pragma unroll
            for (int e = 0; e < kElems; ++e) acc[e] = fma(wk, win[O + e + j], acc[e]);
          }
        }
      };
      if (DOWN && whole < count) rest();
      if (lo < hi) read<kWindow - kElems>(xs, base + (DOWN ? hi : lo), win + (DOWN ? kElems : 0));
      for (int i = lo; i < hi; i += kElems) {
        const int k = DOWN ? lo + hi - kElems - i : i;
        alignas(16) A wk[kElems];
        constexpr int kVec = 16 / sizeof(A);
#pragma unroll
        for (int j = 0; j < kElems; j += kVec) *reinterpret_cast<Vec<A, kVec>*>(wk + j) = *reinterpret_cast<const Vec<A, kVec>*>(ws + k + j);
        read<kElems>(xs, base + k + (DOWN ? 0 : kWindow - kElems), win + (DOWN ? 0 : kWindow - kElems));
#pragma unroll
        for (int i = 0; i < kElems; ++i) {
          const int j = DOWN ? kElems - 1 - i : i;
#pragma unroll
          for (int e = 0; e < kElems; ++e) acc[e] = fma(wk[j], win[O + e + j], acc[e]);
        }
#pragma unroll
        for (int e = 0; e < kWindow - kElems; ++e) {
          if (DOWN) win[kWindow - 1 - e] = win[kWindow - 1 - kElems - e];
          else win[e] = win[e + kElems];
        }
      }
      if (!DOWN && whole < count) rest();
    });
  }

  const A constant = static_cast<A>(p.shift);
  auto finish = [&](A y, auto&& dy) {
    y += constant;
    if (p.epilogue == Epilogue::kSilu) y = silu<T>(y);
    if (p.epilogue == Epilogue::kSiluGrad) y = silu_backward<T>(A(dy()), y);
    return y;
  };
  constexpr int V = 16 / sizeof(T);
  const T* dy = static_cast<const T*>(p.dy) + b * p.dys.b + c * p.dys.c;
  OUT* out = static_cast<OUT*>(p.out) + b * p.outs.b + c * p.outs.c;
  const bool whole_vectors = sizeof(OUT) == sizeof(T) && p.outs.t == 1 && reinterpret_cast<uintptr_t>(out) % 16 == 0 && t0 + mine + kElems <= out_len &&
                             (p.epilogue != Epilogue::kSiluGrad || (p.dys.t == 1 && reinterpret_cast<uintptr_t>(dy) % 16 == 0));
  if (__syncthreads_and(whole_vectors)) {
#pragma unroll
    for (int i = 0; i < kElems; i += V) {
      Vec<T, V> theirs = {};
      if (p.epilogue == Epilogue::kSiluGrad) theirs = *reinterpret_cast<const Vec<T, V>*>(dy + t0 + mine + i);
      float y[V];
#pragma unroll
      for (int j = 0; j < V; ++j) y[j] = static_cast<float>(finish(acc[i + j], [&] { return to_float(theirs.v[j]); }));
      *reinterpret_cast<Vec<T, V>*>(out + t0 + mine + i) = pack<T, V>(y);
    }
    return;
  }
#pragma unroll
  for (int e = 0; e < kElems; ++e) xs[padded<A>(mine + e)] = acc[e];
  __syncthreads();
#pragma unroll 4
  for (int i = threadIdx.x; i < min(tile, out_len - t0); i += blockDim.x)
    out[(t0 + i) * p.outs.t] = rounded<OUT>(finish(xs[padded<A>(i)], [&] { return to_float(dy[(t0 + i) * p.dys.t]); }));
}

// One block: 8 * chunks taps of one channel. A thread owns 8 taps and every slices-th group of 8 samples.
constexpr int kGradThreads = 256, kGradTile = 2048, kMaxChunks = 16;

template <typename G, typename T>
__global__ void __launch_bounds__(kGradThreads, sizeof(T) == 4 ? 4 : 5) window_weight_grad(const WeightGradParams p, const int tiles, const int chunks) {
  using S = Sum<T>;
  extern __shared__ __align__(16) char shared[];
  S* gs = reinterpret_cast<S*>(shared);
  S* xs = gs + padded<S>(kGradTile);
  const int slices = kGradThreads / chunks, own_taps = chunks * kElems;
  const int64_t c = blockIdx.x;
  const int k0 = blockIdx.z * own_taps;
  const int in_len = static_cast<int>(p.in_len), out_len = static_cast<int>(p.out_len), left = static_cast<int>(p.left);
  const int chunk = threadIdx.x % chunks, slice = threadIdx.x / chunks;

  S acc[kElems] = {}, db = 0;
  for (int64_t item = blockIdx.y; item < p.batch * tiles; item += p.splits) {
    const int64_t b = item / tiles;
    const G* g_row = static_cast<const G*>(p.g) + b * p.gs.b + c * p.gs.c;
    const T* x_row = static_cast<const T*>(p.x) + b * p.xs.b + c * p.xs.c;
    const int t0 = static_cast<int>(item - b * tiles) * kGradTile - misalignment(g_row, 0, p.gs.t);
    const int count = min(kGradTile, out_len - t0);
    // Nothing of x is in reach: only db wants this tile.
    const bool reach = t0 + count - 1 - left + k0 + own_taps - 1 >= 0 && t0 - left + k0 < in_len;
    if (count <= 0 || (!reach && blockIdx.z)) continue;
    const int before = max(0, -t0), start = t0 - left + k0, shift = misalignment(x_row, start, p.xs.t);
    __syncthreads();
    stage(gs, g_row, t0, (count + kElems - 1) / kElems * kElems, out_len, p.gs.t);
    stage(xs, x_row, start - shift, shift + count + own_taps - 1, in_len, p.xs.t);
    __syncthreads();
    with_offset(shift % 4, [&](auto offset) {
      constexpr int O = decltype(offset)::value;
      for (int t = slice * kElems; t < count; t += slices * kElems) {
        alignas(16) S g[kElems], win[kWindow];
        read<kElems>(gs, t, g);
        read<kWindow>(xs, t + chunk * kElems + shift - O, win);
        const bool whole = t >= before && t + kElems <= count;
#pragma unroll
        for (int e = 0; e < kElems; ++e) {
          if (whole || (t + e >= before && t + e < count)) {  // a gradient that is not there must not meet an inf
#pragma unroll
            for (int j = 0; j < kElems; ++j) acc[j] = fma(g[e], win[O + e + j], acc[j]);
          }
          db += g[e];
        }
      }
    });
  }
  // Sum the slices in order.
  const int width = own_taps + chunks;
  S* sums = xs;
  static_assert(kMaxChunks * (kElems + 1) * 8 <= padded<S>(kGradTile) && kGradThreads / kMaxChunks % 8 == 0, "eight slices at a time");
  S total = 0, total_db = 0;
  for (int s0 = 0; s0 < slices; s0 += 8) {
    __syncthreads();
    if (slice >= s0 && slice < s0 + 8) {
#pragma unroll
      for (int j = 0; j < kElems; ++j) sums[(slice - s0) * width + chunk * kElems + j] = acc[j];
      if (chunk == 0) sums[(slice - s0) * width + own_taps] = db;
    }
    __syncthreads();
#pragma unroll
    for (int s = 0; s < 8; ++s) {
      if (threadIdx.x < own_taps) total += sums[s * width + threadIdx.x];
      if (threadIdx.x == 0) total_db += sums[s * width + own_taps];
    }
  }
  double* out = p.partial + (blockIdx.y * p.channels + c) * (p.taps + 1);
  if (threadIdx.x < own_taps && k0 + threadIdx.x < p.taps) out[k0 + threadIdx.x] = total;
  if (threadIdx.x == 0 && blockIdx.z == 0) out[p.taps] = total_db;
}

template <typename X, typename OUT, typename T, typename A, bool DOWN>
cudaError_t forward(const ConvParams& p, cudaStream_t stream) {
  const int threads = p.out_len <= 32 * kElems ? 32 : p.out_len <= 64 * kElems ? 64 : kMaxThreads, tile = threads * kElems;
  const int64_t tiles = (p.out_len + tile - 1) / tile, blocks = p.batch * p.channels * tiles;
  if (blocks > 0x7fffffff) return cudaErrorInvalidConfiguration;
  const size_t bytes = (kTapBlock + padded<A>(tile + kTapBlock + 16) + 4) * sizeof(A);
  window_forward<X, OUT, T, A, DOWN><<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(p, static_cast<uint32_t>(tiles));
  return cudaGetLastError();
}

// Tiles of a row: the first may begin before it, at a 16-byte boundary.
int64_t grad_tiles(const WeightGradParams& p) { return (p.out_len + 7 + kGradTile - 1) / kGradTile; }

template <typename G, typename T>
cudaError_t weight_grad(const WeightGradParams& p, cudaStream_t stream) {
  int chunks = 1;
  while (chunks < kMaxChunks && chunks * kElems < p.taps) chunks *= 2;
  const dim3 grid(static_cast<unsigned>(p.channels), p.splits, static_cast<unsigned>((p.taps + chunks * kElems - 1) / (chunks * kElems)));
  const size_t bytes = (padded<Sum<T>>(kGradTile) + padded<Sum<T>>(kGradTile + chunks * kElems + 16) + 4) * sizeof(Sum<T>);
  window_weight_grad<G, T><<<grid, kGradThreads, bytes, stream>>>(p, static_cast<int>(grad_tiles(p)), chunks);
  const cudaError_t e = cudaGetLastError();
  if (e != cudaSuccess) return e;
  return launch_reduce_partials(p.partial, p.splits, p.channels, p.taps, p.dw, p.db, p.dtype, stream);
}

}  // namespace

cudaError_t launch_window_forward(const ConvParams& p, cudaStream_t stream) {
  return dispatch_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    using A = Sum<T>;
    if (p.out_dtype != p.dtype) return forward<T, A, T, A, false>(p, stream);
    if (p.x_dtype != p.dtype) return forward<A, T, T, A, false>(p, stream);
    if constexpr (sizeof(T) == 4) {
      if (p.exact) return forward<T, T, T, A, false>(p, stream);
    }
    return p.w_k < 0 ? forward<T, T, T, float, true>(p, stream) : forward<T, T, T, float, false>(p, stream);
  });
}

int window_weight_grad_splits(const WeightGradParams& p) {
  const int64_t items = p.batch * grad_tiles(p);
  const int64_t blocks = p.channels * ((p.taps + 8 * 32 - 1) / (8 * 32));
  return static_cast<int>(std::clamp<int64_t>((sm_count() * 16 + blocks - 1) / blocks, 1, std::clamp<int64_t>(items, 1, 4096)));
}

cudaError_t launch_window_weight_grad(const WeightGradParams& p, cudaStream_t stream) {
  return dispatch_dtype(p.dtype, [&](auto type) {
    using T = decltype(type);
    return p.g_dtype == p.dtype ? weight_grad<T, T>(p, stream) : weight_grad<Sum<T>, T>(p, stream);
  });
}

}  // namespace fusebackend::conv1d
