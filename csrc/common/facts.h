// Facts of a kernel for Python: "name=value" pairs, separated by spaces, as `ops.facts` reads them.
#pragma once
#include <sstream>
#include <string>

namespace fusebackend {

class FactText {
 public:
  FactText() { out_.precision(17); }  // enough for any double

  template <typename Value>
  FactText& add(const char* name, Value value) {
    out_ << separator_ << name << '=' << value;
    separator_ = " ";
    return *this;
  }
  std::string str() const { return out_.str(); }

 private:
  std::ostringstream out_;
  const char* separator_ = "";
};

}  // namespace fusebackend
