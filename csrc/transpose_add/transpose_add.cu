#include "transpose_add/transpose_add.h"

#include "common/tile/launch.cuh"
#include "transpose_add/add_op.cuh"

namespace fusebackend::transpose_add {
namespace {

template <typename T>
cudaError_t launch_as(const tile::Plan& plan, const Alpha& alpha, bool integers, cudaStream_t stream) {
  using Op = AddOp<T>;
  const auto factor = std::is_integral_v<T> ? typename Op::Scalar(alpha.integer) : typename Op::Scalar(alpha.real);
  return launch_plan(plan, Op{factor, typename Op::Integer(alpha.integer), integers}, stream);
}

}  // namespace

cudaError_t launch_add(const tile::Problem& problem, DType type, Alpha alpha, cudaStream_t stream) {
  const tile::Plan plan = tile::make_plan(problem);
  const bool integers = !is_floating(type);
  switch (type) {
    case DType::kFloat64:
    case DType::kInt64: return launch_as<double>(plan, alpha, integers, stream);
    case DType::kFloat32:
    case DType::kInt32: return launch_as<float>(plan, alpha, integers, stream);
    case DType::kBFloat16: return launch_as<__nv_bfloat16>(plan, alpha, integers, stream);
    case DType::kFloat16: return launch_as<__half>(plan, alpha, integers, stream);
    case DType::kInt16: return launch_as<uint16_t>(plan, alpha, integers, stream);
    case DType::kInt8:
    case DType::kUInt8: return launch_as<uint8_t>(plan, alpha, integers, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace fusebackend::transpose_add
