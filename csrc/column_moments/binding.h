// What both bindings do: check the arguments of column_moments, and describe them.
#pragma once

#include <tuple>

#include "column_moments/column_moments.h"
#include "column_sum/binding.h"

namespace fusebackend::column_moments {

struct Results {
  Problem p;
  std::tuple<Tensor, Tensor, Tensor> tensors;  // variance, mean, scale
};

inline Results make(Tensor& x, int64_t begin, int64_t end, double correction, double epsilon, ScalarType dtype) {
  Problem p{};
  p.rows = column_sum::describe(x, begin, end, false, dtype), p.rows.form = column_sum::Form::kMoments, p.correction = correction, p.epsilon = epsilon;
  const auto result = [&] { return column_sum::make_result(p.rows, x, begin, end, dtype); };
  Tensor variance = result(), mean = result(), scale = result();
  p.variance = variance.data_ptr(), p.mean = mean.data_ptr(), p.scale = scale.data_ptr();
  return {p, {variance, mean, scale}};
}

}  // namespace fusebackend::column_moments
