#include "column_moments/binding.h"
#include "common/device_properties.h"
#include "common/direct_call.h"
#include "common/workspace.h"

namespace fusebackend::column_moments {
namespace {

std::tuple<Tensor, Tensor, Tensor> column_moments(const Tensor& given, int64_t begin, int64_t end, double correction, double epsilon,
                                                  ScalarType dtype) {
  Tensor x = given;
  const Results found = make(x, begin, end, correction, epsilon, dtype);
  const column_sum::Problem& rows = found.p.rows;
  if (rows.batch * rows.columns == 0) return found.tensors;
  const CudaScope scope(x);
  const column_sum::Plan plan = column_sum::make_plan(rows, sm_count());
  const Workspace partials(2 * plan.partials(rows) * (rows.in_fp64() ? sizeof(double) : sizeof(float)));
  check_cuda(launch(found.p, plan, partials.data(), scope.stream()), "column_moments");
  return found.tensors;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CUDA, m) { direct::implement<&column_moments>(m, "CUDA", "column_moments"); }

}  // namespace fusebackend::column_moments
