// Tiles of 64 rows of a head, copied by the tensor memory accelerator: one thread starts a copy, and the tile lies in shared memory as
// Tile<32> or Tile<64> has it. Elements outside of the matrix are zeros.
#pragma once

#include "attention/fragments.cuh"
#include "attention/heads.cuh"
#include "attention/ptx_tma_sm90.cuh"
#include "common/bulk_copy_sm90.cuh"
#include "common/encode_tiled_sm90.h"
#include "common/mbarrier_sm90.cuh"

namespace fusebackend::attention {

// Matrices of all heads.
struct HeadMap {
  CUtensorMap map;
  int step[3];  // 0 of the plan's dimensions along which it is broadcast, else 1
};

__device__ __forceinline__ void load_tile(uint32_t to, const HeadMap& from, uint32_t barrier, int row, int column, const HeadIndex& index) {
  tma::load_tensor(to, &from.map, barrier, column, row, int(index.i[2]) * from.step[2], int(index.i[1]) * from.step[1],
                   int(index.i[0]) * from.step[0]);
}

// The stages of a pipeline: one thread fills them, `warps` warps use each and then let go of it.
template <int kStageCount>
struct Stages {
  uint32_t barriers;  // full and free of each stage, and that of what is copied once
  static constexpr int kBytes = 16 * (kStageCount + 1);

  __device__ __forceinline__ uint32_t full(int stage) const { return barriers + stage * 16; }
  __device__ __forceinline__ uint32_t free(int stage) const { return full(stage) + 8; }
  __device__ __forceinline__ uint32_t once() const { return full(kStageCount); }
  __device__ __forceinline__ void init(int warps) const {  // by one thread
    for (int i = 0; i < kStageCount; ++i) mbarrier::init(full(i), 1), mbarrier::init(free(i), warps);
    mbarrier::init(once(), 1);
    mbarrier::init_fence();
  }
  // By a thread that then copies into the stage. The warps' last reads of it happen before: of each, by its __syncwarp and lane 0's arrival. Some
  // are ordinary loads, and a copy is of the async proxy, so that their order needs the fence too (PTX ISA, async proxy).
  __device__ __forceinline__ void wait_until_free(int stage, uint32_t parity) const {
    mbarrier::wait(free(stage), parity);
    fence_async_proxy();
  }
};

// Where a thread is in the pipeline. A tile uses the stage after that of the tile before it.
template <int kStageCount>
struct Place {
  int stage = 0;
  uint32_t parity = 0;  // of the stage's uses
  __device__ __forceinline__ void next() {
    stage = stage + 1 == kStageCount ? 0 : stage + 1;
    if (stage == 0) parity ^= 1;
  }
  __device__ __forceinline__ int before() const { return stage == 0 ? kStageCount - 1 : stage - 1; }
  // Of the tile two before.
  __device__ __forceinline__ int stage_two_before() const { return stage < 2 ? stage + kStageCount - 2 : stage - 2; }
  __device__ __forceinline__ uint32_t parity_two_before() const { return parity ^ (stage < 2); }
};

// Of matrices of 16-bit elements. The cache reads a tile's rows alone: next to a head's row lies that of another, which is needed later.
// `strides`: of the plan's dimensions, in elements; `tile_columns`: 32 or 64.
inline cudaError_t make_head_map(HeadMap& to, const void* data, const int64_t (&strides)[3], int64_t row_stride, const uint32_t (&heads)[3],
                                 int rows, int columns, int tile_columns) {
  if (!encode_tiled()) return cudaErrorNotSupported;
  constexpr cuuint64_t kAnyStride = 16;  // of dimensions of one element
  cuuint64_t sizes[5] = {cuuint64_t(columns), cuuint64_t(rows), 1, 1, 1};
  cuuint64_t bytes[4] = {rows == 1 ? kAnyStride : cuuint64_t(row_stride) * 2, kAnyStride, kAnyStride, kAnyStride};
  for (int i = 0; i < 3; ++i) {
    to.step[i] = strides[i] != 0;
    if (strides[i] != 0) sizes[4 - i] = heads[i], bytes[3 - i] = cuuint64_t(strides[i]) * 2;
  }
  const cuuint32_t box[5] = {cuuint32_t(tile_columns), 64, 1, 1, 1}, every[5] = {1, 1, 1, 1, 1};
  const CUresult result = encode_tiled()(&to.map, CU_TENSOR_MAP_DATA_TYPE_UINT16, 5, const_cast<void*>(data), sizes, bytes, box, every,
                                         CU_TENSOR_MAP_INTERLEAVE_NONE, tile_columns == 64 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_64B,
                                         tile_columns == 64 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B : CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
                                         CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}
inline cudaError_t make_head_map(HeadMap& to, const HeadRows& from, const Arguments& a, int rows, int columns, int tile_columns) {
  return make_head_map(to, from.data, from.stride, from.row, a.size, rows, columns, tile_columns);
}
// Of the bias `i`, if it is not negative.
inline cudaError_t make_bias_map(HeadMap& to, const Arguments& a, int i) {
  return i < 0 ? cudaSuccess : make_head_map(to, a.bias[i].data, a.bias[i].stride, a.bias[i].row, a.size, a.t, a.s, 64);
}

}  // namespace fusebackend::attention
