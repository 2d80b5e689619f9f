// How an operand's three bf16 planes lie in memory, and the kernel that writes them.
#pragma once
#include <algorithm>
#include "matmul.h"

namespace fusebackend::matmul {

// Six of the nine plane products, smallest first.
constexpr int kProducts = 6;
#ifdef __CUDACC__
__device__ constexpr int kProductA[kProducts] = {1, 0, 2, 0, 1, 0};
__device__ constexpr int kProductB[kProducts] = {1, 2, 0, 1, 0, 0};
#endif

// Tensor cores truncate what they add. Truncating after half a unit in the last place was added is rounding: so lo is made larger by this
// part of hi, and the two products hi * lo and lo * hi, which are summed before hi * hi, raise a sum by 2 kHalfUlp = 3 * 2^-26 of itself,
// 0.38 to 0.75 units. Elements of which no lo is left are not touched, so that products of integers, say, stay exact. Measured for 0 to
// 4 * 2^-26: errors of log-normal products fall by half, those of uniform ones by a third, none rise.
constexpr float kHalfUlp = 1.5f / (1 << 26);

// One operand seen from the product: `mn` is its free index (rows of A, columns of B), `k` the contracted one.
struct Operand {
  const float* data;
  int64_t mn_size, k_size, batch_size;
  int64_t mn_stride, k_stride, batch_stride;
  bool mn_inner;                     // whether its planes have mn innermost
  bool batched;                      // whether it has planes a batch element; else all share one set
};

// planes[batch][plane][outer][pitch]. The planes keep the operand's own contiguous index innermost, so that writing them is a copy and
// the matmul reads either order; an operand with no unit stride is gathered into k-innermost order.
struct PlaneLayout {
  int64_t inner, outer, batch, pitch;

  explicit PlaneLayout(const Operand& op)
      : inner(op.mn_inner ? op.mn_size : op.k_size),
        outer(op.mn_inner ? op.k_size : op.mn_size),
        batch(op.batched ? op.batch_size : 1),
        pitch((inner + 63) / 64 * 64) {}

  int64_t plane() const { return outer * pitch; }
  size_t bytes() const { return size_t(batch) * kPlanes * plane() * 2; }
};

// Planes that the caller has are in the order he says, one set a batch element; ours are in the order in which splitting is a copy.
inline Operand operand(const Problem& p, const Matrix& x, int64_t mn_size, int64_t mn_stride, int64_t k_stride, bool planes_mn_inner) {
  return {x.data,  mn_size, p.k, p.batch, mn_stride, k_stride, x.batch, x.planes ? planes_mn_inner : mn_stride == 1 && k_stride != 1,
          x.planes ? p.batch > 1 : x.batch != 0};
}
inline Operand a_operand(const Problem& p) { return operand(p, p.a, p.m, p.a.row, p.a.col, p.a.planes_column_major); }
inline Operand b_operand(const Problem& p) { return operand(p, p.b, p.n, p.b.col, p.b.row, !p.b.planes_column_major); }

// Writes the planes of one operand or of two in one launch (null: no such operand), and zeroes `flags` for the kernel that follows.
cudaError_t launch_split(const Operand* a, void* a_planes, const Operand* b, void* b_planes, int* flags, int flag_count,
                         cudaStream_t stream);

}  // namespace fusebackend::matmul
