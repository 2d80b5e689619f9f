#include "attention/stored_backward_sm90.cuh"

namespace fusebackend::attention {
namespace {

template <typename T, int kD, int kHeads, int kBlocks>
cudaError_t launch_as(const Arguments& a, const StoredHeads& stored, int64_t shares, cudaStream_t stream) {
  using Layout = StoredBackward<kD, kBlocks>;
  const auto kernel = attention_stored_backward<T, kD, kHeads, kBlocks>;
  static SharedMemoryOptIn opt_in;
  if (const cudaError_t error = opt_in.ensure(kernel, Layout::kBytes); error != cudaSuccess) return error;
  const int64_t query_tiles = a.padded_t / kStoredTile, blocks = query_tiles * shares;
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  return launch_dependent(kernel, unsigned(blocks), Layout::kThreads, Layout::kBytes, true, stream, a, uint32_t(query_tiles), stored);
}

// Each warpgroup has half of the heads.
template <typename T>
cudaError_t launch_heads(const Arguments& a, const Backward& p, const StoredHeads& stored, int64_t shares, cudaStream_t stream) {
  const bool narrow = is_narrow(p);
  if (a.per_block > 8) return launch_as<T, 32, 8, 1>(a, stored, shares, stream);
  if (a.per_block > 4) return narrow ? launch_as<T, 32, 4, 2>(a, stored, shares, stream) : launch_as<T, 64, 4, 1>(a, stored, shares, stream);
  if (a.per_block > 2) return narrow ? launch_as<T, 32, 2, 2>(a, stored, shares, stream) : launch_as<T, 64, 2, 1>(a, stored, shares, stream);
  return narrow ? launch_as<T, 32, 1, 2>(a, stored, shares, stream) : launch_as<T, 64, 1, 1>(a, stored, shares, stream);
}

}  // namespace

cudaError_t launch_stored_backward(const Arguments& a, const Backward& p, const StoredHeads& stored, int64_t shares, cudaStream_t stream) {
  return p.dtype == DType::kBFloat16 ? launch_heads<__nv_bfloat16>(a, p, stored, shares, stream) : launch_heads<__half>(a, p, stored, shares, stream);
}

}  // namespace fusebackend::attention
