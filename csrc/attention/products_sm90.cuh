// The products of tiles that attention consists of, by wgmma: four warps compute 64 rows together, and read tiles from shared memory.
#pragma once

#include "attention/fragments.cuh"
#include "common/bulk_copy_sm90.cuh"

namespace fusebackend::attention {
namespace wgmma {

// Shared-memory descriptor of a tile whose rows are one swizzled line of kPitch bytes: 64 or 128. Groups of 8 rows follow one another.
template <int kPitch>
__device__ __forceinline__ uint64_t descriptor(uint32_t address) {
  constexpr uint64_t kSwizzle = kPitch == 128 ? 1 : 2, kGroup = 8 * kPitch;
  return uint64_t((address & 0x3ffff) >> 4) | uint64_t(1) << 16 | (kGroup >> 4) << 32 | kSwizzle << 62;
}

__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

#define FUSE_R4(d) "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
#define FUSE_R16(d, j) FUSE_R4(d[j]), FUSE_R4(d[j + 1]), FUSE_R4(d[j + 2]), FUSE_R4(d[j + 3])
#define FUSE_D16 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define FUSE_D32                                                                                                              \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, " \
  "%26, %27, %28, %29, %30, %31}"

// d (64 x 64) += a (64 x 16) @ b (64 x 16).mT, both in shared memory. kAdds: whether d was there before.
template <typename T, bool kAdds>
__device__ __forceinline__ void scores(float (&d)[8][4], uint64_t a, uint64_t b);
// d (64 x 32 or 64) += a (64 x 16) @ b (16 x 32 or 64), a in registers.
template <typename T>
__device__ __forceinline__ void sum(float (&d)[4][4], const uint32_t (&a)[4], uint64_t b);
template <typename T>
__device__ __forceinline__ void sum(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b);

// d (64 x 32 or 64) += a (16 x 64).mT @ b (16 x 32 or 64), both in shared memory.
template <typename T, bool kAdds>
__device__ __forceinline__ void sum_transposed(float (&d)[4][4], uint64_t a, uint64_t b);
template <typename T, bool kAdds>
__device__ __forceinline__ void sum_transposed(float (&d)[8][4], uint64_t a, uint64_t b);

#define FUSE_WGMMA(T, kind)                                                                                                          \
  template <>                                                                                                                        \
  __device__ __forceinline__ void scores<T, true>(float (&d)[8][4], uint64_t a, uint64_t b) {                                        \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." kind "." kind " " FUSE_D32 ", %32, %33, 1, 1, 1, 0, 0;\n"             \
                 : FUSE_R16(d, 0), FUSE_R16(d, 4)                                                                                    \
                 : "l"(a), "l"(b));                                                                                                  \
  }                                                                                                                                  \
  template <>                                                                                                                        \
  __device__ __forceinline__ void scores<T, false>(float (&d)[8][4], uint64_t a, uint64_t b) {                                       \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." kind "." kind " " FUSE_D32 ", %32, %33, 0, 1, 1, 0, 0;\n"             \
                 : FUSE_R16(d, 0), FUSE_R16(d, 4)                                                                                    \
                 : "l"(a), "l"(b));                                                                                                  \
  }                                                                                                                                  \
  template <>                                                                                                                        \
  __device__ __forceinline__ void sum<T>(float (&d)[4][4], const uint32_t (&a)[4], uint64_t b) {                                     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." kind "." kind " " FUSE_D16 ", {%16, %17, %18, %19}, %20, 1, 1, 1, 1;\n" \
                 : FUSE_R16(d, 0)                                                                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                              \
  }                                                                                                                                  \
  template <>                                                                                                                        \
  __device__ __forceinline__ void sum<T>(float (&d)[8][4], const uint32_t (&a)[4], uint64_t b) {                                     \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." kind "." kind " " FUSE_D32 ", {%32, %33, %34, %35}, %36, 1, 1, 1, 1;\n" \
                 : FUSE_R16(d, 0), FUSE_R16(d, 4)                                                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                              \
  }
FUSE_WGMMA(__nv_bfloat16, "bf16")
FUSE_WGMMA(__half, "f16")
#undef FUSE_WGMMA

#define FUSE_WGMMA(T, kind, adds, scale)                                                                                             \
  template <>                                                                                                                        \
  __device__ __forceinline__ void sum_transposed<T, adds>(float (&d)[4][4], uint64_t a, uint64_t b) {                                \
    asm volatile("wgmma.mma_async.sync.aligned.m64n32k16.f32." kind "." kind " " FUSE_D16 ", %16, %17, " scale ", 1, 1, 1, 1;\n"     \
                 : FUSE_R16(d, 0)                                                                                                    \
                 : "l"(a), "l"(b));                                                                                                  \
  }                                                                                                                                  \
  template <>                                                                                                                        \
  __device__ __forceinline__ void sum_transposed<T, adds>(float (&d)[8][4], uint64_t a, uint64_t b) {                                \
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." kind "." kind " " FUSE_D32 ", %32, %33, " scale ", 1, 1, 1, 1;\n"     \
                 : FUSE_R16(d, 0), FUSE_R16(d, 4)                                                                                    \
                 : "l"(a), "l"(b));                                                                                                  \
  }
FUSE_WGMMA(__nv_bfloat16, "bf16", false, "0")
FUSE_WGMMA(__nv_bfloat16, "bf16", true, "1")
FUSE_WGMMA(__half, "f16", false, "0")
FUSE_WGMMA(__half, "f16", true, "1")
#undef FUSE_WGMMA
#undef FUSE_R4
#undef FUSE_R16
#undef FUSE_D16
#undef FUSE_D32

}  // namespace wgmma

// As MmaProducts; the four warps of a group call each function together, of whose 64 rows `first_row` is in the warp's 16.
template <typename T, int kD, int kTiles>
struct WgmmaProducts {
  static_assert(kTiles == 1 && (kD == 32 || kD == 64));
  static constexpr int kPitch = Tile<kD>::kPitch;
  using Scores = float[1][8][4];
  using Results = float[1][kD / 8][4];
  struct Packed {
    uint32_t left[4][4];
  };

  static __device__ __forceinline__ void start_scores(Scores& scores, uint32_t left_tile, int first_row, uint32_t right_tile) {
    const uint64_t left = wgmma::descriptor<kPitch>(left_tile + first_row / 64 * 64 * kPitch), right = wgmma::descriptor<kPitch>(right_tile);
    wgmma::fence();
    wgmma::scores<T, false>(scores[0], left, right);
#pragma unroll
    for (int k = 1; k < kD / 16; ++k) wgmma::scores<T, true>(scores[0], left + k * (32 >> 4), right + k * (32 >> 4));
    wgmma::commit();
  }

  static __device__ __forceinline__ void start_sum(Results& result, const Scores& left, uint32_t right_tile, Packed& packed) {
    const uint64_t right = wgmma::descriptor<kPitch>(right_tile);
#pragma unroll
    for (int k = 0; k < 4; ++k) pack_left<T>(packed.left[k], left[0], k);
    wgmma::fence();
#pragma unroll
    for (int k = 0; k < 4; ++k) wgmma::sum<T>(result[0], packed.left[k], right + k * (16 * kPitch >> 4));
    wgmma::commit();
  }

  template <int kPending, int kColumns>
  static __device__ __forceinline__ void wait(float (&done)[1][kColumns][4]) {
    wgmma::wait<kPending>();
    // The compiler must not read them before.
#pragma unroll
    for (int j = 0; j < kColumns; ++j)
#pragma unroll
      for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(done[0][j][e])::"memory");
  }
  // The compiler must not put anything else into these registers before.
  static __device__ __forceinline__ void release(Packed& packed) {
#pragma unroll
    for (int k = 0; k < 4; ++k)
#pragma unroll
      for (int x = 0; x < 4; ++x) asm volatile("" : "+r"(packed.left[k][x])::"memory");
  }
  static __device__ __forceinline__ void publish() { fence_async_proxy(); }
};

}  // namespace fusebackend::attention
