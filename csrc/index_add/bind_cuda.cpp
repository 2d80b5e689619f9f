#include "bind.h"
#include "launch.h"

// CPU builds of torch lack these: weak, so that the library loads there too.
#pragma weak aoti_torch_cuda_caching_allocator_raw_alloc
#pragma weak aoti_torch_cuda_caching_allocator_raw_delete

namespace fusebackend::accumulate {
namespace {

// Memory from torch's allocator for the length of a call: given back in stream order. Not a tensor: those the deterministic mode fills.
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

// On the current stream of out's device.
auto runner(const Tensor& like) {
  return [&like](const Params& p) {
    const CudaScope scope(like);
    Device device;
    check_cuda(query_device(device), "index_add");
    const Plan plan = make_plan(p, device);
    const Workspace workspace(plan.workspace_bytes);
    check_cuda(launch(p, plan, workspace.data(), device, scope.stream()), "index_add");
  };
}

void index_add_(const Tensor& self, FUSEBACKEND_INDEX_ADD_OPTIONS) { index_add_in_place(self, FUSEBACKEND_INDEX_ADD_FORWARD, runner(self)); }
Tensor index_add(const Tensor& self, FUSEBACKEND_INDEX_ADD_OPTIONS) { return index_add_onto(self, FUSEBACKEND_INDEX_ADD_FORWARD, runner(self)); }
Tensor index_add_zeros(int64_t rows, FUSEBACKEND_INDEX_ADD_OPTIONS) {
  return index_add_onto_zeros(rows, FUSEBACKEND_INDEX_ADD_FORWARD, runner(source));
}

Tensor index_plan(const Tensor& index, int64_t rows, std::optional<int64_t> ignore_index, int64_t bounds,
                  const std::optional<Tensor>& source_index, int64_t source_rows) {
  return make_index_plan(index, rows, ignore_index, bounds, source_index, source_rows, [&](const Params& p, int32_t* plan) {
    const CudaScope scope(index);
    Device device;
    check_cuda(query_device(device), "index_plan");
    const Workspace workspace(sort_bytes(p, device));
    check_cuda(launch_plan(p, plan, workspace.data(), device, scope.stream()), "index_plan");
  });
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CUDA, m) {
  m.impl("index_add_", TORCH_BOX(&index_add_));
  m.impl("index_add", TORCH_BOX(&index_add));
  m.impl("index_add_zeros", TORCH_BOX(&index_add_zeros));
  m.impl("index_plan", TORCH_BOX(&index_plan));
}

}  // namespace fusebackend::accumulate
