// What both bindings do: check the arguments of column_sum, and describe the sum.
#pragma once

#include <optional>
#include <vector>

#include "column_sum/column_sum.h"
#include "common/binding.h"

namespace fusebackend::column_sum {

// Dims that lie in memory like one: its size and stride. None if they do not. Dims of size 1 have no place.
struct Merged {
  int64_t size = 1, stride = 0;
};
inline std::optional<Merged> merge(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int64_t begin, int64_t end) {
  Merged found;
  for (int64_t d = end; d-- > begin;) {
    if (sizes[d] == 1) continue;
    if (found.size == 1) found.stride = strides[d];
    else if (strides[d] != found.size * found.stride) return std::nullopt;
    found.size *= sizes[d];
  }
  return found;
}

// The sum over the dims begin to end - 1 of a tensor of these sizes and strides, without its result. None if the dims that are summed, or
// those on one side of them, can't be seen as one, or if the columns do not lie side by side.
inline std::optional<Problem> describe(const void* x, const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides, int64_t begin, int64_t end,
                        bool mean, ScalarType in, ScalarType result) {
  const int64_t dims = static_cast<int64_t>(sizes.size());
  STD_TORCH_CHECK(0 <= begin && begin < end && end <= dims, "column_sum: there are no dims ", begin, " to ", end - 1, " of ", dims);
  const std::optional<DType> from = to_dtype(in), to = to_dtype(result);
  STD_TORCH_CHECK(from && to && is_floating(*from) && is_floating(*to), "column_sum: a floating-point dtype that is not supported");
  Problem p{};
  p.x = x, p.in = *from, p.result = *to, p.mean = mean;
  const auto count = [&](int64_t first, int64_t last) {
    int64_t n = 1;
    for (int64_t d = first; d < last; ++d) n *= sizes[d];
    return n;
  };
  p.batch = count(0, begin), p.rows = count(begin, end), p.columns = count(end, dims);
  if (p.batch * p.rows * p.columns == 0) {
    p.batch_stride = 0, p.row_stride = p.columns;
    return p;
  }
  const auto outer = merge(sizes, strides, 0, begin), reduced = merge(sizes, strides, begin, end), inner = merge(sizes, strides, end, dims);
  if (!outer || !reduced || !inner || (inner->size != 1 && inner->stride != 1)) return std::nullopt;
  p.batch_stride = outer->stride, p.row_stride = reduced->size == 1 ? p.columns : reduced->stride;
  return p;
}

// A tensor that lies otherwise is copied: graphs are not rewritten for such, but PyTorch may give a tensor other strides than it said before.
inline Problem describe(Tensor& x, int64_t begin, int64_t end, bool mean, ScalarType result) {
  const auto found = [&] {
    return describe(x.data_ptr(), to_vector(x.sizes()), to_vector(x.strides()), begin, end, mean, x.scalar_type(), result);
  };
  if (const auto p = found()) return *p;
  x = torch::stable::contiguous(x);
  return *found();
}

// The result, without the dims that are summed.
inline Tensor make_result(Problem& p, const Tensor& x, int64_t begin, int64_t end, ScalarType dtype) {
  std::vector<int64_t> kept = to_vector(x.sizes());
  kept.erase(kept.begin() + begin, kept.begin() + end);
  Tensor out = empty_like_sized(x, kept, dtype);
  p.out = out.data_ptr();
  return out;
}

}  // namespace fusebackend::column_sum
