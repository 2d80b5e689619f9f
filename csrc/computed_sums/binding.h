// Torch's types as the kernels know them.
#pragma once

#include "common/binding.h"
#include "computed_sums/computed_sums.h"

namespace fusebackend::computed_sums {

inline Type input_type(ScalarType dtype, size_t k) {
  switch (dtype) {
    case ScalarType::Float: return kFloat32;
    case ScalarType::Half: return kFloat16;
    case ScalarType::BFloat16: return kBFloat16;
    case ScalarType::Byte: return kUInt8;
    case ScalarType::Bool: return kBool;
    default: STD_TORCH_CHECK(false, "computed_sums: input ", k, " is ", torch::headeronly::toString(dtype), "; fp32, fp16, bf16, uint8 and bool are accepted");
  }
}

inline Type result_type(ScalarType dtype, size_t s) {
  const bool accepted = dtype == ScalarType::Float || dtype == ScalarType::Half || dtype == ScalarType::BFloat16;
  STD_TORCH_CHECK(accepted, "computed_sums: result ", s, " in ", torch::headeronly::toString(dtype), "; fp32, fp16 and bf16 are accepted");
  return input_type(dtype, s);
}

inline ScalarType result_dtype(char type) {
  STD_TORCH_CHECK(type == kFloat32 || type == kFloat16 || type == kBFloat16, "computed_sums: results are of types f (fp32), h (fp16) and b (bf16), not ", type);
  return type == kFloat32 ? ScalarType::Float : type == kFloat16 ? ScalarType::Half : ScalarType::BFloat16;
}

inline void check_counts(size_t inputs, size_t outs) {
  STD_TORCH_CHECK(1 <= inputs && inputs <= kMostInputs, "computed_sums: 1 to ", kMostInputs, " inputs are accepted, not ", inputs);
  STD_TORCH_CHECK(1 <= outs && outs <= kMostOuts, "computed_sums: 1 to ", kMostOuts, " results (types) are accepted, not ", outs);
}

}  // namespace fusebackend::computed_sums
