#include "common/device_properties.h"
#include "common/direct_call.h"
#include "common/workspace.h"
#include "row_scatter/binding.h"

namespace fusebackend::row_scatter {
namespace {

Tensor row_scatter(const Tensor& source, const Tensor& index, int64_t bins, std::optional<Tensor> self) {
  Tensor out = source;
  const Problem p = describe(source, index, bins, self, out);
  if (out.numel() == 0) return out;
  const CudaScope scope(source);
  const Plan plan = make_plan(p, sm_count(), max_shared_bytes(), int(reinterpret_cast<uintptr_t>(p.source) % 16));
  const Workspace workspace(plan.workspace_bytes);
  check_cuda(launch(p, plan, workspace.data(), scope.stream()), "row_scatter");
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CUDA, m) { direct::implement<&row_scatter>(m, "CUDA", "row_scatter"); }

}  // namespace fusebackend::row_scatter
