// Runs a CPU loop over a problem on torch's threads.
#pragma once

#include <algorithm>

#include "common/tile/binding.h"
#include "common/tile/cpu_blocks.h"

namespace fusebackend::tile {

constexpr int64_t kMinElementsPerTask = 8192;  // fewer do not pay for waking a thread

// Calls body(plan, blocking, begin, end) for ranges of the blocks of `problem`, in parallel.
template <typename Body>
void run_on_cpu(const Problem& problem, Body body) {
  const Plan plan = make_plan(problem);
  const Blocking blocking = make_blocking(plan);
  torch::stable::parallel_for(0, blocking.blocks, std::max<int64_t>(1, kMinElementsPerTask / blocking.block_elements()),
                              [&](int64_t begin, int64_t end) { body(plan, blocking, begin, end); });
}

}  // namespace fusebackend::tile
