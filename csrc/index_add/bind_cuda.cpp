#include "index_add/bind.h"
#include "index_add/launch.h"

// CPU builds of torch lack these: weak, so that the library loads there too.
#pragma weak aoti_torch_cuda_caching_allocator_raw_alloc
#pragma weak aoti_torch_cuda_caching_allocator_raw_delete

namespace fusebackend::index_add {
namespace {

// Memory from torch's allocator for the length of a call: it is given back in stream order. Not a tensor, which torch fills where it is
// asked to be deterministic.
class Workspace {
 public:
  explicit Workspace(size_t bytes) {
    if (bytes > 0) check_allocated(aoti_torch_cuda_caching_allocator_raw_alloc(bytes, &data_));
  }
  ~Workspace() {
    if (data_) aoti_torch_cuda_caching_allocator_raw_delete(data_);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
};

struct Cuda {
  static void sum(const Params& p, const Tensor& out) {
    const CudaScope scope(out);
    const Device& device = current_device();
    const Plan plan = make_plan(p, device);
    const Workspace workspace(plan.workspace_bytes);
    check_cuda(launch(p, plan, workspace.data(), device, scope.stream()), "index_add");
  }
  static void sort(const Params& p, uint32_t* words, const Tensor& index) {
    const CudaScope scope(index);
    const Device& device = current_device();
    const Workspace workspace(sort_bytes(p, device));
    check_cuda(launch_sort(p, words, workspace.data(), device, scope.stream()), "index_plan");
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CUDA, m) { Operators<Cuda>::implement(m); }

}  // namespace fusebackend::index_add
