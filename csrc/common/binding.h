// What every thin binding needs from torch, on the stable ABI only: one binary serves torch 2.11 and later, with or without CUDA.
#pragma once

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "dtype.h"
#include "out_of_memory.h"

namespace fusebackend {

using torch::headeronly::IntHeaderOnlyArrayRef;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// torch.empty_strided(sizes, strides) on the device of `like`; of its dtype, if no other is given.
inline Tensor empty_strided_like(const Tensor& like, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides,
                                 std::optional<ScalarType> other_dtype = std::nullopt) {
  int32_t dtype, device_type, device_index;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(like.get(), &dtype));
  if (other_dtype) dtype = static_cast<int32_t>(*other_dtype);
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  AtenTensorHandle handle = nullptr;
  const AOTITorchError error = aoti_torch_empty_strided(
      static_cast<int64_t>(sizes.size()), sizes.data(), strides.data(), dtype, device_type, device_index, &handle);
  if (device_type == aoti_torch_device_type_cuda()) check_allocated(error);
  TORCH_ERROR_CODE_CHECK(error);
  return Tensor(handle);
}

// The same, contiguous.
inline Tensor empty_like_sized(const Tensor& like, const std::vector<int64_t>& sizes, std::optional<ScalarType> other_dtype = std::nullopt) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t d = sizes.size(); d-- > 0;) {
    strides[d] = step;
    step *= sizes[d] > 0 ? sizes[d] : 1;
  }
  return empty_strided_like(like, sizes, strides, other_dtype);
}

// The strides of a dense tensor whose dims lie in this order, from the outermost to the innermost.
inline std::vector<int64_t> dense_strides(const std::vector<int64_t>& sizes, const std::vector<int64_t>& order) {
  std::vector<int64_t> strides(sizes.size());
  int64_t step = 1;
  for (size_t i = order.size(); i-- > 0;) {
    strides[order[i]] = step;
    step *= std::max<int64_t>(sizes[order[i]], 1);
  }
  return strides;
}

// The kernels' name of a torch dtype; none if no kernel computes in it.
inline std::optional<DType> to_dtype(ScalarType t) {
  switch (t) {
    case ScalarType::Double: return DType::kFloat64;
    case ScalarType::Float: return DType::kFloat32;
    case ScalarType::Half: return DType::kFloat16;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Long: return DType::kInt64;
    case ScalarType::Int: return DType::kInt32;
    case ScalarType::Short: return DType::kInt16;
    case ScalarType::Char: return DType::kInt8;
    case ScalarType::Byte: return DType::kUInt8;
    default: return std::nullopt;
  }
}

inline bool on_same_device(const Tensor& a, const Tensor& b) {
  return a.is_cuda() == b.is_cuda() && a.get_device_index() == b.get_device_index();
}

// Whether the elements lie in one stretch of memory without gaps, in whatever order of dims: it can be walked, or initialised, as a whole.
inline bool covers_memory(const Tensor& t) {
  if (t.numel() == 0) return true;
  int64_t extent = 1;
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (t.size(d) > 1 && t.stride(d) == 0) return false;
    extent += (t.size(d) - 1) * t.stride(d);
  }
  return extent == t.numel();
}

inline std::vector<int64_t> to_vector(IntHeaderOnlyArrayRef ref) { return {ref.begin(), ref.end()}; }

}  // namespace fusebackend

// The CUDA half. Without a toolkit only the CPU bindings are compiled, and they do not need it.
#if __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>

// CPU builds of torch lack this symbol: weak, so that the library loads there; no CUDA op can be reached without CUDA torch.
#pragma weak aoti_torch_get_current_cuda_stream

namespace fusebackend {

// Makes the tensor's device current for its lifetime, and knows torch's current stream there. Never synchronises.
class __attribute__((visibility("hidden"))) CudaScope {
 public:
  explicit CudaScope(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    void* stream = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
    stream_ = static_cast<cudaStream_t>(stream);
  }
  cudaStream_t stream() const { return stream_; }

 private:
  torch::stable::accelerator::DeviceGuard guard_;
  cudaStream_t stream_ = nullptr;
};

// Throws, naming the operation, when a launcher reports an error.
inline void check_cuda(cudaError_t error, const char* operation) {
  STD_TORCH_CHECK(error == cudaSuccess, "fusebackend::", operation, ": CUDA error: ", cudaGetErrorString(error));
}

}  // namespace fusebackend
#endif
