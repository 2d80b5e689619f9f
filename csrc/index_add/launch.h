// The CUDA side's interface to the bindings: choose a route, say which workspace it needs, launch it. Never synchronises, never allocates.
#pragma once

#include <cuda_runtime_api.h>

#include "index_add/params.h"

namespace fusebackend::index_add {

struct Device {
  int sm_count, major, shared_bytes_per_sm, shared_bytes_per_block, l2_bytes;

  bool has_dependent_launch() const { return major >= 9; }  // see common/programmatic_launch.cuh
};
const Device& current_device();

enum class Route {
  kAtomicAdd,      // vector atomic additions straight into out
  kAtomicAddFp32,  // 16-bit out: atomic additions into an fp32 copy of it, which is rounded once
  kFewEntries,     // every block sorts all entries, a thread sums its columns: few entries, wide rows; deterministic
  kThreadTables,   // few rows, many entries: each thread sums its columns of all rows in shared memory; deterministic
  kBlockTables,    // the same for rows of 128 bytes or more: a block sorts tiles of entries and sums runs; deterministic on request
  kBucketSum,      // several entries a row, much to read: entries are sorted into buckets of rows, and each row is written once
  kSegmentedSum,   // by a sorted index, each row is summed and written once; deterministic
};

struct Plan {
  Route route;
  size_t workspace_bytes;
};
Plan make_plan(const Params& p, const Device& device);
cudaError_t launch(const Params& p, const Plan& plan, void* workspace, const Device& device, cudaStream_t stream);

// The sorted index of p.index and p.source_index, by which kSegmentedSum goes: `words` is the memory of a SortedIndex.
size_t sort_bytes(const Params& p, const Device& device);  // of the workspace
cudaError_t launch_sort(const Params& p, uint32_t* words, void* workspace, const Device& device, cudaStream_t stream);

}  // namespace fusebackend::index_add
