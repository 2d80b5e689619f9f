// Between the types of elements and those in which kernels compute.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

namespace fusebackend {

// In which sums of elements of type T are made.
template <typename T>
using AccumulatorOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

__device__ __forceinline__ float widen(float x) { return x; }
__device__ __forceinline__ double widen(double x) { return x; }
__device__ __forceinline__ float widen(__half x) { return __half2float(x); }
__device__ __forceinline__ float widen(__nv_bfloat16 x) { return __bfloat162float(x); }

// Rounded once, to the nearest.
__device__ __forceinline__ void narrow(float x, float& y) { y = x; }
__device__ __forceinline__ void narrow(double x, double& y) { y = x; }
__device__ __forceinline__ void narrow(float x, __half& y) { y = __float2half_rn(x); }
__device__ __forceinline__ void narrow(float x, __nv_bfloat16& y) { y = __float2bfloat16_rn(x); }

}  // namespace fusebackend
