// Memory orders, and which of them the CUDA kernels take. Plain C++, so that it can be asked where there is no GPU (bind.cpp).
#pragma once
#include <cstdint>

namespace fusebackend::causal_conv1d {

// Element strides of a (batch, channel, time) tensor.
struct Strides {
  int64_t b, c, t;
};

// Outermost dimension first: (batch, channel, time) with contiguous time, or (batch, time, channel) with contiguous channels. Outer dimensions
// may be strided.
enum class MemoryOrder { kBct, kBtc, kOther };

inline MemoryOrder memory_order(const Strides& s, int64_t channels) {
  if (s.c == 1 && s.t != 1 && channels > 1) return MemoryOrder::kBtc;
  return s.t == 1 ? MemoryOrder::kBct : MemoryOrder::kOther;
}
inline bool is_btc(const Strides& s, int64_t channels) { return memory_order(s, channels) == MemoryOrder::kBtc; }

// Taps of the kernels for short causal convolutions (short.cu).
constexpr int kMinShortTaps = 2, kMaxShortTaps = 4;

// Of these kernels, those that transpose x: channels of which the forward kernel takes a multiple, and channels and samples of 16-bit types of
// which the backward kernel takes multiples at full speed.
constexpr int kTransposeChannels = 2, kTransposeVec = 8;

// Whether kernels are faster on (batch, time, channel) tensors than on copies of them in (batch, channel, time). With many taps those of 16-bit
// types run on tensor cores, which is worth the copies (measured on an H200).
inline bool prefers_btc(int64_t element_size, int64_t taps) { return taps <= (element_size == 4 ? 32 : 8); }

// Whether a kernel takes x as (batch, time, channel), and everything else as (batch, channel, time), without a copy and at full speed. The
// convolution is causal.
inline bool transposes_btc(int64_t element_size, int64_t channels, int64_t length, int64_t taps, bool backward) {
  if (taps > kMaxShortTaps) return false;
  if (!backward) return channels % kTransposeChannels == 0;
  return element_size == 2 && channels % kTransposeVec == 0 && length % kTransposeVec == 0;
}

}  // namespace fusebackend::causal_conv1d
