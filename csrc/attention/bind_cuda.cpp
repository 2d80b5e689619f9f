#include "attention/binding.h"
#include "common/device_properties.h"
#include "common/workspace.h"

namespace fusebackend::attention {
namespace {

void check_device() {
  STD_TORCH_CHECK(compute_capability_major() >= 8 && max_shared_bytes() >= kMinSharedBytes, "attention: a GPU of compute capability 8.0 or later with ",
                  kMinSharedBytes, " bytes of shared memory a block is needed");
}

struct Cuda {
  static void mask_bits(const MaskBits& p, const Tensor& mask) {
    const CudaScope scope(mask);
    check_cuda(launch_mask_bits(p, scope.stream()), "attention_mask_bits");
  }
  static void forward(const Forward& p, const Tensor& q) {
    const CudaScope scope(q);
    check_device();
    const Workspace workspace(forward_workspace_bytes(p));
    check_cuda(launch_forward(p, workspace.data(), sm_count(), scope.stream()), "attention");
  }
  static void backward(const Backward& p, const Tensor& q) {
    const CudaScope scope(q);
    check_device();
    const int sms = sm_count();
    const Workspace workspace(backward_workspace_bytes(p, sms));
    check_cuda(launch_backward(p, workspace.data(), sms, scope.stream()), "attention_backward");
  }
};

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CUDA, m) { Operators<Cuda>::implement(m, "CUDA"); }

}  // namespace fusebackend::attention
