// From a problem to launches. Kernels run on `stream` of the current device; nothing synchronises or allocates, so that all of it may be
// captured into a CUDA graph.
#pragma once

#include <algorithm>

#include "common/tile/boxes_launch.cuh"
#include "common/tile/rows.cuh"
#include "common/tile/tiles_launch.cuh"

namespace fusebackend::tile {

// Kernels count elements in 31 bits and bytes in 64. Larger problems are cut along their longest dimension into several launches.
constexpr int64_t kMaxElementsPerLaunch = int64_t(1) << 30;

template <typename Op>
cudaError_t launch_plan(const Plan& plan, Op op, cudaStream_t stream) {
  const Problem& p = plan.problem;
  if (p.elements() > kMaxElementsPerLaunch) {
    const int d = int(std::max_element(p.sizes, p.sizes + p.rank) - p.sizes);
    const int64_t middle = p.sizes[d] / 2, half = middle > 1024 ? middle / 1024 * 1024 : middle;  // keeps alignment
    Plan part = plan;
    part.problem.sizes[d] = half;
    if (cudaError_t error = launch_plan(part, op, stream)) return error;
    part.problem.sizes[d] = p.sizes[d] - half;
    for (int r = 0; r < p.operands; ++r) part.problem.data[r] += half * p.strides[r][d] * p.element_bytes;
    return launch_plan(part, op, stream);
  }
  switch (route_of(plan)) {
    case Route::kEmpty: return cudaSuccess;
    case Route::kRows: return launch_rows(plan, op, stream);
    case Route::kTiles: return launch_tiles(plan, op, stream);
    case Route::kBoxes: {
      const BoxPlan box = plan_box(plan);
      return box.fits() ? launch_boxes(plan, box, op, stream) : launch_rows(plan, op, stream);
    }
  }
  return cudaErrorInvalidValue;
}

}  // namespace fusebackend::tile
