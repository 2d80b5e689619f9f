// Conversions, dispatch on the element type, and what else device code of this folder shares.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "depthwise_conv/params.h"

namespace fusebackend::depthwise_conv {

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T>
__device__ __forceinline__ T from_float(float v);
template <>
__device__ __forceinline__ float from_float<float>(float v) { return v; }
template <>
__device__ __forceinline__ __half from_float<__half>(float v) { return __float2half_rn(v); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float v) { return __float2bfloat16_rn(v); }

// Two floats as 16-bit ones in one word, the first in the lower half.
template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ uint32_t pack<__half>(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}
template <>
__device__ __forceinline__ uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&both);
}

// The floats of a word that holds two 16-bit ones.
template <typename T>
__device__ __forceinline__ float low_half(uint32_t both) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __uint_as_float(both << 16);
  else return __half2float(__ushort_as_half(uint16_t(both)));
}
template <typename T>
__device__ __forceinline__ float high_half(uint32_t both) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) return __uint_as_float(both & 0xffff0000u);
  else return __half2float(__ushort_as_half(uint16_t(both >> 16)));
}

// A pointer that is computed once: where loads are conditional, the compiler would compute it for each anew.
template <typename T>
__device__ __forceinline__ const T* settled(const T* at) {
  asm("" : "+l"(at));
  return at;
}

template <typename F>
cudaError_t dispatch_16_bits(DType dtype, F&& f) {
  return dtype == DType::kFloat16 ? f(__half{}) : f(__nv_bfloat16{});
}
template <typename F>
cudaError_t dispatch_dtype(DType dtype, F&& f) {
  return dtype == DType::kFloat32 ? f(float{}) : dispatch_16_bits(dtype, std::forward<F>(f));
}

// n / d rounded down, for d > 0.
__host__ __device__ constexpr int floor_div(int n, int d) { return n >= 0 ? n / d : -((d - 1 - n) / d); }

}  // namespace fusebackend::depthwise_conv
