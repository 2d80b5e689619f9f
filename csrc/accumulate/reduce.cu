// kReduce, kWide and kOwn: straight into out, or, for kWide, into an fp32 copy of it.
#include "finish.cuh"

namespace fusebackend::accumulate {
namespace {

constexpr int kReduceBlocksPerSm = 4;

// The same slice as p, laid out [rows][columns] in a replacement of out.
Params onto_scratch(const Params& p) {
  Params q = p;
  int64_t stride = 1;
  for (int d = p.n_dims - 1; d >= 0; --d) {
    q.dims[d].out_stride = stride;
    stride *= p.dims[d].size;
  }
  q.out_row_stride = stride;
  return q;
}

}  // namespace

cudaError_t launch_reduce(const Params& p, const Device& device, cudaStream_t stream) {
  const int v = vector_width(p, true);
  if (flat_fits(p, v, device)) return launch_flat(p, v, stream);
  const bool prefetch = p.rows * p.columns() * element_size(p.dtype) > device.l2_bytes;
  return dispatch(p.dtype, [&](auto type) {
    using T = decltype(type);
    const Walk walk = plan_walk(p, v, int64_t(device.sm_count) * kReduceBlocksPerSm, kTile<Flush::kReduce>, true);
    const Args<T> a{p, walk, static_cast<T*>(p.out), {}, prefetch};
    return launch_walk<T, T, Flush::kReduce>(a, v, stream);
  });
}

size_t wide_bytes(const Params& p) { return size_t(p.rows) * p.columns() * sizeof(float); }

cudaError_t launch_wide(const Params& p, void* workspace, const Device& device, cudaStream_t stream) {
  if (cudaError_t error = cudaMemsetAsync(workspace, 0, wide_bytes(p), stream); error != cudaSuccess) return error;
  const Params q = onto_scratch(p);
  const int v = vector_width(p, false);
  auto run = [&](auto type) {
    using T = decltype(type);
    float* const scratch = static_cast<float*>(workspace);
    const Args<float> a{q, plan_walk(q, v, int64_t(device.sm_count) * kReduceBlocksPerSm, kTile<Flush::kReduce>, true), scratch, {}};
    cudaError_t error = launch_walk<T, float, Flush::kReduce>(a, v, stream);
    return error == cudaSuccess ? finish<T>(p, scratch, 1, device, stream) : error;
  };
  if (p.dtype == DType::kFloat16) return run(__half());
  if (p.dtype == DType::kBFloat16) return run(__nv_bfloat16());
  return cudaErrorInvalidValue;
}

bool own_fits(const Params& p) { return p.n <= kMaxOwn; }

cudaError_t launch_own(const Params& p, cudaStream_t stream) {
  const int v = vector_width(p, true);
  return dispatch(p.dtype, [&](auto type) {
    using T = decltype(type);
    Args<T> a{p, plan_walk(p, v, 1, kMaxOwn, false), static_cast<T*>(p.out), {}};
    a.walk.groups = 1;
    a.walk.per_group = int(p.n);
    a.walk.tiles = a.walk.row_blocks = 1;
    return launch_walk<T, T, Flush::kOwn>(a, v, stream);
  });
}

}  // namespace fusebackend::accumulate
