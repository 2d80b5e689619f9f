// Copies of adjacent bytes between global and shared memory that need no registers for what is on its way (bulk copies of the tensor memory accelerator), and
// the fence between them and other accesses, one small function an instruction. Bytes are a multiple of 16, at addresses that are.
#pragma once

#include <cstdint>

namespace fusebackend {

// Orders what this thread, and threads that it has synchronized with, did to shared memory by ordinary instructions before what wgmma and copies
// of the tensor memory accelerator (the async proxy) do to it later. Their completion is such a fence by itself.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// To shared memory, of which a barrier tells (mbarrier_sm90.cuh).
__device__ __forceinline__ void copy_bytes(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes),
               "r"(barrier)
               : "memory");
}

// From shared memory. A thread's stores since its last `commit_stores` are a group.
__device__ __forceinline__ void store_bytes(void* to, uint32_t from, uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void commit_stores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Until shared memory was read, by all of this thread's groups but the last kPending.
template <int kPending>
__device__ __forceinline__ void wait_until_read() { asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory"); }
// Until all of this thread's stores are complete.
__device__ __forceinline__ void wait_until_stored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

}  // namespace fusebackend
