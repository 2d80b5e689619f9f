#include "column_sum/binding.h"
#include "common/device_properties.h"
#include "common/direct_call.h"
#include "common/workspace.h"

namespace fusebackend::column_sum {
namespace {

struct Cuda {
  static void run(const Problem& p, const Tensor& like) {
    const CudaScope scope(like);
    const Plan plan = make_plan(p, sm_count());
    const Workspace partials(plan.partials(p) * p.sums() * (p.in_fp64() ? sizeof(double) : sizeof(float)));
    check_cuda(launch(p, plan, partials.data(), scope.stream()), "column_sum");
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CUDA, m) {
  direct::implement<&Operators<Cuda>::column_sum>(m, "CUDA", "column_sum");
  direct::implement<&Operators<Cuda>::column_sums>(m, "CUDA", "column_sums");
}

}  // namespace fusebackend::column_sum
