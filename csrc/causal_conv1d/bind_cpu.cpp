#include <algorithm>

#include "bind.h"
#include "conv1d_cpu.h"

namespace fusebackend::conv1d {
namespace {

// Work below this many multiplications a thread does not pay for waking it.
constexpr int64_t kGrain = 1 << 16;

int64_t grain(int64_t work, int64_t units) { return std::max<int64_t>(1, kGrain * units / std::max<int64_t>(1, work)); }

Tensor causal_conv1d(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t left, int64_t right, double shift,
                     bool silu, bool channels_last) {
  const int64_t length = check_forward(x, weight, bias, left, right);
  Tensor out = empty_rows(x, x.size(0), x.size(1), length, channels_last);
  if (out.numel() == 0) return out;
  const ConvParams p = forward_params(x, weight, bias, left, out, shift, silu);
  const int64_t units = forward_units(p);
  torch::stable::parallel_for(0, units, grain(out.numel() * (p.taps + 8), units),
                              [&](int64_t begin, int64_t end) { cpu_kernels().forward(p, begin, end); });
  return out;
}

std::tuple<Tensor, Tensor, Tensor> causal_conv1d_backward(const Tensor& grad, const Tensor& x, const Tensor& weight,
                                                          const std::optional<Tensor>& bias, int64_t left, double shift, bool silu,
                                                          bool channels_last, bool need_x, bool need_weight, bool need_bias) {
  check_backward(grad, x, weight, bias, left);
  Backward b(grad, x, weight, bias, left, shift, silu, channels_last, need_x, need_weight, need_bias);
  const int64_t units = backward_units(b.params);
  torch::stable::parallel_for(0, units, grain(x.numel() * (3 * b.params.taps + 16), units),
                              [&](int64_t begin, int64_t end) { cpu_kernels().backward(b.params, begin, end); });
  return {b.dx, b.dw, b.db};
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CPU, m) {
  m.impl("causal_conv1d", TORCH_BOX(&causal_conv1d));
  m.impl("causal_conv1d_backward", TORCH_BOX(&causal_conv1d_backward));
}

}  // namespace fusebackend::conv1d
