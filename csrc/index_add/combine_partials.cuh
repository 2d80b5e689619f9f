// The second kernel of the routes that sum into a workspace.
#pragma once

#include "index_add/launch.h"
#include "index_add/overflow_rows.cuh"

namespace fusebackend::index_add {

// out = initial + the sum over `splits` of partial[split][row][column], which are of the accumulation type; of `rows` only. The kernel is
// launched dependent on the one that writes them.
cudaError_t combine_partials(const Params& p, const void* partial, int64_t splits, const Device& device, cudaStream_t stream,
                             const OverflowRows& rows = {});

}  // namespace fusebackend::index_add
