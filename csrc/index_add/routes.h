// The launchers of all routes; shapes.h says what each can do and which workspace it needs.
#pragma once

#include "index_add/launch.h"
#include "index_add/shapes.h"

namespace fusebackend::index_add {

// out must hold `initial` already.
cudaError_t launch_atomic_add(const Params& p, const Device& device, cudaStream_t stream);
cudaError_t launch_small_atomic_add(const Params& p, int vector_width, cudaStream_t stream);
cudaError_t launch_wide_row_atomic_add(const Params& p, int vector_width, const Device& device, cudaStream_t stream);
cudaError_t launch_few_entries(const Params& p, const Device& device, cudaStream_t stream);

// These read p.initial themselves.
cudaError_t launch_atomic_add_fp32(const Params& p, void* workspace, const Device& device, cudaStream_t stream);
cudaError_t launch_thread_tables(const Params& p, void* workspace, const Device& device, cudaStream_t stream);
cudaError_t launch_block_tables(const Params& p, void* workspace, const Device& device, cudaStream_t stream);
cudaError_t launch_bucket_sum(const Params& p, void* workspace, const Device& device, cudaStream_t stream);
cudaError_t launch_segmented_sum(const Params& p, void* workspace, const Device& device, cudaStream_t stream);

// The sort by buckets, which launch_sort tries first: sets *overflow where the index is too uneven for it.
cudaError_t launch_bucket_sort(const Params& p, uint32_t* words, void* workspace, uint32_t* overflow, const Device& device,
                               cudaStream_t stream);

}  // namespace fusebackend::index_add
