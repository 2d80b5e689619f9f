// Any taps, any strides, any GPU: tiles of x and w in shared memory, fused multiply-adds on windows of samples in registers. For 5 to some
// tens of taps, for few that are not causal, for single rows, and where there are no tensor cores.
//
// An output is one chain of fused multiply-adds that begins with the bias, in the order of ATen's depthwise kernels: from the first tap to
// the last forwards, and from the last to the first (LAST_TAP_FIRST) for the gradient of x, whose taps come reversed. So fp32 results are
// bit-identical to ATen's, and those of sums in double are correctly rounded.
#pragma once
#include "causal_conv1d/direct_sums.cuh"
#include "causal_conv1d/shared_tile.cuh"
#include "common/channel_epilogue.cuh"

namespace fusebackend::causal_conv1d {

constexpr int kTapBlock = 512;  // taps staged at a time
constexpr int kMaxForwardThreads = 128;

// A block computes 8 outputs a thread, of one row. X is the type of x, OUT of the results, A of the sums, T of all else.
template <typename X, typename OUT, typename T, typename A, bool LAST_TAP_FIRST>
__global__ void __launch_bounds__(kMaxForwardThreads, sizeof(A) == 8 ? 7 : 10)
    shared_tile_forward(const ConvParams p, const uint32_t tiles) {
  extern __shared__ __align__(16) char shared[];
  A* w_tile = reinterpret_cast<A*>(shared);
  A* x_tile = w_tile + kTapBlock;
  const int tile = blockDim.x * kElems;
  const uint32_t row = blockIdx.x / tiles, channels = static_cast<uint32_t>(p.channels);
  const int64_t b = row / channels, c = row % channels;
  const int t0 = static_cast<int>(blockIdx.x - row * tiles) * tile, thread_t = threadIdx.x * kElems;
  const int in_len = static_cast<int>(p.in_len), out_len = static_cast<int>(p.out_len);
  const int taps = static_cast<int>(p.taps), left = static_cast<int>(p.left);
  const X* x = row_of<X>(p.x, p.x_stride, b, c);
  const T* w = static_cast<const T*>(p.w) + c * p.w_stride.c;

  A acc[kElems];
  const A bias = load_bias<T>(p, c);
#pragma unroll
  for (int e = 0; e < kElems; ++e) acc[e] = bias;
  // The taps that meet x for some output of the tile.
  const int first = max(0, left - (t0 + tile - 1)) / kElems * kElems, last = min(taps, in_len + left - t0);
  const int blocks = last > first ? (last - first + kTapBlock - 1) / kTapBlock : 0;
  bool finite = true;  // the taps that this thread has read
  const auto tap = [&](int k) {
    const A value = to_float(w[k * p.w_stride.k]);
    finite &= fabs(value) < A(INFINITY);
    return value;
  };
  for (int block = 0; block < blocks; ++block) {
    const int k0 = first + (LAST_TAP_FIRST ? blocks - 1 - block : block) * kTapBlock;
    const int count = min(kTapBlock, last - k0), whole_steps = count / kElems * kElems;
    const int start = t0 - left + k0, skip = misalignment(x, start, p.x_stride.t);
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) w_tile[i] = tap(k0 + i);
    stage_tile(x_tile, x, start - skip, skip + tile + count - 1, in_len, p.x_stride.t);
    __syncthreads();
    // Steps in which all products of this warp would be with padding are skipped.
    const int warp_t0 = t0 + (thread_t & ~(32 * kElems - 1)), warp_t1 = warp_t0 + 32 * kElems - 1;
    const int lo = min(whole_steps, max(0, (left - warp_t1 - k0) / kElems * kElems));
    const int hi = min(whole_steps, (max(0, in_len + left - warp_t0 - k0) + kElems - 1) / kElems * kElems);
    with_offset(skip % 4, [&](auto offset) {
      constexpr int O = decltype(offset)::value;
      const int base = thread_t + skip - O;
      alignas(16) A window[kWindow];
      auto last_taps = [&] {  // after the whole steps: a tap past the last must not meet an inf
        read_tile<kWindow>(x_tile, base + whole_steps, window);
#pragma unroll
        for (int i = 0; i < kElems - 1; ++i) {
          const int j = LAST_TAP_FIRST ? kElems - 2 - i : i;
          if (whole_steps + j < count) {
            const A wk = w_tile[whole_steps + j];
#pragma unroll
            for (int e = 0; e < kElems; ++e) acc[e] = fma(wk, window[O + e + j], acc[e]);
          }
        }
      };
      if (LAST_TAP_FIRST && whole_steps < count) last_taps();
      if (lo < hi) read_tile<kWindow - kElems>(x_tile, base + (LAST_TAP_FIRST ? hi : lo), window + (LAST_TAP_FIRST ? kElems : 0));
      for (int i = lo; i < hi; i += kElems) {
        const int k = LAST_TAP_FIRST ? lo + hi - kElems - i : i;
        alignas(16) A wk[kElems];
        constexpr int kVec = 16 / sizeof(A);
#pragma unroll
        for (int j = 0; j < kElems; j += kVec) *reinterpret_cast<Vec<A, kVec>*>(wk + j) = *reinterpret_cast<const Vec<A, kVec>*>(w_tile + k + j);
        read_tile<kElems>(x_tile, base + k + (LAST_TAP_FIRST ? 0 : kWindow - kElems), window + (LAST_TAP_FIRST ? 0 : kWindow - kElems));
#pragma unroll
        for (int i = 0; i < kElems; ++i) {
          const int j = LAST_TAP_FIRST ? kElems - 1 - i : i;
#pragma unroll
          for (int e = 0; e < kElems; ++e) acc[e] = fma(wk[j], window[O + e + j], acc[e]);
        }
#pragma unroll
        for (int e = 0; e < kWindow - kElems; ++e) {
          if (LAST_TAP_FIRST) window[kWindow - 1 - e] = window[kWindow - 1 - kElems - e];
          else window[e] = window[e + kElems];
        }
      }
      if (!LAST_TAP_FIRST && whole_steps < count) last_taps();
    });
  }

  if (!p.skips_padding) {  // the taps that meet zeros only
#pragma unroll 4
    for (int k = threadIdx.x; k < min(first, taps); k += blockDim.x) tap(k);
#pragma unroll 4
    for (int k = max(last, 0) + threadIdx.x; k < taps; k += blockDim.x) tap(k);
  }

  const A constant = static_cast<A>(p.shift);
  const ChannelAffine affine = p.epilogue == Epilogue::kChannel ? affine_of<T>(p.after, c) : ChannelAffine{};
  auto finished = [&](A y, auto&& dy) {
    y += constant;
    if (p.epilogue == Epilogue::kSilu) y = silu<T>(y);
    if (p.epilogue == Epilogue::kSiluGrad) y = silu_backward<T>(A(dy()), y);
    if (p.epilogue == Epilogue::kChannel) {
      float one[1] = {static_cast<float>(y)};
      finish<T>(one, p.after, affine);
      y = one[0];
    }
    return y;
  };
  constexpr int V = 16 / sizeof(T);
  const T* dy = row_of<T>(p.dy, p.dy_stride, b, c);
  OUT* out = row_of<OUT>(p.out, p.out_stride, b, c);
  const bool whole_vectors = sizeof(OUT) == sizeof(T) && p.out_stride.t == 1 && reinterpret_cast<uintptr_t>(out) % 16 == 0 &&
                             t0 + thread_t + kElems <= out_len &&
                             (p.epilogue != Epilogue::kSiluGrad || (p.dy_stride.t == 1 && reinterpret_cast<uintptr_t>(dy) % 16 == 0));
  if (__syncthreads_and(whole_vectors && finite)) {
#pragma unroll
    for (int i = 0; i < kElems; i += V) {
      Vec<T, V> dy_raw = {};
      if (p.epilogue == Epilogue::kSiluGrad) dy_raw = *reinterpret_cast<const Vec<T, V>*>(dy + t0 + thread_t + i);
      float y[V];
#pragma unroll
      for (int j = 0; j < V; ++j) y[j] = static_cast<float>(finished(acc[i + j], [&] { return to_float(dy_raw.v[j]); }));
      *reinterpret_cast<Vec<T, V>*>(out + t0 + thread_t + i) = pack<T, V>(y);
    }
    return;
  }
#pragma unroll
  for (int e = 0; e < kElems; ++e) x_tile[padded<A>(thread_t + e)] = acc[e];
  const bool direct = !__syncthreads_and(finite);  // products with padding were skipped, or were not to be made
#pragma unroll 4
  for (int i = threadIdx.x; i < min(tile, out_len - t0); i += blockDim.x) {
    A y = x_tile[padded<A>(i)];
    if (direct) y = direct_sum(x, p.x_stride.t, in_len, w, p.w_stride.k, taps, t0 + i - left, bias, p.skips_padding);
    out[(t0 + i) * p.out_stride.t] = rounded<OUT>(finished(y, [&] { return to_float(dy[(t0 + i) * p.dy_stride.t]); }));
  }
}

}  // namespace fusebackend::causal_conv1d
