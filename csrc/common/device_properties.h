// What launchers ask about the current device. A call may ask twenty times, of the same few attributes, so they are kept.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>

namespace fusebackend {

inline int device_attribute(cudaDeviceAttr attribute) {
  constexpr int kDevices = 16;
  static std::atomic<int> kept[kDevices][cudaDevAttrMax];  // 0: not asked yet, or 0
  int device = 0, value = 0;
  cudaGetDevice(&device);
  if (device < kDevices && (value = kept[device][attribute].load(std::memory_order_relaxed)) != 0) return value;
  cudaDeviceGetAttribute(&value, attribute, device);
  if (device < kDevices) kept[device][attribute].store(value, std::memory_order_relaxed);
  return value;
}

inline int sm_count() { return device_attribute(cudaDevAttrMultiProcessorCount); }
inline int compute_capability_major() { return device_attribute(cudaDevAttrComputeCapabilityMajor); }
inline int compute_capability_minor() { return device_attribute(cudaDevAttrComputeCapabilityMinor); }

// Shared memory that one block may have after opting in (SharedMemoryOptIn in cuda_common.cuh).
inline int max_shared_bytes() { return device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin); }

}  // namespace fusebackend
