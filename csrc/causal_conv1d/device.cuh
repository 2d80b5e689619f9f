// Device helpers shared by the kernels of this folder: conversion, 16-byte access, SiLU.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "../common/cuda_common.cuh"
#include "conv1d.h"

namespace fusebackend::conv1d {

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ double to_float(double v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) { return v; }
// A sum, in whatever it was made, as what is stored.
template <typename T, typename A>
__device__ __forceinline__ T rounded(A v) {
  if constexpr (std::is_same_v<T, A>) return v;
  else return from_float<T>(static_cast<float>(v));
}
template <>
__device__ __forceinline__ __half from_float<__half>(float v) { return __float2half_rn(v); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }

template <typename T, int N>
__device__ __forceinline__ void unpack(const Vec<T, N>& raw, float* out) {
  if constexpr (std::is_same_v<T, __nv_bfloat16> && N % 2 == 0) {  // one instruction an element: half of a word is a float
#pragma unroll
    for (int i = 0; i < N; i += 2) {
      const uint32_t two = reinterpret_cast<const uint32_t*>(&raw)[i / 2];
      out[i] = __uint_as_float(two << 16);
      out[i + 1] = __uint_as_float(two & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) out[i] = to_float(raw.v[i]);
  }
}

template <typename T, int N>
__device__ __forceinline__ Vec<T, N> pack(const float* in) {
  Vec<T, N> raw;
  if constexpr (std::is_same_v<T, __nv_bfloat16> && N % 2 == 0) {
#pragma unroll
    for (int i = 0; i < N; i += 2)
      reinterpret_cast<__nv_bfloat162*>(&raw)[i / 2] = __floats2bfloat162_rn(in[i], in[i + 1]);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) raw.v[i] = from_float<T>(in[i]);
  }
  return raw;
}

// Sums that end up in a gradient of many samples. Products of two fp32 numbers are exact in double, so that fp32 gradients
// come out correctly rounded; 16-bit ones round far more when they are stored.
template <typename T>
using Sum = std::conditional_t<std::is_same_v<T, float>, double, float>;

// The constant that is added to a sum after it, as ATen does in fp32. 16-bit results round the difference away: there it is
// added to the bias, with which sums begin.
template <typename T>
__device__ __forceinline__ float late_shift(double shift, float& bias) {
  if constexpr (sizeof(T) != 4) bias += static_cast<float>(shift);
  return sizeof(T) == 4 ? static_cast<float>(shift) : 0.f;
}
template <typename T, int N>
__device__ __forceinline__ float late_shift(double shift, float (&bias)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) late_shift<T>(shift, bias[i]);
  return sizeof(T) == 4 ? static_cast<float>(shift) : 0.f;
}

// A channel's taps and bias.
template <typename T, int K>
__device__ __forceinline__ void load_taps(const void* w_, const void* bias_, int64_t c, int64_t w_c, int64_t w_k,
                                          int64_t bias_c, float (&w)[K], float& bias) {
  const T* wc = static_cast<const T*>(w_) + c * w_c;
#pragma unroll
  for (int k = 0; k < K; ++k) w[k] = to_float(wc[k * w_k]);
  bias = (bias_ ? to_float(static_cast<const T*>(bias_)[c * bias_c]) : 0.f);
}

// For 16-bit types: without the scaling that keeps __expf exact below 2^-126: 1 + that is 1.
__device__ __forceinline__ float fast_sigmoid(float v) {
  float e, s;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.f + e));
  return s;
}
// In fp32 with the same roundings as ATen's kernels.
template <typename T>
__device__ __forceinline__ float silu(float v) {
  if constexpr (sizeof(T) == 4) return v / (1.f + expf(-v));
  else return v * fast_sigmoid(v);
}
template <typename T>
__device__ __forceinline__ float silu_backward(float dy, float v) {
  const float s = sizeof(T) == 4 ? 1.f / (1.f + expf(-v)) : fast_sigmoid(v);
  return dy * s * fmaf(v, 1.f - s, 1.f);
}

// In double: nothing but the result's own rounding is left.
template <typename T>
__device__ __forceinline__ double silu(double v) { return v / (1. + exp(-v)); }
template <typename T>
__device__ __forceinline__ double silu_backward(double dy, double v) {
  const double s = 1. / (1. + exp(-v));
  return dy * s * fma(v, 1. - s, 1.);
}

// Whether SiLU follows: known when a kernel is compiled, where a branch would cost time, else asked when it runs, since each
// kernel more costs whoever compiles them.
enum class Silu : int { kNone, kFollows, kAsked };
template <Silu SILU>
__device__ __forceinline__ bool silu_follows(bool asked) { return SILU == Silu::kFollows || (SILU == Silu::kAsked && asked); }

// f(Silu) as a constant: kAsked where the kernel is not FAST.
template <bool FAST, typename F>
cudaError_t dispatch_silu(bool silu, F&& f) {
  if constexpr (!FAST) return f(std::integral_constant<Silu, Silu::kAsked>{});
  else return silu ? f(std::integral_constant<Silu, Silu::kFollows>{}) : f(std::integral_constant<Silu, Silu::kNone>{});
}

template <typename F>
cudaError_t dispatch_dtype(Dtype dtype, F&& f) {
  switch (dtype) {
    case Dtype::kFloat: return f(float{});
    case Dtype::kHalf: return f(__half{});
    case Dtype::kBFloat16: return f(__nv_bfloat16{});
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace fusebackend::conv1d
