//   fusebackend::matmul(Tensor a, Tensor b, Tensor? d, float alpha, float beta, Tensor? a_planes=None, int a_inner=-1,
//                       Tensor? b_planes=None, int b_inner=-1, str kernel="auto") -> Tensor
//   fusebackend::matmul_planes(Tensor x, int inner) -> Tensor
//
// patterns/fp32_matmul/ops.py says what they compute. Temporary memory of matmul: 1.5 times the bytes of the operands that come without
// planes, at most 1 GiB, and at most 13 MB more; where there is not that much, less.
#include <optional>
#include <string>

#include "common/binding.h"
#include "common/device_properties.h"
#include "common/direct_call.h"
#include "common/workspace.h"
#include "fp32_matmul/fp32_matmul.h"
#include "fp32_matmul/planes.h"

namespace fusebackend::fp32_matmul {
namespace {

// On the current device.
Kernel kernel_named(const std::string& name) {
  const int major = compute_capability_major(), minor = compute_capability_minor();
#ifdef FUSE_HAS_SM90A
  const bool has_wgmma = major == 9;
#else
  const bool has_wgmma = false;
#endif
  if (name == "auto") return default_kernel(major, minor, has_wgmma);
  if (name == "ffma") return Kernel::kFfma;
  if (name == "mma") {
    STD_TORCH_CHECK(major >= 8, "matmul: the kernel mma needs a GPU of compute capability 8.0 or later");
    return Kernel::kMma;
  }
  STD_TORCH_CHECK(name == "wgmma", "matmul: kernel ", name, ": auto, wgmma, mma and ffma are known");
  STD_TORCH_CHECK(has_wgmma, "matmul: the kernel wgmma needs a GPU of compute capability 9.0 and a library built for it");
  return Kernel::kWgmma;
}

// The kernel, and memory for its planes.
struct Scratch {
  Kernel kernel;
  size_t planes_limit;
  Workspace memory;
};

// A product of cuBLAS needs no planes, so a step that ends for want of them would be our fault: where memory is short, the product is computed in
// more pieces, and at last without planes, unless a kernel was asked for by name.
Scratch scratch_for(const Problem& p, const std::string& kernel) {
  constexpr size_t kLeastPlanes = size_t(16) << 20;
  const Kernel chosen = kernel_named(kernel);
  const auto bytes = [&](size_t limit) { return static_cast<int64_t>(workspace_bytes(p, chosen, limit, sm_count())); };
  int64_t refused = INT64_MAX;
  for (size_t limit = kPlanesLimit; limit >= kLeastPlanes; limit /= 4) {
    const int64_t needed = bytes(limit);
    if (needed >= refused) continue;
    if (auto memory = Workspace::if_there_is(needed)) return {chosen, limit, std::move(*memory)};
    refused = needed;
  }
  if (kernel == "auto") return {Kernel::kFfma, 0, Workspace(0)};
  return {chosen, kLeastPlanes, Workspace(refused)};
}

bool is_fp32_on(const Tensor& t, const Tensor& like) {
  return t.scalar_type() == ScalarType::Float && t.is_cuda() && t.get_device_index() == like.get_device_index();
}

// t as a batch of matrices of these sizes; dimensions that are missing or of size 1 broadcast.
Matrix matrix(const Tensor& t, int64_t batch, int64_t rows, int64_t columns) {
  const int64_t rank = t.dim(), wanted[3] = {batch, rows, columns};
  int64_t strides[3];
  for (int64_t i = 0; i < 3; ++i) {
    const int64_t d = i - (3 - rank);
    const int64_t size = d < 0 ? 1 : t.size(d);
    STD_TORCH_CHECK(size == wanted[i] || size == 1, "matmul: an operand's size ", size, " does not fit ", wanted[i]);
    strides[i] = size == 1 ? (wanted[i] == 1 && d >= 0 && i > 0 ? t.stride(d) : 0) : t.stride(d);
  }
  return {static_cast<const float*>(t.data_ptr()), strides[1], strides[2], strides[0]};
}

// Sizes of the planes of a rank 2 or 3 operand.
std::vector<int64_t> plane_sizes(const Tensor& x, int64_t inner) {
  STD_TORCH_CHECK(inner == -1 || inner == -2, "matmul: the inner dimension is -1 or -2, not ", inner);
  const int64_t rank = x.dim();
  return {rank == 3 ? x.size(0) : 1, kPlanes, x.size(rank - 3 - inner), round_up(x.size(rank + inner), kPitchMultiple)};
}

void set_planes(Matrix& matrix, const Tensor& x, const std::optional<Tensor>& planes, int64_t inner) {
  if (!planes) return;
  STD_TORCH_CHECK(planes->scalar_type() == ScalarType::BFloat16 && planes->is_contiguous() && planes->is_cuda() &&
                      planes->get_device_index() == x.get_device_index() && to_vector(planes->sizes()) == plane_sizes(x, inner),
                  "matmul: these are not the operand's planes");
  matrix.planes = planes->data_ptr();
  matrix.planes_column_major = inner == -2;
}

Tensor matmul_planes(const Tensor& x, int64_t inner) {
  STD_TORCH_CHECK(is_fp32_on(x, x) && (x.dim() == 2 || x.dim() == 3),
                  "matmul_planes: x must be an fp32 matrix, or a batch of them, on a GPU");
  const std::vector<int64_t> sizes = plane_sizes(x, inner);
  Tensor planes = empty_like_sized(x, sizes, ScalarType::BFloat16);
  if (x.numel() == 0) return planes;
  const int64_t rows = x.size(x.dim() - 2), columns = x.size(x.dim() - 1);
  const Matrix m = matrix(x, sizes[0], rows, columns);
  // Rows as the product's free index. A batch that is broadcast in x is written out.
  const Operand op{m.data, rows, columns, sizes[0], m.row, m.col, m.batch, inner == -2, sizes[0] > 1};
  const CudaScope scope(x);
  check_cuda(launch_split(&op, planes.data_ptr(), nullptr, nullptr, nullptr, 0, scope.stream()), "matmul_planes");
  return planes;
}

Tensor matmul(const Tensor& a, const Tensor& b, const std::optional<Tensor>& d, double alpha, double beta,
              const std::optional<Tensor>& a_planes, int64_t a_inner, const std::optional<Tensor>& b_planes, int64_t b_inner,
              const std::string& kernel) {
  const int64_t rank = a.dim();
  STD_TORCH_CHECK((rank == 2 || rank == 3) && b.dim() == rank, "matmul: a and b must both have 2 or both have 3 dimensions");
  STD_TORCH_CHECK(is_fp32_on(a, a) && is_fp32_on(b, a) && (!d || is_fp32_on(*d, a)), "matmul: operands must be fp32 on one GPU");
  STD_TORCH_CHECK(a.size(rank - 1) == b.size(rank - 2) && (rank == 2 || a.size(0) == b.size(0)), "matmul: sizes of a and b do not fit");
  STD_TORCH_CHECK(!d || d->dim() <= rank, "matmul: d has more dimensions than the result");

  Problem p;
  p.m = a.size(rank - 2), p.n = b.size(rank - 1), p.k = a.size(rank - 1), p.batch = rank == 3 ? a.size(0) : 1;
  std::vector<int64_t> sizes{p.m, p.n};
  if (rank == 3) sizes.insert(sizes.begin(), p.batch);
  Tensor c = empty_like_sized(a, sizes);

  const bool add = d && beta != 0;
  p.a = matrix(a, p.batch, p.m, p.k);
  p.b = matrix(b, p.batch, p.k, p.n);
  p.d = add ? matrix(*d, p.batch, p.m, p.n) : Matrix{nullptr, 0, 0, 0};
  p.c = static_cast<float*>(c.data_ptr());
  p.c_row = p.n, p.c_col = 1, p.c_batch = p.m * p.n;
  p.alpha = float(alpha), p.beta = add ? float(beta) : 0.f;
  set_planes(p.a, a, a_planes, a_inner);
  set_planes(p.b, b, b_planes, b_inner);
  if (c.numel() == 0) return c;

  const CudaScope scope(a);
  const Scratch scratch = scratch_for(p, kernel);
  check_cuda(launch(p, scratch.kernel, scratch.memory.data(), scratch.planes_limit, sm_count(), scope.stream()), "matmul");
  return c;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fusebackend, CUDA, m) {
  direct::implement<&matmul>(m, "CUDA", "matmul");
  direct::implement<&matmul_planes>(m, "CUDA", "matmul_planes");
}

}  // namespace fusebackend::fp32_matmul
