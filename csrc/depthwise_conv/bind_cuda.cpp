// The CUDA operators: allocates, and launches the first kernel that takes a convolution.
#include "common/direct_call.h"
#include "common/workspace.h"
#include "depthwise_conv/bind.h"
#include "depthwise_conv/launchers.h"

namespace fusebackend::depthwise_conv {

#ifndef FUSE_HAS_SM90A
bool can_run_channel_ring(const ForwardParams&) { return false; }
cudaError_t launch_channel_ring(const ForwardParams&, cudaStream_t) { return cudaErrorNotSupported; }
bool can_run_plane_ring(const ForwardParams&) { return false; }
bool can_run_plane_ring(const InputGradParams&, const WeightGradParams&) { return false; }
int plane_ring_splits(const InputGradParams&, const WeightGradParams&) { return 0; }
cudaError_t launch_plane_ring(const ForwardParams&, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t launch_plane_ring(const InputGradParams&, const WeightGradParams&, cudaStream_t) { return cudaErrorNotSupported; }
bool can_run_strided_ring(const ForwardParams&) { return false; }
bool can_run_strided_ring(const InputGradParams&, const WeightGradParams&) { return false; }
int strided_ring_splits(const InputGradParams&, const WeightGradParams&) { return 0; }
cudaError_t launch_strided_ring(const ForwardParams&, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t launch_strided_ring(const InputGradParams&, const WeightGradParams&, cudaStream_t) { return cudaErrorNotSupported; }
bool can_run_row_ring(const ForwardParams&) { return false; }
bool can_run_row_ring(const InputGradParams&, const WeightGradParams&) { return false; }
int row_ring_splits(const InputGradParams&, const WeightGradParams&) { return 0; }
cudaError_t launch_row_ring(const ForwardParams&, cudaStream_t) { return cudaErrorNotSupported; }
cudaError_t launch_row_ring(const InputGradParams&, const WeightGradParams&, cudaStream_t) { return cudaErrorNotSupported; }
#endif

namespace {

cudaError_t forward(const ForwardParams& p, cudaStream_t stream) {
  if (can_run_dilated_rows(p)) return launch_dilated_rows(p, stream);
  if (can_run_plane_ring(p)) return launch_plane_ring(p, stream);
  if (can_run_strided_ring(p)) return launch_strided_ring(p, stream);
  if (can_run_rolling_band(p)) return launch_rolling_band(p, stream);
  if (can_run_channel_ring(p)) return launch_channel_ring(p, stream);
  if (can_run_channel_band(p)) return launch_channel_band(p, stream);
  if (can_run_row_ring(p)) return launch_row_ring(p, stream);
  if (can_run_rolling_window(p)) return launch_rolling_window(p, stream);
  if (can_run_toeplitz(p)) return launch_toeplitz(p, stream);
  if (can_run_register_window(p)) return launch_register_window(p, stream);
  return launch_direct_forward(p, stream);
}

cudaError_t input_grad(const InputGradParams& p, cudaStream_t stream) {
  const bool is_forward = p.g.stride.h == 1 && p.g.stride.w == 1 && p.g.multiplier == 1;
  const ForwardParams f = is_forward ? reversed(p) : ForwardParams{};
  if (is_forward && can_run_dilated_rows(f)) return launch_dilated_rows(f, stream);
  if (is_forward && can_run_plane_ring(f)) return launch_plane_ring(f, stream);
  if (is_forward && can_run_rolling_band(f)) return launch_rolling_band(f, stream);
  if (is_forward && can_run_channel_ring(f)) return launch_channel_ring(f, stream);
  if (is_forward && can_run_channel_band(f)) return launch_channel_band(f, stream);
  if (is_forward && can_run_row_ring(f)) return launch_row_ring(f, stream);
  if (is_forward && can_run_rolling_window(f)) return launch_rolling_window(f, stream);
  if (!is_forward && can_run_rolling_window(p)) return launch_rolling_window(p, stream);
  if (can_run_toeplitz(p)) return launch_toeplitz(p, stream);
  if (is_forward && can_run_register_window(f)) return launch_register_window(f, stream);
  return launch_direct_input_grad(p, stream);
}

// A kernel of the weight's gradient: how many partial sums it writes, and what launches it.
struct WeightGradRoute {
  int splits;
  cudaError_t (*launch)(const WeightGradParams& p, cudaStream_t stream);
};

WeightGradRoute route_of(const WeightGradParams& p) {
  if (can_run_dilated_rows(p)) return {dilated_rows_splits(p), launch_dilated_rows};
  if (can_run_row_products(p)) return {row_products_splits(p), launch_row_products};
  if (can_run_channel_products(p)) return {channel_products_splits(p), launch_channel_products};
  if (can_run_rolling_window(p)) return {rolling_window_splits(p), launch_rolling_window};
  if (can_run_outer_products(p)) return {outer_products_splits(p), launch_outer_products};
  if (can_run_register_window(p)) return {register_window_splits(p), launch_register_window};
  return {direct_weight_grad_splits(p), launch_direct_weight_grad};
}

// A kernel of both gradients; none launches if no kernel takes them.
struct GradientsRoute {
  int splits;
  cudaError_t (*launch)(const InputGradParams& input, const WeightGradParams& weight, cudaStream_t stream);
};

GradientsRoute route_of(const InputGradParams& input, const WeightGradParams& weight) {
  if (can_run_dilated_rows(input, weight)) return {dilated_rows_splits(input, weight), launch_dilated_rows};
  if (can_run_plane_ring(input, weight)) return {plane_ring_splits(input, weight), launch_plane_ring};
  if (can_run_strided_ring(input, weight)) return {strided_ring_splits(input, weight), launch_strided_ring};
  if (can_run_row_ring(input, weight)) return {row_ring_splits(input, weight), launch_row_ring};
  return {};
}

// The gradients of weight and bias from what `launch` writes, partial sums in `splits` parts.
template <typename Launch>
cudaError_t weight_grad(WeightGradParams& p, int splits, cudaStream_t stream, Launch&& launch) {
  p.splits = splits;
  const Workspace partial(p.splits * p.g.outputs() * (p.g.tap_count() + 1) * sizeof(float));
  p.partial = partial.as<float>();
  const cudaError_t e = launch();
  return e == cudaSuccess ? launch_reduce(p, stream) : e;
}

Tensor depthwise_conv(const Tensor& x, const Tensor& weight, const Bias& bias, const Ints& stride, const Ints& padding, const Ints& dilation,
                      std::optional<bool> channels_last, const ChannelNumbers& mean, const ChannelNumbers& variance, const ChannelNumbers& scale, const ChannelNumbers& shift, double eps,
                      std::string activation) {
  const Geometry g = geometry_of(x, weight, stride, padding, dilation);
  const ChannelEpilogue epilogue = epilogue_of("depthwise_conv", x, g.outputs(), mean, variance, scale, shift, eps, activation);
  const CudaScope scope(x);
  Tensor y = empty_image(x, {g.batch, g.outputs(), g.out.h, g.out.w}, channels_last.value_or(is_channels_last(x)));
  if (y.numel() > 0) check_cuda(forward(forward_params(g, x, weight, bias, epilogue, y), scope.stream()), "depthwise_conv");
  return y;
}

std::tuple<Tensor, Tensor, Tensor> depthwise_conv_backward(const Tensor& grad, const Tensor& x, const Tensor& weight, const Ints& stride,
                                                           const Ints& padding, const Ints& dilation, std::optional<bool> channels_last,
                                                           bool weight_channels_last, bool need_x, bool need_weight, bool need_bias) {
  const CudaScope scope(x);
  Backward b(grad, x, weight, stride, padding, dilation, channels_last, weight_channels_last, need_x, need_weight, need_bias);
  const auto check = [](cudaError_t e) { check_cuda(e, "depthwise_conv_backward"); };
  const bool any_x = need_x && b.dx.numel() > 0, any_weight = need_weight || need_bias;
  if (const GradientsRoute both = any_x && any_weight ? route_of(b.input, b.weight) : GradientsRoute{}; both.launch) {
    check(weight_grad(b.weight, both.splits, scope.stream(), [&] { return both.launch(b.input, b.weight, scope.stream()); }));
    return {b.dx, b.dw, b.db};
  }
  if (any_x) check(input_grad(b.input, scope.stream()));
  if (any_weight) {
    const WeightGradRoute route = route_of(b.weight);
    check(weight_grad(b.weight, route.splits, scope.stream(), [&] { return route.launch(b.weight, scope.stream()); }));
  }
  return {b.dx, b.dw, b.db};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CUDA, m) {
  direct::implement<&depthwise_conv>(m, "CUDA", "depthwise_conv");
  direct::implement<&depthwise_conv_backward>(m, "CUDA", "depthwise_conv_backward");
}

}  // namespace fusebackend::depthwise_conv
