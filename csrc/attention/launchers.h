// The launchers of single kernels, among which launch_cuda.cpp chooses.
#pragma once

#include <cuda_runtime_api.h>

#include "attention/routes.h"

namespace fusebackend::attention {

cudaError_t launch_window_forward(const Forward& p, int sm_count, cudaStream_t stream);
cudaError_t launch_flash_forward(const Forward& p, cudaStream_t stream);

// `summed`: the bias whose gradient is summed as well; none if negative.
cudaError_t launch_window_backward(const Backward& p, int summed, float* partial_sums, int sm_count, cudaStream_t stream);

// The arguments have the results of row_sums. Those of the kernels that sum a bias's gradient are of the plan.
cudaError_t launch_row_sums(const Arguments& a, DType dtype, int64_t heads, cudaStream_t stream);
cudaError_t launch_flash_backward_keys(const Arguments& a, const Backward& p, const HeadPlan& plan, bool sums_bias, cudaStream_t stream);
cudaError_t launch_flash_backward_queries(const Arguments& a, const Backward& p, cudaStream_t stream);
cudaError_t launch_flash_backward_bias(const Arguments& a, const Backward& p, const HeadPlan& plan, cudaStream_t stream);

#ifdef FUSE_HAS_SM90A
// On GPUs of compute capability 9.0, for heads of up to 64, biases that are staged and rows that have tiles (routes.h).
cudaError_t launch_pipelined_forward(const Forward& p, const StagedBiases& staged, cudaStream_t stream);
// dk and dv of `shares` shares of the plan from `stored`.first_share on; their gradients of scores too if there is room for them.
cudaError_t launch_pipelined_backward_keys(const Arguments& a, const Backward& p, int tile_bias, const StoredHeads& stored, int64_t shares,
                                            cudaStream_t stream);
// dq and the bias's gradient of the same, of the stored gradients.
cudaError_t launch_stored_backward(const Arguments& a, const Backward& p, const StoredHeads& stored, int64_t shares, cudaStream_t stream);

// As those above by wgmma, for heads of up to 64, and any biases.
cudaError_t launch_flash_forward_wgmma(const Forward& p, cudaStream_t stream);
cudaError_t launch_flash_backward_keys_wgmma(const Arguments& a, const Backward& p, const HeadPlan& plan, bool sums_bias, cudaStream_t stream);
cudaError_t launch_flash_backward_queries_wgmma(const Arguments& a, const Backward& p, cudaStream_t stream);
cudaError_t launch_flash_backward_bias_wgmma(const Arguments& a, const Backward& p, const HeadPlan& plan, cudaStream_t stream);
#endif

// A bias whose rows are contiguous and have a pitch of a multiple of 8 elements.
struct BiasCopy {
  const void* from;
  void* to;
  int64_t size[5], stride[5];  // of the bias, 1 where it is broadcast
  int64_t pitch;
};
cudaError_t launch_align_bias(const BiasCopy& copy, bool is_fp32, cudaStream_t stream);

// (kept, chunks, T, S) to (kept, T or 1, S or 1).
struct PartialSums {
  const float* from;
  void* to;
  int64_t kept, chunks, t, s;
  bool sums_rows, sums_columns;
};
cudaError_t launch_add_partial_sums(const PartialSums& p, DType dtype, cudaStream_t stream);

}  // namespace fusebackend::attention
