#include "attention/pipelined_backward_keys_sm90.cuh"

namespace fusebackend::attention {
namespace {

template <typename T, int kD, int kGroups, int kStageCount, int kBlocks, bool kStores, bool kDrops>
cudaError_t launch_as(const Arguments& a, int tile_bias, const StoredHeads& stored, int64_t shares, cudaStream_t stream) {
  using Layout = PipelinedBackwardKeys<kD, kGroups, kStageCount, kDrops>;
  const auto kernel = attention_pipelined_backward_keys<T, kD, kGroups, kStageCount, kBlocks, kStores, kDrops>;
  static SharedMemoryOptIn opt_in;
  if (const cudaError_t error = opt_in.ensure(kernel, Layout::kBytes); error != cudaSuccess) return error;
  const int64_t key_blocks = ceil_div(int64_t(a.s), int64_t(Layout::kBlockKeys)), blocks = key_blocks * shares * a.per_block;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  KeyMaps maps = {};
  cudaError_t error = make_head_map(maps.q, a.q, a, a.t, a.d, kD);
  if (error == cudaSuccess) error = make_head_map(maps.grad, a.grad, a, a.t, a.dv, kD);
  if (error == cudaSuccess) error = make_head_map(maps.k, a.k, a, a.s, a.d, kD);
  if (error == cudaSuccess) error = make_head_map(maps.v, a.v, a, a.s, a.dv, kD);
  if (error == cudaSuccess) error = make_bias_map(maps.bias, a, tile_bias);
  if (error != cudaSuccess) return error;
  return launch_dependent(kernel, unsigned(blocks), Layout::kThreads, Layout::kBytes, true, stream, a, uint32_t(key_blocks), tile_bias, stored, maps);
}

template <typename T, bool kStores, bool kDrops>
cudaError_t launch_dim(const Arguments& a, const Backward& p, int tile_bias, const StoredHeads& stored, int64_t shares, cudaStream_t stream) {
  constexpr int kGroups = kPipelinedBackwardKeys / 64;
  return is_narrow(p) ? launch_as<T, 32, kGroups, 3, 3, kStores, kDrops>(a, tile_bias, stored, shares, stream)
                      : launch_as<T, 64, kGroups, 3, 2, kStores, kDrops>(a, tile_bias, stored, shares, stream);
}

template <typename T, bool kStores>
cudaError_t launch_drops(const Arguments& a, const Backward& p, int tile_bias, const StoredHeads& stored, int64_t shares, cudaStream_t stream) {
  return p.kept ? launch_dim<T, kStores, true>(a, p, tile_bias, stored, shares, stream)
                : launch_dim<T, kStores, false>(a, p, tile_bias, stored, shares, stream);
}

template <typename T>
cudaError_t launch_stores(const Arguments& a, const Backward& p, int tile_bias, const StoredHeads& stored, int64_t shares, cudaStream_t stream) {
  return stored.gradients ? launch_drops<T, true>(a, p, tile_bias, stored, shares, stream)
                          : launch_drops<T, false>(a, p, tile_bias, stored, shares, stream);
}

}  // namespace

cudaError_t launch_pipelined_backward_keys(const Arguments& a, const Backward& p, int tile_bias, const StoredHeads& stored, int64_t shares,
                                           cudaStream_t stream) {
  return p.dtype == DType::kBFloat16 ? launch_stores<__nv_bfloat16>(a, p, tile_bias, stored, shares, stream)
                                     : launch_stores<__half>(a, p, tile_bias, stored, shares, stream);
}

}  // namespace fusebackend::attention
