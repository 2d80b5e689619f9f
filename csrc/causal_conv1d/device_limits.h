// What launchers ask about the current device.
#pragma once
#include <cuda_runtime_api.h>

namespace fusebackend::conv1d {

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

inline int sm_count() { return device_attribute(cudaDevAttrMultiProcessorCount); }

// Shared memory that one block may have.
inline int max_shared_bytes() { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

// The same where there are tensor cores for fp16, bf16 and asynchronous copies; else none.
inline int tensor_core_shared_bytes() { return device_attribute(cudaDevAttrComputeCapabilityMajor) >= 8 ? max_shared_bytes() : 0; }

}  // namespace fusebackend::conv1d
