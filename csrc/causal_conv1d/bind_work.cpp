// causal_conv1d_work(int[] sizes, bool[] orders, ScalarType dtype, int left, bool silu, bool[] needed, int multiprocessors, bool epilogue=False) ->
// str: what a convolution, or its backward, makes a GPU do (work.h), for tensors that need not exist.
//
//   sizes: batch, channels, samples of x, samples of the result, taps.
//   orders: of x, of the result, and for a backward of x's gradient: true for (batch, time, channel), false for (batch, channel, time).
//   epilogue: whether a forward applies that of common/channel_epilogue.h.
//   needed: which gradients, of x, weight and bias, a backward computes; none for a forward.
#include <optional>
#include <string>
#include <vector>

#include "causal_conv1d/work.h"
#include "common/binding.h"

namespace fusebackend::causal_conv1d {
namespace {

Strides strides(bool btc, int64_t channels, int64_t length) {
  return btc ? Strides{length * channels, 1, channels} : Strides{length * channels, length, 1};
}

template <typename Params>
Params described(const std::vector<int64_t>& sizes, bool x_btc, DType dtype, int64_t left) {
  Params p = {};
  p.batch = sizes[0], p.channels = sizes[1], p.in_len = sizes[2], p.out_len = sizes[3], p.taps = sizes[4], p.left = left;
  p.x_stride = strides(x_btc, p.channels, p.in_len);
  p.w_stride = {p.taps, 1};
  p.dtype = dtype;
  return p;
}

std::string causal_conv1d_work(const std::vector<int64_t>& sizes, const std::vector<bool>& orders, ScalarType type, int64_t left, bool silu,
                               const std::vector<bool>& needed, int64_t multiprocessors, bool epilogue) {
  const std::optional<DType> dtype = to_dtype(type);
  STD_TORCH_CHECK(dtype && sizes.size() == 5 && orders.size() == 3 && (needed.empty() || needed.size() == 3) && multiprocessors > 0,
                  "causal_conv1d_work: a floating-point dtype, five sizes, three orders, and no or three gradients");
  const int64_t channels = sizes[1];
  if (needed.empty()) {
    ConvParams p = described<ConvParams>(sizes, orders[0], *dtype, left);
    p.out_stride = strides(orders[1], channels, p.out_len);
    p.x_dtype = p.out_dtype = p.dtype;
    p.epilogue = epilogue ? Epilogue::kChannel : silu ? Epilogue::kSilu : Epilogue::kNone;
    return work_of(p, int(multiprocessors));
  }
  BackwardParams p = described<BackwardParams>(sizes, orders[0], *dtype, left);
  p.dy_stride = strides(orders[1], channels, p.out_len);
  p.dx_stride = strides(orders[2], channels, p.in_len);
  p.silu = silu;
  void* const somewhere = &p;  // null is a gradient that is not needed
  p.dx = needed[0] ? somewhere : nullptr, p.dw = needed[1] ? somewhere : nullptr, p.db = needed[2] ? somewhere : nullptr;
  return work_of(p, int(multiprocessors));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CompositeExplicitAutograd, m) { m.impl("causal_conv1d_work", TORCH_BOX(&causal_conv1d_work)); }

}  // namespace fusebackend::causal_conv1d
