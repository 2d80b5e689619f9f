// What both bindings do: check the arguments of small_bmm, and describe the products.
#pragma once

#include <optional>
#include <vector>

#include "common/binding.h"
#include "small_bmm/small_bmm.h"

namespace fusebackend::small_bmm {

enum class Order { kRows, kColumns };

// How matrices that follow one another without a gap lie in memory; none if they do not. Dims of size 1 have no place.
inline std::optional<Order> order_of(const std::vector<int64_t>& sizes, const std::vector<int64_t>& strides) {
  const auto lies = [&](int64_t row, int64_t column) {
    return (sizes[0] == 1 || strides[0] == sizes[1] * sizes[2]) && (sizes[1] == 1 || strides[1] == row) &&
           (sizes[2] == 1 || strides[2] == column);
  };
  if (lies(sizes[2], 1)) return Order::kRows;
  if (lies(1, sizes[1])) return Order::kColumns;
  return std::nullopt;
}

inline Problem describe(const std::vector<int64_t>& a_sizes, const std::vector<int64_t>& a_strides, const std::vector<int64_t>& b_sizes,
                        const std::vector<int64_t>& b_strides, ScalarType dtype) {
  STD_TORCH_CHECK(a_sizes.size() == 3 && b_sizes.size() == 3, "small_bmm: a and b are batches of matrices, with three dims");
  STD_TORCH_CHECK(a_sizes[0] == b_sizes[0] && a_sizes[2] == b_sizes[1], "small_bmm: a and b do not fit to one another");
  const std::optional<DType> type = to_dtype(dtype);
  STD_TORCH_CHECK(type && (*type == DType::kFloat32 || is_half(*type)), "small_bmm: dtype is not supported");
  const int64_t m = a_sizes[1], k = a_sizes[2], n = b_sizes[2];
  Problem p{};
  for (int64_t size : {m, n, k}) p.is_small = p.is_small && 1 <= size && size <= kMostSize;
  p.batch = a_sizes[0], p.dtype = *type;
  if (!p.is_small) return p;
  p.m = int(m), p.n = int(n), p.k = int(k);
  p.a_transposed = order_of(a_sizes, a_strides) == Order::kColumns, p.b_transposed = order_of(b_sizes, b_strides) == Order::kColumns;
  return p;
}

// Matrices that lie otherwise are copied: graphs are not rewritten for such, but PyTorch may give a tensor other strides than it said before.
inline void make_dense(Tensor& x) {
  if (x.dim() == 3 && !order_of(to_vector(x.sizes()), to_vector(x.strides()))) x = torch::stable::contiguous(x);
}

inline Problem describe(Tensor& a, Tensor& b) {
  STD_TORCH_CHECK(a.scalar_type() == b.scalar_type(), "small_bmm: a and b have one dtype");
  STD_TORCH_CHECK(on_same_device(a, b), "small_bmm: a and b are on one device");
  make_dense(a), make_dense(b);
  Problem p = describe(to_vector(a.sizes()), to_vector(a.strides()), to_vector(b.sizes()), to_vector(b.strides()), a.scalar_type());
  p.a = a.data_ptr(), p.b = b.data_ptr();
  return p;
}

}  // namespace fusebackend::small_bmm
