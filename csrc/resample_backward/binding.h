// What the bindings do: check the arguments of resample_backward, and describe the sums.
#pragma once

#include <algorithm>

#include "common/binding.h"
#include "resample_backward/resample_backward.h"

namespace fusebackend::resample_backward {

using Sizes = std::vector<int64_t>;

// The sums of a gradient of these sizes and strides, without its memory, indices and weights; `sizes` are those of the result. Refuses what `_fake` in
// patterns/resample_backward/ops.py refuses.
inline Problem describe(const Sizes& grad_sizes, const Sizes& grad_strides, int64_t dim, const Sizes& terms, const Sizes& axis_sizes, const Sizes& order,
                        ScalarType dtype, ScalarType out_dtype, Sizes& sizes) {
  const int64_t rank = static_cast<int64_t>(grad_sizes.size()), axes = static_cast<int64_t>(terms.size());
  STD_TORCH_CHECK(rank <= kMostDims, "resample_backward: ", rank, " dimensions; up to ", kMostDims, " are accepted");
  STD_TORCH_CHECK(axes > 0 && axes <= kMostAxes && axis_sizes.size() == terms.size(), "resample_backward: ", axes, " axes and ", axis_sizes.size(),
                  " sizes; as many of both, 1 to ", kMostAxes, ", are accepted");
  STD_TORCH_CHECK(dim >= 0 && dim + axes <= rank, "resample_backward: dim=", dim, " is out of range for ", axes, " axes of ", rank, " dimensions");
  Sizes sorted = order;
  std::sort(sorted.begin(), sorted.end());
  bool is_order = static_cast<int64_t>(order.size()) == rank;
  for (int64_t d = 0; is_order && d < rank; ++d) is_order = sorted[d] == d;
  STD_TORCH_CHECK(is_order, "resample_backward: order is no permutation of the dimensions");
  const std::optional<DType> type = to_dtype(dtype), out_type = to_dtype(out_dtype);
  STD_TORCH_CHECK(type && out_type && is_floating(*type) && is_floating(*out_type) && (*type == DType::kFloat64) == (*out_type == DType::kFloat64),
                  "resample_backward: a dtype that is not supported");
  Problem p{};
  p.dtype = *type, p.out_dtype = *out_type;
  sizes = grad_sizes;
  for (int64_t k = 0; k < axes; ++k) {
    STD_TORCH_CHECK(terms[k] > 0 && terms[k] <= kMostTerms, "resample_backward: ", terms[k], " terms of an axis; 1 to ", kMostTerms, " are accepted");
    STD_TORCH_CHECK(axis_sizes[k] >= 0, "resample_backward: a size of ", axis_sizes[k]);
    sizes[dim + k] = axis_sizes[k];
  }
  const Sizes strides = dense_strides(sizes, order);
  const int64_t absent = kMostAxes - axes;
  for (int64_t k = 0; k < kMostAxes; ++k) {
    const int64_t d = dim + k - absent;
    p.axis[k] = k < absent ? Axis{1, 1, 0, 0, 0, {}} : Axis{sizes[d], grad_sizes[d], strides[d], grad_strides[d], int(terms[k - absent]), {}};
  }
  for (int64_t d : order) {
    if ((d >= dim && d < dim + axes) || sizes[d] == 1) continue;
    const Dim next{sizes[d], strides[d], grad_strides[d]};
    Dim* const before = p.count > 0 ? &p.dims[p.count - 1] : nullptr;
    if (before && before->out_stride == next.size * next.out_stride && before->grad_stride == next.size * next.grad_stride) {
      *before = {before->size * next.size, next.out_stride, next.grad_stride};
    } else {
      p.dims[p.count++] = next;
    }
  }
  return p;
}

}  // namespace fusebackend::resample_backward
