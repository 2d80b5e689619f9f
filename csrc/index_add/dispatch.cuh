// From run-time dtype, alignment and shape to a kernel instance.
#pragma once

#include <algorithm>
#include <type_traits>

#include "device.cuh"
#include "launch.h"

namespace fusebackend::accumulate {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

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

template <typename T>
constexpr bool kHalf = std::is_same_v<T, __half> || std::is_same_v<T, __nv_bfloat16>;

// Widths, in elements, that a thread may move at once: 16 bytes (of bytes 4, which take 16 once summed), a pair of 16-bit floats, one element.
constexpr int wide(int element_bytes) { return element_bytes > 1 ? 16 / element_bytes : 4; }
template <typename T>
constexpr int kWide = wide(sizeof(T));

// As many are reduced in global memory at once: without vector reductions, a warp's single ones had better be neighbours.
constexpr bool has_vector_reds(DType t) { return t == DType::kFloat32 || is_half(t); }
template <typename T>
constexpr int kReduced = std::is_same_v<T, float> || kHalf<T> ? kWide<T> : 1;

// The widest that alignment allows along the last slice dimension in the source, and in out if it is written directly.
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
  if (fits(wide(size))) return wide(size);
  return is_half(p.dtype) && fits(2) ? 2 : 1;
}

}  // namespace fusebackend::accumulate
