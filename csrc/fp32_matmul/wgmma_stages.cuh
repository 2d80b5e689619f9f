// The shared memory of the wgmma kernel: two rings of pipeline stages, how TMA fills a stage and how wgmma reads it.
//
// The hi planes of a k block have a ring of their own, because they are needed longer than the mid and lo planes.
#pragma once
#include "fp32_matmul/constants.h"
#include "fp32_matmul/ptx_sm90.cuh"

namespace fusebackend::fp32_matmul {

constexpr int kAPlaneBytes = kTileM * kBlockK * 2, kBPlaneBytes = kTileN * kBlockK * 2;     // one plane of a k block
constexpr int kHiBytes = kAPlaneBytes + kBPlaneBytes, kRestBytes = 2 * kHiBytes;            // a stage of hi planes; of mid and lo planes
constexpr int kHiStages = 4, kRestStages = 3;
constexpr int kRingBytes = kHiStages * kHiBytes + kRestStages * kRestBytes;
constexpr int kSmemBytes = kRingBytes + 16 * (kHiStages + kRestStages) + 1024;              // two mbarriers a stage; alignment
constexpr int kMnBlock = 64;                                        // elements: TMA box and swizzle span of an mn-innermost operand
constexpr int kMnBlockBytes = kBlockK * kMnBlock * 2;               // [k][64 mn], 128-byte swizzle
constexpr int kWarpgroupRowBytes = 64 * kBlockK * 2;                // to the second warpgroup's rows of A's plane, in either layout
static_assert(kWarpgroupRowBytes == kMnBlockBytes);

template <bool kMnInner, int kRows>
__device__ __forceinline__ void load_plane(uint32_t dst, const CUtensorMap* map, uint32_t bar, int mn, int k, int plane, int batch) {
  if constexpr (kMnInner) {
#pragma unroll
    for (int i = 0; i < kRows / kMnBlock; ++i)
      ptx::tma_load_4d(dst + i * kMnBlockBytes, map, bar, mn + i * kMnBlock, k, plane, batch);
  } else {
    ptx::tma_load_4d(dst, map, bar, k, mn, plane, batch);
  }
}

// The descriptor of a staged plane from k = 16 * step on; `plane` is the address of its first row / 16. Only additions of constants: the
// tensor cores wait for it.
template <bool kMnInner> __device__ __forceinline__ uint64_t descriptor(uint32_t plane, int step) {
  constexpr uint64_t kFixed = kMnInner ? ptx::wgmma_descriptor_base(kMnBlockBytes, 8 * kMnBlock * 2, ptx::kSwizzle128)
                                       : ptx::wgmma_descriptor_base(16, 8 * kBlockK * 2, ptx::kSwizzle64);
  constexpr int kStep = kMnInner ? 16 * kMnBlock * 2 : 16 * 2;
  return kFixed >> 32 << 32 | (uint32_t(kFixed) + plane + step * kStep / 16);
}

// The position of the next k block in a ring, and the parity of its barriers, in as few registers as possible.
struct HiRing {
  int block = 0;                     // modulo two rounds of the ring

  __device__ int stage() const { return block & (kHiStages - 1); }
  __device__ int previous_stage() const { return (block - 1) & (kHiStages - 1); }
  __device__ int phase() const { return block / kHiStages & 1; }
  __device__ void advance() { block = (block + 1) & (2 * kHiStages - 1); }
};
static_assert(kHiStages == 4);       // a power of two, for the masks; two pairs of k blocks

struct RestRing {
  int stage = 0, phase = 0;

  __device__ void advance() {
    if (++stage == kRestStages) stage = 0, phase ^= 1;
  }
};

}  // namespace fusebackend::fp32_matmul
