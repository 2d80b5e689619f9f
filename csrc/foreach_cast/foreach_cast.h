// foreach_cast: many tensors to another dtype by one kernel. Knows nothing of torch.
#pragma once

#include <cstdint>

#include "common/dtype.h"

#if __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>
#endif

namespace fusebackend::foreach_cast {

// Tensors of one launch: their descriptions are the kernel's parameters, of which there may be 4 KB. Matchers make groups of as many (groups.py).
constexpr int kMostTensors = 128;

// Stretches of memory, each of so many elements, that are cast one into the other. None is empty.
struct Stretches {
  const void* from[kMostTensors];
  void* to[kMostTensors];
  int64_t elements[kMostTensors];
  int count = 0;
};

#if __has_include(<cuda_runtime_api.h>)
// From fp32 to a 16-bit float, or back. On `stream` of the current device; captured into a CUDA graph if the stream is.
cudaError_t launch(const Stretches& stretches, DType from, DType to, cudaStream_t stream);
#endif

}  // namespace fusebackend::foreach_cast
