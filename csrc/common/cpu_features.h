// What the CPU that the library runs on has beyond what its files are compiled for.
#pragma once

#include <cstdlib>
#include <cstring>

namespace fusebackend {

// Whether the processor has AVX-512, and PyTorch's variable for what CPU kernels may use allows it.
inline bool may_use_avx512() {
#if defined(__x86_64__)
  const char* capability = std::getenv("ATEN_CPU_CAPABILITY");
  return (!capability || !std::strncmp(capability, "avx512", 6)) && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
  return false;
#endif
}

}  // namespace fusebackend
