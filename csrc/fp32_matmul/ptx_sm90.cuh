// The instructions that the wgmma kernel is made of, one small function each. Shared-memory addresses are in the shared window
// (`shared_address` in common/cuda_common.cuh).
#pragma once
#include <cuda.h>
#include <cstdint>

namespace fusebackend::fp32_matmul::ptx {

// Tensor memory access ------------------------------------------------------------------------------------------------------------
__device__ __forceinline__ void tma_load_4d(uint32_t dst, const CUtensorMap* map, uint32_t bar, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(dst),
      "l"(map), "r"(bar), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}

// Named barriers and registers ----------------------------------------------------------------------------------------------------
__device__ __forceinline__ void bar_sync(int id, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
__device__ __forceinline__ void bar_arrive(int id, int threads) { asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory"); }
template <int N> __device__ __forceinline__ void registers_up_to() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N)); }
template <int N> __device__ __forceinline__ void registers_down_to() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N)); }

__device__ __forceinline__ void flag_raise(int* flag) { asm volatile("st.release.gpu.global.s32 [%0], 1;" ::"l"(flag) : "memory"); }
__device__ __forceinline__ void flag_wait(const int* flag) {
  int v;
  do asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(flag) : "memory");
  while (v == 0);
}

// Knuth's TwoSum: a becomes the rounded sum a + b, and b its rounding error, so that a + b is unchanged. `zero` must be 0 at run time
// without the compiler's knowledge. The exclusive or with it copies a to a temporary, so that the sum is computed in a's register: else
// every a would need a second one, and registers would be spilled.
__device__ __forceinline__ void two_sum_in_place(float& a, float& b, int zero) {
  asm volatile(
      "{\n.reg .f32 old, part, rest;\n"
      "xor.b32 old, %0, %2;\n"
      "add.rn.f32 %0, %0, %1;\n"
      "sub.rn.f32 part, %0, old;\n"
      "sub.rn.f32 rest, %0, part;\n"
      "sub.rn.f32 part, %1, part;\n"
      "sub.rn.f32 rest, old, rest;\n"
      "add.rn.f32 %1, rest, part;\n}\n"
      : "+f"(a), "+f"(b)
      : "r"(zero));
}

// Dekker's Fast2Sum: the same for |a| >= |b| in four instructions instead of seven. Where |a| < |b|, b may be off by the rounding error of a.
__device__ __forceinline__ void fast_two_sum_in_place(float& a, float& b, int zero) {
  asm volatile(
      "{\n.reg .f32 old, part;\n"
      "xor.b32 old, %0, %2;\n"
      "add.rn.f32 %0, %0, %1;\n"
      "sub.rn.f32 part, %0, old;\n"
      "sub.rn.f32 %1, %1, part;\n}\n"
      : "+f"(a), "+f"(b)
      : "r"(zero));
}

// Warpgroup matrix multiply -------------------------------------------------------------------------------------------------------
// The shared-memory operand descriptor without its start address: leading and stride byte offsets, / 16, and the swizzle mode.
enum Swizzle : uint64_t { kSwizzle128 = 1, kSwizzle64 = 2 };
__device__ constexpr uint64_t wgmma_descriptor_base(uint32_t leading, uint32_t stride, Swizzle swizzle) {
  return uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 | uint64_t(swizzle) << 62;
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending> __device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory"); }

#define FB_R4(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define FB_R16(d, i) FB_R4(d, i), FB_R4(d, i + 4), FB_R4(d, i + 8), FB_R4(d, i + 12)
#define FB_D96                                                                                                                             \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, "                        \
  "%24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, "                         \
  "%46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, "                         \
  "%68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, %82, %83, %84, %85, %86, %87, %88, %89, "                         \
  "%90, %91, %92, %93, %94, %95}"

// d (64 x 192) += a (64 x 16) @ b (16 x 192). kAMajorMN, kBMajorMN: m, or n, is the operand's contiguous index in shared memory.
template <bool kAMajorMN, bool kBMajorMN>
__device__ __forceinline__ void wgmma_m64n192k16(float (&d)[96], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 " FB_D96 ", %96, %97, 1, 1, 1, %98, %99;\n"
      : FB_R16(d, 0), FB_R16(d, 16), FB_R16(d, 32), FB_R16(d, 48), FB_R16(d, 64), FB_R16(d, 80)
      : "l"(a), "l"(b), "n"(int(kAMajorMN)), "n"(int(kBMajorMN)));
}
#undef FB_R4
#undef FB_R16
#undef FB_D96

}  // namespace fusebackend::fp32_matmul::ptx
