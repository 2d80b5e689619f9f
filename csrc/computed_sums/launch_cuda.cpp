// Loads what NVRTC compiled and launches it. The driver's functions are found through the runtime, so that the library does not link the driver.
#include "computed_sums/launch.h"

#include <cuda.h>

#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>

#include "common/device_properties.h"
#include "computed_sums/nvrtc.h"

namespace fusebackend::computed_sums {

struct Kernel {
  std::once_flag once;
  CUfunction function;
};

namespace {

template <typename Function>
void find(Function& function, const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  const cudaError_t error = cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t error = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  if (error != cudaSuccess || result != cudaDriverEntryPointSuccess) throw std::runtime_error(std::string("computed_sums: the driver has no ") + name);
  function = reinterpret_cast<Function>(found);
}

struct Driver {
  decltype(&cuCtxGetCurrent) current_context;
  decltype(&cuModuleLoadData) load_module;
  decltype(&cuModuleGetFunction) get_function;
  decltype(&cuFuncSetAttribute) set_attribute;
  decltype(&cuLaunchKernel) launch;
  decltype(&cuGetErrorString) error_string;

  Driver() {
    find(current_context, "cuCtxGetCurrent");
    find(load_module, "cuModuleLoadData");
    find(get_function, "cuModuleGetFunction");
    find(set_attribute, "cuFuncSetAttribute");
    find(launch, "cuLaunchKernel");
    find(error_string, "cuGetErrorString");
  }
};

const Driver& driver() {
  static const Driver found;
  return found;
}

void check(CUresult result, const char* what) {
  if (result == CUDA_SUCCESS) return;
  const char* text = nullptr;
  driver().error_string(result, &text);
  throw std::runtime_error(std::string("computed_sums: ") + what + ": CUDA error: " + (text ? text : "unknown"));
}

// A thread that has not called the runtime yet, such as one of autograd's, has no context, which the driver's functions need.
void make_context_current(int device) {
  CUcontext context = nullptr;
  if (driver().current_context(&context) == CUDA_SUCCESS && context != nullptr) return;
  if (cudaSetDevice(device) != cudaSuccess) throw std::runtime_error("computed_sums: the device can't be made current");
}

// While a stream is captured, loading is forbidden to threads in the usual mode. It does nothing that belongs into the graph.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

void load(const Variant& v, Kernel& kernel) {
  const Compiled& code = compiled(v, "sm_" + std::to_string(compute_capability_major() * 10 + compute_capability_minor()));
  if (!code.failure.empty()) throw std::runtime_error("computed_sums: " + code.failure);
  const RelaxedCapture relaxed;
  CUmodule module = nullptr;
  check(driver().load_module(&module, code.machine_code.data()), "loading a kernel");  // for as long as the process lives
  check(driver().get_function(&kernel.function, module, v.adds() ? "computed_sums_rows" : "computed_rows"), "loading a kernel");
  constexpr int kLimitWithoutAsking = 48 << 10;
  const int bytes = shared_bytes(v, kMostThreads);
  if (bytes > kLimitWithoutAsking)
    check(driver().set_attribute(kernel.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, bytes), "shared memory of a kernel");
}

}  // namespace

const Kernel& kernel_of(const Variant& v) {
  static std::mutex mutex;
  static auto& kernels = *new std::map<std::string, std::unique_ptr<Kernel>>;  // lives as long as the process, for its threads
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) throw std::runtime_error("computed_sums: there is no device");
  make_context_current(device);
  Kernel* kernel;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    std::unique_ptr<Kernel>& place = kernels[std::to_string(device) + ' ' + v.key()];
    if (!place) place = std::make_unique<Kernel>();
    kernel = place.get();
  }
  std::call_once(kernel->once, [&] { load(v, *kernel); });
  return *kernel;
}

cudaError_t launch(const Kernel& kernel, const Variant& v, const Plan& plan, Arguments p, float* partials, cudaStream_t stream) {
  if (plan.blocks() > INT32_MAX) return cudaErrorInvalidConfiguration;
  const Arguments results = p;
  p.tiles = uint32_t(plan.tiles), p.splits = uint32_t(plan.splits), p.tile_vectors = plan.tile_vectors, p.lanes = plan.lanes;
  p.finished = !v.adds() || plan.splits == 1;
  if (!p.finished) p.out[0] = partials;
  void* parameters[] = {&p};
  check(driver().launch(kernel.function, unsigned(plan.blocks()), 1, 1, unsigned(plan.threads), 1, 1, unsigned(shared_bytes(v, plan.threads)),
                        reinterpret_cast<CUstream>(stream), parameters, nullptr),
        "launching a kernel");
  if (p.finished) return cudaSuccess;
  p.out[0] = results.out[0];
  return launch_partials(p, v.outs, partials, stream);
}

}  // namespace fusebackend::computed_sums
