"""The facts that native code tells Python (csrc/common/facts.h)."""

import shlex
import subprocess

import pytest

from fusebackend.native import build
from fusebackend.native.toolchain import Toolchain

PROGRAM = """
#include <cstdio>
#include <locale>
#include "common/facts.h"

struct Grouped : std::numpunct<char> {
  std::string do_grouping() const override { return "\\3"; }
  char do_thousands_sep() const override { return '.'; }
  char do_decimal_point() const override { return ','; }
};

int main() {
  std::locale::global(std::locale(std::locale(), new Grouped));
  fusebackend::FactText facts;
  facts.add("rows", 1234567).add("is_small", false).add("share", 0.1).add("flops", 2.5e18).add("steps", 4.f);
  puts(facts.str().c_str());
}
"""


def test_numbers_are_written_for_python_in_any_locale(tmp_path):
    toolchain = Toolchain.find()
    if toolchain.cxx is None or toolchain.crosses:
        pytest.skip("no C++ compiler for this host")
    (tmp_path / "facts.cpp").write_text(PROGRAM)
    words = [
        *shlex.split(toolchain.cxx),
        "-std=c++17",
        f"-I{build.sources_root()}",
        str(tmp_path / "facts.cpp"),
        "-o",
        str(tmp_path / "facts"),
    ]
    subprocess.run(words, check=True)
    text = subprocess.run([tmp_path / "facts"], check=True, capture_output=True, text=True).stdout
    facts = {name: float(number) for name, number in (fact.split("=") for fact in text.split())}
    assert facts == {"rows": 1234567, "is_small": 0, "share": 0.1, "flops": 2.5e18, "steps": 4}
