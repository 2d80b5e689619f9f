// Which kernels compute attention on a GPU, and where their intermediate results lie.
#include <algorithm>

#include "attention/attention.h"
#include "attention/launchers.h"
#include "common/device_properties.h"

namespace fusebackend::attention {
namespace {

constexpr int64_t kWorkspaceAlign = 256;  // bytes

// Parts of a workspace, one behind the other. Without memory it only counts.
class Workspace {
 public:
  explicit Workspace(void* data) : data_(static_cast<char*>(data)) {}
  void* take(int64_t bytes) {
    char* const part = data_ + used_;
    used_ += round_up(bytes, kWorkspaceAlign);
    return part;
  }
  int64_t used() const { return used_; }

 private:
  char* data_;
  int64_t used_ = 0;
};

// Puts a copy in the place of each bias whose rows can't be read in vectors; copies if `runs`.
cudaError_t align_biases(Problem& p, Workspace& workspace, bool runs, cudaStream_t stream) {
  const int64_t scores[5] = {p.size.b, p.size.g, p.size.h, p.size.t, p.size.s};
  for (int i = 0; i < p.biases; ++i) {
    Bias& bias = p.bias[i];
    if (has_vectors(bias, p.size.s)) continue;
    BiasCopy copy = {bias.data, nullptr, {}, {}, round_up(p.size.s, kBiasVector)};
    for (int d = 0; d < 5; ++d) {
      copy.size[d] = bias.stride[d] == 0 ? 1 : scores[d];
      copy.stride[d] = bias.stride[d];
    }
    int64_t step = copy.pitch;
    for (int d = 3; d >= 0; --d) {
      bias.stride[d] = copy.size[d] == 1 ? 0 : step;
      step *= copy.size[d];
    }
    bias.stride[4] = 1;
    copy.to = workspace.take(step * element_size(bias.dtype));
    bias.data = static_cast<const char*>(copy.to);
    if (!runs) continue;
    if (const cudaError_t error = launch_align_bias(copy, bias.dtype == DType::kFloat32, stream); error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

// The second step of the sum of bias i's gradient, if there is one.
cudaError_t add_partial_sums(const Backward& p, const HeadPlan& plan, int i, const float* partial_sums, cudaStream_t stream) {
  if (!needs_partial_sums(p, plan, i)) return cudaSuccess;
  const BiasGradient& to = p.dbias[i];
  return launch_add_partial_sums({partial_sums, to.data, plan.kept, plan.chunks, p.size.t, p.size.s, to.size[3] != p.size.t, to.size[4] != p.size.s},
                                 to.dtype, stream);
}

int64_t partial_sum_bytes(const Backward& p, const HeadPlan& plan, int i) {
  return needs_partial_sums(p, plan, i) ? plan.blocks() * p.size.t * p.size.s * int64_t(sizeof(float)) : 0;
}

// The launchers of the kernels for any length that suit the current device.
struct FlashLaunchers {
  decltype(&launch_flash_forward) forward = launch_flash_forward;
  decltype(&launch_flash_backward_keys) keys = launch_flash_backward_keys;
  decltype(&launch_flash_backward_queries) queries = launch_flash_backward_queries;
  decltype(&launch_flash_backward_bias) bias = launch_flash_backward_bias;

  explicit FlashLaunchers(const Problem& p) {
#ifdef FUSE_HAS_SM90A
    if (compute_capability_major() == 9 && std::max(p.size.d, p.size.dv) <= 64) {
      forward = launch_flash_forward_wgmma, keys = launch_flash_backward_keys_wgmma;
      queries = launch_flash_backward_queries_wgmma, bias = launch_flash_backward_bias_wgmma;
    }
#endif
  }
};

cudaError_t window_backward(const Backward& p, Workspace& workspace, bool runs, int sm_count, cudaStream_t stream) {
  bool done = false;
  for (int i = 0; i <= p.biases; ++i) {
    const bool wanted = i < p.biases && p.dbias[i].data;
    if (!wanted && (i < p.biases || done)) continue;
    const int summed = wanted ? i : -1;
    const HeadPlan plan = plan_window_backward(p, summed, sm_count);
    float* const sums = wanted ? static_cast<float*>(workspace.take(partial_sum_bytes(p, plan, i))) : nullptr;
    done = true;
    if (!runs) continue;
    cudaError_t error = launch_window_backward(p, summed, sums, sm_count, stream);
    if (error == cudaSuccess && wanted) error = add_partial_sums(p, plan, i, sums, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t flash_backward(Backward p, Workspace& workspace, bool runs, int sm_count, cudaStream_t stream) {
  if (const cudaError_t error = align_biases(p, workspace, runs, stream); error != cudaSuccess) return error;
  const FlashLaunchers launchers(p);
  const int64_t padded_t = round_up(p.size.t, int64_t(kRowSumTile)), rows = p.size.heads() * padded_t;
  const RowSums* row_sums = static_cast<RowSums*>(workspace.take(rows * int64_t(sizeof(RowSums))));
  const int* large_tiles = static_cast<int*>(workspace.take(rows / kRowSumTile * int64_t(sizeof(int))));
  const auto arguments = [&](const HeadPlan& plan) {
    Arguments a = backward_arguments(p, plan);
    a.row_sums = row_sums, a.large_tiles = large_tiles, a.padded_t = int(padded_t);
    return a;
  };

  int with_keys = -1;  // the bias whose gradient is summed by the kernel for dk and dv
  for (int i = p.biases - 1; i >= 0; --i)
    if (p.dbias[i].data && fits_in_keys_kernel(p)) with_keys = i;
  const HeadPlan plan = plan_keys_kernel(p, with_keys, sm_count);
  float* const sums = with_keys >= 0 ? static_cast<float*>(workspace.take(partial_sum_bytes(p, plan, with_keys))) : nullptr;
  if (runs) {
    Arguments a = arguments(plan);
    if (with_keys >= 0) sum_bias_gradient(a, p, plan, with_keys, sums);
    cudaError_t error = launch_row_sums(a, p.dtype, p.size.heads(), stream);
    if (error == cudaSuccess) error = launchers.keys(a, p, plan, with_keys >= 0, stream);
    if (error == cudaSuccess) error = launchers.queries(arguments(plan_keys_kernel(p, -1, sm_count)), p, stream);
    if (error == cudaSuccess && with_keys >= 0) error = add_partial_sums(p, plan, with_keys, sums, stream);
    if (error != cudaSuccess) return error;
  }
  for (int i = 0; i < p.biases; ++i) {
    if (!p.dbias[i].data || i == with_keys) continue;
    const HeadPlan own = plan_bias_kernel(p, i, sm_count);
    float* const own_sums = static_cast<float*>(workspace.take(partial_sum_bytes(p, own, i)));
    if (!runs) continue;
    Arguments a = arguments(own);
    sum_bias_gradient(a, p, own, i, own_sums);
    cudaError_t error = launchers.bias(a, p, own, stream);
    if (error == cudaSuccess) error = add_partial_sums(p, own, i, own_sums, stream);
    if (error != cudaSuccess) return error;
  }
  return cudaSuccess;
}

cudaError_t backward(const Backward& p, Workspace& workspace, bool runs, int sm_count, cudaStream_t stream) {
  return is_window(p) ? window_backward(p, workspace, runs, sm_count, stream) : flash_backward(p, workspace, runs, sm_count, stream);
}

}  // namespace

int64_t forward_workspace_bytes(const Forward& p) {
  Workspace workspace(nullptr);
  Forward copy = p;
  if (!is_window(p)) align_biases(copy, workspace, false, nullptr);
  return workspace.used();
}

cudaError_t launch_forward(const Forward& p, void* workspace, int sm_count, cudaStream_t stream) {
  if (is_window(p)) return launch_window_forward(p, sm_count, stream);
  Forward aligned = p;
  Workspace parts(workspace);
  if (const cudaError_t error = align_biases(aligned, parts, true, stream); error != cudaSuccess) return error;
  return FlashLaunchers(p).forward(aligned, stream);
}

int64_t backward_workspace_bytes(const Backward& p, int sm_count) {
  Workspace workspace(nullptr);
  backward(p, workspace, false, sm_count, nullptr);
  return workspace.used();
}

cudaError_t launch_backward(const Backward& p, void* workspace, int sm_count, cudaStream_t stream) {
  Workspace parts(workspace);
  return backward(p, parts, true, sm_count, stream);
}

}  // namespace fusebackend::attention
