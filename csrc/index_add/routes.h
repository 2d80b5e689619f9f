// The launchers of all routes (launch.h), each with what it can do (`_fits`) and the size of its workspace (`_bytes`).
#pragma once

#include "index_add/launch.h"

namespace fusebackend::index_add {

// out must hold `initial` already.
cudaError_t launch_atomic_add(const Params& p, const Device& device, cudaStream_t stream);
bool small_atomic_add_fits(const Params& p, int vector_width, const Device& device);  // few entries: a thread a vector of an entry
cudaError_t launch_small_atomic_add(const Params& p, int vector_width, cudaStream_t stream);
bool wide_row_atomic_add_fits(const Params& p, int vector_width);  // wide rows that are added as they are
cudaError_t launch_wide_row_atomic_add(const Params& p, int vector_width, const Device& device, cudaStream_t stream);
constexpr int kMaxFewEntries = 256;
inline bool few_entries_fits(const Params& p) { return p.n <= kMaxFewEntries; }
cudaError_t launch_few_entries(const Params& p, const Device& device, cudaStream_t stream);

// These read p.initial themselves.
size_t atomic_add_fp32_bytes(const Params& p);
cudaError_t launch_atomic_add_fp32(const Params& p, void* workspace, const Device& device, cudaStream_t stream);
int thread_tables_blocks_per_sm(const Params& p, const Device& device);  // 0: does not fit
size_t thread_tables_bytes(const Params& p, const Device& device);
cudaError_t launch_thread_tables(const Params& p, void* workspace, const Device& device, cudaStream_t stream);
bool block_tables_fit(const Params& p, const Device& device);
size_t block_tables_bytes(const Params& p, const Device& device);
cudaError_t launch_block_tables(const Params& p, void* workspace, const Device& device, cudaStream_t stream);
bool bucket_sum_fits(const Params& p, const Device& device);
size_t bucket_sum_bytes(const Params& p, const Device& device);
cudaError_t launch_bucket_sum(const Params& p, void* workspace, const Device& device, cudaStream_t stream);
size_t segmented_sum_bytes(const Params& p, const Device& device);
cudaError_t launch_segmented_sum(const Params& p, void* workspace, const Device& device, cudaStream_t stream);

// The sort by buckets, which launch_sort tries first: sets *overflow where the index is too uneven for it.
bool bucket_sort_fits(const Params& p, const Device& device);
size_t bucket_sort_bytes(const Params& p);
cudaError_t launch_bucket_sort(const Params& p, uint32_t* words, void* workspace, uint32_t* overflow, const Device& device,
                               cudaStream_t stream);

}  // namespace fusebackend::index_add
