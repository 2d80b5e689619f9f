#include "column_sum/binding.h"

namespace fusebackend::column_sum {
namespace {

Tensor column_sum(const Tensor& given, int64_t begin, int64_t end, bool mean, ScalarType dtype) {
  Tensor x = given;
  Problem p = describe(x, begin, end, mean, dtype);
  Tensor out = make_result(p, x, begin, end, dtype);
  if (p.batch * p.columns == 0) return out;
  const CpuPlan plan = make_cpu_plan(p);
  std::vector<double> partials(p.batch * plan.chunks * plan.fold * p.columns);
  torch::stable::parallel_for(0, p.batch * plan.chunks, 1,
                              [&](int64_t first, int64_t last) { sum_chunks_cpu(p, plan, partials.data(), first, last); });
  constexpr int64_t kGrain = 1024;  // results
  torch::stable::parallel_for(0, p.batch * p.columns, kGrain,
                              [&](int64_t first, int64_t last) { sum_partials_cpu(p, plan, partials.data(), first, last); });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CPU, m) { m.impl("column_sum", TORCH_BOX(&column_sum)); }

}  // namespace fusebackend::column_sum
