// Facts of a kernel for Python: "name=value" pairs, separated by spaces, as `ops.facts` reads them.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <string>
#include <type_traits>

namespace fusebackend {

// Not by a stream, which would write numbers as the process's locale does, with digits in groups perhaps.
class FactText {
 public:
  template <typename Value>
  FactText& add(const char* name, Value value) {
    static_assert(std::is_arithmetic_v<Value>);
    if (!text_.empty()) text_ += ' ';
    text_ += name;
    text_ += '=';
    if constexpr (std::is_floating_point_v<Value>) text_ += of_double(value);
    else text_ += std::to_string(+value);
    return *this;
  }
  std::string str() const { return text_; }

 private:
  static std::string of_double(double value) {
    if (std::abs(value) < 1e15 && value == std::trunc(value)) return std::to_string(static_cast<int64_t>(value));
    char digits[32];
    const int length = std::snprintf(digits, sizeof digits, "%.17g", value);  // enough for any double
    std::replace(digits, digits + length, ',', '.');
    return digits;
  }

  std::string text_;
};

}  // namespace fusebackend
