// From a product to launches: the planes first, in bounded memory, then the kernel.
#include <algorithm>

#include "../common/cuda_common.cuh"
#include "epilogue.cuh"
#include "launch.h"

namespace fusebackend::matmul {
namespace {

// What an empty contraction leaves: C = beta * D.
__global__ void scale_kernel(const __grid_constant__ Problem p) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x, batch = i / p.n / p.m;
  const int m = int(i / p.n % p.m), n = int(i % p.n);
  if (batch < p.batch) p.c[c_offset(p, batch, m, n)] = scale(p, batch, m, n, 0.f);
}

Problem transposed(Problem p) {
  const auto t = [](Matrix x) { return Matrix{x.data, x.col, x.row, x.batch, x.planes, !x.planes_column_major}; };
  const Matrix a = t(p.b), b = t(p.a);
  std::swap(p.m, p.n);
  std::swap(p.c_row, p.c_col);
  p.a = a, p.b = b, p.d = t(p.d);
  return p;
}

constexpr size_t aligned(size_t bytes) { return (bytes + 255) / 256 * 256; }

// Walks through the launches of a product; without a workspace it only finds out how much is needed.
class Launcher {
 public:
  Launcher(Kernel kernel, char* workspace, int sm_count, cudaStream_t stream)
      : kernel_(kernel), dry_(!workspace), workspace_(dry_ ? reinterpret_cast<char*>(256) : workspace), sm_count_(sm_count), stream_(stream) {}

  size_t bytes() const { return bytes_; }

  // Halves p until its planes fit, along an index that costs nothing if there is one: the batch, or the larger operand's free index,
  // the other operand then being split only once. Along k the second half is added to the first.
  cudaError_t run(Problem p, size_t used) {
    const size_t a = p.a.planes ? 0 : aligned(PlaneLayout(a_operand(p)).bytes());
    const size_t b = p.b.planes ? 0 : aligned(PlaneLayout(b_operand(p)).bytes());
    if (used + a + b <= kPlanesLimit || kernel_ == Kernel::kFfma) return multiply(p, used, a, b);
    if (p.batch > 1) return p.a.planes || p.b.planes ? multiply(p, used, a, b) : halve(p, p.batch, 1, used, &along_batch);
    const bool by_m = a >= b;
    if ((by_m ? p.m : p.n) > 2 * kTileN) {
      const size_t other = by_m ? b : a;
      if (other && other <= kPlanesLimit / 4) {
        const Operand op = by_m ? b_operand(p) : a_operand(p);
        Matrix& x = by_m ? p.b : p.a;
        x.planes = at(used);
        x.planes_column_major = by_m ? !op.mn_inner : op.mn_inner;
        if (cudaError_t err = dry_ ? cudaSuccess : launch_split(&op, at(used), nullptr, nullptr, nullptr, 0, stream_)) return err;
        used += other;
      }
      return by_m ? halve(p, p.m, kTileN, used, &along_m) : halve(p, p.n, kTileN, used, &along_n);
    }
    if (p.a.planes || p.b.planes || p.k < 4096) return multiply(p, used, a, b);
    return halve(p, p.k, kBlockK, used, &along_k);
  }

 private:
  using Along = void (*)(Problem& first, Problem& second, int64_t size);

  static void along_batch(Problem& first, Problem& second, int64_t size) {
    first.batch = size, second.batch -= size;
    for (Matrix* x : {&second.a, &second.b, &second.d}) x->data += size * x->batch;
    second.c += size * second.c_batch;
  }
  static void along_m(Problem& first, Problem& second, int64_t size) {
    first.m = size, second.m -= size;
    second.a.data += size * second.a.row, second.d.data += size * second.d.row;
    second.c += size * second.c_row;
  }
  static void along_n(Problem& first, Problem& second, int64_t size) {
    first.n = size, second.n -= size;
    second.b.data += size * second.b.col, second.d.data += size * second.d.col;
    second.c += size * second.c_col;
  }
  static void along_k(Problem& first, Problem& second, int64_t size) {
    first.k = size, second.k -= size;
    second.a.data += size * second.a.col, second.b.data += size * second.b.row;
    second.d = {second.c, second.c_row, second.c_col, second.c_batch}, second.beta = 1.f;
  }
  cudaError_t halve(const Problem& p, int64_t size, int64_t multiple, size_t used, Along along) {
    Problem first = p, second = p;
    along(first, second, ceil_div(ceil_div(size, 2), multiple) * multiple);
    if (cudaError_t err = run(first, used)) return err;
    return run(second, used);
  }

  cudaError_t multiply(const Problem& problem, size_t used, size_t a_bytes, size_t b_bytes) {
    if (kernel_ == Kernel::kFfma) return dry_ ? cudaSuccess : launch_ffma(problem, stream_);
    const Plan how = kernel_ == Kernel::kWgmma ? plan(problem, sm_count_) : Plan{};
    const Problem p = how.swap ? transposed(problem) : problem;
    if (how.swap) std::swap(a_bytes, b_bytes);
    const size_t sums = used + a_bytes + b_bytes;
    const size_t ready = sums + (how.split_tiles ? aligned(size_t(how.grid) * kTileM * kTileN * sizeof(float)) : 0);
    const int flags = how.split_tiles ? how.grid * kPartialFlags : 0;
    bytes_ = std::max(bytes_, ready + aligned(flags * sizeof(int)));
    if (dry_) return cudaSuccess;

    const Operand a = a_operand(p), b = b_operand(p);
    const Partials partials{reinterpret_cast<float*>(at(sums)), reinterpret_cast<int*>(at(ready))};
    void *const a_new = a_bytes ? at(used) : nullptr, *const b_new = b_bytes ? at(used + a_bytes) : nullptr;
    if (cudaError_t err = launch_split(a_new ? &a : nullptr, a_new, b_new ? &b : nullptr, b_new, partials.ready, flags, stream_)) return err;
    const Split split{a, b, a_new ? a_new : p.a.planes, b_new ? b_new : p.b.planes};
    if (kernel_ == Kernel::kMma) return launch_mma(p, split, stream_);
#ifdef FUSE_HAS_SM90A
    return launch_wgmma(p, how, split, partials, a_new || b_new || flags, stream_);
#else
    return cudaErrorNotSupported;
#endif
  }

  void* at(size_t offset) const { return workspace_ + offset; }

  Kernel kernel_;
  bool dry_;
  char* workspace_;
  int sm_count_;
  cudaStream_t stream_;
  size_t bytes_ = 0;
};

}  // namespace

size_t workspace_bytes(const Problem& p, Kernel kernel, int sm_count) {
  if (p.k == 0) return 0;
  Launcher launcher(kernel, nullptr, sm_count, nullptr);
  launcher.run(p, 0);
  return launcher.bytes();
}

cudaError_t launch(const Problem& p, Kernel kernel, void* workspace, int sm_count, cudaStream_t stream) {
  if (std::max({p.m, p.n, p.k}) > INT32_MAX - 2 * kTileN) return cudaErrorInvalidValue;
  if (p.k > 0) return Launcher(kernel, static_cast<char*>(workspace), sm_count, stream).run(p, 0);
  const int64_t blocks = ceil_div(p.batch * p.m * p.n, 256);
  if (blocks > INT32_MAX) return cudaErrorInvalidValue;
  scale_kernel<<<unsigned(blocks), 256, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace fusebackend::matmul
