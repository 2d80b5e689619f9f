// How an operand's three bf16 planes lie in memory, and the kernel that writes them.
#pragma once
#include <algorithm>
#include "matmul.h"

namespace fusebackend::matmul {

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

// Writes the planes of one operand or of two in one launch (null: no such operand), and zeroes `flags` for the kernel that follows.
cudaError_t launch_split(const Operand* a, void* a_planes, const Operand* b, void* b_planes, int* flags, int flag_count,
                         cudaStream_t stream);

}  // namespace fusebackend::matmul
