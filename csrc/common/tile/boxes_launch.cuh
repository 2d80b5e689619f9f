// From the plan of a box to a launch.
#pragma once

#include <algorithm>

#include "common/integer_math.h"
#include "common/tile/boxes.cuh"

namespace fusebackend::tile {

constexpr int64_t kLongRunBytes = 384;  // longer input runs are read from whole lines on

inline BoxArgs box_args(const Plan& plan, const BoxPlan& box) {
  const Problem& p = plan.problem;
  const int64_t w = p.element_bytes;
  const Operand staged = plan.staged, direct = plan.other();
  BoxArgs args;
  args.base = {p.data[kOut], p.data[staged], plan.has_direct() ? p.data[direct] : nullptr, 0, 0};
  args.partner = plan.staged_pair ? p.data[direct] - p.data[staged] : 0;
  args.has_direct = plan.has_direct();
  args.staged_extent = {p.data[staged], p.data[staged] + p.extent_bytes(staged)};
  args.direct_extent = {args.base.direct, args.base.direct + (plan.has_direct() ? p.extent_bytes(direct) : 0)};
  args.staged_is_y = staged == kY;
  args.direct_is_contiguous = box.direct_is_contiguous;
  args.skewed = box.skewed;
  args.in_length = uint32_t(box.in_length);
  args.in_runs = uint32_t(box.in_runs);
  args.out_length = uint32_t(box.out_length);
  args.out_runs = uint32_t(box.out_runs);
  args.period = FastDiv(uint32_t(box.inner_length));
  args.stage_offset = uint32_t(box.stage_offset);
  const auto stride = [&](Operand operand, int d) { return p.strides[operand][d] * w; };
  args.run_step = stride(staged, box.dims[0]);
  args.chunked = args.run_step == w && !plan.staged_pair;

  int listed = 0;
  const auto list = [&](BoxDims& dims, int k, Operand operand) {
    const int d = box.dims[k];
    if (dims.rank++ == 0) dims.at = listed;
    args.dims[listed++] = {FastDiv(uint32_t(box.extent[d])), uint32_t(box.shared_stride[k]), stride(operand, d), stride(direct, d)};
  };
  int index_in_box[kMaxRank];
  std::fill_n(index_in_box, kMaxRank, -1);
  uintptr_t in_begins = reinterpret_cast<uintptr_t>(p.data[staged]);  // low bits of the addresses of input runs
  args.span = w;
  uint32_t runs_before = 1;
  for (int k = 0; k < box.rank; ++k) {
    const int d = box.dims[k];
    index_in_box[d] = k;
    args.span += (box.extent[d] - 1) * stride(staged, d);
    if (k >= box.in_rank && stride(staged, d)) {
      if (d == 0) args.skew_before = FastDiv(runs_before), args.skew_extent = FastDiv(uint32_t(box.extent[d]));
      runs_before *= uint32_t(box.extent[d]);
      list(args.in, k, staged);
      in_begins |= stride(staged, d);
    }
  }
  for (int d = 0; d < p.rank && args.run.rank < box.out_rank; ++d) {
    if (index_in_box[d] < 0) continue;
    list(args.run, index_in_box[d], kOut);
    index_in_box[d] = -1;
  }
  for (int k = 0; k < box.rank; ++k)  // in the input's order
    if (index_in_box[box.dims[k]] >= 0) list(args.out, k, kOut);
  const BoxDim& run_dim = args.dims[args.run.at + args.run.rank - 1];
  args.shared_step = int(run_dim.shared_stride);
  args.direct_step = run_dim.direct_stride;

  args.boxes = uint32_t(box.count);
  args.inner_length = uint32_t(box.inner_length);
  args.halo = uint32_t(box.halo);
  args.window = int(box.window * box.inner_length);
  args.run_length = int(box.run_extent * box.inner_length);
  args.window_grid = -1;
  args.grid_rank = 0;
  for (int d = 0; d < p.rank; ++d) {
    const bool windowed = d == box.window_dim;
    const int64_t step = windowed ? box.window : box.extent[d], last = p.sizes[d] - box.extent[d], boxes = ceil_div(p.sizes[d], step);
    if (boxes == 1) continue;
    in_begins |= stride(staged, d) * step | stride(staged, d) * last;
    if (windowed) {
      in_begins |= stride(staged, d) * box.halo;
      args.window_grid = args.grid_rank;
    }
    args.grid[args.grid_rank++] = {FastDiv(uint32_t(boxes)), uint32_t(step), uint32_t(last), windowed ? 0 : stride(kOut, d),
                                   stride(staged, d), stride(direct, d)};
  }
  args.has_unread = box.unread_runs > 0;
  args.unread_runs = uint32_t(box.unread_runs);
  args.unread_bytes = uint32_t(box.unread_bytes);
  args.runs_per_index = uint32_t((box.in_runs + box.unread_runs) / (box.window + box.halo));
  // Where lanes begin to read a run: from lines on they make the fewest requests, but some are idle, which matters in short runs.
  const int64_t align = args.in_length * w >= kLongRunBytes ? kLineBytes : kSectorBytes;
  args.align = uint32_t(align);
  int64_t common_align = align;  // of all runs
  while (common_align > w && in_begins % common_align) common_align /= 2;
  args.in_chunks = FastDiv(uint32_t(ceil_div(align - common_align + box.in_length * w, kChunkBytes)));
  args.warp_runs_log2 = uint32_t(box.warp_runs_log2);
  args.warps_per_run_log2 = uint32_t(box.warps_per_run_log2);
  args.hash_shift = uint32_t(box.hash_shift);
  return args;
}

template <RunLayout kLayout, typename Op>
cudaError_t launch_boxes_as(const BoxArgs& args, int shared_bytes, Op op, cudaStream_t stream) {
  static SharedMemoryOptIn opt_in;
  const auto kernel = move_boxes_kernel<Op, kLayout>;
  if (cudaError_t error = opt_in.ensure(kernel, int(kMaxBoxBytes))) return error;
  kernel<<<args.boxes, kBoxThreads, shared_bytes, stream>>>(args, op);
  return cudaGetLastError();
}

template <typename Op>
cudaError_t launch_boxes(const Plan& plan, const BoxPlan& box, Op op, cudaStream_t stream) {
  const BoxArgs args = box_args(plan, box);
  switch (box.layout) {
    case RunLayout::kContiguous: return launch_boxes_as<RunLayout::kContiguous>(args, box.shared_bytes, op, stream);
    case RunLayout::kStrided: return launch_boxes_as<RunLayout::kStrided>(args, box.shared_bytes, op, stream);
    case RunLayout::kSwizzled: return launch_boxes_as<RunLayout::kSwizzled>(args, box.shared_bytes, op, stream);
    case RunLayout::kTabulated: return launch_boxes_as<RunLayout::kTabulated>(args, box.shared_bytes, op, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fusebackend::tile
