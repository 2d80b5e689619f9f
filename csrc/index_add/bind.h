// From tensors to accumulate Params; shared by the CPU and CUDA bindings.
//
//   fusebackend::index_add_(Tensor(a!) self, int dim, Tensor index, Tensor source, Tensor? weight, Tensor? source_index, float alpha,
//                           int? ignore_index, int bounds, bool precise, bool deterministic, Tensor? plan=None) -> ()
//   fusebackend::index_add(Tensor self, <the same>) -> Tensor               laid out as self, which is dense
//   fusebackend::index_add_zeros(SymInt rows, <the same>) -> Tensor         onto zeros, contiguous
//   fusebackend::index_plan(Tensor index, SymInt rows, int? ignore_index, int bounds, Tensor? source_index, SymInt source_rows) -> Tensor
#pragma once

#include <optional>

#include "../common/binding.h"
#include "accumulate.h"

namespace fusebackend::accumulate {

struct Options {
  int64_t dim;
  Tensor index, source;
  std::optional<Tensor> weight, source_index;
  double alpha;
  std::optional<int64_t> ignore_index;
  int64_t bounds;
  bool precise, deterministic;
  std::optional<Tensor> plan;
};

inline DType to_dtype(ScalarType t) {
  switch (t) {
    case ScalarType::Double: return DType::kFloat64;
    case ScalarType::Float: return DType::kFloat32;
    case ScalarType::Half: return DType::kFloat16;
    case ScalarType::BFloat16: return DType::kBFloat16;
    case ScalarType::Long: return DType::kInt64;
    case ScalarType::Int: return DType::kInt32;
    case ScalarType::Short: return DType::kInt16;
    case ScalarType::Char: return DType::kInt8;
    case ScalarType::Byte: return DType::kUInt8;
    default: STD_TORCH_CHECK(false, "index_add: dtype is not supported");
  }
}

inline RowVector row_vector(const Tensor& t, int64_t n, const char* name) {
  STD_TORCH_CHECK(t.dim() == 1 && t.size(0) == n, "index_add: ", name, " must have one entry for each of the ", n, " rows of source");
  return {t.data_ptr(), t.stride(0), t.scalar_type() == ScalarType::Long};
}

// An uninitialised int32 vector on the device of `like`.
inline Tensor empty_int32_on(const Tensor& like, int64_t size) {
  int32_t device_type, device_index;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  const int64_t stride = 1;
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, &size, &stride, aoti_torch_dtype_int32(), device_type, device_index, &handle));
  return Tensor(handle);
}

inline void check_index(const Tensor& t) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Long || t.scalar_type() == ScalarType::Int, "index_add: indices must be int32 or int64");
}

inline void set_bounds(Params& p, int64_t bounds) {
  constexpr int64_t kSourceStrict = 4;
  STD_TORCH_CHECK(bounds >= 0 && bounds % kSourceStrict <= 2 && bounds < 2 * kSourceStrict,
                  "index_add: bounds must be 0 (strict), 1 (wrap) or 2 (drop), plus 4 if negative source indices are errors");
  p.bounds = Bounds(bounds % kSourceStrict);
  p.source_wraps = bounds < kSourceStrict;
}

inline void check_plan(const Tensor& t, const Params& p) {
  const int64_t words = plan_words(p.n, p.rows, p.source_index.data);
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int && t.dim() == 1 && t.size(0) == words && t.stride(0) == 1,
                  "index_add: the plan is of another index, or for another number of rows");
}

// `out` gets the sums; what it starts from is `initial`: none (zeros), out itself, or a tensor of the same layout.
inline Params make_params(const Tensor& out, const void* initial, const Options& o) {
  const int64_t rank = out.dim(), dim = o.dim < 0 ? o.dim + rank : o.dim;
  STD_TORCH_CHECK(dim >= 0 && dim < rank, "index_add: dimension ", o.dim, " of a tensor with ", rank);
  STD_TORCH_CHECK(o.source.dim() == rank, "index_add: self and source must have the same number of dimensions");
  STD_TORCH_CHECK(rank <= kMaxSliceDims + 1, "index_add: at most ", kMaxSliceDims + 1, " dimensions");
  STD_TORCH_CHECK(out.scalar_type() == o.source.scalar_type(), "index_add: self and source must have the same dtype");
  check_index(o.index);
  Params p;
  p.dtype = to_dtype(out.scalar_type());
  p.out = out.data_ptr();
  p.initial = initial;
  p.source = o.source.data_ptr();
  p.n = o.index.size(0);
  p.rows = out.size(dim);
  p.source_rows = o.source.size(dim);
  p.index = row_vector(o.index, p.n, "index");
  if (o.source_index) {
    check_index(*o.source_index);
    p.source_index = row_vector(*o.source_index, p.n, "source_index");
  } else {
    STD_TORCH_CHECK(p.source_rows == p.n, "index_add: ", p.n, " indices for ", p.source_rows, " rows of source");
  }
  if (o.weight) {
    STD_TORCH_CHECK(o.weight->scalar_type() == o.source.scalar_type(), "index_add: weight and source must have the same dtype");
    p.weight = row_vector(*o.weight, p.n, "weight");
  }
  p.out_row_stride = out.stride(dim);
  p.source_row_stride = o.source.stride(dim);
  for (int64_t d = 0; d < rank; ++d) {
    if (d == dim) continue;
    STD_TORCH_CHECK(out.size(d) == o.source.size(d), "index_add: self and source differ in dimension ", d, ": ", out.size(d), " and ",
                    o.source.size(d));
    STD_TORCH_CHECK(out.size(d) <= 1 || out.stride(d) != 0, "index_add: self must not be expanded");
    p.dims[p.n_dims++] = {out.size(d), out.stride(d), o.source.stride(d)};
  }
  STD_TORCH_CHECK(p.rows <= 1 || p.out_row_stride != 0, "index_add: self must not be expanded");
  p.out_numel = out.numel();
  p.alpha = o.alpha;
  set_bounds(p, o.bounds);
  p.has_ignore = o.ignore_index.has_value();
  p.ignore = o.ignore_index.value_or(0);
  p.precise = o.precise;
  p.deterministic = o.deterministic;
  STD_TORCH_CHECK(p.rows > 0 || p.n == 0 || p.bounds == Bounds::kDrop, "index_add: every index is out of range of a dimension of size 0");
  STD_TORCH_CHECK(!(p.deterministic || p.precise || o.plan) || (p.n < INT32_MAX && p.rows < INT32_MAX && p.source_rows < UINT32_MAX),
                  "index_add: deterministic, precise and planned sums take fewer than 2^31 entries and rows");
  if (o.plan) {
    check_plan(*o.plan, p);
    p.plan = o.plan->data_ptr();
  }
  collapse(p);
  return p;
}

// Whether the tensor covers one gapless stretch of memory, in whatever order of dimensions: it can then be initialised as a whole.
inline bool is_dense(const Tensor& t) {
  if (t.numel() < 2) return true;
  int64_t extent = 1;
  for (int64_t d = 0; d < t.dim(); ++d) {
    if (t.size(d) == 1) continue;
    if (t.stride(d) == 0) return false;
    extent += (t.size(d) - 1) * t.stride(d);
  }
  return extent == t.numel();
}

// The three ops; `run(params)` does the work.
template <typename Run>
void index_add_in_place(const Tensor& self, const Options& o, Run run) {
  const Params p = make_params(self, self.data_ptr(), o);
  if (p.n > 0 && p.out_numel > 0) run(p);
}

template <typename Run>
Tensor index_add_onto(const Tensor& self, const Options& o, Run run) {
  STD_TORCH_CHECK(is_dense(self), "index_add: self must be dense and non-overlapping");
  Tensor out = empty_strided_like(self, to_vector(self.sizes()), to_vector(self.strides()));
  const Params p = make_params(out, self.data_ptr(), o);
  if (p.out_numel > 0) run(p);
  return out;
}

template <typename Run>
Tensor index_add_onto_zeros(int64_t rows, const Options& o, Run run) {
  std::vector<int64_t> sizes = to_vector(o.source.sizes());
  const int64_t rank = int64_t(sizes.size()), dim = o.dim < 0 ? o.dim + rank : o.dim;
  STD_TORCH_CHECK(dim >= 0 && dim < rank, "index_add: dim out of range");
  sizes[dim] = rows;
  Tensor out = empty_like_sized(o.source, sizes);
  const Params p = make_params(out, nullptr, o);
  if (p.out_numel > 0) run(p);
  return out;
}

// The plan of an index; `run(params, plan's memory)` makes it.
template <typename Run>
Tensor make_index_plan(const Tensor& index, int64_t rows, std::optional<int64_t> ignore_index, int64_t bounds,
                       const std::optional<Tensor>& source_index, int64_t source_rows, Run run) {
  check_index(index);
  STD_TORCH_CHECK(index.dim() == 1 && index.size(0) < INT32_MAX && rows < INT32_MAX, "index_plan: fewer than 2^31 entries and rows");
  Params p;
  p.n = index.size(0);
  p.rows = rows;
  p.index = row_vector(index, p.n, "index");
  set_bounds(p, bounds);
  p.has_ignore = ignore_index.has_value();
  p.ignore = ignore_index.value_or(0);
  p.source_rows = source_rows;
  if (source_index) {
    check_index(*source_index);
    p.source_index = row_vector(*source_index, p.n, "source_index");
    STD_TORCH_CHECK(source_rows < UINT32_MAX, "index_plan: fewer than 2^32 source rows");
  }
  STD_TORCH_CHECK(p.rows > 0 || p.n == 0 || p.bounds == Bounds::kDrop, "index_plan: every index is out of range of a dimension of size 0");
  Tensor plan = empty_int32_on(index, plan_words(p.n, p.rows, p.source_index.data));
  run(p, static_cast<int32_t*>(plan.data_ptr()));
  return plan;
}

#define FUSEBACKEND_INDEX_ADD_OPTIONS                                                                                                     \
  int64_t dim, const Tensor &index, const Tensor &source, const std::optional<Tensor>&weight, const std::optional<Tensor>&source_index, \
      double alpha, std::optional<int64_t> ignore_index, int64_t bounds, bool precise, bool deterministic, \
      const std::optional<Tensor>&plan
#define FUSEBACKEND_INDEX_ADD_FORWARD \
  Options { dim, index, source, weight, source_index, alpha, ignore_index, bounds, precise, deterministic, plan }

}  // namespace fusebackend::accumulate
