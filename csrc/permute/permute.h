// permute_copy: copies a tensor into another memory order. Knows nothing of torch.
#pragma once

#include "common/tile/cpu_blocking.h"

#if __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>
#endif

namespace fusebackend::permute {

// Copies blocks [begin, end).
void copy_cpu(const tile::Plan& plan, const tile::Blocking& blocking, int64_t begin, int64_t end);

#if __has_include(<cuda_runtime_api.h>)
// On `stream` of the current device; captured into a CUDA graph if the stream is.
cudaError_t launch_copy(const tile::Problem& problem, cudaStream_t stream);
#endif

}  // namespace fusebackend::permute
