// Launches strided_ring_sm90.cuh.
#include "depthwise_conv/strided_ring_sm90.cuh"

#include "depthwise_conv/ring_device.h"

namespace fusebackend::depthwise_conv {
namespace {

StridedRingPlan plan_of(const ForwardParams& p) {
  return strided_ring_plan(p.g, placement_of(p.x, p.x_stride, p.g.channels, p.g.in.w), placement_of(p.y, p.y_stride, p.g.channels, p.g.out.w), this_device());
}
StridedRingPlan plan_of(const InputGradParams& input, const WeightGradParams& p) {
  const Geometry& g = p.g;
  return strided_ring_gradients_plan(g, placement_of(p.grad, p.grad_stride, g.channels, g.out.w), placement_of(p.x, p.x_stride, g.channels, g.in.w),
                                     placement_of(input.dx, input.dx_stride, g.channels, g.in.w), this_device());
}

StridedRingTensor tensor_of(const void* data, const Strides& s, const Pair& size) {
  return {static_cast<char*>(const_cast<void*>(data)), s.n * 2, s.c * 2, int(size.h), int(size.w) * 2};
}

StridedRingParams params_of(const Geometry& g, const StridedRingPlan& plan, const void* w, const Strides& w_stride) {
  StridedRingParams p = {};
  p.plan = plan;
  p.row_tiles = FastDiv(uint32_t(plan.row_tiles)), p.columns = FastDiv(uint32_t(plan.columns)), p.images = FastDiv(uint32_t(plan.images));
  p.batch = int(g.batch), p.channels = int(g.channels), p.pad_h = int(g.pad.h), p.pad_w = int(g.pad.w), p.in_w = int(g.in.w), p.out_w = int(g.out.w);
  p.w = w, p.tap_channel = w_stride.n, p.tap_row = int(w_stride.h), p.tap_column = int(w_stride.w);
  return p;
}

template <typename T, int kTaps, bool kSums, bool kFinishes, bool kWords, int kShift>
cudaError_t launch_kernel(const StridedRingParams& p, cudaStream_t stream) {
  static SharedMemoryOptIn opt_in;
  const auto kernel = depthwise_strided_ring<T, kTaps, kSums, kFinishes, kWords, kShift>;
  const cudaError_t error = opt_in.ensure(kernel, max_shared_bytes() - kStridedRingBlockBytes);
  if (error != cudaSuccess) return error;
  kernel<<<unsigned(p.channels * p.plan.splits), p.plan.threads + 32, p.plan.shared_bytes(), stream>>>(p);
  return cudaGetLastError();
}

template <typename T, int kTaps, bool kSums, bool kFinishes>
cudaError_t launch_form(const StridedRingParams& p, cudaStream_t stream) {
  if (!p.plan.words) return launch_kernel<T, kTaps, kSums, kFinishes, false, 0>(p, stream);
  return p.plan.shift ? launch_kernel<T, kTaps, kSums, kFinishes, true, 1>(p, stream) : launch_kernel<T, kTaps, kSums, kFinishes, true, 0>(p, stream);
}

template <bool kSums, bool kFinishes>
cudaError_t launch(const StridedRingParams& p, DType dtype, int64_t taps, cudaStream_t stream) {
  return dispatch_16_bits(dtype, [&](auto type) {
    using T = decltype(type);
    return taps == 3 ? launch_form<T, 3, kSums, kFinishes>(p, stream) : launch_form<T, 5, kSums, kFinishes>(p, stream);
  });
}

}  // namespace

bool can_run_strided_ring(const ForwardParams& p) { return has_ring(p.dtype, p.w_stride) && plan_of(p).fits; }
bool can_run_strided_ring(const InputGradParams& input, const WeightGradParams& p) { return has_ring(p.dtype, input.w_stride) && plan_of(input, p).fits; }

int strided_ring_splits(const InputGradParams& input, const WeightGradParams& p) { return plan_of(input, p).splits; }

cudaError_t launch_strided_ring(const ForwardParams& f, cudaStream_t stream) {
  StridedRingParams p = params_of(f.g, plan_of(f), f.w, f.w_stride);
  p.forward = f;
  p.x = tensor_of(f.x, f.x_stride, f.g.in), p.result = tensor_of(f.y, f.y_stride, f.g.out);
  return f.epilogue.any ? launch<false, true>(p, f.dtype, f.g.taps.h, stream) : launch<false, false>(p, f.dtype, f.g.taps.h, stream);
}

cudaError_t launch_strided_ring(const InputGradParams& input, const WeightGradParams& w, cudaStream_t stream) {
  StridedRingParams p = params_of(w.g, plan_of(input, w), input.w, input.w_stride);
  p.input = input;
  p.x = tensor_of(w.x, w.x_stride, w.g.in), p.grad = tensor_of(w.grad, w.grad_stride, w.g.out), p.result = tensor_of(input.dx, input.dx_stride, w.g.in);
  p.partial = w.partial, p.need_bias = w.db != nullptr;
  return launch<true, false>(p, w.dtype, w.g.taps.h, stream);
}

}  // namespace fusebackend::depthwise_conv
