// fp32 to three bf16 planes. Memory bound: 4 bytes read and 6 written an element.
#include <cuda_bf16.h>

#include <algorithm>

#include "common/cuda_common.cuh"
#include "fp32_matmul/planes.h"

namespace fusebackend::fp32_matmul {
namespace {

constexpr int kThreads = 256;
constexpr int kElements = 16;        // a thread, in chunks kThreads apart, so that a block reads and writes contiguous memory

struct SplitOperand {
  const float* src;
  uint16_t* dst;
  int64_t inner, outer, chunks;      // chunks of `vector` elements along inner, over all rows and batches
  int64_t inner_stride, outer_stride, batch_stride, pitch;
  FastDiv chunks_per_row, rows_per_batch;
  int vector;                        // elements a chunk. 8: two 16-byte loads, and one 16-byte store a plane; 2: any strides and alignment
};

// hi and mid are rounded to nearest, so that mid and lo take either sign and the dropped products average out. Where rounding would exceed
// the largest bf16, hi is truncated instead. Infinities and NaNs give NaN planes; the epilogue recomputes what they touch. constants.h
// explains kHalfUlp.
__device__ __forceinline__ void split(float x, float (&part)[kPlanes]) {
  float hi = __bfloat162float(__float2bfloat16_rn(x));
  if (isinf(hi)) hi = __uint_as_float(__float_as_uint(x) & 0xffff0000u);
  const float rest = x - hi;
  const float mid = __bfloat162float(__float2bfloat16_rn(rest));
  part[0] = hi;
  part[1] = mid;
  const float lo = rest - mid;
  part[2] = lo == 0.f ? 0.f : fmaf(hi, kHalfUlp, lo);
}

__device__ __forceinline__ uint32_t pack(float even, float odd) {
  __nv_bfloat162 pair = __floats2bfloat162_rn(even, odd);
  return reinterpret_cast<uint32_t&>(pair);
}

template <int kVector> __device__ __forceinline__ void load(const SplitOperand& op, const float* src, int64_t column, float (&x)[kVector]) {
  if constexpr (kVector == 8) {
    if (column + kVector <= op.inner) {
      const float4* src4 = reinterpret_cast<const float4*>(src + column);
      const float4 first = __ldcs(src4), second = __ldcs(src4 + 1);
      x[0] = first.x, x[1] = first.y, x[2] = first.z, x[3] = first.w;
      x[4] = second.x, x[5] = second.y, x[6] = second.z, x[7] = second.w;
      return;
    }
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) x[i] = column + i < op.inner ? src[(column + i) * op.inner_stride] : 0.f;
}

template <int kVector> __device__ __forceinline__ void split_block(const SplitOperand& op) {
  constexpr int kChunks = kElements / kVector;
  const int64_t first = int64_t(blockIdx.x) * kThreads * kChunks + threadIdx.x;
  if (first >= op.chunks) return;
  float x[kChunks][kVector];
  int64_t to[kChunks];
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int64_t chunk = first + c * kThreads;
    if (chunk >= op.chunks) break;
    uint32_t row, column, batch, row_in_batch;
    op.chunks_per_row.divmod(uint32_t(chunk), row, column);
    op.rows_per_batch.divmod(row, batch, row_in_batch);
    load<kVector>(op, op.src + batch * op.batch_stride + row_in_batch * op.outer_stride, int64_t(column) * kVector, x[c]);
    to[c] = (int64_t(row) + int64_t(kPlanes - 1) * batch * op.outer) * op.pitch + int64_t(column) * kVector;
  }
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    if (first + c * kThreads >= op.chunks) break;
    Vec<uint32_t, kVector / 2> packed[kPlanes];
#pragma unroll
    for (int i = 0; i < kVector; i += 2) {
      float even[kPlanes], odd[kPlanes];
      split(x[c][i], even);
      split(x[c][i + 1], odd);
#pragma unroll
      for (int plane = 0; plane < kPlanes; ++plane) packed[plane].v[i / 2] = pack(even[plane], odd[plane]);
    }
#pragma unroll
    for (int plane = 0; plane < kPlanes; ++plane)
      *reinterpret_cast<Vec<uint32_t, kVector / 2>*>(op.dst + to[c] + plane * op.outer * op.pitch) = packed[plane];
  }
}

__global__ void __launch_bounds__(kThreads)
    split_kernel(const __grid_constant__ SplitOperand a, const __grid_constant__ SplitOperand b, int* flags, int flag_count) {
  if (blockIdx.x == 0 && blockIdx.y == 0)
    for (int i = threadIdx.x; i < flag_count; i += kThreads) flags[i] = 0;
  const SplitOperand& op = blockIdx.y ? b : a;
  if (op.vector == 8)
    split_block<8>(op);
  else
    split_block<2>(op);
}

SplitOperand describe(const Operand* operand, void* planes) {
  SplitOperand s = {};
  s.vector = 8;
  if (!operand) return s;
  const Operand& op = *operand;
  const PlaneLayout layout(op);
  s.src = op.data;
  s.dst = static_cast<uint16_t*>(planes);
  s.inner = layout.inner;
  s.outer = layout.outer;
  s.inner_stride = op.mn_inner ? op.mn_stride : op.k_stride;
  s.outer_stride = op.mn_inner ? op.k_stride : op.mn_stride;
  s.batch_stride = op.batch_stride;
  s.pitch = layout.pitch;
  s.vector = splits_vectors(op) ? 8 : 2;
  const int64_t per_row = s.pitch / s.vector;  // includes the padding, which is written as zeros
  s.chunks = per_row * s.outer * layout.batch;
  s.chunks_per_row = FastDiv(uint32_t(per_row));
  s.rows_per_batch = FastDiv(uint32_t(s.outer));
  return s;
}

}  // namespace

cudaError_t launch_split(const Operand* a, void* a_planes, const Operand* b, void* b_planes, int* flags, int flag_count,
                         cudaStream_t stream) {
  const SplitOperand sa = describe(a, a_planes), sb = describe(b, b_planes);
  if (std::max(sa.chunks, sb.chunks) > INT32_MAX) return cudaErrorInvalidValue;
  const auto blocks = [](const SplitOperand& s) { return ceil_div(s.chunks * s.vector, kThreads * kElements); };
  const int64_t grid = std::max<int64_t>(std::max(blocks(sa), blocks(sb)), flag_count > 0);
  if (grid == 0) return cudaSuccess;
  split_kernel<<<dim3(unsigned(grid), 2), kThreads, 0, stream>>>(sa, sb, flags, flag_count);
  return cudaGetLastError();
}

}  // namespace fusebackend::fp32_matmul
