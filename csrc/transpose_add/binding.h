// What the CPU and the CUDA binding share.
#pragma once

#include "common/tile/binding.h"
#include "transpose_add/transpose_add.h"

namespace fusebackend::transpose_add {

// Checks and describes the sum, allocates it, and calls run(problem, dtype).
template <typename Run>
Tensor add_with(const Tensor& x, const Tensor& y, const std::vector<int64_t>& order, Run run) {
  const std::optional<DType> type = to_dtype(x.scalar_type());
  STD_TORCH_CHECK(type.has_value(), "transpose_add does not take this dtype");
  tile::Problem problem = tile::make_problem(x, y, order);
  Tensor out = tile::allocate_result(problem, x);
  run(problem, *type);
  return out;
}

}  // namespace fusebackend::transpose_add
