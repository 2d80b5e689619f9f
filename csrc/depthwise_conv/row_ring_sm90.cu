// Launches row_ring_forward_sm90.cuh and row_ring_gradients_sm90.cuh.
#include "common/device_properties.h"
#include "depthwise_conv/row_ring_forward_sm90.cuh"
#include "depthwise_conv/row_ring_gradients_sm90.cuh"

namespace fusebackend::depthwise_conv {
namespace {

Placement image_of(const void* data, const Strides& stride, const Geometry& g) { return placement_of(data, stride, g.channels, g.in.w); }

RowRingPlan plan_of(const ForwardParams& p) {
  return row_ring_plan(p.g, p.dtype, image_of(p.x, p.x_stride, p.g), image_of(p.y, p.y_stride, p.g), nullptr, sm_count());
}
RowRingPlan plan_of(const InputGradParams& input, const WeightGradParams& p) {
  const Placement x = image_of(p.x, p.x_stride, p.g);
  return row_ring_plan(p.g, p.dtype, image_of(p.grad, p.grad_stride, p.g), image_of(input.dx, input.dx_stride, p.g), &x, sm_count());
}

RowRingShape shape_of(const Geometry& g, DType dtype, const RowRingPlan& plan) {
  const int item = element_size(dtype);
  RowRingShape s = {int(g.in.h), int(g.in.w), int(g.channels), int(g.batch * g.in.h), plan, plan.channels * item, int(g.channels) * item, {}};
  for (int i = 0; i < kRingWindow; ++i) s.pixel_offset[i] = i * s.pixel_bytes;
  return s;
}

template <typename Params>
cudaError_t launch(void (*kernel)(Params), const Params& params, int movers, SharedMemoryOptIn& opt_in, cudaStream_t stream) {
  const RowRingPlan& plan = params.shape.plan;
  const cudaError_t e = opt_in.ensure(kernel, max_shared_bytes());
  if (e != cudaSuccess) return e;
  kernel<<<plan.blocks(), plan.threads + movers, plan.shared_bytes, stream>>>(params);
  return cudaGetLastError();
}

}  // namespace

bool can_run_row_ring(const ForwardParams& p) { return compute_capability_major() == 9 && plan_of(p).fits; }
bool can_run_row_ring(const InputGradParams& input, const WeightGradParams& p) { return compute_capability_major() == 9 && plan_of(input, p).fits; }
int row_ring_splits(const InputGradParams& input, const WeightGradParams& p) {
  const RowRingPlan plan = plan_of(input, p);
  return plan.parts * plan.segments;
}

cudaError_t launch_row_ring(const ForwardParams& p, cudaStream_t stream) {
  const RowRingParams params = {p, shape_of(p.g, p.dtype, plan_of(p))};
  const int movers = ring_movers(RowRingResult::kForward);
  return dispatch_dtype(p.dtype, [&](auto type) {
    static SharedMemoryOptIn plain, with_epilogue;
    return p.epilogue.any ? launch(depthwise_row_ring<decltype(type), true>, params, movers, with_epilogue, stream)
                          : launch(depthwise_row_ring<decltype(type), false>, params, movers, plain, stream);
  });
}

cudaError_t launch_row_ring(const InputGradParams& input, const WeightGradParams& p, cudaStream_t stream) {
  const RowRingGradients params = {input, p, shape_of(p.g, p.dtype, plan_of(input, p))};
  return dispatch_dtype(p.dtype, [&](auto type) {
    static SharedMemoryOptIn opt_in;
    return launch(depthwise_row_ring_gradients<decltype(type)>, params, ring_movers(RowRingResult::kGradients), opt_in, stream);
  });
}

}  // namespace fusebackend::depthwise_conv
