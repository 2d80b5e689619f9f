#include "column_sum/binding.h"
#include "common/device_properties.h"

namespace fusebackend::column_sum {
namespace {

struct Cuda {
  static void run(const Problem& p, const Tensor& like) {
    const CudaScope scope(like);
    const Plan plan = make_plan(p, sm_count());
    const int64_t partials = plan.partials(p) * p.sums();
    std::optional<Tensor> sums;
    if (partials > 0) sums = empty_like_sized(like, {partials}, p.in_fp64() ? ScalarType::Double : ScalarType::Float);
    check_cuda(launch(p, plan, sums ? sums->data_ptr() : nullptr, scope.stream()), "column_sum");
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CUDA, m) {
  m.impl("column_sum", TORCH_BOX(&Operators<Cuda>::column_sum));
  m.impl("column_sums", TORCH_BOX(&Operators<Cuda>::column_sums));
}

}  // namespace fusebackend::column_sum
