// The family's operators, whose schemas are in fusebackend/patterns/index_add/ops.py, for a backend that knows two things:
//
//   Backend::sum(params, out)              runs the sum
//   Backend::sort(params, words, index)    writes the SortedIndex of params into `words`
//
// The tensors are there to say on which device.
#pragma once

#include "common/direct_call.h"
#include "index_add/make_params.h"

namespace fusebackend::index_add {

template <typename Backend>
struct Operators {
  using Optional = const std::optional<Tensor>&;

  static void index_add_(const Tensor& self, int64_t dim, const Tensor& index, const Tensor& source, Optional weight,
                         Optional source_index, double alpha, std::optional<int64_t> ignore_index, int64_t bounds, bool precise,
                         bool deterministic, Optional plan) {
    const Params p = make_params(
        self, self.data_ptr(), {dim, index, source, weight, source_index, alpha, ignore_index, bounds, precise, deterministic, plan});
    if (p.n > 0 && p.out_numel > 0) Backend::sum(p, self);
  }

  static Tensor index_add(const Tensor& self, int64_t dim, const Tensor& index, const Tensor& source, Optional weight,
                          Optional source_index, double alpha, std::optional<int64_t> ignore_index, int64_t bounds, bool precise,
                          bool deterministic, Optional plan) {
    STD_TORCH_CHECK(covers_memory(self), "index_add: self must be dense and non-overlapping");
    Tensor out = empty_strided_like(self, to_vector(self.sizes()), to_vector(self.strides()));
    const Params p = make_params(
        out, self.data_ptr(), {dim, index, source, weight, source_index, alpha, ignore_index, bounds, precise, deterministic, plan});
    if (p.out_numel > 0) Backend::sum(p, out);
    return out;
  }

  static Tensor index_add_zeros(int64_t rows, int64_t dim, const Tensor& index, const Tensor& source, Optional weight,
                                Optional source_index, double alpha, std::optional<int64_t> ignore_index, int64_t bounds, bool precise,
                                bool deterministic, Optional plan) {
    STD_TORCH_CHECK(rows >= 0, "index_add: a negative number of rows");
    std::vector<int64_t> sizes = to_vector(source.sizes());
    sizes[wrap_dim(dim, source.dim())] = rows;
    Tensor out = empty_like_sized(source, sizes);
    const Params p = make_params(
        out, nullptr, {dim, index, source, weight, source_index, alpha, ignore_index, bounds, precise, deterministic, plan});
    if (p.out_numel > 0) Backend::sum(p, out);
    return out;
  }

  static Tensor index_plan(const Tensor& index, int64_t rows, std::optional<int64_t> ignore_index, int64_t bounds, Optional source_index,
                           int64_t source_rows) {
    const Params p = make_index_params(index, rows, source_index, source_rows, ignore_index, bounds);
    check_sortable(p);
    const int64_t words = sorted_index_words(p);
    Tensor plan = empty_like_sized(index, {words}, ScalarType::Int);
    Backend::sort(p, static_cast<uint32_t*>(plan.data_ptr()), index);
    return plan;
  }

  static void implement(torch::stable::detail::StableLibrary& m, const char* key) {
    m.impl("index_add_", TORCH_BOX(&index_add_));
    direct::implement<&index_add>(m, key, "index_add");
    direct::implement<&index_add_zeros>(m, key, "index_add_zeros");
    direct::implement<&index_plan>(m, key, "index_plan");
  }
};

}  // namespace fusebackend::index_add
