// Device helpers of all kernels of this folder: conversion, wide loads and stores, the type of sums, SiLU.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <type_traits>

#include "causal_conv1d/params.h"
#include "common/cuda_common.cuh"

namespace fusebackend::causal_conv1d {

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ double to_float(double v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T>
__device__ __forceinline__ T from_float(float v) {
  if constexpr (std::is_same_v<T, __half>) return __float2half_rn(v);
  else if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(v);
  else return v;
}
// A sum of type A as what is stored, of type T.
template <typename T, typename A>
__device__ __forceinline__ T rounded(A v) {
  if constexpr (std::is_same_v<T, A>) return v;
  else return from_float<T>(static_cast<float>(v));
}

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

// The type in which weight gradients of T are summed. Products of two fp32 numbers are exact in double, so fp32 gradients come out
// correctly rounded; 16-bit ones round far more when they are stored.
template <typename T>
using Sum = std::conditional_t<std::is_same_v<T, float>, double, float>;

// What is left to add to a finished sum of p.shift. ATen adds that constant after the sum, in fp32, and so do fp32 kernels. 16-bit results
// round the difference away: there `bias`, with which sums begin, takes it up.
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

// Element (b, c, 0) of a tensor.
template <typename T>
__device__ __forceinline__ const T* row_of(const void* data, const Strides& s, int64_t b, int64_t c) {
  return static_cast<const T*>(data) + b * s.b + c * s.c;
}
template <typename T>
__device__ __forceinline__ T* row_of(void* data, const Strides& s, int64_t b, int64_t c) {
  return static_cast<T*>(data) + b * s.b + c * s.c;
}

// A channel's bias and taps. Params: ConvParams or BackwardParams.
template <typename T, typename Params>
__device__ __forceinline__ float load_bias(const Params& p, int64_t c) {
  return p.bias ? to_float(static_cast<const T*>(p.bias)[c * p.bias_stride]) : 0.f;
}
template <typename T, int K, typename Params>
__device__ __forceinline__ void load_taps(const Params& p, int64_t c, float (&w)[K], float& bias) {
  const T* wc = static_cast<const T*>(p.w) + c * p.w_stride.c;
#pragma unroll
  for (int k = 0; k < K; ++k) w[k] = to_float(wc[k * p.w_stride.k]);
  bias = load_bias<T>(p, c);
}

// start + sum_k w[k] * x[k].
template <int K>
__device__ __forceinline__ float tap_sum(const float (&w)[K], const float* x, float start) {
#pragma unroll
  for (int k = 0; k < K; ++k) start = fmaf(w[k], x[k], start);
  return start;
}

// For 16-bit types: without the scaling that keeps __expf exact below 2^-126, which is lost beside 1.
__device__ __forceinline__ float fast_sigmoid(float v) {
  float e, s;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(v * -1.4426950408889634f));
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(s) : "f"(1.f + e));
  return s;
}
// fp32: the same roundings as ATen's kernels.
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
// In double only the rounding of the stored result is left.
template <typename T>
__device__ __forceinline__ double silu(double v) { return v / (1. + exp(-v)); }
template <typename T>
__device__ __forceinline__ double silu_backward(double dy, double v) {
  const double s = 1. / (1. + exp(-v));
  return dy * s * fma(v, 1. - s, 1.);
}

// Whether a kernel applies SiLU: decided when it is compiled, where a branch would cost time, or when it runs, since each instantiation
// costs compile time and library size.
enum class SiluMode : int { kNever, kAlways, kRuntime };
template <SiluMode MODE>
__device__ __forceinline__ bool applies_silu(bool wanted) { return MODE == SiluMode::kAlways || (MODE == SiluMode::kRuntime && wanted); }

// f(SiluMode) as a constant: kNever or kAlways if COMPILED, else kRuntime.
template <bool COMPILED, typename F>
cudaError_t dispatch_silu(bool wanted, F&& f) {
  if constexpr (!COMPILED) return f(std::integral_constant<SiluMode, SiluMode::kRuntime>{});
  else return wanted ? f(std::integral_constant<SiluMode, SiluMode::kAlways>{}) : f(std::integral_constant<SiluMode, SiluMode::kNever>{});
}

template <typename F>
cudaError_t dispatch_dtype(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat32: return f(float{});
    case DType::kFloat16: return f(__half{});
    case DType::kBFloat16: return f(__nv_bfloat16{});
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace fusebackend::causal_conv1d
