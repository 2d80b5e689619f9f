// The tile engine: one strided movement engine behind two operations,
//
//   permute_copy   out[i] = a[i]
//   add            out[i] = a[i] + alpha * b[i]
//
// where all operands are seen in one logical index space of rank <= 16, each through its own strides (0 where it is broadcast).
// The output must not overlap itself or the inputs. Nothing here knows torch.
#pragma once

#include <cstdint>

#if __has_include(<cuda_runtime_api.h>)
#include <cuda_runtime_api.h>
#endif

namespace fusebackend::tile {

constexpr int kMaxRank = 16;
enum Role : int { kOut = 0, kA = 1, kB = 2 };

struct Problem {
  int rank = 0;
  int operands = 2;       // 2: out, a (permute_copy). 3: out, a, b (add).
  int element_bytes = 0;  // 1, 2, 4, 8 or 16
  int64_t sizes[kMaxRank] = {};
  int64_t strides[3][kMaxRank] = {};  // by Role; in elements, >= 0
  char* data[3] = {};                 // by Role; any alignment that the elements have
};

// Types that `add` computes in. Integers wrap modulo 2^n, so signed and unsigned are one.
enum class AddType { kF64, kF32, kF16, kBF16, kI8, kI16, kI32, kI64 };

// Floating types read `real` (fp16 and bf16 compute in fp32 and round once, as fp32 does), integers `integer`.
struct Alpha {
  double real = 1.0;
  int64_t integer = 1;
};

#if __has_include(<cuda_runtime_api.h>)
// Launch on `stream` of the current device. No synchronisation, no allocation: safe under CUDA-graph capture.
cudaError_t launch_permute_copy(const Problem& problem, cudaStream_t stream);
cudaError_t launch_add(const Problem& problem, AddType type, Alpha alpha, cudaStream_t stream);
#endif

}  // namespace fusebackend::tile
