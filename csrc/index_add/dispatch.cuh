// From a dtype and a vector width at run time to template arguments.
#pragma once

#include <algorithm>
#include <type_traits>

#include "index_add/entries.cuh"
#include "index_add/launch.h"

namespace fusebackend::index_add {

constexpr int kThreads = 256;  // of a block, in kernels that do not sort in it

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
constexpr bool has_vector_red(DType t) { return t == DType::kFloat32 || is_half(t); }

// The vector widths, in elements, for which kernels are compiled: 16 bytes (of 1-byte elements 4, which take 16 bytes once they are
// widened), a pair of 16-bit floats, one element.
constexpr int widest_vector(int element_bytes) { return element_bytes > 1 ? 16 / element_bytes : 4; }
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

// The widest vectors along the last slice dimension that alignment allows in source, and in out and initial if they are accessed directly.
inline int vector_width(const Params& p, bool out_too) {
  const int size = element_size(p.dtype);
  const SliceDim& last = p.dims[p.n_dims - 1];
  auto fits = [&](int v) {
    const int bytes = v * size;
    auto aligned = [&](const void* base, int64_t row_stride) {
      return reinterpret_cast<uintptr_t>(base) % bytes == 0 && row_stride * size % bytes == 0;
    };
    if (last.size % v || last.source_stride != 1 || !aligned(p.source, p.source_row_stride)) return false;
    if (out_too && (last.out_stride != 1 || !aligned(p.out, p.out_row_stride) || !aligned(p.initial, 0))) return false;
    for (int d = 0; d + 1 < p.n_dims; ++d)
      if (p.dims[d].source_stride * size % bytes || (out_too && p.dims[d].out_stride * size % bytes)) return false;
    return true;
  };
  if (fits(widest_vector(size))) return widest_vector(size);
  return is_half(p.dtype) && fits(2) ? 2 : 1;
}

// How many bits it takes to write x.
constexpr int bit_width(uint64_t x) {
  int bits = 0;
  for (; x; x >>= 1) ++bits;
  return bits;
}

// Where parts of a workspace begin: on multiples of this many bytes.
constexpr int64_t kWorkspaceAlignment = 256;

}  // namespace fusebackend::index_add
