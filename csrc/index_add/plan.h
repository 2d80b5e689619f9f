// Which kernels compute a sum on a GPU. Host code without CUDA, so that it can be asked and tested where there is no GPU.
#pragma once

#include <cstddef>

#include "index_add/params.h"

namespace fusebackend::index_add {

struct Device {
  int sm_count, major, shared_bytes_per_sm, shared_bytes_per_block, l2_bytes;

  bool has_dependent_launch() const { return major >= 9; }  // see common/programmatic_launch.cuh
};

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

size_t sort_bytes(const Params& p, const Device& device);  // of the workspace of launch_sort

}  // namespace fusebackend::index_add
