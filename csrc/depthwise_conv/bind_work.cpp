// depthwise_conv_work(str direction, int[] sizes, int[] taps, int[] stride, int[] padding, int[] dilation, bool[] orders, ScalarType dtype,
//                     int multiprocessors) -> str: what a convolution makes a GPU do (work.h), or, with 0 multiprocessors, this CPU
//                     (cpu_launch.h), for tensors that need not exist.
//
//   direction: "forward", "input" or "weight": whose gradient; "gradients": what computes both.
//   sizes: batch, channels, outputs, rows and columns of x, rows and columns of the result.
//   padding: above and on the left.
//   orders: of x, of the result (or the incoming gradient), and of x's gradient: true for (batch, height, width, channels).
#include <optional>
#include <string>
#include <vector>

#include "common/binding.h"
#include "depthwise_conv/cpu_launch.h"
#include "depthwise_conv/work.h"

namespace fusebackend::depthwise_conv {
namespace {

Strides strides(bool channels_last, int64_t channels, Pair sides) {
  return channels_last ? Strides{channels * sides.h * sides.w, 1, channels * sides.w, channels} : Strides{channels * sides.h * sides.w, sides.h * sides.w, sides.w, 1};
}

std::string cpu_work(const std::string& direction, const WorkParams& p) {
  if (direction == "forward") {
    ForwardParams f = {};
    f.g = p.g, f.x_stride = p.x_stride, f.y_stride = p.y_stride, f.dtype = p.dtype;
    return cpu_forward_work(f);
  }
  if (direction == "input") {
    InputGradParams f = {};
    f.g = p.g, f.grad_stride = p.y_stride, f.dx_stride = p.dx_stride, f.dtype = p.dtype;
    return cpu_input_grad_work(f);
  }
  WeightGradParams f = {};
  f.g = p.g, f.grad_stride = p.y_stride, f.x_stride = p.x_stride, f.dtype = p.dtype;
  return cpu_weight_grad_work(f);
}

std::string depthwise_conv_work(std::string direction, const std::vector<int64_t>& sizes, const std::vector<int64_t>& taps, const std::vector<int64_t>& stride,
                                const std::vector<int64_t>& padding, const std::vector<int64_t>& dilation, const std::vector<bool>& orders, ScalarType type,
                                int64_t multiprocessors) {
  const std::optional<DType> dtype = to_dtype(type);
  STD_TORCH_CHECK(dtype && sizes.size() == 7 && taps.size() == 2 && stride.size() == 2 && padding.size() == 2 && dilation.size() == 2 &&
                      orders.size() == 3 && multiprocessors >= 0 && sizes[1] > 0 && sizes[2] % sizes[1] == 0,
                  "depthwise_conv_work: a floating-point dtype, seven sizes, three orders, and two of each other number");
  WorkParams p = {};
  p.g.batch = sizes[0], p.g.channels = sizes[1], p.g.multiplier = sizes[2] / sizes[1];
  p.g.in = {sizes[3], sizes[4]}, p.g.out = {sizes[5], sizes[6]};
  p.g.taps = {taps[0], taps[1]}, p.g.stride = {stride[0], stride[1]}, p.g.pad = {padding[0], padding[1]}, p.g.dilation = {dilation[0], dilation[1]};
  p.x_stride = strides(orders[0], sizes[1], p.g.in), p.y_stride = strides(orders[1], sizes[2], p.g.out), p.dx_stride = strides(orders[2], sizes[1], p.g.in);
  p.dtype = *dtype;
  const int sms = int(multiprocessors);
  STD_TORCH_CHECK(direction == "forward" || direction == "input" || direction == "weight" || (direction == "gradients" && sms > 0),
                  "depthwise_conv_work: direction must be forward, input, weight or, on a GPU, gradients");
  if (sms == 0) return cpu_work(direction, p);
  if (direction == "forward") return forward_work(p, sms);
  if (direction == "gradients") return gradients_work(p, sms);
  return direction == "input" ? input_grad_work(p, sms) : weight_grad_work(p, sms);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CompositeExplicitAutograd, m) { m.impl("depthwise_conv_work", TORCH_BOX(&depthwise_conv_work)); }

}  // namespace fusebackend::depthwise_conv
