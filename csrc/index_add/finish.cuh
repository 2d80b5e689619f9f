// The second kernel of the routes that sum into scratch.
#pragma once

#include "dispatch.cuh"
#include "left.cuh"

namespace fusebackend::accumulate {

// out = initial + the sums over `splits` of partial[split][row][column], in the accumulation type; only rows that `left` has. The kernel is set
// up while the one before it runs, where the architecture can do that: it waits by itself.
cudaError_t finish(const Params& p, const void* partial, int64_t splits, const Device& device, cudaStream_t stream, const LeftOver& left = {});

}  // namespace fusebackend::accumulate
