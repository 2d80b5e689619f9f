"""What a pattern reads is part of its fingerprint, whatever can't be told is never cached, and the same is the same in every process."""

import os
import subprocess
import sys
import textwrap

import pytest
import torch

import fusebackend
from fusebackend import Match, Pattern, identity
from fusebackend.identity import UnidentifiableError, identify
from fusebackend.native import loader
from fusebackend.options import Options
from fusebackend.session import code_identity

FILES = {
    "pattern.py": """
        import functools, re
        import torch
        import constants
        import package.limits
        from helpers import bound, Factors
        from fusebackend import Match, Pattern

        FACTOR = 2.0
        NAMES = {"alpha", "beta", "gamma", "delta"}

        def decorated(f):
            @functools.wraps(f)
            def inner(*args):
                return f(*args)
            return inner

        class Base(Pattern):
            anchors = (torch.ops.aten.sin.default,)
            def emit(self, e, node):
                return e.call(torch.ops.aten.mul.Tensor, node, self.factor())
            def factor(self):
                return FACTOR * self.scale + Factors.offset()

        class Mine(Base):
            name = "mine"
            def __init__(self, scale=1.0, kind=re.compile("a+")):
                self.scale, self.kind = scale, kind
            @decorated
            def match(self, node):
                if node.name in {"one", "two", "three"} or node.name in NAMES:
                    return None
                if node.meta["val"].shape[0] > bound(3) + constants.LIMIT + package.limits.UPPER:
                    return None
                return Match((node,), lambda e: self.emit(e, node))
            def estimate(self, match):
                return super().estimate(match)
    """,
    "helpers.py": """
        import math

        def bound(n):
            return again(n) if n else inner(n)

        def again(n):
            return bound(n - 1)

        def inner(n):
            return math.floor(7.0)

        class Factors:
            @staticmethod
            def offset():
                return 0.0
    """,
    "constants.py": "LIMIT = 10\n",
    "package/__init__.py": "",
    "package/limits.py": "UPPER = 100\n",
}
PRINT = "from pattern import Mine; print(Mine().fingerprint())"


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))


def python(folder, *command, text=None, **environment):
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, capture_output=True, text=True, input=text, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return done


def test_what_a_pattern_reads_is_in_its_fingerprint_whichever_file_it_is_in(tmp_path):
    """Edited are a helper's helper, a class that it uses, modules' attributes, and the pattern itself."""
    write(tmp_path, FILES)
    first = python(tmp_path, "-c", PRINT, PYTHONHASHSEED="1").stdout
    assert python(tmp_path, "-c", PRINT, PYTHONHASHSEED="2").stdout == first, "from compiled files now, with sets in another order"
    edits = [
        ("helpers.py", "floor(7.0)", "floor(8.0)"),
        ("helpers.py", "return 0.0", "return 1.0"),
        ("constants.py", "10", "11"),
        ("package/limits.py", "100", "99"),
        ("pattern.py", "FACTOR = 2.0", "FACTOR = 3.0"),
        ("pattern.py", "scale=1.0", "scale=1.5"),
        ("pattern.py", 're.compile("a+")', 're.compile("a*")'),
    ]
    found = {first}
    for file, old, new in edits:
        assert old in FILES[file]
        write(tmp_path, {file: FILES[file].replace(old, new)})
        found.add(python(tmp_path, "-B", "-c", PRINT).stdout)
        write(tmp_path, {file: FILES[file]})
    assert len(found) == 1 + len(edits)
    assert python(tmp_path, "-B", "-c", PRINT).stdout == first


STDIN = """
import logging, sys, torch, fusebackend
from torch._dynamo.utils import counters

class Typed(fusebackend.Pattern):
    name = "typed"
    anchors = (torch.ops.aten.sin.default,)
    def match(self, node):
        aten = torch.ops.aten
        return fusebackend.Match((node,), lambda e: e.call(aten.mul.Tensor, e.call(aten.sin.default, *node.args), FACTOR))

fusebackend.register(Typed())
for gate in ("off", "measure"):
    torch._dynamo.reset()
    fn = torch.compile(lambda x: torch.sin(x) + 1, backend="fuse", options={"fuse.patterns": ["typed"], "fuse.gate": gate})
    y = fn(torch.ones(4))
print(counters["aot_autograd"]["autograd_cache_hit"] + counters["inductor"]["fxgraph_cache_hit"])
print(round(((fn(torch.ones(4)) - 1) / torch.ones(4).sin())[0].item(), 3), fusebackend.last_report().from_cache)
"""


@pytest.mark.codegen
def test_a_pattern_that_was_typed_in_is_never_cached_and_says_so_once(tmp_path):
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"), "FUSEBACKEND_CACHE_DIR": str(tmp_path / "cache")}
    for factor in ("1.0", "3.0", "3.0"):
        done = python(tmp_path, "-", text=STDIN.replace("FACTOR", factor), **folders, FUSEBACKEND_LIBRARY=str(loader.load().path.parent))
        hits, result = done.stdout.splitlines()
        assert hits == "0" and result.endswith("False")
        assert result.startswith((factor, "1.0")), "timed as slower, or applied"
        (said,) = [line for line in done.stderr.splitlines() if "'typed'" in line]
        assert "fusebackend: pattern 'typed': the source of Typed.match can't be read (<stdin>)" in said and "Define it in a file" in said
    assert not list((tmp_path / "cache").rglob("gate/*.json"))
    assert not list((tmp_path / "inductor").rglob("fusebackend-reports/*"))


def executed(source, **names):
    namespace = {"torch": torch, "Pattern": Pattern, "Match": Match, **names}
    exec(textwrap.dedent(source), namespace)
    return namespace


EXECUTED = """
class Executed(Pattern):
    name = "test_executed"
    anchors = (torch.ops.aten.sin.default,)
    def match(self, node):
        return None
"""


def test_an_executed_pattern_switches_the_caches_off(temporary_pattern, caplog):
    temporary_pattern(executed(EXECUTED)["Executed"]())
    for _ in range(2):
        assert code_identity(Options(), loader.load()) is None
    (warning,) = [r for r in caplog.records if "test_executed" in r.getMessage()]
    assert warning.getMessage().startswith("fusebackend: pattern 'test_executed': the source of Executed.match can't be read")
    assert code_identity(Options(patterns=("-test_executed",)), loader.load()) is not None


@pytest.mark.parametrize("which", ["search", "replacement", "check"])
def test_functions_that_were_typed_in_are_not_cached_either(which):
    typed = executed("def fn(x): return torch.sin(x) * 2\ndef check(c): return True")
    readable = lambda x: torch.sin(x) * 2  # noqa: E731
    pattern = fusebackend.register_replacement(
        typed["fn"] if which == "search" else readable,
        typed["fn"] if which == "replacement" else readable,
        (torch.randn(4),),
        name="test_typed",
        extra_check=typed["check"] if which == "check" else None,
        verify=False,
    )
    fusebackend.unregister("test_typed")
    with pytest.raises(UnidentifiableError, match=f"the source of its {'search function' if which == 'search' else which} can't be read"):
        pattern.fingerprint()


def test_a_helper_that_was_typed_in_is_known_by_its_code():
    def identity_of(limit):
        helper = executed(f"def helper(x): return x < {limit}")["helper"]
        return identify(lambda x: helper(x), "f")

    assert identity_of(3) == identity_of(3) != identity_of(4)


def test_classes_of_a_name_that_is_a_modules_are_not_taken_for_it():
    """A class that was executed without a module's name calls itself one of Python's own."""
    classes = [executed(f"class Thing:\n    limit = {n}")["Thing"] for n in (1, 2)]
    assert {c.__module__ for c in classes} == {"builtins"}
    assert len({identify(c, "c") for c in classes}) == 2


def test_values_in_cycles_and_shared_values_end():
    a, b = [1], {"deep": None}
    b["deep"] = [a, b, a]
    assert identify(b, "b") == identify(b, "b")
    chain = [0]
    for _ in range(60):
        chain = [chain, chain]  # 2**60 paths
    identify(chain, "chain")
    deep = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(UnidentifiableError, match="nested too deeply"):
        identify(deep, "deep")
    with pytest.raises(UnidentifiableError, match="more than"):
        identify([[i] for i in range(identity._MAX_VALUES + 1)], "long")


@pytest.mark.parametrize(
    "value", [torch.ones(2), (x for x in ()), {"deep": [torch.nn.Linear(2, 2)]}], ids=["tensor", "generator", "module"]
)
def test_what_can_not_be_told_is_named(value):
    def reads(x):
        return x, value

    with pytest.raises(UnidentifiableError, match="f closes over 'value', a (Tensor|generator|Parameter|Linear)"):
        identify(reads, "f")


def test_keyword_defaults_and_nested_functions_count():
    def make(a, b):
        def outer(x, *, limit=a):
            return [y for y in x if y < limit and (lambda: b)()]

        return identify(outer, "f")

    assert make(1, 2) == make(1, 2) and len({make(1, 2), make(3, 2), make(1, 3)}) == 3
