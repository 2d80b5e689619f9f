#include "conv1d_cpu.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "cpu_kernels.h"

namespace fusebackend::conv1d {
namespace {

constexpr int64_t kMostLanes = 16;  // of a vector
constexpr int64_t kManyTaps = 256;  // worth transposing samples for

bool across(const Strides& s) { return s.c == 1 && s.t != 1; }
int64_t elements(int64_t bytes, Dtype dtype) { return bytes / (dtype == Dtype::kDouble ? 8 : dtype == Dtype::kFloat ? 4 : 2); }

// Whether this processor has it, and PyTorch's variable for what its kernels may use allows it.
bool may_use_avx512() {
#if defined(__x86_64__)
  const char* capability = std::getenv("ATEN_CPU_CAPABILITY");
  return (!capability || !std::strncmp(capability, "avx512", 6)) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

bool turned(const ConvParams& p) { return !across(p.xs) || !across(p.outs); }

}  // namespace

// With fewer channels than a vector has lanes most would be idle.
bool in_lanes(const ConvParams& p) {
  return p.channels >= kMostLanes && (across(p.xs) || across(p.outs) || std::min(p.taps, p.in_len) >= kManyTaps);
}

// In lanes: even parts, whose taps, and the samples that they meet, stay in the second cache. Transposed samples are scattered over as
// many pages as channels.
int64_t rows_together(const ConvParams& p) {
  if (in_lanes(p)) {
    const int64_t most = std::clamp<int64_t>((1 << 16) / p.taps, 32, turned(p) ? 64 : 512), parts = (p.channels + most - 1) / most;
    return (p.channels + parts * kMostLanes - 1) / (parts * kMostLanes) * kMostLanes;
  }
  return across(p.xs) || across(p.outs) ? elements(128, p.dtype) : 1;
}
int64_t rows_together(const BackwardParams& p) { return across(p.xs) || across(p.dys) || (p.dx && across(p.dxs)) ? elements(64, p.dtype) : 1; }

// So that scratch stays in the fastest caches, and tiles are more than the taps that they overlap by.
int64_t tile_of(const ConvParams& p) {
  if (in_lanes(p)) return std::max<int64_t>(turned(p) ? 256 : 64, 2 * p.taps / 16 * 16);
  return std::max<int64_t>(rows_together(p) == 1 ? 2048 : 256, 4 * p.taps / 256 * 256);
}
int64_t tiles_of(const ConvParams& p) { return (p.out_len + tile_of(p) - 1) / tile_of(p); }

int64_t forward_units(const ConvParams& p) { return p.batch * row_groups(p) * tiles_of(p); }
int64_t backward_units(const BackwardParams& p) { return row_groups(p); }

const CpuKernels& cpu_kernels() {
  static const CpuKernels kernels = [] {
    const CpuKernels wide = may_use_avx512() ? avx512_kernels() : CpuKernels{};
    return wide.forward ? wide : CpuKernels{forward_range, backward_range};
  }();
  return kernels;
}

}  // namespace fusebackend::conv1d
