// From a product to launches: the planes first, in bounded memory, then the kernel.
#include "fp32_matmul/launch.h"

#include <algorithm>
#include <utility>

namespace fusebackend::fp32_matmul {
namespace {

constexpr size_t aligned(size_t bytes) { return round_up(bytes, 256); }

// Makes the launches of one product; or launches nothing and only finds the bytes of workspace that are needed.
class Launcher {
 public:
  Launcher(Kernel kernel, char* workspace, int sm_count, cudaStream_t stream)
      : kernel_(kernel), dry_run_(false), workspace_(workspace), sm_count_(sm_count), stream_(stream) {}
  static Launcher dry_run(Kernel kernel, int sm_count) {
    Launcher launcher(kernel, nullptr, sm_count, nullptr);
    launcher.dry_run_ = true;
    return launcher;
  }

  size_t bytes() const { return bytes_; }

  // Halves p until its planes fit behind the first `used` bytes. The best index to halve costs nothing: the batch, or the free index of
  // the larger operand, where the other operand is split only once. Along k the second half is added to the first.
  cudaError_t run(Problem p, size_t used) {
    const size_t a = p.a.planes ? 0 : aligned(PlaneLayout(a_operand(p)).bytes());
    const size_t b = p.b.planes ? 0 : aligned(PlaneLayout(b_operand(p)).bytes());
    if (used + a + b <= kPlanesLimit || kernel_ == Kernel::kFfma) return multiply(p, used, a, b);
    if (p.batch > 1) return p.a.planes || p.b.planes ? multiply(p, used, a, b) : halve(p, p.batch, 1, used, &divide_batch);
    const bool by_m = a >= b;
    if ((by_m ? p.m : p.n) > 2 * kTileN) {
      const size_t other = by_m ? b : a;
      if (other && other <= kPlanesLimit / 4) {
        const Operand op = by_m ? b_operand(p) : a_operand(p);
        Matrix& x = by_m ? p.b : p.a;
        x.planes = at(used);
        x.planes_column_major = by_m ? !op.mn_inner : op.mn_inner;
        if (cudaError_t err = dry_run_ ? cudaSuccess : launch_split(&op, at(used), nullptr, nullptr, nullptr, 0, stream_)) return err;
        used += other;
      }
      return by_m ? halve(p, p.m, kTileN, used, &divide_m) : halve(p, p.n, kTileN, used, &divide_n);
    }
    if (p.a.planes || p.b.planes || p.k < 4096) return multiply(p, used, a, b);
    return halve(p, p.k, kBlockK, used, &divide_k);
  }

 private:
  // Each divides `first` and `second`, which are the same product, after `size` of one index.
  using Divide = void (*)(Problem& first, Problem& second, int64_t size);

  static void divide_batch(Problem& first, Problem& second, int64_t size) {
    first.batch = size, second.batch -= size;
    for (Matrix* x : {&second.a, &second.b, &second.d}) x->data += size * x->batch;
    second.c += size * second.c_batch;
  }
  static void divide_m(Problem& first, Problem& second, int64_t size) {
    first.m = size, second.m -= size;
    second.a.data += size * second.a.row, second.d.data += size * second.d.row;
    second.c += size * second.c_row;
  }
  static void divide_n(Problem& first, Problem& second, int64_t size) {
    first.n = size, second.n -= size;
    second.b.data += size * second.b.col, second.d.data += size * second.d.col;
    second.c += size * second.c_col;
  }
  static void divide_k(Problem& first, Problem& second, int64_t size) {
    first.k = size, second.k -= size;
    second.a.data += size * second.a.col, second.b.data += size * second.b.row;
    second.d = {second.c, second.c_row, second.c_col, second.c_batch}, second.beta = 1.f;
  }
  cudaError_t halve(const Problem& p, int64_t size, int64_t multiple, size_t used, Divide divide) {
    Problem first = p, second = p;
    divide(first, second, round_up(ceil_div(size, 2), multiple));
    if (cudaError_t err = run(first, used)) return err;
    return run(second, used);
  }

  cudaError_t multiply(const Problem& problem, size_t used, size_t a_bytes, size_t b_bytes) {
    if (kernel_ == Kernel::kFfma) return dry_run_ ? cudaSuccess : launch_ffma(problem, stream_);
    const WgmmaPlan plan = kernel_ == Kernel::kWgmma ? plan_wgmma(problem, sm_count_) : WgmmaPlan{};
    const Problem p = plan.swap ? transposed(problem) : problem;
    if (plan.swap) std::swap(a_bytes, b_bytes);
    const size_t sums = used + a_bytes + b_bytes;
    const size_t ready = sums + (plan.split_tiles ? aligned(size_t(plan.grid) * kTileM * kTileN * sizeof(float)) : 0);
    const int flags = plan.split_tiles ? plan.grid * kPartialFlags : 0;
    bytes_ = std::max(bytes_, ready + aligned(flags * sizeof(int)));
    if (dry_run_) return cudaSuccess;

    const Operand a = a_operand(p), b = b_operand(p);
    const Partials partials{reinterpret_cast<float*>(at(sums)), reinterpret_cast<int*>(at(ready))};
    void *const a_new = a_bytes ? at(used) : nullptr, *const b_new = b_bytes ? at(used + a_bytes) : nullptr;
    if (cudaError_t err = launch_split(a_new ? &a : nullptr, a_new, b_new ? &b : nullptr, b_new, partials.ready, flags, stream_)) return err;
    const SplitOperands split{a, b, a_new ? a_new : p.a.planes, b_new ? b_new : p.b.planes};
    if (kernel_ == Kernel::kMma) return launch_mma(p, split, stream_);
#ifdef FUSE_HAS_SM90A
    return launch_wgmma(p, plan, split, partials, a_new || b_new || flags, stream_);
#else
    return cudaErrorNotSupported;
#endif
  }

  // In a dry run any address but null, which would mean that there are no planes.
  void* at(size_t offset) const { return dry_run_ ? reinterpret_cast<void*>(1) : workspace_ + offset; }

  Kernel kernel_;
  bool dry_run_;
  char* workspace_;
  int sm_count_;
  cudaStream_t stream_;
  size_t bytes_ = 0;
};

}  // namespace

size_t workspace_bytes(const Problem& p, Kernel kernel, int sm_count) {
  if (p.k == 0) return 0;
  Launcher launcher = Launcher::dry_run(kernel, sm_count);
  launcher.run(p, 0);
  return launcher.bytes();
}

cudaError_t launch(const Problem& p, Kernel kernel, void* workspace, int sm_count, cudaStream_t stream) {
  if (std::max({p.m, p.n, p.k}) > INT32_MAX - 2 * kTileN) return cudaErrorInvalidValue;
  if (p.k == 0) return launch_ffma(p, stream);  // C = beta * D: nothing to split
  return Launcher(kernel, static_cast<char*>(workspace), sm_count, stream).run(p, 0);
}

}  // namespace fusebackend::fp32_matmul
