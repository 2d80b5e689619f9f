// Copies by the tensor memory accelerator, which complete barriers in shared memory (common/mbarrier_sm90.cuh), and the fence between them and
// other accesses, one small function an instruction.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace fusebackend::attention {

// Orders what this thread, and threads that it has synchronized with, did to shared memory by ordinary instructions before what wgmma and copies
// of the tensor memory accelerator (the async proxy) do to it later. Their completion is such a fence by itself.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

namespace tma {

__device__ __forceinline__ void load_tensor(uint32_t to, const CUtensorMap* from, uint32_t barrier, int i0, int i1, int i2, int i3, int i4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
      "l"(from), "r"(barrier), "r"(i0), "r"(i1), "r"(i2), "r"(i3), "r"(i4)
      : "memory");
}
// Adjacent bytes: a multiple of 16, at addresses that are.
__device__ __forceinline__ void load_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
               "r"(barrier)
               : "memory");
}

}  // namespace tma
}  // namespace fusebackend::attention
