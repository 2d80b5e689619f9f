// What the kernels make a GPU do for a sum, or for the sort of an index, in physical quantities, for estimates of its time.
#pragma once

#include <string>

#include "index_add/plan.h"

namespace fusebackend::index_add {

// "name=value" pairs, separated by spaces. First the route, 1 where it is taken, else 0:
//   tiled, small, wide   forms of kAtomicAdd
//   fp32_copy, few, thread_tables, block_tables, buckets, segments   the other routes, by their names in plan.h
// and then
//   launches   kernels, fills and copies
//   vector     bytes that are added at once
//   blocks     of the kernel that reads the source
//   steps      entries that a thread adds one after the other
//   atomics    atomic additions in global memory, of a vector each
//   queue      of these, how many are to one address, on average
//   scratch    bytes that are written into the workspace and read again
//   sorted     entries that are put in order, once for each pass over them
//   syncs      of all blocks, by a sort of any size
std::string work_of(const Params& p, const Device& device);

// The last three and `launches` and `blocks`, of launch_sort.
std::string work_of_sort(const Params& p, const Device& device);

}  // namespace fusebackend::index_add
