// From tensors to a tile::Problem, for the bindings of both families and devices.
//
// `order` lists a result's dimensions from outermost to innermost in memory: its strides are those of torch.empty_permuted(sizes, order).
#pragma once

#include <algorithm>
#include <optional>

#include "common/binding.h"
#include "common/tile/problem.h"

namespace fusebackend::tile {

// x + y as the problem sees them, or x alone. The result is described but not allocated: its data is null. Throws if `order` is no
// permutation of the result's dimensions, or if dtypes, devices or sizes do not fit each other.
Problem make_problem(const Tensor& x, const std::optional<Tensor>& y, const std::vector<int64_t>& order);

// Allocates the problem's result, with the dtype and device of `like`.
Tensor allocate_result(Problem& problem, const Tensor& like);

}  // namespace fusebackend::tile
