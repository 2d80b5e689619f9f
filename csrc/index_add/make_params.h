// From tensors to Params: what the operators require of their arguments is checked here.
#pragma once

#include <algorithm>

#include "common/binding.h"
#include "index_add/params.h"

namespace fusebackend::index_add {

// What the operators are given besides what they add to; see fusebackend/patterns/index_add/ops.py.
struct Options {
  int64_t dim;
  const Tensor& index;
  const Tensor& source;
  const std::optional<Tensor>& weight;
  const std::optional<Tensor>& source_index;
  double alpha;
  std::optional<int64_t> ignore_index;
  int64_t bounds;
  bool precise, deterministic;
  const std::optional<Tensor>& sorted_index;
};

inline int64_t wrap_dim(int64_t dim, int64_t rank) {
  const int64_t wrapped = dim < 0 ? dim + rank : dim;
  STD_TORCH_CHECK(wrapped >= 0 && wrapped < rank, "index_add: dimension ", dim, " of a tensor with ", rank);
  return wrapped;
}

inline void check_device(const Tensor& t, const Tensor& like, const char* name) {
  STD_TORCH_CHECK(on_same_device(t, like), "index_add: ", name, " is on another device");
}

inline EntryVector entry_vector(const Tensor& t, int64_t n, const char* name) {
  STD_TORCH_CHECK(t.dim() == 1 && t.size(0) == n, "index_add: ", name, " must have one element for each of the ", n, " entries");
  return {t.data_ptr(), t.stride(0), t.scalar_type() == ScalarType::Long};
}
inline EntryVector index_vector(const Tensor& t, int64_t n, const char* name) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Long || t.scalar_type() == ScalarType::Int, "index_add: indices must be int32 or int64");
  return entry_vector(t, n, name);
}

// The part of Params that says what an entry means.
inline Params make_index_params(const Tensor& index, int64_t rows, const std::optional<Tensor>& source_index, int64_t source_rows,
                                std::optional<int64_t> ignore_index, int64_t bounds) {
  constexpr int64_t kSourceStrict = 4;  // added to a Bounds
  STD_TORCH_CHECK(bounds >= 0 && bounds % kSourceStrict <= int64_t(Bounds::kDrop) && bounds < 2 * kSourceStrict,
                  "index_add: bounds must be 0 (strict), 1 (wrap) or 2 (drop), plus 4 if negative source indices are errors");
  STD_TORCH_CHECK(index.dim() == 1, "index_add: index must have one dimension");
  STD_TORCH_CHECK(rows >= 0 && source_rows >= 0, "index_add: a negative number of rows");
  Params p;
  p.n = index.size(0);
  p.rows = rows;
  p.source_rows = source_rows;
  p.index = index_vector(index, p.n, "index");
  if (source_index) {
    check_device(*source_index, index, "source_index");
    p.source_index = index_vector(*source_index, p.n, "source_index");
  }
  p.bounds = Bounds(bounds % kSourceStrict);
  p.source_wraps = bounds < kSourceStrict;
  p.has_ignore = ignore_index.has_value();
  p.ignore = ignore_index.value_or(0);
  STD_TORCH_CHECK(rows > 0 || p.n == 0 || p.bounds == Bounds::kDrop, "index_add: every index is out of range of a dimension of size 0");
  STD_TORCH_CHECK(!source_index || source_rows > 0 || p.n == 0, "index_add: every source index is out of range of a dimension of size 0");
  return p;
}

inline void check_sortable(const Params& p) {
  STD_TORCH_CHECK(p.n < INT32_MAX && p.rows < INT32_MAX && p.source_rows < UINT32_MAX,
                  "index_add: deterministic, precise and planned sums take fewer than 2^31 entries and rows");
}

// Sorts the slice dimensions by falling stride in out, and merges neighbours where both tensors allow it.
inline void merge_slice_dims(Params& p) {
  SliceDim* const end = std::remove_if(p.dims, p.dims + p.n_dims, [](const SliceDim& d) { return d.size == 1; });
  std::sort(p.dims, end, [](const SliceDim& a, const SliceDim& b) { return a.out_stride > b.out_stride; });
  if (end == p.dims) p.dims[0] = {1, 1, 1};
  SliceDim* last = p.dims;
  for (const SliceDim* d = last + 1; d < end; ++d) {
    const bool merges = last->out_stride == d->out_stride * d->size && last->source_stride == d->source_stride * d->size;
    if (merges)
      *last = {last->size * d->size, d->out_stride, d->source_stride};
    else
      *++last = *d;
  }
  p.n_dims = int(last - p.dims) + 1;
}

// The sums go into `out`. `initial` is what they start from: out's own memory, that of a tensor with out's layout, or nullptr for zeros.
inline Params make_params(const Tensor& out, const void* initial, const Options& o) {
  const int64_t rank = out.dim(), dim = wrap_dim(o.dim, rank);
  STD_TORCH_CHECK(o.source.dim() == rank, "index_add: self and source must have the same number of dimensions");
  STD_TORCH_CHECK(rank <= kMaxSliceDims + 1, "index_add: at most ", kMaxSliceDims + 1, " dimensions");
  STD_TORCH_CHECK(out.scalar_type() == o.source.scalar_type(), "index_add: self and source must have the same dtype");
  const std::optional<DType> dtype = to_dtype(out.scalar_type());
  STD_TORCH_CHECK(dtype.has_value(), "index_add: dtype is not supported");
  check_device(o.source, out, "source");
  check_device(o.index, out, "index");
  Params p = make_index_params(o.index, out.size(dim), o.source_index, o.source.size(dim), o.ignore_index, o.bounds);
  p.dtype = *dtype;
  p.out = out.data_ptr();
  p.initial = initial;
  p.source = o.source.data_ptr();
  STD_TORCH_CHECK(o.source_index || p.source_rows == p.n, "index_add: ", p.n, " indices for ", p.source_rows, " rows of source");
  if (o.weight) {
    check_device(*o.weight, out, "weight");
    STD_TORCH_CHECK(o.weight->scalar_type() == o.source.scalar_type(), "index_add: weight and source must have the same dtype");
    p.weight = entry_vector(*o.weight, p.n, "weight");
  }
  p.out_row_stride = out.stride(dim);
  p.source_row_stride = o.source.stride(dim);
  for (int64_t d = 0; d < rank; ++d) {
    STD_TORCH_CHECK(out.size(d) <= 1 || out.stride(d) != 0, "index_add: self must not be expanded");
    if (d == dim) continue;
    STD_TORCH_CHECK(out.size(d) == o.source.size(d), "index_add: self and source differ in dimension ", d, ": ", out.size(d), " and ",
                    o.source.size(d));
    p.dims[p.n_dims++] = {out.size(d), out.stride(d), o.source.stride(d)};
  }
  merge_slice_dims(p);
  p.out_numel = out.numel();
  p.alpha = o.alpha;
  p.precise = o.precise;
  p.deterministic = o.deterministic;
  if (p.deterministic || p.precise || o.sorted_index) check_sortable(p);
  if (o.sorted_index) {
    const Tensor& t = *o.sorted_index;
    check_device(t, out, "plan");
    STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int && t.dim() == 1 && t.size(0) == sorted_index_words(p) && t.stride(0) == 1,
                    "index_add: the plan is of another index, or for another number of rows");
    p.sorted_index = t.data_ptr();
  }
  return p;
}

}  // namespace fusebackend::index_add
