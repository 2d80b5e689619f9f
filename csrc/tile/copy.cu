#include "launch.cuh"

namespace fusebackend::tile {

cudaError_t launch_permute_copy(const Problem& problem, cudaStream_t stream) {
  const Plan plan = make_plan(problem);
  switch (plan.problem.element_bytes) {
    case 1: return launch_plan(plan, CopyOp<1>{}, stream);
    case 2: return launch_plan(plan, CopyOp<2>{}, stream);
    case 4: return launch_plan(plan, CopyOp<4>{}, stream);
    case 8: return launch_plan(plan, CopyOp<8>{}, stream);
    case 16: return launch_plan(plan, CopyOp<16>{}, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fusebackend::tile
