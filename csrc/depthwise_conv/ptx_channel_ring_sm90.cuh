// Copies of boxes of (batch, height, width, channels) tensors by the tensor memory accelerator, 8x8 matrices of shared memory, and registers of warps, one
// small function an instruction.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "depthwise_conv/device_math.cuh"

namespace fusebackend::depthwise_conv {

// To shared memory, of which a barrier tells.
__device__ __forceinline__ void load_box(uint32_t to, const CUtensorMap* map, uint32_t barrier, int channel, int column, int row, int image) {
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(to),
               "l"(map), "r"(barrier), "r"(channel), "r"(column), "r"(row), "r"(image)
               : "memory");
}
// From shared memory, in the thread's group of stores (`commit_stores`).
__device__ __forceinline__ void store_box(const CUtensorMap* map, uint32_t from, int channel, int column, int row, int image) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(map), "r"(from), "r"(channel), "r"(column),
               "r"(row), "r"(image)
               : "memory");
}

// Four matrices; lane l gives the address of row l%8 of matrix l/8. Neither is moved across barriers.
__device__ __forceinline__ void store_matrices(uint32_t at, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(r0), "r"(r1), "r"(r2), "r"(r3) : "memory");
}
// Two, whose rows' addresses the first sixteen lanes give.
__device__ __forceinline__ void store_two_matrices(uint32_t at, uint32_t r0, uint32_t r1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(at), "r"(r0), "r"(r1) : "memory");
}
__device__ __forceinline__ void load_matrices_now(uint32_t (&r)[4], uint32_t at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at) : "memory");
}
__device__ __forceinline__ void transpose_matrices(uint32_t to, uint32_t from) {
  uint32_t r[4];
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
  store_matrices(to, r[0], r[1], r[2], r[3]);
}

// The registers that each thread of a group of four warps has from here on.
template <int kRegisters>
__device__ __forceinline__ void release_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters)); }
template <int kRegisters>
__device__ __forceinline__ void acquire_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters)); }

// A barrier, by number, of some warps alone.
template <int kBarrier, int kThreads>
__device__ __forceinline__ void wait_for_threads() { asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory"); }

}  // namespace fusebackend::depthwise_conv
