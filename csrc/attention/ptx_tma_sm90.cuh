// Copies of boxes of tensors by the tensor memory accelerator, which complete barriers in shared memory (common/mbarrier_sm90.cuh).
#pragma once

#include <cuda.h>

#include <cstdint>

namespace fusebackend::attention::tma {

__device__ __forceinline__ void load_tensor(uint32_t to, const CUtensorMap* from, uint32_t barrier, int i0, int i1, int i2, int i3, int i4) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(to),
      "l"(from), "r"(barrier), "r"(i0), "r"(i1), "r"(i2), "r"(i3), "r"(i4)
      : "memory");
}

}  // namespace fusebackend::attention::tma
