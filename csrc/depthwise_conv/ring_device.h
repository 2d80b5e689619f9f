// The device, as the launchers of rings of planes ask for it.
#pragma once
#include "common/device_properties.h"
#include "depthwise_conv/plane_ring_plan.h"

namespace fusebackend::depthwise_conv {

// Whether the current device runs rings of planes of this dtype, with taps that are so far apart.
inline bool has_ring(DType dtype, const Strides& w) {
  return is_half(dtype) && has_small_steps(w) && compute_capability_major() == 9 && compute_capability_minor() == 0;
}

inline PlaneRingDevice this_device() { return {sm_count(), device_attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor)}; }

}  // namespace fusebackend::depthwise_conv
