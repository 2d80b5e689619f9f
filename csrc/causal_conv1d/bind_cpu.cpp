// The CPU operators: allocates, and hands units of work to torch's threads.
#include <algorithm>

#include "causal_conv1d/bind.h"
#include "causal_conv1d/cpu_launch.h"
#include "common/direct_call.h"
#include "common/integer_math.h"

namespace fusebackend::causal_conv1d {
namespace {

// Runs f(begin, end) over ranges of units, on so many threads that each has 2^16 multiplications or more: less would not pay for waking it.
template <typename F>
void parallel(int64_t units, int64_t multiplications, F&& f) {
  const int64_t grain = std::max<int64_t>(1, (units << 16) / std::max<int64_t>(1, multiplications));
  torch::stable::parallel_for(0, units, grain, f);
}

Tensor causal_conv1d(const Tensor& x, const Tensor& weight, const Bias& bias, int64_t left, int64_t right, double shift, bool silu,
                     bool channels_last, const ChannelNumbers& mean, const ChannelNumbers& variance, const ChannelNumbers& scale,
                     const ChannelNumbers& offset, double eps, std::string activation) {
  const int64_t length = check_forward(x, weight, bias, left, right);
  const ChannelEpilogue after = epilogue_of("causal_conv1d", x, x.size(1), mean, variance, scale, offset, eps, activation, "offset");
  Tensor out = empty_rows(x, x.size(0), x.size(1), length, channels_last);
  if (out.numel() == 0) return out;
  const ConvParams p = forward_params(x, weight, bias, left, out, shift, silu, after);
  const ForwardUnits units = forward_units(p);
  parallel(p.batch * units.groups * units.tiles, out.numel() * (p.taps + 8),
           [&](int64_t begin, int64_t end) { cpu_kernels().forward(p, begin, end); });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> causal_conv1d_backward(const Tensor& grad, const Tensor& x, const Tensor& weight, const Bias& bias,
                                                          int64_t left, double shift, bool silu, bool channels_last, bool need_x,
                                                          bool need_weight, bool need_bias) {
  check_backward(grad, x, weight, bias, left);
  Backward b(grad, x, weight, bias, left, shift, silu, channels_last, need_x, need_weight, need_bias);
  const BackwardParams& p = b.params;
  parallel(ceil_div(p.channels, backward_unit_channels(p)), x.numel() * (3 * p.taps + 16),
           [&](int64_t begin, int64_t end) { cpu_kernels().backward(p, begin, end); });
  return {b.dx, b.dw, b.db};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CPU, m) {
  direct::implement<&causal_conv1d>(m, "CPU", "causal_conv1d");
  direct::implement<&causal_conv1d_backward>(m, "CPU", "causal_conv1d_backward");
}

}  // namespace fusebackend::causal_conv1d
