// From the plan of a box to a launch.
#pragma once

#include <algorithm>

#include "boxes.cuh"

namespace fusebackend::tile {

constexpr int64_t kLongRunBytes = 384;  // longer input runs are read by lines

template <typename Op>
cudaError_t launch_boxes(const Plan& plan, const BoxPlan& box, Op op, cudaStream_t stream) {
  const Problem& p = plan.problem;
  const int64_t w = p.element_bytes;
  const int staged = plan.staged, direct = staged == kA ? kB : kA;
  const bool has_direct = p.operands == 3 && !plan.staged_pair;
  BoxArgs args;
  args.base = {p.data[kOut], p.data[staged], has_direct ? p.data[direct] : nullptr, 0, 0};
  args.partner = plan.staged_pair ? p.data[direct] - p.data[staged] : 0;
  args.has_direct = has_direct;
  args.staged_extent = {p.data[staged], p.data[staged] + extent_bytes(p, Role(staged))};
  args.direct_extent = {args.base.direct, args.base.direct + (has_direct ? extent_bytes(p, Role(direct)) : 0)};
  args.staged_is_b = staged == kB;
  args.direct_follows = has_direct && box.direct_follows;
  args.skewed = box.skewed;
  args.in_length = uint32_t(box.in_length);
  args.in_runs = uint32_t(box.in_runs);
  args.out_length = uint32_t(box.out_length);
  args.out_runs = uint32_t(box.out_runs);
  args.table = FastDiv(uint32_t(box.lead));
  args.stage_at = uint32_t(box.stage_at);
  const auto stride = [&](int role, int d) {
    const int source = role == kOut ? int(kOut) : role == kA ? staged : direct;
    return source < p.operands ? p.strides[source][d] * w : 0;
  };
  args.run_step = stride(kA, box.dims[0]);
  args.chunked = args.run_step == w && !plan.staged_pair;

  int index_in_box[kMaxRank];
  std::fill_n(index_in_box, kMaxRank, -1);
  uintptr_t in_begins = reinterpret_cast<uintptr_t>(p.data[staged]);  // low bits of input runs' begins
  args.span = w;
  const auto describe = [&](int k, int role) {
    const int d = box.dims[k];
    return BoxDim{FastDiv(uint32_t(box.extent[d])), uint32_t(box.weight[k]), stride(role, d), stride(kB, d)};
  };
  uint32_t runs_before = 1;
  int listed = 0;
  const auto list = [&](BoxDims& dims, int k, int role) {
    if (dims.rank++ == 0) dims.at = listed;
    args.dims[listed++] = describe(k, role);
  };
  for (int k = 0; k < box.rank; ++k) {
    const int d = box.dims[k];
    index_in_box[d] = k;
    args.span += (box.extent[d] - 1) * stride(kA, d);
    if (k >= box.in_rank && stride(kA, d)) {
      if (d == 0) args.skew_before = FastDiv(runs_before), args.skew_extent = FastDiv(uint32_t(box.extent[d]));
      runs_before *= uint32_t(box.extent[d]);
      list(args.in, k, kA);
      in_begins |= stride(kA, d);
    }
  }
  for (int d = 0; d < p.rank && args.run.rank < box.out_rank; ++d) {
    if (index_in_box[d] < 0) continue;
    list(args.run, index_in_box[d], kOut);
    index_in_box[d] = -1;
  }
  for (int k = 0; k < box.rank; ++k)  // in the input's order
    if (index_in_box[box.dims[k]] >= 0) list(args.out, k, kOut);
  const BoxDim& marched = args.dims[args.run.at + args.run.rank - 1];
  args.march = int(marched.weight);
  args.march_beside = marched.beside;

  args.boxes = uint32_t(box.count);
  args.lead = uint32_t(box.lead);
  args.halo = uint32_t(box.halo);
  args.window = int(box.window * box.lead);
  args.run_length = int(box.run_size * box.lead);
  args.window_grid = -1;
  args.grid_rank = 0;
  for (int d = 0; d < p.rank; ++d) {
    const bool windowed = d == box.window_dim;
    const int64_t step = windowed ? box.window : box.extent[d], last = p.sizes[d] - box.extent[d];
    const int64_t boxes = (p.sizes[d] + step - 1) / step;
    if (boxes == 1) continue;
    const int g = args.grid_rank++;
    args.grid[g] = {FastDiv(uint32_t(boxes)), uint32_t(step), uint32_t(last), {stride(kOut, d), stride(kA, d), stride(kB, d)}};
    in_begins |= stride(kA, d) * step | stride(kA, d) * last;
    if (windowed) {
      in_begins |= stride(kA, d) * box.halo;
      args.window_grid = g;
      args.grid[g].stride[kOut] = 0;
    }
  }
  args.spares = box.spared_runs > 0;
  args.spared_runs = uint32_t(box.spared_runs);
  args.spared_bytes = uint32_t(box.spared_bytes);
  args.row_runs = uint32_t((box.in_runs + box.spared_runs) / (box.window + box.halo));
  // Where lanes begin: lines make the fewest requests, but leave lanes idle at the ends of short runs.
  const int64_t align = args.in_length * w >= kLongRunBytes ? kLineBytes : kSectorBytes;
  args.align = uint32_t(align);
  int64_t low = align;  // bytes that all runs begin at multiples of
  while (low > w && in_begins % low) low /= 2;
  args.in_chunks = FastDiv(uint32_t((align - low + box.in_length * w + kChunkBytes - 1) / kChunkBytes));
  args.run_bits = uint32_t(box.run_bits);
  args.share_bits = uint32_t(box.share_bits);
  args.hash = uint32_t(box.hash);

  const auto launch = [&](auto kernel, SharedMemoryOptIn& opt_in) {
    if (cudaError_t error = opt_in.ensure(kernel, int(kMaxBoxBytes))) return error;
    kernel<<<args.boxes, kBoxThreads, box.shared_bytes, stream>>>(args, op);
    return cudaGetLastError();
  };
  static SharedMemoryOptIn straight, marching, swizzled, tabled;
  switch (box.places) {
    case BoxPlaces::kStraight: return launch(boxes_kernel<Op, BoxPlaces::kStraight>, straight);
    case BoxPlaces::kMarched: return launch(boxes_kernel<Op, BoxPlaces::kMarched>, marching);
    case BoxPlaces::kSwizzled: return launch(boxes_kernel<Op, BoxPlaces::kSwizzled>, swizzled);
    case BoxPlaces::kTabled: return launch(boxes_kernel<Op, BoxPlaces::kTabled>, tabled);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fusebackend::tile
