// From tensors to a tile Problem; shared by the CPU and CUDA bindings.
//
//   fusebackend::permute_copy(Tensor x, int[] order) -> Tensor
//   fusebackend::transpose_add(Tensor x, Tensor y, float alpha, int ialpha, int[] order) -> Tensor
//   fusebackend::tile_route(Tensor x, Tensor? y, int[] order) -> int     which CUDA kernel would serve either (CudaRoute); for tests
//
// `order` lists the output's dimensions from outermost to innermost in memory: its strides are those of torch.empty_permuted(shape, order).
#pragma once

#include <algorithm>
#include <optional>

#include "../common/binding.h"
#include "cuda_plan.h"

namespace fusebackend::tile {

// The strides of torch.empty_permuted(sizes, order).
inline std::vector<int64_t> strides_in_order(const std::vector<int64_t>& sizes, const std::vector<int64_t>& order) {
  const size_t rank = sizes.size();
  STD_TORCH_CHECK(order.size() == rank, "order must name each of the ", rank, " output dimensions once, got ", order.size());
  std::vector<int64_t> strides(rank, -1);
  int64_t step = 1;
  for (size_t i = rank; i-- > 0;) {
    const int64_t d = order[i];
    STD_TORCH_CHECK(d >= 0 && d < int64_t(rank) && strides[d] < 0, "order must be a permutation of the output's dimensions");
    strides[d] = step;
    step *= sizes[d] > 0 ? sizes[d] : 1;
  }
  return strides;
}

// numpy broadcasting.
inline std::vector<int64_t> broadcast_sizes(const Tensor& x, const Tensor& y) {
  const int64_t rank = std::max(x.dim(), y.dim());
  std::vector<int64_t> sizes(rank);
  for (int64_t d = 0; d < rank; ++d) {
    const int64_t dx = d - (rank - x.dim()), dy = d - (rank - y.dim());
    const int64_t nx = dx < 0 ? 1 : x.size(dx), ny = dy < 0 ? 1 : y.size(dy);
    STD_TORCH_CHECK(nx == ny || nx == 1 || ny == 1, "sizes ", nx, " and ", ny, " of dimension ", d, " do not broadcast");
    sizes[d] = nx == 1 ? ny : nx;
  }
  return sizes;
}

inline Problem make_problem(const std::vector<int64_t>& sizes, int element_bytes) {
  STD_TORCH_CHECK(sizes.size() <= size_t(kMaxRank), "rank ", sizes.size(), " exceeds ", kMaxRank);
  Problem p;
  p.rank = int(sizes.size());
  p.element_bytes = element_bytes;
  for (int d = 0; d < p.rank; ++d) p.sizes[d] = sizes[d];
  return p;
}

// `t` seen in the problem's index space: missing and size-1 dimensions are broadcast.
inline void set_operand(Problem& p, Role role, const Tensor& t) {
  p.data[role] = static_cast<char*>(t.data_ptr());
  const IntHeaderOnlyArrayRef sizes = t.sizes(), strides = t.strides();
  const int missing = p.rank - int(sizes.size());
  for (int d = 0; d < p.rank; ++d) {
    const bool broadcast = d < missing || (sizes[d - missing] == 1 && p.sizes[d] != 1);
    p.strides[role][d] = broadcast ? 0 : strides[d - missing];
  }
}

inline std::optional<AddType> add_type(ScalarType type) {
  switch (type) {
    case ScalarType::Double: return AddType::kF64;
    case ScalarType::Float: return AddType::kF32;
    case ScalarType::Half: return AddType::kF16;
    case ScalarType::BFloat16: return AddType::kBF16;
    case ScalarType::Char:
    case ScalarType::Byte: return AddType::kI8;
    case ScalarType::Short: return AddType::kI16;
    case ScalarType::Int: return AddType::kI32;
    case ScalarType::Long: return AddType::kI64;
    default: return std::nullopt;
  }
}

// Both ops: check, describe, allocate; `run(problem)` or `run(problem, type, alpha)` does the work.
inline Problem copy_problem(const Tensor& x, const std::vector<int64_t>& order, std::vector<int64_t>& out_strides) {
  const std::vector<int64_t> sizes = to_vector(x.sizes());
  Problem problem = make_problem(sizes, int(x.element_size()));
  out_strides = strides_in_order(sizes, order);
  std::copy(out_strides.begin(), out_strides.end(), problem.strides[kOut]);
  set_operand(problem, kA, x);
  return problem;
}

inline Problem add_problem(const Tensor& x, const Tensor& y, const std::vector<int64_t>& order, std::vector<int64_t>& out_strides) {
  STD_TORCH_CHECK(x.scalar_type() == y.scalar_type(), "x and y must have one dtype");
  STD_TORCH_CHECK(x.is_cuda() == y.is_cuda() && x.get_device_index() == y.get_device_index(), "x and y must be on one device");
  const std::vector<int64_t> sizes = broadcast_sizes(x, y);
  Problem problem = make_problem(sizes, int(x.element_size()));
  problem.operands = 3;
  out_strides = strides_in_order(sizes, order);
  std::copy(out_strides.begin(), out_strides.end(), problem.strides[kOut]);
  set_operand(problem, kA, x);
  set_operand(problem, kB, y);
  return problem;
}

inline Tensor allocate_output(Problem& problem, const Tensor& like, const std::vector<int64_t>& strides) {
  Tensor out = empty_strided_like(like, {problem.sizes, problem.sizes + problem.rank}, strides);
  problem.data[kOut] = static_cast<char*>(out.data_ptr());
  return out;
}

template <typename Run>
Tensor permute_copy_with(const Tensor& x, const std::vector<int64_t>& order, Run run) {
  std::vector<int64_t> strides;
  Problem problem = copy_problem(x, order, strides);
  Tensor out = allocate_output(problem, x, strides);
  run(problem);
  return out;
}

template <typename Run>
Tensor transpose_add_with(const Tensor& x, const Tensor& y, double alpha, int64_t ialpha, const std::vector<int64_t>& order, Run run) {
  const std::optional<AddType> type = add_type(x.scalar_type());
  STD_TORCH_CHECK(type.has_value(), "transpose_add does not take this dtype");
  std::vector<int64_t> strides;
  Problem problem = add_problem(x, y, order, strides);
  Tensor out = allocate_output(problem, x, strides);
  run(problem, *type, Alpha{alpha, ialpha});
  return out;
}

inline int64_t tile_route(const Tensor& x, const std::optional<Tensor>& y, const std::vector<int64_t>& order) {
  std::vector<int64_t> strides;
  const Problem problem = y ? add_problem(x, *y, order, strides) : copy_problem(x, order, strides);
  return int64_t(cuda_route(make_plan(problem)));  // the output counts as aligned: it is allocated
}

}  // namespace fusebackend::tile
