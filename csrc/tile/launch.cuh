// From a plan to launches.
#pragma once

#include <algorithm>

#include "boxes_launch.cuh"
#include "rows.cuh"
#include "tiles.cuh"

namespace fusebackend::tile {

// Kernels count their work in 31 bits and bytes in 64. Larger problems are cut along their longest dimension into
// several launches, so that no kernel pays for them.
constexpr int64_t kMaxElementsPerLaunch = int64_t(1) << 30;

template <typename Op>
cudaError_t launch_plan(const Plan& plan, Op op, cudaStream_t stream) {
  const Problem& p = plan.problem;
  int64_t elements = 1;
  for (int d = 0; d < p.rank; ++d) elements *= p.sizes[d];
  if (elements > kMaxElementsPerLaunch) {
    const int d = int(std::max_element(p.sizes, p.sizes + p.rank) - p.sizes);
    const int64_t middle = p.sizes[d] / 2, half = middle > 1024 ? middle / 1024 * 1024 : middle;  // keeps alignment
    Plan part = plan;
    part.problem.sizes[d] = half;
    if (cudaError_t error = launch_plan(part, op, stream)) return error;
    part.problem.sizes[d] = p.sizes[d] - half;
    for (int r = 0; r < p.operands; ++r) part.problem.data[r] += half * p.strides[r][d] * p.element_bytes;
    return launch_plan(part, op, stream);
  }
  switch (cuda_route(plan)) {
    case CudaRoute::kEmpty: return cudaSuccess;
    case CudaRoute::kRows: return launch_rows(plan, op, stream);
    case CudaRoute::kTiles: return launch_tiles(plan, op, stream);
    case CudaRoute::kBoxes: {
      const BoxPlan box = plan_box(plan);
      return box_fits(box) ? launch_boxes(plan, box, op, stream) : launch_rows(plan, op, stream);
    }
  }
  return cudaErrorInvalidValue;
}

}  // namespace fusebackend::tile
