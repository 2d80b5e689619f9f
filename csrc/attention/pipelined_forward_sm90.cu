#include "attention/pipelined_forward_sm90.cuh"

namespace fusebackend::attention {
namespace {

template <typename T, int kD, int kGroups, int kStageCount, int kBlocks, bool kDrops>
cudaError_t launch_as(const Forward& p, const StagedBiases& staged, cudaStream_t stream) {
  using Layout = PipelinedForward<kD, kGroups, kStageCount>;
  const auto kernel = attention_pipelined_forward<T, kD, kGroups, kStageCount, kBlocks, kDrops>;
  static SharedMemoryOptIn opt_in;
  if (const cudaError_t error = opt_in.ensure(kernel, Layout::kBytes); error != cudaSuccess) return error;
  const int64_t tiles = ceil_div(p.size.t, int64_t(Layout::kQueries)), blocks = tiles * p.size.heads();
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const Arguments a = forward_arguments(p, plan_heads(p, -1, nullptr, 1));
  ForwardMaps maps = {};
  cudaError_t error = make_head_map(maps.q, a.q, a, a.t, a.d, kD);
  if (error == cudaSuccess) error = make_head_map(maps.k, a.k, a, a.s, a.d, kD);
  if (error == cudaSuccess) error = make_head_map(maps.v, a.v, a, a.s, a.dv, kD);
  if (error == cudaSuccess) error = make_bias_map(maps.bias, a, staged.tile);
  if (error != cudaSuccess) return error;
  kernel<<<unsigned(blocks), Layout::kThreads, Layout::kBytes, stream>>>(a, uint32_t(tiles), staged, maps);
  return cudaGetLastError();
}

template <typename T, bool kDrops>
cudaError_t launch_dim(const Forward& p, const StagedBiases& staged, cudaStream_t stream) {
  if (is_narrow(p)) return launch_as<T, 32, 1, 3, 4, kDrops>(p, staged, stream);
  return pipelined_forward_queries(p) == 128 ? launch_as<T, 64, 2, 3, 2, kDrops>(p, staged, stream)
                                             : launch_as<T, 64, 1, 3, 4, kDrops>(p, staged, stream);
}

template <typename T>
cudaError_t launch_drops(const Forward& p, const StagedBiases& staged, cudaStream_t stream) {
  return p.kept ? launch_dim<T, true>(p, staged, stream) : launch_dim<T, false>(p, staged, stream);
}

}  // namespace

cudaError_t launch_pipelined_forward(const Forward& p, const StagedBiases& staged, cudaStream_t stream) {
  return p.dtype == DType::kBFloat16 ? launch_drops<__nv_bfloat16>(p, staged, stream) : launch_drops<__half>(p, staged, stream);
}

}  // namespace fusebackend::attention
