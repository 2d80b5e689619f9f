// Element types that kernels compute in; bindings translate torch's (`to_dtype` in binding.h).
#pragma once

namespace fusebackend {

enum class DType : int { kFloat64, kFloat32, kFloat16, kBFloat16, kInt64, kInt32, kInt16, kInt8, kUInt8 };

constexpr int element_size(DType t) {
  switch (t) {
    case DType::kFloat64: case DType::kInt64: return 8;
    case DType::kFloat32: case DType::kInt32: return 4;
    case DType::kFloat16: case DType::kBFloat16: case DType::kInt16: return 2;
    case DType::kInt8: case DType::kUInt8: return 1;
  }
  return 0;
}
constexpr bool is_half(DType t) { return t == DType::kFloat16 || t == DType::kBFloat16; }
constexpr bool is_floating(DType t) { return t <= DType::kBFloat16; }

}  // namespace fusebackend
