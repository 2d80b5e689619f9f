// The driver's function that describes a tensor to the tensor memory accelerator, found at run time, so that libraries do not link the driver.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace fusebackend {

// Null where the driver has none.
inline decltype(&cuTensorMapEncodeTiled) encode_tiled() {
  static const auto function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result);
    return error == cudaSuccess && result == cudaDriverEntryPointSuccess ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(found) : nullptr;
  }();
  return function;
}

}  // namespace fusebackend
