// The device that the kernels run on, and the launch of the route that was chosen (plan.h).
#include <algorithm>
#include <mutex>

#include "common/device_properties.h"
#include "index_add/routes.h"

namespace fusebackend::index_add {
const Device& current_device() {
  constexpr int kMaxDevices = 64;
  static Device devices[kMaxDevices];
  static std::once_flag known[kMaxDevices];
  int id = 0;
  cudaGetDevice(&id);
  id = std::min(id, kMaxDevices - 1);
  std::call_once(known[id], [&] {
    devices[id] = {sm_count(), compute_capability_major(), device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
                   max_shared_bytes(), device_attribute(cudaDevAttrL2CacheSize)};
  });
  return devices[id];
}

cudaError_t launch(const Params& p, const Plan& plan, void* workspace, const Device& device, cudaStream_t stream) {
  if (!p.in_place() && (plan.route == Route::kAtomicAdd || plan.route == Route::kFewEntries)) {
    const size_t bytes = size_t(p.out_numel) * element_size(p.dtype);
    const cudaError_t error = p.initial ? cudaMemcpyAsync(p.out, p.initial, bytes, cudaMemcpyDeviceToDevice, stream)
                                        : cudaMemsetAsync(p.out, 0, bytes, stream);
    if (error != cudaSuccess) return error;
  }
  if (p.n == 0) return cudaSuccess;
  switch (plan.route) {
    case Route::kAtomicAdd: return launch_atomic_add(p, device, stream);
    case Route::kAtomicAddFp32: return launch_atomic_add_fp32(p, workspace, device, stream);
    case Route::kFewEntries: return launch_few_entries(p, device, stream);
    case Route::kThreadTables: return launch_thread_tables(p, workspace, device, stream);
    case Route::kBlockTables: return launch_block_tables(p, workspace, device, stream);
    case Route::kBucketSum: return launch_bucket_sum(p, workspace, device, stream);
    case Route::kSegmentedSum: return launch_segmented_sum(p, workspace, device, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fusebackend::index_add
