// Launches plane_ring_sm90.cuh.
#include "depthwise_conv/plane_ring_sm90.cuh"

#include "depthwise_conv/ring_device.h"

namespace fusebackend::depthwise_conv {
namespace {

PlaneRingPlan plan_of(const ForwardParams& p) {
  return plane_ring_plan(p.g, placement_of(p.x, p.x_stride, p.g.channels, p.g.in.w), placement_of(p.y, p.y_stride, p.g.channels, p.g.out.w), this_device());
}
PlaneRingPlan plan_of(const InputGradParams& input, const WeightGradParams& p) {
  const Geometry& g = p.g;
  return plane_ring_gradients_plan(g, placement_of(p.grad, p.grad_stride, g.channels, g.out.w), placement_of(p.x, p.x_stride, g.channels, g.in.w),
                                   placement_of(input.dx, input.dx_stride, g.channels, g.in.w), this_device());
}

PlaneRingTensor tensor_of(const void* data, const Strides& s, int64_t height, int64_t pad) {
  return {static_cast<const char*>(data), s.n * 2, s.c * 2, int(height), int(pad)};
}

PlaneRingParams params_of(const ForwardParams& f, const PlaneRingPlan& plan) {
  const Geometry& g = f.g;
  PlaneRingParams p = {};
  p.p = f, p.plan = plan, p.row_tiles = FastDiv(uint32_t(plan.row_tiles));
  p.batch = int(g.batch), p.channels = int(g.channels), p.in_w = int(g.in.w), p.out_h = int(g.out.h), p.out_w = int(g.out.w);
  p.pad_w = int(g.pad.w), p.taps_w = int(g.taps.w), p.tap_row = int(f.w_stride.h), p.tap_column = int(f.w_stride.w);
  p.tensors[0] = tensor_of(f.x, f.x_stride, g.in.h, g.pad.h);
  return p;
}

template <typename T, int kTaps, bool kSums>
cudaError_t launch_kernel(const PlaneRingParams& p, cudaStream_t stream) {
  static SharedMemoryOptIn opt_in;
  const auto kernel = depthwise_plane_ring<T, kTaps, kSums>;
  const cudaError_t error = opt_in.ensure(kernel, max_shared_bytes() - kPlaneRingBlockBytes);
  if (error != cudaSuccess) return error;
  kernel<<<unsigned(p.channels * p.plan.splits), plane_ring_threads(kSums), p.plan.shared_bytes(), stream>>>(p);
  return cudaGetLastError();
}

template <bool kSums>
cudaError_t launch(const PlaneRingParams& p, cudaStream_t stream) {
  return dispatch_16_bits(p.p.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t taps = p.p.g.taps.h;
    return taps == 3 ? launch_kernel<T, 3, kSums>(p, stream) : taps == 5 ? launch_kernel<T, 5, kSums>(p, stream) : launch_kernel<T, 7, kSums>(p, stream);
  });
}

}  // namespace

// What follows a convolution is left to kernels of more warps, which have time for it.
bool can_run_plane_ring(const ForwardParams& p) { return has_ring(p.dtype, p.w_stride) && !p.epilogue.any && plan_of(p).fits; }
bool can_run_plane_ring(const InputGradParams& input, const WeightGradParams& p) { return has_ring(p.dtype, input.w_stride) && plan_of(input, p).fits; }

int plane_ring_splits(const InputGradParams& input, const WeightGradParams& p) { return plan_of(input, p).splits * kPlaneRingSumWarps; }

cudaError_t launch_plane_ring(const ForwardParams& p, cudaStream_t stream) { return launch<false>(params_of(p, plan_of(p)), stream); }

cudaError_t launch_plane_ring(const InputGradParams& input, const WeightGradParams& w, cudaStream_t stream) {
  PlaneRingParams p = params_of(reversed(input), plan_of(input, w));
  p.tensors[1] = tensor_of(w.x, w.x_stride, w.g.in.h, w.g.pad.h);
  p.partial = w.partial, p.need_bias = w.db != nullptr;
  return launch<true>(p, stream);
}

}  // namespace fusebackend::depthwise_conv
