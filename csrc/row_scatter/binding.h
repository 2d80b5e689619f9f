// What both bindings do: check the arguments of row_scatter, and describe the sum.
#pragma once

#include "common/binding.h"
#include "row_scatter/row_scatter.h"

namespace fusebackend::row_scatter {

using Sizes = std::vector<int64_t>;

// The sums of a source of these sizes and strides, without its memory. Refuses what `_fake` in patterns/row_scatter/ops.py refuses.
inline Problem describe(const Sizes& sizes, const Sizes& strides, const Sizes& index_sizes, const Sizes& index_strides, int64_t bins,
                        ScalarType dtype) {
  const int64_t rank = static_cast<int64_t>(sizes.size());
  STD_TORCH_CHECK(rank > 0 && rank <= kMostDims, "row_scatter: ", rank, " dimensions; 1 to ", kMostDims, " are accepted");
  STD_TORCH_CHECK(index_sizes.size() == sizes.size(), "row_scatter: source and index differ in rank");
  const std::optional<DType> type = to_dtype(dtype);
  STD_TORCH_CHECK(type && is_floating(*type) && *type != DType::kFloat64, "row_scatter: a dtype that is not supported");
  STD_TORCH_CHECK(bins >= 0 && bins <= kMostRow && sizes[rank - 1] <= kMostRow, "row_scatter: rows may have up to ", kMostRow, " elements");
  const auto index_stride = [&](int64_t d) {
    STD_TORCH_CHECK(index_sizes[d] == sizes[d] || index_sizes[d] == 1, "row_scatter: the index does not broadcast to the source");
    return index_sizes[d] == 1 ? 0 : index_strides[d];
  };
  Problem p{};
  p.dtype = *type;
  p.sources = sizes[rank - 1], p.bins = bins;
  p.source_step = strides[rank - 1], p.index_step = index_stride(rank - 1);
  Sizes out_strides(rank);
  int64_t out_stride = bins;
  for (int64_t d = rank - 1; d-- > 0; out_stride *= sizes[d]) out_strides[d] = out_stride;
  for (int64_t d = 0; d + 1 < rank; ++d) {
    const Dim dim{sizes[d], strides[d], out_strides[d], index_stride(d)};
    if (dim.size == 1) continue;
    Dims& dims = dim.index_stride == 0 ? p.shared : p.own;
    dims.dim[dims.count++] = dim;
  }
  STD_TORCH_CHECK(p.own.size() * p.shared.size() * p.sources == 0 || bins > 0,
                  "row_scatter: every index is out of range of a dimension of size 0");
  // Rows that lie beside one another in the source follow one another.
  for (int d = 0; d < p.own.count; ++d) {
    if (p.source_step == 1 || p.own.dim[d].source_stride != 1) continue;
    const Dim across = p.own.dim[d];
    for (; d + 1 < p.own.count; ++d) p.own.dim[d] = p.own.dim[d + 1];
    p.own.dim[d] = across;
  }
  return p;
}

// The same of tensors. `self` becomes contiguous; `out` is the result, which is contiguous.
inline Problem describe(const Tensor& source, const Tensor& index, int64_t bins, std::optional<Tensor>& self, Tensor& out) {
  STD_TORCH_CHECK(index.scalar_type() == ScalarType::Long || index.scalar_type() == ScalarType::Int,
                  "row_scatter: the index must be int32 or int64");
  STD_TORCH_CHECK(on_same_device(source, index) && (!self || on_same_device(source, *self)), "row_scatter: tensors on several devices");
  Problem p = describe(to_vector(source.sizes()), to_vector(source.strides()), to_vector(index.sizes()), to_vector(index.strides()), bins,
                       source.scalar_type());
  Sizes sizes = to_vector(source.sizes());
  sizes.back() = bins;
  if (self) {
    STD_TORCH_CHECK(self->scalar_type() == source.scalar_type() && to_vector(self->sizes()) == sizes,
                    "row_scatter: self must have the dtype of the source and the shape of the result");
    self = torch::stable::contiguous(*self);
  }
  out = empty_like_sized(source, sizes);
  p.source = source.data_ptr(), p.index = index.data_ptr(), p.self = self ? self->data_ptr() : nullptr, p.out = out.data_ptr();
  p.index_is_64 = index.scalar_type() == ScalarType::Long;
  return p;
}

}  // namespace fusebackend::row_scatter
