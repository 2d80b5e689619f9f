// How the three bf16 planes of an operand lie in memory, and the launcher of the kernel that writes them.
#pragma once
#include "common/integer_math.h"
#include "fp32_matmul/fp32_matmul.h"

namespace fusebackend::fp32_matmul {

// The plane products that are computed, smallest first.
constexpr int kProducts = 6;
#ifdef __CUDACC__
__device__ constexpr int kProductA[kProducts] = {1, 0, 2, 0, 1, 0};
__device__ constexpr int kProductB[kProducts] = {1, 2, 0, 1, 0, 0};
#endif

// One operand as the product indexes it: `mn` is its free index (rows of A, columns of B), `k` the contracted one.
struct Operand {
  const float* data;
  int64_t mn_size, k_size, batch_size;
  int64_t mn_stride, k_stride, batch_stride;
  bool mn_inner;                     // whether its planes have mn innermost
  bool batched;                      // whether each batch element has planes of its own; if not, all share one set
};

// planes[batch][plane][outer][pitch]. The operand's contiguous index stays innermost, so that writing planes is a copy; the kernels read
// either order. An operand without a unit stride is gathered with k innermost.
struct PlaneLayout {
  int64_t inner, outer, batch, pitch;

  explicit PlaneLayout(const Operand& op)
      : inner(op.mn_inner ? op.mn_size : op.k_size),
        outer(op.mn_inner ? op.k_size : op.mn_size),
        batch(op.batched ? op.batch_size : 1),
        pitch(round_up(inner, kPitchMultiple)) {}

  int64_t plane() const { return outer * pitch; }
  size_t bytes() const { return size_t(batch) * kPlanes * plane() * 2; }
};

// Planes from the caller have the order that he gives and one set a batch element; planes made here keep the operand's contiguous index.
inline Operand operand(const Problem& p, const Matrix& x, int64_t mn_size, int64_t mn_stride, int64_t k_stride, bool planes_mn_inner) {
  return {x.data,  mn_size, p.k, p.batch, mn_stride, k_stride, x.batch, x.planes ? planes_mn_inner : mn_stride == 1 && k_stride != 1,
          x.planes ? p.batch > 1 : x.batch != 0};
}
inline Operand a_operand(const Problem& p) { return operand(p, p.a, p.m, p.a.row, p.a.col, p.a.planes_column_major); }
inline Operand b_operand(const Problem& p) { return operand(p, p.b, p.n, p.b.col, p.b.row, !p.b.planes_column_major); }

// Whether an operand is read and split 8 elements at a time, not 2.
inline bool splits_vectors(const Operand& op) {
  const int64_t inner_stride = op.mn_inner ? op.mn_stride : op.k_stride, outer_stride = op.mn_inner ? op.k_stride : op.mn_stride;
  return inner_stride == 1 && reinterpret_cast<uintptr_t>(op.data) % 16 == 0 && outer_stride % 4 == 0 && op.batch_stride % 4 == 0;
}

#if __has_include(<cuda_runtime_api.h>)
// Writes the planes of one or two operands in one launch (null: none), and zeroes `flags`, which the next kernel uses.
cudaError_t launch_split(const Operand* a, void* a_planes, const Operand* b, void* b_planes, int* flags, int flag_count,
                         cudaStream_t stream);
#endif

}  // namespace fusebackend::fp32_matmul
