// Memory for the length of a call.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>

#include "common/binding.h"

// CPU builds of torch lack these: weak, so that the library loads there too.
#pragma weak aoti_torch_cuda_caching_allocator_raw_alloc
#pragma weak aoti_torch_cuda_caching_allocator_raw_delete

namespace fusebackend {

// From torch's allocator, on the current device and stream (within a CudaScope), and given back in stream order; none for no bytes. Not a tensor, which
// the host takes several times as long to make, and which torch fills where it is asked to be deterministic.
class Workspace {
 public:
  explicit Workspace(int64_t bytes) {
    if (bytes > 0) check_allocated(aoti_torch_cuda_caching_allocator_raw_alloc(static_cast<uint64_t>(bytes), &data_));
  }
  // Nothing where that much memory is not there, for a caller that can do with less.
  static std::optional<Workspace> if_there_is(int64_t bytes) {
    Workspace found(0);
    if (bytes > 0 && is_out_of_memory(aoti_torch_cuda_caching_allocator_raw_alloc(static_cast<uint64_t>(bytes), &found.data_))) return std::nullopt;
    return found;
  }
  ~Workspace() {
    if (data_) aoti_torch_cuda_caching_allocator_raw_delete(data_);
  }
  Workspace(Workspace&& other) noexcept : data_(std::exchange(other.data_, nullptr)) {}
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  void* data() const { return data_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
};

}  // namespace fusebackend
