// From run-time dtype, alignment and shape to a kernel instance.
#pragma once

#include <algorithm>

#include "device.cuh"
#include "launch.h"

namespace fusebackend::accumulate {

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

template <typename F>
cudaError_t dispatch(DType t, F&& f) {
  switch (t) {
    case DType::kFloat64: return f(double());
    case DType::kFloat32: return f(float());
    case DType::kFloat16: return f(__half());
    case DType::kBFloat16: return f(__nv_bfloat16());
    case DType::kInt64: return f(int64_t());
    case DType::kInt32: return f(int32_t());
    case DType::kInt16: return f(int16_t());
    case DType::kInt8: return f(int8_t());
    case DType::kUInt8: return f(uint8_t());
  }
  return cudaErrorInvalidValue;
}

// Widths, in elements, that a thread may move at once: 16 bytes, a pair of 16-bit elements, one element.
template <typename T>
constexpr int kWide = sizeof(T) >= 2 ? 16 / int(sizeof(T)) : 1;

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
  if (size == 1) return 1;
  if (fits(16 / size)) return 16 / size;
  return is_half(p.dtype) && fits(2) ? 2 : 1;
}

}  // namespace fusebackend::accumulate
