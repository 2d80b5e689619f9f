// The CPU operators: allocates, and hands planes to torch's threads.
#include "common/direct_call.h"
#include "depthwise_conv/bind.h"
#include "depthwise_conv/cpu_launch.h"
#include "depthwise_conv/cpu_loops.h"

namespace fusebackend::depthwise_conv {
namespace {

// Runs f(begin, end) over ranges of units, on so many threads that each has 2^16 multiplications or more: less would not pay for waking it.
template <typename F>
void parallel(int64_t units, int64_t multiplications, F&& f) {
  if (units == 0) return;
  const int64_t each = multiplications / units + 1;
  const int64_t grain = (int64_t{1} << 16) / each + 1;
  torch::stable::parallel_for(0, units, grain, f);
}

Tensor depthwise_conv(const Tensor& x, const Tensor& weight, const Bias& bias, const Ints& stride, const Ints& padding, const Ints& dilation,
                      std::optional<bool> channels_last, const ChannelNumbers& mean, const ChannelNumbers& variance, const ChannelNumbers& scale, const ChannelNumbers& shift, double eps,
                      std::string activation) {
  const Geometry g = geometry_of(x, weight, stride, padding, dilation);
  const ChannelEpilogue epilogue = epilogue_of("depthwise_conv", x, g.outputs(), mean, variance, scale, shift, eps, activation);
  Tensor y = empty_image(x, {g.batch, g.outputs(), g.out.h, g.out.w}, channels_last.value_or(is_channels_last(x)));
  const ForwardParams p = forward_params(g, x, weight, bias, epilogue, y);
  const int64_t units = forward_units(p);
  parallel(units, y.numel() * g.tap_count(), [&](int64_t begin, int64_t end) { forward(p, begin, end); });
  return y;
}

std::tuple<Tensor, Tensor, Tensor> depthwise_conv_backward(const Tensor& grad, const Tensor& x, const Tensor& weight, const Ints& stride,
                                                           const Ints& padding, const Ints& dilation, std::optional<bool> channels_last,
                                                           bool weight_channels_last, bool need_x, bool need_weight, bool need_bias) {
  Backward b(grad, x, weight, stride, padding, dilation, channels_last, weight_channels_last, need_x, need_weight, need_bias);
  const int64_t products = grad.numel() * b.g.tap_count();
  if (need_x) {
    const std::vector<ForwardParams> convolutions = input_grad_convolutions(b.input);
    for (const ForwardParams& p : convolutions) {
      const int64_t share = p.g.batch * p.g.outputs() * p.g.out.h * p.g.out.w * (p.g.tap_count() + 1);
      parallel(forward_units(p), share, [&](int64_t begin, int64_t end) { forward(p, begin, end); });
    }
    if (convolutions.empty() && b.dx.numel() > 0)
      parallel(loops_input_grad_units(b.input), products, [&](int64_t begin, int64_t end) { loops_input_grad(b.input, begin, end); });
  }
  if (need_weight || need_bias) {
    const WeightGradParams& p = b.weight;
    const int64_t parts = weight_grad_parts(p);
    if (parts == 0) {
      parallel(loops_weight_grad_units(p), products, [&](int64_t begin, int64_t end) { loops_weight_grad(p, begin, end); });
    } else {
      std::vector<double> partial(weight_grad_partials(p, parts));
      parallel(weight_grad_units(p, parts), products, [&](int64_t begin, int64_t end) { weight_grad(p, partial.data(), parts, begin, end); });
      reduce_weight_grad(p, partial.data(), parts);
    }
  }
  return {b.dx, b.dw, b.db};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CPU, m) {
  direct::implement<&depthwise_conv>(m, "CPU", "depthwise_conv");
  direct::implement<&depthwise_conv_backward>(m, "CPU", "depthwise_conv_backward");
}

}  // namespace fusebackend::depthwise_conv
