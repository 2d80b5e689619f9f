// Element types in kernels: in which type each is summed, conversions, and vectors of them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/cuda_common.cuh"

namespace fusebackend::index_add {

template <typename T>
constexpr bool kHalf = std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>;

// The type in which elements T are summed.
template <typename T> struct AccOf { using type = int32_t; };
template <> struct AccOf<double> { using type = double; };
template <> struct AccOf<float> { using type = float; };
template <> struct AccOf<__half> { using type = float; };
template <> struct AccOf<__nv_bfloat16> { using type = float; };
template <> struct AccOf<int64_t> { using type = int64_t; };
template <typename T> using Acc = typename AccOf<T>::type;

template <typename A, typename T> __device__ __forceinline__ A widen(T x) { return A(x); }
template <> __device__ __forceinline__ float widen<float, __half>(__half x) { return __half2float(x); }
template <> __device__ __forceinline__ float widen<float, __nv_bfloat16>(__nv_bfloat16 x) { return __bfloat162float(x); }
template <typename T, typename A> __device__ __forceinline__ T narrow(A x) { return T(x); }
template <> __device__ __forceinline__ __half narrow<__half, float>(float x) { return __float2half_rn(x); }
template <> __device__ __forceinline__ __nv_bfloat16 narrow<__nv_bfloat16, float>(float x) { return __float2bfloat16_rn(x); }

// A product that is rounded before it is added: one that overflows is infinite then, as in eager mode, and not finite in a fused
// multiply-add.
template <typename A> __device__ __forceinline__ A product(A x, A factor) { return x * factor; }
template <> __device__ __forceinline__ float product<float>(float x, float factor) { return __fmul_rn(x, factor); }
template <> __device__ __forceinline__ double product<double>(double x, double factor) { return __dmul_rn(x, factor); }

template <int kBytes> struct Word;
template <> struct Word<16> { using type = uint4; };
template <> struct Word<8> { using type = uint2; };
template <> struct Word<4> { using type = unsigned; };
template <> struct Word<2> { using type = unsigned short; };
template <> struct Word<1> { using type = unsigned char; };

// Source rows are read once and should leave the caches first, unless a source_index names some of them several times.
template <typename T, int V>
__device__ __forceinline__ Vec<T, V> load_source(const T* p, bool may_repeat) {
  using W = typename Word<sizeof(T) * V>::type;
  if (may_repeat) {
    const W w = __ldg(reinterpret_cast<const W*>(p));
    return reinterpret_cast<const Vec<T, V>&>(w);
  }
  const W w = __ldcs(reinterpret_cast<const W*>(p));
  return reinterpret_cast<const Vec<T, V>&>(w);
}

// Fetches the cache line at p into the L2 cache.
__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// N neighbours in shared memory by 16-byte loads; `at` is aligned to 16 bytes.
template <typename W, int N>
__device__ __forceinline__ void load_shared_vector(W (&to)[N], const W* at) {
  constexpr int kWords = N * sizeof(W) / 16;
  static_assert(N * sizeof(W) % 16 == 0);
  uint4 words[kWords];
#pragma unroll
  for (int w = 0; w < kWords; ++w) words[w] = reinterpret_cast<const uint4*>(at)[w];
#pragma unroll
  for (int i = 0; i < N; ++i) to[i] = reinterpret_cast<const W*>(words)[i];
}

}  // namespace fusebackend::index_add
