// What launchers ask about the current device. Attributes are read from the driver's tables: tens of nanoseconds a call.
#pragma once

#include <cuda_runtime_api.h>

namespace fusebackend {

inline int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&value, attribute, device);
  return value;
}

inline int sm_count() { return device_attribute(cudaDevAttrMultiProcessorCount); }
inline int compute_capability_major() { return device_attribute(cudaDevAttrComputeCapabilityMajor); }
inline int compute_capability_minor() { return device_attribute(cudaDevAttrComputeCapabilityMinor); }

// Shared memory that one block may have after opting in (SharedMemoryOptIn in cuda_common.cuh).
inline int max_shared_bytes() { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

}  // namespace fusebackend
