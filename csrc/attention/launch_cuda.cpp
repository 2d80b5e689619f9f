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

bool uses_wgmma(const Problem& p) {
#ifdef FUSE_HAS_SM90A
  return uses_wgmma(p, compute_capability_major());
#else
  return false;
#endif
}

// The launchers of the kernels for any length and any biases that suit the current device.
struct FlashLaunchers {
  decltype(&launch_flash_forward) forward = launch_flash_forward;
  decltype(&launch_flash_backward_keys) keys = launch_flash_backward_keys;
  decltype(&launch_flash_backward_queries) queries = launch_flash_backward_queries;
  decltype(&launch_flash_backward_bias) bias = launch_flash_backward_bias;

  explicit FlashLaunchers(const Problem& p) {
#ifdef FUSE_HAS_SM90A
    if (uses_wgmma(p)) {
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

// What the backward kernels for any length share.
struct FlashBackward {
  Backward p;  // with aligned biases
  const RowSums* row_sums;
  const int* special_tiles;
  Workspace& workspace;
  bool runs;
  int sm_count;
  cudaStream_t stream;

  Arguments arguments(const HeadPlan& plan) const {
    Arguments a = backward_arguments(p, plan);
    a.row_sums = row_sums, a.special_tiles = special_tiles;
    return a;
  }
  HeadPlan single_heads() const { return plan_keys_kernel(p, -1, sm_count); }
};

// dk, dv, dq and the gradient of the bias `summed`, none if negative, by the kernels for any biases.
cudaError_t any_gradients(const FlashBackward& f, const FlashLaunchers& launchers, int summed) {
  const Backward& p = f.p;
  const HeadPlan plan = plan_keys_kernel(p, summed, f.sm_count);
  float* const sums = summed >= 0 ? static_cast<float*>(f.workspace.take(partial_sum_bytes(p, plan, summed))) : nullptr;
  if (!f.runs) return cudaSuccess;
  Arguments a = f.arguments(plan);
  if (summed >= 0) sum_bias_gradient(a, p, plan, summed, sums);
  cudaError_t error = launchers.keys(a, p, plan, summed >= 0, f.stream);
  if (error == cudaSuccess) error = launchers.queries(f.arguments(f.single_heads()), p, f.stream);
  if (error == cudaSuccess && summed >= 0) error = add_partial_sums(p, plan, summed, sums, f.stream);
  return error;
}

#ifdef FUSE_HAS_SM90A
// The same by the pipelined kernels, without a bias's gradient.
cudaError_t pipelined_gradients(const FlashBackward& f, const FlashLaunchers& launchers, int tile_bias) {
  if (!f.runs) return cudaSuccess;
  const HeadPlan plan = f.single_heads();
  const Arguments a = f.arguments(plan);
  const cudaError_t error = launch_pipelined_backward_keys(a, f.p, tile_bias, {}, plan.blocks(), f.stream);
  return error == cudaSuccess ? launchers.queries(a, f.p, f.stream) : error;
}

// The same with it: gradients of scores are stored, of some heads at a time.
cudaError_t stored_gradients(const FlashBackward& f, int tile_bias, int summed) {
  const Backward& p = f.p;
  const StoredPlan plan = plan_stored(p, summed, f.sm_count);
  float* const sums = static_cast<float*>(f.workspace.take(partial_sum_bytes(p, plan.heads, summed)));
  StoredHeads stored = {static_cast<char*>(f.workspace.take(plan.bytes())), plan.key_tiles, 0};
  if (!f.runs) return cudaSuccess;
  Arguments a = f.arguments(plan.heads);
  sum_bias_gradient(a, p, plan.heads, summed, sums);
  for (int64_t first = 0; first < plan.heads.blocks(); first += plan.shares) {
    stored.first_share = uint32_t(first);
    const int64_t shares = std::min(plan.shares, plan.heads.blocks() - first);
    cudaError_t error = launch_pipelined_backward_keys(a, p, tile_bias, stored, shares, f.stream);
    if (error == cudaSuccess) error = launch_stored_backward(a, p, stored, shares, f.stream);
    if (error != cudaSuccess) return error;
  }
  return add_partial_sums(p, plan.heads, summed, sums, f.stream);
}
#endif

cudaError_t flash_backward(Backward p, Workspace& workspace, bool runs, int sm_count, cudaStream_t stream) {
  if (const cudaError_t error = align_biases(p, workspace, runs, stream); error != cudaSuccess) return error;
  const FlashLaunchers launchers(p);
  const int64_t rows = p.size.heads() * kept_queries(p.size.t);
  const RowSums* row_sums = static_cast<RowSums*>(workspace.take(rows / kRowSumQueries * int64_t(sizeof(RowSums))));
  const int* special_tiles = static_cast<int*>(workspace.take(rows / kRowSumTile * int64_t(sizeof(int))));
  const FlashBackward f = {p, row_sums, special_tiles, workspace, runs, sm_count, stream};
  if (runs)
    if (const cudaError_t error = launch_row_sums(f.arguments(f.single_heads()), p.dtype, p.size.heads(), stream); error != cudaSuccess) return error;

  const BackwardRoute route = backward_route(p, uses_wgmma(p), sm_count);
  cudaError_t error = cudaSuccess;
#ifdef FUSE_HAS_SM90A
  if (route.kind == BackwardRoute::kStored) error = stored_gradients(f, route.tile_bias, route.summed);
  else if (route.kind == BackwardRoute::kPipelined) error = pipelined_gradients(f, launchers, route.tile_bias);
#endif
  if (route.kind == BackwardRoute::kAny) error = any_gradients(f, launchers, route.summed);
  if (error != cudaSuccess) return error;
  for (int i = 0; i < p.biases; ++i) {
    if (!p.dbias[i].data || i == route.summed) continue;
    const HeadPlan own = plan_bias_kernel(p, i, sm_count);
    float* const own_sums = static_cast<float*>(workspace.take(partial_sum_bytes(p, own, i)));
    if (!runs) continue;
    Arguments a = f.arguments(own);
    sum_bias_gradient(a, p, own, i, own_sums);
    error = launchers.bias(a, p, own, stream);
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
#ifdef FUSE_HAS_SM90A
  StagedBiases staged;
  if (takes_pipelined_forward(aligned, uses_wgmma(p), staged)) return launch_pipelined_forward(aligned, staged, stream);
#endif
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
