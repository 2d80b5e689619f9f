// From tensors to a tile Problem; shared by the CPU and CUDA bindings.
//
//   fusebackend::permute_copy(Tensor x, int[] order) -> Tensor
//   fusebackend::transpose_add(Tensor x, Tensor y, float alpha, int ialpha, int[] order) -> Tensor
//
// `order` lists the output's dimensions from outermost to innermost in memory: its strides are those of torch.empty_permuted(shape, order).
#pragma once

#include <optional>

#include "../common/binding.h"
#include "tile.h"

namespace fusebackend::tile {

// A new tensor of `sizes` laid out in `order`, like `like` otherwise.
inline Tensor empty_permuted(const Tensor& like, const std::vector<int64_t>& sizes, const std::vector<int64_t>& order) {
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
  return empty_strided_like(like, sizes, strides);
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
  for (int d = 0; d < p.rank; ++d) p.strides[role][d] = d < missing || (sizes[d - missing] == 1 && p.sizes[d] != 1) ? 0 : strides[d - missing];
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

// Both ops: check, allocate, describe; `run(problem)` or `run(problem, type, alpha)` does the work.
template <typename Run>
Tensor permute_copy_with(const Tensor& x, const std::vector<int64_t>& order, Run run) {
  const std::vector<int64_t> sizes = to_vector(x.sizes());
  Problem problem = make_problem(sizes, int(x.element_size()));
  Tensor out = empty_permuted(x, sizes, order);
  set_operand(problem, kOut, out);
  set_operand(problem, kA, x);
  run(problem);
  return out;
}

template <typename Run>
Tensor transpose_add_with(const Tensor& x, const Tensor& y, double alpha, int64_t ialpha, const std::vector<int64_t>& order, Run run) {
  STD_TORCH_CHECK(x.scalar_type() == y.scalar_type(), "x and y must have one dtype");
  STD_TORCH_CHECK(x.is_cuda() == y.is_cuda() && x.get_device_index() == y.get_device_index(), "x and y must be on one device");
  const std::optional<AddType> type = add_type(x.scalar_type());
  STD_TORCH_CHECK(type.has_value(), "dtype is not supported");
  const std::vector<int64_t> sizes = broadcast_sizes(x, y);
  Problem problem = make_problem(sizes, int(x.element_size()));
  problem.operands = 3;
  Tensor out = empty_permuted(x, sizes, order);
  set_operand(problem, kOut, out);
  set_operand(problem, kA, x);
  set_operand(problem, kB, y);
  run(problem, *type, Alpha{alpha, ialpha});
  return out;
}

}  // namespace fusebackend::tile
