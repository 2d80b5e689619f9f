// What both bindings do: check the arguments of column_moments, and describe them.
#pragma once

#include <tuple>

#include "column_moments/column_moments.h"
#include "column_sum/binding.h"

namespace fusebackend::column_moments {

struct Results {
  Problem p;
  Tensor variance, mean;
};

inline Results make(Tensor& x, int64_t begin, int64_t end, double correction, ScalarType dtype) {
  Problem p{};
  p.rows = column_sum::describe(x, begin, end, false, dtype), p.correction = correction;
  Tensor variance = column_sum::make_result(p.rows, x, begin, end, dtype), mean = column_sum::make_result(p.rows, x, begin, end, dtype);
  p.variance = variance.data_ptr(), p.mean = mean.data_ptr();
  return {p, variance, mean};
}

}  // namespace fusebackend::column_moments
