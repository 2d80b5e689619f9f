// The CUDA operators: allocates, and launches what routes.h says.
#include "causal_conv1d/bind.h"
#include "causal_conv1d/launchers.h"
#include "causal_conv1d/routes.h"
#include "common/direct_call.h"
#include "common/workspace.h"

namespace fusebackend::causal_conv1d {
namespace {

cudaError_t convolve(ConvParams& p, cudaStream_t stream) {
  p.exact = sums_exactly(p);
  if (p.batch * p.channels * p.out_len == 0) return cudaSuccess;
  switch (forward_route(p)) {
    case ForwardRoute::kShort: return launch_short_forward(p, stream);
    case ForwardRoute::kRegisterWindow: return launch_register_window_forward(p, stream);
    case ForwardRoute::kRegisterToeplitz: return launch_register_toeplitz_forward(p, stream);
    case ForwardRoute::kToeplitz: return launch_toeplitz_forward(p, stream);
    case ForwardRoute::kFft: {
      const Workspace spectra(fft_forward_scratch(p) * sizeof(float));
      return launch_fft_forward(p, spectra.as<float>(), stream);
    }
    default: return launch_shared_tile_forward(p, stream);
  }
}

Tensor causal_conv1d(const Tensor& x, const Tensor& weight, const Bias& bias, int64_t left, int64_t right, double shift, bool silu,
                     bool channels_last, const ChannelNumbers& mean, const ChannelNumbers& variance, const ChannelNumbers& scale,
                     const ChannelNumbers& offset, double eps, std::string activation) {
  const int64_t length = check_forward(x, weight, bias, left, right);
  const ChannelEpilogue after = epilogue_of("causal_conv1d", x, x.size(1), mean, variance, scale, offset, eps, activation, "offset");
  const CudaScope scope(x);
  Tensor out = empty_rows(x, x.size(0), x.size(1), length, channels_last);
  ConvParams p = forward_params(x, weight, bias, left, out, shift, silu, after);
  check_cuda(convolve(p, scope.stream()), "causal_conv1d");
  return out;
}

// The gradient of pre.
struct PreGradient {
  Tensor memory;
  Strides strides;
  DType dtype;
};

int splits_of(WeightGradRoute route, const WeightGradParams& p) {
  switch (route) {
    case WeightGradRoute::kRegisterWindow: return register_window_weight_grad_splits(p);
    case WeightGradRoute::kToeplitz: return toeplitz_weight_grad_splits(p);
    case WeightGradRoute::kFft: return fft_weight_grad_splits(p);
    default: return shared_tile_weight_grad_splits(p);
  }
}

cudaError_t launch_weight_grad(WeightGradRoute route, const WeightGradParams& p, cudaStream_t stream) {
  switch (route) {
    case WeightGradRoute::kRegisterWindow: return launch_register_window_weight_grad(p, stream);
    case WeightGradRoute::kToeplitz: return launch_toeplitz_weight_grad(p, stream);
    case WeightGradRoute::kFft: {
      const Workspace spectra(fft_weight_grad_scratch(p) * sizeof(double));
      return launch_fft_weight_grad(p, spectra.as<double>(), stream);
    }
    default: return launch_shared_tile_weight_grad(p, stream);
  }
}

template <typename Params>
Workspace allocate_partial(Params& p, int splits) {
  p.splits = splits;
  Workspace partial(splits * p.channels * (p.taps + 1) * sizeof(double));
  p.partial = partial.as<double>();
  return partial;
}

cudaError_t weight_gradient(const BackwardParams& b, const PreGradient& g, cudaStream_t stream) {
  WeightGradParams p = {};
  p.x = b.x, p.g = g.memory.data_ptr(), p.dw = b.dw, p.db = b.db;
  p.batch = b.batch, p.channels = b.channels, p.in_len = b.in_len, p.out_len = b.out_len, p.taps = b.taps, p.left = b.left;
  p.x_stride = b.x_stride, p.g_stride = g.strides;
  p.dtype = b.dtype, p.g_dtype = g.dtype;
  const WeightGradRoute route = weight_grad_route(p);
  p.skips_padding = route == WeightGradRoute::kSharedTile && shared_tile_weight_grad_skips_padding(p);
  const Workspace partial = allocate_partial(p, splits_of(route, p));
  const cudaError_t e = launch_weight_grad(route, p, stream);
  return e == cudaSuccess ? launch_reduce_partials(p, stream) : e;
}

std::tuple<Tensor, Tensor, Tensor> causal_conv1d_backward(const Tensor& grad, const Tensor& x, const Tensor& weight, const Bias& bias,
                                                          int64_t left, double shift, bool silu, bool channels_last, bool need_x,
                                                          bool need_weight, bool need_bias) {
  check_backward(grad, x, weight, bias, left);
  const CudaScope scope(x);
  const auto check = [](cudaError_t e) { check_cuda(e, "causal_conv1d_backward"); };
  Backward b(grad, x, weight, bias, left, shift, silu, channels_last, need_x, need_weight, need_bias);
  BackwardParams& p = b.params;
  if (p.channels == 0) return {b.dx, b.dw, b.db};

  if (one_pass_backward(p)) {
    const Workspace partial = allocate_partial(p, short_backward_splits(p));
    check(launch_short_backward(p, scope.stream()));
    return {b.dx, b.dw, b.db};
  }

  PreGradient g = {grad, p.dy_stride, p.dtype};
  if (silu) {
    if (widens_silu_grad(p)) {
      const ScalarType wider = p.dtype == DType::kFloat32 ? ScalarType::Double : ScalarType::Float;
      g = {empty_like_sized(x, {grad.numel()}, wider), {p.channels * p.out_len, p.out_len, 1}, *to_dtype(wider)};
    } else {
      g.memory = empty_rows(x, p.batch, p.channels, p.out_len, is_btc(p.dy_stride, p.channels));
      g.strides = strides_of(g.memory);
    }
    ConvParams pre = forward_params(x, weight, bias, left, g.memory, shift, false);
    pre.out_len = p.out_len, pre.out_stride = g.strides, pre.out_dtype = g.dtype;
    pre.dy = p.dy, pre.dy_stride = p.dy_stride, pre.epilogue = Epilogue::kSiluGrad;
    check(convolve(pre, scope.stream()));
  }
  if (need_x) {
    ConvParams d = forward_params(grad, weight, std::nullopt, p.taps - 1 - left, b.dx, 0, false);
    d.x = g.memory.data_ptr(), d.x_stride = g.strides, d.x_dtype = g.dtype;
    d.w = static_cast<const char*>(p.w) + (p.taps - 1) * p.w_stride.k * static_cast<int64_t>(weight.element_size());
    d.w_stride.k = -p.w_stride.k;
    d.skips_padding = true;
    check(convolve(d, scope.stream()));
  }
  if (need_weight || need_bias) check(weight_gradient(p, g, scope.stream()));
  return {b.dx, b.dw, b.db};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CUDA, m) {
  direct::implement<&causal_conv1d>(m, "CUDA", "causal_conv1d");
  direct::implement<&causal_conv1d_backward>(m, "CUDA", "causal_conv1d_backward");
}

}  // namespace fusebackend::causal_conv1d
