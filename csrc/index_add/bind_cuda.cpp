#include "common/workspace.h"
#include "index_add/bind.h"
#include "index_add/launch.h"

namespace fusebackend::index_add {
namespace {

struct Cuda {
  static void sum(const Params& p, const Tensor& out) {
    const CudaScope scope(out);
    const Device& device = current_device();
    const Plan plan = make_plan(p, device);
    const Workspace workspace(static_cast<int64_t>(plan.workspace_bytes));
    check_cuda(launch(p, plan, workspace.data(), device, scope.stream()), "index_add");
  }
  static void sort(const Params& p, uint32_t* words, const Tensor& index) {
    const CudaScope scope(index);
    const Device& device = current_device();
    const Workspace workspace(static_cast<int64_t>(sort_bytes(p, device)));
    check_cuda(launch_sort(p, words, workspace.data(), device, scope.stream()), "index_plan");
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CUDA, m) { Operators<Cuda>::implement(m, "CUDA"); }

}  // namespace fusebackend::index_add
