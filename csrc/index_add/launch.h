// The CUDA side's interface to the bindings: launch the route that was chosen (plan.h). Never synchronises, never allocates.
#pragma once

#include <cuda_runtime_api.h>

#include "index_add/plan.h"

namespace fusebackend::index_add {

const Device& current_device();

cudaError_t launch(const Params& p, const Plan& plan, void* workspace, const Device& device, cudaStream_t stream);

// The sorted index of p.index and p.source_index, by which kSegmentedSum goes: `words` is the memory of a SortedIndex,
// the workspace has sort_bytes().
cudaError_t launch_sort(const Params& p, uint32_t* words, void* workspace, const Device& device, cudaStream_t stream);

}  // namespace fusebackend::index_add
