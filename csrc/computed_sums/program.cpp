// Programs (patterns/computed_sums/program.py says what they are) as C++. A program comes from an operator's argument: every word of it is checked
// before it is compiled, and names and numbers are written anew.
#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <locale>
#include <map>
#include <mutex>
#include <sstream>
#include <stdexcept>

#include "computed_sums/computed_sums.h"

namespace fusebackend::computed_sums {
namespace {

// A function's name, and the types of its result and its arguments: f, a number, or b, a truth value.
struct Function {
  const char *name, *types;
};
constexpr Function kFunctions[] = {
    {"add", "fff"}, {"sub", "fff"}, {"mul", "fff"}, {"div", "fff"}, {"maximum", "fff"}, {"minimum", "fff"}, {"pow", "fff"},
    {"neg", "ff"}, {"abs", "ff"}, {"exp", "ff"}, {"exp2", "ff"}, {"log", "ff"}, {"log1p", "ff"}, {"expm1", "ff"}, {"sqrt", "ff"}, {"rsqrt", "ff"},
    {"reciprocal", "ff"}, {"sigmoid", "ff"}, {"tanh", "ff"}, {"erf", "ff"}, {"sin", "ff"}, {"cos", "ff"}, {"relu", "ff"}, {"square", "ff"},
    {"bf16", "ff"}, {"fp16", "ff"},
    {"lt", "bff"}, {"le", "bff"}, {"gt", "bff"}, {"ge", "bff"}, {"eq", "bff"}, {"ne", "bff"},
    {"and", "bbb"}, {"or", "bbb"}, {"not", "bb"}, {"where", "fbff"},
};

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (char c : text) {
    if (c == separator) parts.emplace_back();
    else parts.back() += c;
  }
  return parts;
}

// The number of a name such as t12; none if it is not one.
std::optional<int> number_of(const std::string& text, char letter) {
  if (text.size() < 2 || text.size() > 6 || text[0] != letter || (text[1] == '0' && text.size() > 2)) return std::nullopt;
  for (size_t i = 1; i < text.size(); ++i)
    if (!std::isdigit(static_cast<unsigned char>(text[i]))) return std::nullopt;
  return std::stoi(text.substr(1));
}

// A number as Python writes it: -1.5e-05, inf, nan.
std::optional<float> literal(const std::string& text) {
  const bool negative = text[0] == '-';
  const std::string digits = text.substr(negative);
  double value;
  if (digits == "inf") value = std::numeric_limits<double>::infinity();
  else if (digits == "nan") value = std::numeric_limits<double>::quiet_NaN();
  else {
    size_t i = 0;
    const auto skip = [&] {
      const size_t begin = i;
      while (i < digits.size() && std::isdigit(static_cast<unsigned char>(digits[i]))) ++i;
      return i > begin;
    };
    bool right = skip();
    if (i < digits.size() && digits[i] == '.') right &= (++i, skip());
    if (i < digits.size() && digits[i] == 'e') {
      ++i;
      if (i < digits.size() && (digits[i] == '-' || digits[i] == '+')) ++i;
      right &= skip();
    }
    if (!right || i != digits.size()) return std::nullopt;
    std::istringstream in(digits);
    in.imbue(std::locale::classic());
    if (!(in >> value)) return std::nullopt;
  }
  return static_cast<float>(negative ? -value : value);
}

std::string written(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  char text[40];
  std::snprintf(text, sizeof(text), "__uint_as_float(0x%08xu)", bits);
  return text;
}

// Few eighths: what functions are made of.
bool is_common(float value) { return !std::isfinite(value) || (std::fabs(value) <= 8 && value * 8 == std::trunc(value * 8)); }

const char* word(char type) { return type == 'b' ? "a truth value" : "a number"; }

}  // namespace

const Program& prepare(const std::string& program) {
  static std::mutex mutex;
  static auto& known = *new std::map<std::string, Program>;  // lives as long as the process, for its threads
  const std::lock_guard<std::mutex> lock(mutex);
  if (const auto found = known.find(program); found != known.end()) return found->second;
  Program made;
  std::string word;
  for (char c : program + ';') {
    if (std::strchr("(),;=", c) == nullptr) {
      word += c;
      continue;
    }
    if (number_of(word, 'n')) throw std::runtime_error("a program's '" + word + "' is neither tK, iK nor a number as Python writes it");
    const auto value = word.empty() ? std::nullopt : literal(word);
    if (value && !is_common(*value)) {
      const auto same = std::find(made.numbers.begin(), made.numbers.end(), *value);
      const size_t n = size_t(same - made.numbers.begin());
      if (n < kMostNumbers) {
        if (same == made.numbers.end()) made.numbers.push_back(*value);
        word = 'n' + std::to_string(n);
      }
    }
    made.text += word + c;
    word.clear();
  }
  made.text.pop_back();
  return known.emplace(program, std::move(made)).first->second;
}

std::string translate(const std::string& program, int numbers, const std::string& types, int outs) {
  std::string results, code;  // `results` has the type of each
  int given = 0;
  for (size_t k = 0; k < types.size(); ++k) {
    const std::string i = std::to_string(k);
    code += types[k] == kBool ? "  const bool i" + i + " = values[" + i + "] != 0.0f;\n" : "  const float i" + i + " = values[" + i + "];\n";
  }
  const std::vector<std::string> statements = split(program, ';');
  for (size_t n = 0; n < statements.size(); ++n) {
    const std::string& text = statements[n];
    const auto refuse = [&](const std::string& why) {
      throw std::runtime_error("a program's statement " + std::to_string(n) + " ('" + text.substr(0, 200) + "'): " + why);
    };
    const size_t equals = text.find('='), open = text.find('(');
    const bool is_out = equals == std::string::npos;
    const size_t begin = is_out ? 0 : equals + 1;
    if (open == std::string::npos || open < begin || text.back() != ')') refuse("tK=name(argument,...) or out(argument) is accepted");
    const std::string name = text.substr(begin, open - begin);
    const std::vector<std::string> arguments = split(text.substr(open + 1, text.size() - open - 2), ',');

    const char* wanted = nullptr;
    if (is_out) {
      if (name == "out") wanted = "ff";
      else refuse("tK=name(argument,...) or out(argument) is accepted");
    } else {
      std::string names;
      for (const Function& f : kFunctions) {
        if (name == f.name) wanted = f.types;
        names += std::string(names.empty() ? "" : ", ") + f.name;
      }
      if (wanted == nullptr) refuse("there is no function '" + name + "'; accepted are " + names);
      if (number_of(text.substr(0, equals), 't') != int(results.size()))
        refuse("its result is called t" + std::to_string(results.size()) + ", the next number");
    }
    if (arguments.size() != std::strlen(wanted) - 1)
      refuse(name + " takes " + std::to_string(std::strlen(wanted) - 1) + " arguments, not " + std::to_string(arguments.size()));

    std::string call;
    for (size_t a = 0; a < arguments.size(); ++a) {
      const std::string& argument = arguments[a];
      char type = 'f';
      std::string as = argument;
      if (const auto t = number_of(argument, 't')) {
        if (*t >= int(results.size())) refuse(argument + " is not computed before it");
        type = results[*t];
      } else if (const auto i = number_of(argument, 'i')) {
        if (*i >= int(types.size())) refuse("there is no input " + argument + ", only " + std::to_string(types.size()) + " inputs from i0 on");
        type = types[*i] == kBool ? 'b' : 'f';
      } else if (const auto n = number_of(argument, 'n'); n && *n < numbers) {
        as = "numbers[" + std::to_string(*n) + "]";
      } else if (const auto value = argument.empty() ? std::nullopt : literal(argument)) {
        as = written(*value);
      } else {
        refuse("'" + argument + "' is neither tK, iK nor a number as Python writes it");
      }
      if (type != wanted[a + 1])
        refuse("argument " + std::to_string(a) + " of " + name + " is " + word(wanted[a + 1]) + ", and " + argument + " is " + word(type));
      call += (a > 0 ? ", " : "") + as;
    }
    if (is_out) {
      code += "  outs[" + std::to_string(given++) + "] = " + call + ";\n";
      if (given > outs) refuse("there are more results than types: " + std::to_string(outs));
    } else {
      code += std::string(wanted[0] == 'b' ? "  const bool t" : "  const float t") + std::to_string(results.size()) + " = f_" + name + "(" + call + ");\n";
      results += wanted[0];
    }
  }
  if (given != outs)
    throw std::runtime_error("a program of " + std::to_string(given) + " results for " + std::to_string(outs) + " types");
  return code;
}

}  // namespace fusebackend::computed_sums
