// Operators that are called past torch's dispatcher (direct_call_python.cpp): what `implement` gives to torch, it also keeps by name.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/binding.h"

namespace fusebackend::direct {

// An argument of a call, as Python gave it.
struct Argument {
  enum class Kind : uint8_t { kNone, kInteger, kNumber, kText, kTensor, kList } kind = Kind::kNone;
  int64_t integer = 0;            // int, bool, ScalarType
  double number = 0;              // float
  std::string text;               // str
  std::vector<int64_t> integers;  // int[], bool[]
  std::vector<Tensor> tensors;    // Tensor, alone, or Tensor[]
};

struct Kernel {
  std::vector<Tensor> (*call)(const std::vector<const Argument*>& arguments) = nullptr;
  size_t parameters = 0;
  bool one_result = false;  // a tensor, not a list or tuple of tensors
};

// By dispatch key and operator, "CUDA/index_add". Complete once the library is loaded.
inline std::map<std::string, Kernel>& kernels() {
  static std::map<std::string, Kernel> all;
  return all;
}

// Throws where an argument is of another type than the parameter: the dispatcher then converts or refuses it.
inline const Argument& checked(const Argument& a, bool fits) {
  STD_TORCH_CHECK(fits, "an argument of another type than the parameter's");
  return a;
}

template <typename T>
struct Read {
  static_assert(std::is_arithmetic_v<T> || std::is_enum_v<T>, "arguments of this type are not read yet");
  static T from(const Argument& a) {
    const bool whole = a.kind == Argument::Kind::kInteger;
    if constexpr (std::is_floating_point_v<T>) return T(checked(a, whole || a.kind == Argument::Kind::kNumber).number);
    return T(checked(a, whole).integer);
  }
};
template <typename T>
struct Read<std::optional<T>> {
  static std::optional<T> from(const Argument& a) { return a.kind == Argument::Kind::kNone ? std::nullopt : std::optional<T>(Read<T>::from(a)); }
};
template <>
struct Read<std::string> {
  static const std::string& from(const Argument& a) { return checked(a, a.kind == Argument::Kind::kText).text; }
};
template <>
struct Read<std::vector<int64_t>> {
  static const std::vector<int64_t>& from(const Argument& a) { return checked(a, a.kind == Argument::Kind::kList && a.tensors.empty()).integers; }
};
template <>
struct Read<std::vector<bool>> {
  static std::vector<bool> from(const Argument& a) {
    const std::vector<int64_t>& integers = Read<std::vector<int64_t>>::from(a);
    return {integers.begin(), integers.end()};
  }
};
template <>
struct Read<std::vector<Tensor>> {
  static const std::vector<Tensor>& from(const Argument& a) { return checked(a, a.kind == Argument::Kind::kList && a.integers.empty()).tensors; }
};
template <>
struct Read<Tensor> {
  static const Tensor& from(const Argument& a) { return checked(a, a.kind == Argument::Kind::kTensor).tensors[0]; }
};

inline std::vector<Tensor> listed(Tensor result) { return {std::move(result)}; }
inline std::vector<Tensor> listed(std::vector<Tensor> results) { return results; }
template <typename... Tensors>
std::vector<Tensor> listed(std::tuple<Tensors...> results) {
  return std::apply([](const auto&... each) { return std::vector<Tensor>{each...}; }, results);
}

template <auto function>
struct Caller;
template <typename Result, typename... Parameters, Result (*function)(Parameters...)>
struct Caller<function> {
  template <size_t... I>
  static std::vector<Tensor> apply(const std::vector<const Argument*>& arguments, std::index_sequence<I...>) {
    return listed(function(Read<std::decay_t<Parameters>>::from(*arguments[I])...));
  }
  static std::vector<Tensor> call(const std::vector<const Argument*>& arguments) { return apply(arguments, std::index_sequence_for<Parameters...>()); }
  static Kernel kernel() { return {&call, sizeof...(Parameters), std::is_same_v<Result, Tensor>}; }
};

// Makes a function the operator's kernel for a dispatch key, that of `library`. An operator that changes a tensor in place has no direct call: if it
// fails, it can't be called again by the dispatcher for torch's own error.
template <auto function>
void implement(torch::stable::detail::StableLibrary& library, const char* key, const char* name) {
  library.impl(name, TORCH_BOX(function));
  kernels()[std::string(key) + "/" + name] = Caller<function>::kernel();
}

}  // namespace fusebackend::direct
