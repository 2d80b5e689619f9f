// The CUDA side's interface: choose a route, say what workspace it wants, run it. Never synchronises, never allocates.
#pragma once

#include <cuda_runtime_api.h>

#include "accumulate.h"

namespace fusebackend::accumulate {

enum class Route {
  kReduce,  // vector reductions straight into out
  kOwn,     // few entries, wide slices: each thread owns a column; deterministic
  kWide,    // 16-bit out with many additions a row: reductions into an fp32 copy, rounded once
  kTable,   // few rows, many entries: partial sums in shared memory; deterministic
  kGrouped,  // the same where slices are wide: a block's entries sorted by row, sums in registers; deterministic if asked to be
  kBucketed,  // several entries a row and much to read: sorted into buckets of rows, summed in registers, one write a row
  kSorted,  // many rows with several entries each: stable sort (or a plan that has it), segmented sums, one write a row; deterministic
};

struct Plan {
  Route route;
  size_t workspace_bytes;
};

struct Device {
  int sm_count, major, shared_bytes, shared_bytes_per_block, l2_bytes;
};

cudaError_t query_device(Device& device);  // of the current device; cached
Plan make_plan(const Params& p, const Device& device);
cudaError_t launch(const Params& p, const Plan& plan, void* workspace, const Device& device, cudaStream_t stream);

// The plan of p.index (and p.source_index): the order in which kSorted takes its entries. It serves every sum that goes by both.
size_t sort_bytes(const Params& p, const Device& device);  // the workspace
cudaError_t launch_plan(const Params& p, void* plan, void* workspace, const Device& device, cudaStream_t stream);
bool buckets_fit(const Params& p, const Device& device);
size_t bucket_bytes(const Params& p);
// The plan, unless the index is so uneven that *unfit is set.
cudaError_t launch_buckets(const Params& p, void* plan, void* workspace, uint32_t* unfit, const Device& device, cudaStream_t stream);

// The routes. Each wants out initialised already, except kTable, kGrouped, kWide, kBucketed and kSorted, which read p.initial themselves.
cudaError_t launch_reduce(const Params& p, const Device& device, cudaStream_t stream);
bool flat_fits(const Params& p, int vector_width, const Device& device);  // small kReduce work in one thread a piece
cudaError_t launch_flat(const Params& p, int vector_width, cudaStream_t stream);
bool rows_fit(const Params& p, int vector_width);  // kReduce work that is wide rows, added as they are
cudaError_t launch_rows(const Params& p, int vector_width, const Device& device, cudaStream_t stream);
size_t wide_bytes(const Params& p);
cudaError_t launch_wide(const Params& p, void* workspace, const Device& device, cudaStream_t stream);
constexpr int kMaxOwn = 256;  // entries that a block of kOwn sorts
inline bool own_fits(const Params& p) { return p.n <= kMaxOwn; }
cudaError_t launch_own(const Params& p, const Device& device, cudaStream_t stream);
bool table_fits(const Params& p, const Device& device);
bool table_pays(const Params& p, const Device& device);  // and leaves room for loads enough
size_t table_bytes(const Params& p, const Device& device);
cudaError_t launch_table(const Params& p, void* workspace, const Device& device, cudaStream_t stream);
bool grouped_fits(const Params& p, const Device& device);  // kTable work with slices of 128 bytes or more
size_t grouped_bytes(const Params& p, const Device& device);
cudaError_t launch_grouped(const Params& p, void* workspace, const Device& device, cudaStream_t stream);
bool bucketed_fits(const Params& p, const Device& device);
size_t bucketed_bytes(const Params& p, const Device& device);
cudaError_t launch_bucketed(const Params& p, void* workspace, const Device& device, cudaStream_t stream);
size_t sorted_bytes(const Params& p, const Device& device);
cudaError_t launch_sorted(const Params& p, void* workspace, const Device& device, cudaStream_t stream);

}  // namespace fusebackend::accumulate
