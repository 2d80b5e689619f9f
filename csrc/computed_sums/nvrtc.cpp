#include "computed_sums/nvrtc.h"

#include <dlfcn.h>
#include <link.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>

#include "common/kept_code.h"

namespace fusebackend::computed_sums {
namespace {

using Program = void*;

// Found at run time: a library that was built with CUDA serves a torch without it, and the other way round.
struct Nvrtc {
  int (*version)(int*, int*);
  int (*create)(Program*, const char*, const char*, int, const char* const*, const char* const*);
  int (*compile)(Program, int, const char* const*);
  int (*log_size)(Program, size_t*);
  int (*log)(Program, char*);
  int (*code_size)(Program, size_t*);
  int (*code)(Program, char*);
  int (*destroy)(Program*);
  const char* (*error)(int);
  std::string failure;
};

std::string folder_of(const std::string& path) { return path.substr(0, path.rfind('/') + 1); }

// The folder of the torch that is loaded, ending with a slash.
std::string torch_folder() {
  std::string found;
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* to) {
        const char* const name = std::strrchr(info->dlpi_name, '/');
        if (name == nullptr || std::strcmp(name, "/libtorch_cpu.so") != 0) return 0;
        *static_cast<std::string*>(to) = folder_of(info->dlpi_name);
        return 1;
      },
      &found);
  return found;
}

void* open_nvrtc(std::string& tried) {
  if (const char* named = std::getenv("FUSEBACKEND_NVRTC")) {
    tried = std::string(named) + " ($FUSEBACKEND_NVRTC)";
    return dlopen(named, RTLD_NOW);
  }
  const char* const names[] = {"libnvrtc.so.13", "libnvrtc.so.12"};
  for (const char* name : names)
    if (void* library = dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return library;
  // Where pip puts them, and where torch's wheels have their own; before what the system has, which may be of another CUDA than the driver knows.
  const std::string torch = torch_folder();
  for (const char* folder : {"../../nvidia/cu13/lib/", "../../nvidia/cuda_nvrtc/lib/", ""}) {
    for (const char* name : names) {
      if (torch.empty()) break;
      if (void* library = dlopen((torch + folder + name).c_str(), RTLD_NOW)) return library;
    }
  }
  for (const char* name : names)
    if (void* library = dlopen(name, RTLD_NOW)) return library;
  tried = "libnvrtc.so.13, libnvrtc.so.12, among what is loaded, beside torch's libraries in " + torch + " and where the system looks";
  return nullptr;
}

Nvrtc find() {
  Nvrtc found{};
  std::string tried;
  void* const library = open_nvrtc(tried);
  if (library == nullptr) {
    found.failure = "NVRTC is not found: tried " + tried + "; FUSEBACKEND_NVRTC may name the library";
    return found;
  }
  const auto symbol = [&](auto& function, const char* name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    if (function == nullptr) found.failure = std::string("NVRTC has no ") + name;
  };
  symbol(found.version, "nvrtcVersion");
  symbol(found.create, "nvrtcCreateProgram");
  symbol(found.compile, "nvrtcCompileProgram");
  symbol(found.log_size, "nvrtcGetProgramLogSize");
  symbol(found.log, "nvrtcGetProgramLog");
  symbol(found.code_size, "nvrtcGetCUBINSize");
  symbol(found.code, "nvrtcGetCUBIN");
  symbol(found.destroy, "nvrtcDestroyProgram");
  symbol(found.error, "nvrtcGetErrorString");
  if (!found.failure.empty()) return found;
  // It opens a second library, which lies beside it, by its name alone.
  int major = 0, minor = 0;
  Dl_info lies;
  if (found.version(&major, &minor) == 0 && dladdr(reinterpret_cast<void*>(found.version), &lies) != 0 && lies.dli_fname != nullptr) {
    const std::string builtins = "libnvrtc-builtins.so." + std::to_string(major) + "." + std::to_string(minor);
    dlopen((folder_of(lies.dli_fname) + builtins).c_str(), RTLD_NOW);  // if it is not there, NVRTC says so
  }
  return found;
}

const Nvrtc& nvrtc() {
  static const Nvrtc found = find();
  return found;
}

// The number that stands before `text` in the compiler's report: "8 bytes spill stores".
int number_before(const std::string& log, const char* text) {
  size_t end = log.find(text), begin = end;
  if (end == std::string::npos) return 0;
  while (begin > 0 && log[begin - 1] >= '0' && log[begin - 1] <= '9') --begin;
  return std::atoi(log.substr(begin, end - begin).c_str());
}

const char* const kOptions[] = {"--std=c++17", "-default-device", "--ptxas-options=-v"};

std::atomic<int64_t> compilation_count{0};

Compiled compile(const std::string& text, const std::string& architecture) {
  Compiled result{};
  const Nvrtc& compiler = nvrtc();
  if (!compiler.failure.empty()) {
    result.failure = compiler.failure;
    return result;
  }
  ++compilation_count;
  Program program = nullptr;
  const std::string target = "--gpu-architecture=" + architecture;
  const char* const options[] = {target.c_str(), kOptions[0], kOptions[1], kOptions[2]};
  int error = compiler.create(&program, text.c_str(), "computed_sums.cu", 0, nullptr, nullptr);
  if (error == 0) error = compiler.compile(program, 4, options);
  std::string log;
  size_t bytes = 0;
  if (program != nullptr && compiler.log_size(program, &bytes) == 0 && bytes > 1) {
    log.resize(bytes);
    compiler.log(program, log.data());
    log.resize(std::strlen(log.c_str()));
  }
  if (error == 0) error = compiler.code_size(program, &bytes);
  if (error == 0) {
    result.machine_code.resize(bytes);
    error = compiler.code(program, result.machine_code.data());
  }
  if (program != nullptr) compiler.destroy(&program);
  if (error != 0) {
    int major = 0, minor = 0;
    compiler.version(&major, &minor);
    result.failure = "NVRTC " + std::to_string(major) + "." + std::to_string(minor) + " for " + architecture + ": " + compiler.error(error) + ": " + log;
    result.machine_code.clear();
  }
  result.registers = number_before(log, " registers");
  result.stack_bytes = number_before(log, " bytes stack frame");
  result.spill_bytes = number_before(log, " bytes spill stores");
  return result;
}

// All that machine code depends on. The compiler may be another one in the next process, whatever torch is.
std::string name_of(const std::string& text, const std::string& architecture) {
  int major = 0, minor = 0;
  if (nvrtc().failure.empty()) nvrtc().version(&major, &minor);
  std::string name = "NVRTC " + std::to_string(major) + "." + std::to_string(minor) + " for " + architecture;
  for (const char* option : kOptions) name += std::string(" ") + option;
  if (const char* named = std::getenv("FUSEBACKEND_NVRTC")) name += std::string(" ") + named;
  return name + '\n' + text;
}

// What an earlier process compiled, or NVRTC does now.
Compiled kept_or_compiled(const std::string& text, const std::string& architecture) {
  const std::string name = name_of(text, architecture), kept = kept_code(name);
  Compiled found{};
  std::istringstream numbers(kept.substr(0, kept.find('\n')));
  if (numbers >> found.registers >> found.stack_bytes >> found.spill_bytes) {
    found.machine_code = kept.substr(kept.find('\n') + 1);
    return found;
  }
  found = compile(text, architecture);
  std::ostringstream all;
  all << found.registers << ' ' << found.stack_bytes << ' ' << found.spill_bytes << '\n' << found.machine_code;
  if (found.failure.empty()) keep_code(name, all.str());
  return found;
}

// Compiles once. Who wants the same meanwhile waits; others do not.
struct Entry {
  std::once_flag once;
  Compiled result;
};

}  // namespace

const Compiled& compiled(const Variant& v, const std::string& architecture) {
  const std::string text = source(v);  // before there is an entry: it may refuse the program
  static std::mutex mutex;
  static auto& entries = *new std::map<std::string, std::unique_ptr<Entry>>;  // lives as long as the process, for its threads
  Entry* entry;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    std::unique_ptr<Entry>& place = entries[architecture + ' ' + v.key()];
    if (!place) place = std::make_unique<Entry>();
    entry = place.get();
  }
  std::call_once(entry->once, [&] { entry->result = kept_or_compiled(text, architecture); });
  return entry->result;
}

int64_t compilations() { return compilation_count; }

}  // namespace fusebackend::computed_sums
