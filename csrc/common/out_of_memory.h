// torch's own exception for memory that is not there, so that Python sees torch.OutOfMemoryError as from any operator of torch.
//
// The stable ABI reports a failed allocation by number only, and the number becomes a RuntimeError. So the exception is made of what
// libc10 (before 2.13: libc10_cuda) exports: c10::Error's constructor, and the type and vtable of c10::OutOfMemoryError, which adds no
// members. Its size is not known here, so it gets ample room. All symbols are weak: without one of them it is a RuntimeError after all.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <typeinfo>

#include <cxxabi.h>

namespace fusebackend::detail {

struct SourceLocation {  // c10::SourceLocation
  const char *function, *file;
  uint32_t line;
};

extern "C" {
extern const char out_of_memory_type[] __asm__("_ZTIN3c1016OutOfMemoryErrorE") __attribute__((weak));
extern const char out_of_memory_vtable[] __asm__("_ZTVN3c1016OutOfMemoryErrorE") __attribute__((weak));
void construct_error(void* self, SourceLocation, std::string message) __asm__(
    "_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE") __attribute__((weak));
const char* last_error() __asm__("torch_exception_get_what_without_backtrace") __attribute__((weak));  // from 2.13
}

}  // namespace fusebackend::detail

namespace fusebackend {

[[noreturn]] inline void throw_out_of_memory(const std::string& message) {
  using namespace detail;
  if (!&out_of_memory_type || !&out_of_memory_vtable || !construct_error) throw std::runtime_error(message);
  constexpr size_t kRoom = 2048;
  void* const error = abi::__cxa_allocate_exception(kRoom);
  construct_error(error, {__func__, __FILE__, __LINE__}, message);
  // Behind the offset to the top and the type: the virtual functions, the destructor first.
  auto* const functions = reinterpret_cast<void (*const*)(void*)>(out_of_memory_vtable) + 2;
  *static_cast<const void**>(error) = functions;
  abi::__cxa_throw(error, const_cast<std::type_info*>(reinterpret_cast<const std::type_info*>(out_of_memory_type)), functions[0]);
}

// After an allocation on a GPU: whether there was no memory, which an error is taken for unless torch says otherwise; then it throws.
inline bool is_out_of_memory(int32_t error) {
  if (error == 0) return false;
  if (!detail::last_error) return true;
  const std::string said = detail::last_error();
  if (said.find("out of memory") == std::string::npos) throw std::runtime_error("fusebackend: " + said);
  return true;
}

// The same, and throws torch's exception for it.
inline void check_allocated(int32_t error) {
  if (!is_out_of_memory(error)) return;
  throw_out_of_memory(std::string("fusebackend: ") + (detail::last_error ? detail::last_error() : "CUDA out of memory (torch's message is in the log)"));
}

}  // namespace fusebackend
