// The text of a variant's kernel.
#include "computed_sums/computed_sums.h"

namespace fusebackend::computed_sums {
namespace {

constexpr char kFunctionsText[] =
#include "computed_sums/functions.cuh"
    ;
constexpr char kInputsText[] =
#include "computed_sums/inputs.cuh"
    ;
constexpr char kSumKernelText[] =
#include "computed_sums/sum_kernel.cuh"
    ;
constexpr char kRowKernelText[] =
#include "computed_sums/row_kernel.cuh"
    ;

std::string constant(const char* name, size_t value) { return std::string("constexpr int ") + name + " = " + std::to_string(value) + ";\n"; }
std::string letters(const char* name, const std::string& text) { return std::string("constexpr char ") + name + "[] = \"" + text + "\";\n"; }

}  // namespace

std::string source(const Variant& v) {
  const std::string program = translate(v.program, v.numbers, v.types, v.outs);
  return kFunctionsText + constant("kInputs", v.types.size()) + constant("kOuts", v.outs) + constant("kVector", v.vector) +
         constant("kRowsAtOnce", v.rows_at_once()) + constant("kBlocks", v.blocks_at_once()) + constant("kMostThreads", kMostThreads) +
         constant("kMostInputs", kMostInputs) + constant("kMostOuts", kMostOuts) + constant("kMostNumbers", kMostNumbers) + constant("kArgumentsBytes", sizeof(Arguments)) +
         letters("kTypes", v.types) + letters("kKinds", v.kinds) + letters("kStored", v.stored) +
         "FUNCTION void evaluate(const float (&values)[kInputs], const float* numbers, float (&outs)[kOuts]) {\n" + program + "}\n" + kInputsText +
         (v.adds() ? kSumKernelText : kRowKernelText);
}

std::string Variant::key() const { return types + ' ' + kinds + ' ' + std::to_string(vector) + ' ' + std::to_string(outs) + stored + ' ' + program; }

}  // namespace fusebackend::computed_sums
