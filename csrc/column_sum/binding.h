// What both bindings do: check the arguments of column_sum and column_sums, and describe the sums.
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

// Both operators; Device::run(problem, like) sums, where there is anything to sum.
template <typename Device>
struct Operators {
  static Tensor column_sum(const Tensor& given, int64_t begin, int64_t end, bool mean, ScalarType dtype) {
    Tensor x = given;
    Problem p = describe(x, begin, end, mean, dtype);
    Tensor out = make_result(p, x, begin, end, dtype);
    if (p.batch * p.columns > 0) Device::run(p, x);
    return out;
  }

  static std::vector<Tensor> column_sums(const Tensor& given, const std::optional<Tensor>& given_y, int64_t begin, int64_t end,
                                         std::optional<ScalarType> dtype, bool mean, ScalarType product_dtype, bool product_mean, bool rounded) {
    Tensor x = given, y = given_y.value_or(given);
    STD_TORCH_CHECK(y.scalar_type() == x.scalar_type(), "column_sums: x and y have one dtype");
    STD_TORCH_CHECK(on_same_device(x, y), "column_sums: x and y are on one device");
    STD_TORCH_CHECK(to_vector(y.sizes()) == to_vector(x.sizes()), "column_sums: x and y have one shape");
    for (ScalarType type : {x.scalar_type(), dtype.value_or(product_dtype), product_dtype})
      STD_TORCH_CHECK(type != ScalarType::Double, "column_sums: products in fp64 are not supported");
    Problem products = describe(y, begin, end, product_mean, product_dtype);
    const Tensor product_sum = make_result(products, y, begin, end, product_dtype);
    Problem p = products;
    std::vector<Tensor> out;
    if (!given_y) x = y;  // which may have been copied
    else p = describe(x, begin, end, product_mean, product_dtype), p.out = products.out;
    if (dtype) {
      p.mean = mean, p.result = describe(x, begin, end, mean, *dtype).result;
      out.push_back(make_result(p, x, begin, end, *dtype));
      p.second_out = products.out, p.second_result = products.result, p.second_mean = product_mean;
    }
    out.push_back(product_sum);
    p.form = given_y ? (dtype ? Form::kPlainAndProducts : Form::kProducts) : (dtype ? Form::kPlainAndSquares : Form::kSquares);
    p.y = products.x, p.y_batch_stride = products.batch_stride, p.y_row_stride = products.row_stride, p.rounded = rounded;
    if (p.batch * p.columns > 0) Device::run(p, x);
    return out;
  }
};

}  // namespace fusebackend::column_sum
