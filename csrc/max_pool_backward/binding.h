// What the bindings do: check the arguments of max_pool_backward, and describe the sums.
#pragma once

#include <algorithm>

#include "common/binding.h"
#include "max_pool_backward/max_pool_backward.h"

namespace fusebackend::max_pool_backward {

using Sizes = std::vector<int64_t>;

// A gradient of these sizes and strides, without its memory; `sizes` are those of the result. Refuses what `_fake` in
// patterns/max_pool_backward/ops.py refuses.
inline Problem describe(const Sizes& grad_sizes, const Sizes& grad_strides, const Sizes& offset_strides, const Sizes& axis_sizes, const Sizes& kernel,
                        const Sizes& stride, const Sizes& padding, const Sizes& dilation, const Sizes& order, ScalarType dtype, Sizes& sizes) {
  const int64_t rank = static_cast<int64_t>(grad_sizes.size()), axes = static_cast<int64_t>(kernel.size());
  STD_TORCH_CHECK(rank <= kMostDims, "max_pool_backward: ", rank, " dimensions; up to ", kMostDims, " are accepted");
  STD_TORCH_CHECK(axes > 0 && axes <= std::min<int64_t>(kMostAxes, rank), "max_pool_backward: kernel_size of ", axes, " numbers; 1 to ",
                  std::min<int64_t>(kMostAxes, rank), " are accepted");
  for (const Sizes* each : {&axis_sizes, &stride, &padding, &dilation})
    STD_TORCH_CHECK(each->size() == kernel.size(), "max_pool_backward: sizes, stride, padding and dilation are of ", axes, " numbers, as kernel_size is");
  Sizes sorted = order;
  std::sort(sorted.begin(), sorted.end());
  bool is_order = static_cast<int64_t>(order.size()) == rank;
  for (int64_t d = 0; is_order && d < rank; ++d) is_order = sorted[d] == d;
  STD_TORCH_CHECK(is_order, "max_pool_backward: order is no permutation of the dimensions");
  const std::optional<DType> type = to_dtype(dtype);
  STD_TORCH_CHECK(type && is_floating(*type), "max_pool_backward: a dtype that is not supported");
  Problem p{};
  p.dtype = *type;
  sizes = grad_sizes;
  int64_t elements = 1;
  for (int64_t k = 0; k < axes; ++k) {
    const int64_t windows = grad_sizes[rank - axes + k];
    sizes[rank - axes + k] = axis_sizes[k];
    STD_TORCH_CHECK(kernel[k] > 0 && stride[k] > 0 && padding[k] >= 0 && dilation[k] > 0 && axis_sizes[k] >= 0,
                    "max_pool_backward: a negative size or padding, or a kernel_size, stride or dilation that is not positive");
    elements = kernel[k] > kMostElements ? kMostElements + 1 : elements * kernel[k];
    STD_TORCH_CHECK(elements <= kMostElements, "max_pool_backward: windows of more than ", kMostElements, " elements");
    STD_TORCH_CHECK(std::max(axis_sizes[k], padding[k]) <= kMostPlaces && std::max(stride[k], dilation[k]) <= kMostSteps && windows * stride[k] <= 2 * kMostPlaces,
                    "max_pool_backward: sizes and paddings up to ", kMostPlaces, " and strides and dilations up to ", kMostSteps, " are accepted");
  }
  const Sizes strides = dense_strides(sizes, order);
  const int64_t absent = kMostAxes - axes;
  for (int64_t k = 0; k < kMostAxes; ++k) {
    const int64_t d = rank - kMostAxes + k, i = k - absent;
    p.axis[k] = k < absent ? Axis{1, 1, 0, 0, 0, 1, 1, 0, 1}
                           : Axis{sizes[d], grad_sizes[d], strides[d], grad_strides[d], offset_strides[d], int(kernel[i]), int(stride[i]), int(padding[i]), int(dilation[i])};
  }
  for (const int64_t d : order) {
    if (d >= rank - axes || sizes[d] == 1) continue;
    const Dim next{sizes[d], strides[d], grad_strides[d], offset_strides[d]};
    Dim* const before = p.count > 0 ? &p.dims[p.count - 1] : nullptr;
    if (before && before->out_stride == next.size * next.out_stride && before->grad_stride == next.size * next.grad_stride &&
        before->offset_stride == next.size * next.offset_stride) {
      *before = {before->size * next.size, next.out_stride, next.grad_stride, next.offset_stride};
    } else {
      p.dims[p.count++] = next;
    }
  }
  return p;
}

}  // namespace fusebackend::max_pool_backward
