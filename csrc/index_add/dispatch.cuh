// From a dtype and a vector width at run time to template arguments.
#pragma once

#include <algorithm>
#include <type_traits>

#include "index_add/entries.cuh"
#include "index_add/launch.h"
#include "index_add/shapes.h"

namespace fusebackend::index_add {

template <typename F>
cudaError_t dispatch_floating(DType t, F&& f) {
  switch (t) {
    case DType::kFloat64: return f(double());
    case DType::kFloat32: return f(float());
    case DType::kFloat16: return f(__half());
    case DType::kBFloat16: return f(__nv_bfloat16());
    default: return cudaErrorInvalidValue;
  }
}
template <typename F>
cudaError_t dispatch(DType t, F&& f) {
  switch (t) {
    case DType::kInt64: return f(int64_t());
    case DType::kInt32: return f(int32_t());
    case DType::kInt16: return f(int16_t());
    case DType::kInt8: case DType::kUInt8: return f(uint8_t());  // sums modulo 256 are the same
    default: return dispatch_floating(t, f);
  }
}
// The types whose 16-byte vectors `red` adds.
template <typename F>
cudaError_t dispatch_vector_red(DType t, F&& f) {
  if (t == DType::kFloat32) return f(float());
  return t == DType::kFloat16 ? f(__half()) : f(__nv_bfloat16());
}

template <typename T>
constexpr int kWidest = widest_vector(sizeof(T));

// The widest for atomic additions. Types without vector instructions for them are added one by one, best by neighbouring threads.
template <typename T>
constexpr int kWidestRed = std::is_same_v<T, float> || kHalf<T> ? kWidest<T> : 1;

// Calls f(std::integral_constant<int, V>) for a width v that vector_width returned.
template <typename T, int kLimit = kWidest<T>, typename F>
cudaError_t dispatch_width(int v, F&& f) {
  if constexpr (kLimit > 1)
    if (v == kLimit) return f(std::integral_constant<int, kLimit>());
  if constexpr (kHalf<T>)
    if (v == 2) return f(std::integral_constant<int, 2>());
  return f(std::integral_constant<int, 1>());
}

}  // namespace fusebackend::index_add
