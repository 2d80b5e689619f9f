#include "column_sum/binding.h"
#include "common/device_properties.h"

namespace fusebackend::column_sum {
namespace {

Tensor column_sum(const Tensor& given, int64_t begin, int64_t end, bool mean, ScalarType dtype) {
  Tensor x = given;
  Problem p = describe(x, begin, end, mean, dtype);
  Tensor out = make_result(p, x, begin, end, dtype);
  if (p.batch * p.columns == 0) return out;
  const CudaScope scope(x);
  const Plan plan = make_plan(p, sm_count());
  const int64_t partials = plan.partials(p);
  std::optional<Tensor> sums;
  if (partials > 0) sums = empty_like_sized(x, {partials}, p.in_fp64() ? ScalarType::Double : ScalarType::Float);
  check_cuda(launch(p, plan, sums ? sums->data_ptr() : nullptr, scope.stream()), "column_sum");
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CUDA, m) { m.impl("column_sum", TORCH_BOX(&column_sum)); }

}  // namespace fusebackend::column_sum
