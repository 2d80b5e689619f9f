"""Tools for finding the cause of a wrong result: fuse.check, bisect, verify."""

import subprocess
import sys
import threading

import pytest
import torch

import fusebackend
from fusebackend import Match, Pattern
from fusebackend.rewriting import numeric_check, registry
from fusebackend.tools.bisect import bisect

aten = torch.ops.aten


class Scale(Pattern):
    """Replaces aten.sin(x) by sin(x) * factor, wrong unless factor is 1; only where x has ``columns`` columns."""

    anchors = (aten.sin.default,)

    def __init__(self, name, factor, columns=None):
        self.name, self.factor, self.columns = name, factor, columns

    def match(self, node):
        if self.columns not in (None, node.meta["val"].shape[-1]):
            return None
        return Match((node,), lambda e: e.call(aten.mul.Tensor, e.call(aten.sin.default, node.args[0]), self.factor))


def test_numeric_check_reports_the_error_of_each_site(interpreted, temporary_pattern, device):
    temporary_pattern(Scale("test_right", 1.0, columns=4))
    temporary_pattern(Scale("test_off", 1.5, columns=8))
    numeric_check.reset()
    fn = interpreted(lambda x, y: (torch.sin(x), torch.sin(y)), options={"fuse.check": "numeric"})
    x, y = torch.randn(3, 4, device=device), torch.randn(3, 8, device=device)
    for _ in range(2):
        fn(x, y)
    right, off = sorted(fusebackend.numeric_errors(), key=lambda e: e.absolute)
    assert right.site.startswith("test_right in forward") and right.absolute == 0 and right.calls == 2
    assert off.site.startswith("test_off") and off.relative == pytest.approx(0.5)
    assert "test_debugging.py" in str(off) and "(2 calls)" in str(off)


@pytest.mark.codegen
def test_numeric_check_of_generated_code_and_of_a_backward():
    numeric_check.reset()
    fn = torch.compile(lambda x, y, w: ((x.t() + y) @ w).sum(), backend="fuse", options={"fuse.check": "numeric", "fuse.gate": "off"})
    fn(*(torch.randn(s, requires_grad=True) for s in ((6, 8), (8, 6), (6, 5)))).backward()
    (error,) = fusebackend.numeric_errors()
    assert error.absolute == 0 and error.calls == 1


def test_numeric_checks_that_were_compiled_by_another_process_run():
    """Code that Inductor's cache holds names the operator, and nothing is rewritten then."""
    code = "import torch, fusebackend.backend; torch.ops.fusebackend.numeric_check"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_bisect_finds_the_wrong_substitution(interpreted, temporary_pattern):
    temporary_pattern(Scale("test_right", 1.0, columns=4))
    temporary_pattern(Scale("test_off", 1.5, columns=8))
    inputs = [torch.randn(3, n) for n in (4, 4, 8, 4, 4, 4, 8)]
    lines = []

    def passes():
        fn = interpreted(lambda *xs: [torch.sin(x) for x in xs])
        torch.testing.assert_close(fn(*inputs), [torch.sin(x) for x in inputs])

    found = bisect(passes, lines.append)
    assert (found.total, found.culprit.pattern) == (7, "test_off")
    assert "the check fails from this substitution on: test_off" in str(found)
    assert lines[0].startswith("  (AssertionError") and "all substitutions: fails" in lines[1]


def test_bisect_counts_what_other_threads_compile(interpreted, temporary_pattern):
    """As on GPUs, where autograd compiles backward graphs in a thread of its own."""
    temporary_pattern(Scale("test_off", 1.5))

    def passes():
        fn, results = interpreted(torch.sin), []
        thread = threading.Thread(target=lambda: results.append(fn(torch.ones(3))))
        thread.start()
        thread.join()
        return torch.equal(results[0], torch.ones(3).sin())

    found = bisect(passes)
    assert found.total == 1 and found.culprit is not None and found.culprit.pattern == "test_off"


def test_bisect_says_when_substitutions_are_not_to_blame(interpreted, temporary_pattern):
    temporary_pattern(Scale("test_right", 1.0))
    fn = lambda: bool(interpreted(torch.sin)(torch.ones(3)).sum() > 100)  # noqa: E731
    assert "the cause lies elsewhere" in str(bisect(fn))
    assert "passes with all 1" in str(bisect(lambda: interpreted(torch.sin)(torch.ones(3)) is not None))


@pytest.mark.codegen
def test_bisect_leaves_the_kept_report_as_it_is(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    x, y = torch.randn(8, 6), torch.randn(6, 8)
    fn = lambda: torch.compile(lambda x, y: (x.t() + y) @ x, backend="fuse", options={"fuse.gate": "off"})(x, y)  # noqa: E731
    fn()
    assert not bisect(lambda: fn() is None).passes_without
    torch._dynamo.reset()
    fn()
    report = fusebackend.last_report()
    assert report.from_cache and report.counts() == {"transpose_add": 1} and not report.rejections


def test_verify_finds_fault_with_a_structural_pattern(temporary_pattern):
    class Wrong(Scale):
        def examples(self):
            return [(torch.sin, (torch.randn(3, 4),)), (torch.cos, (torch.randn(3, 4),))]

    temporary_pattern(Wrong("test_wrong", 1.5))
    result = fusebackend.verify("test_wrong")
    assert [c.ok for c in result.checks if c.what.startswith("cpu")] == [False, False]
    assert "differs from eager" in result.checks[0].detail and "found 0" in result.checks[1].detail
    with pytest.raises(fusebackend.VerificationError, match="2 of 2 checks|of 4 checks"):
        result.raise_if_wrong()


def test_the_families_verify():
    for pattern in registry.all_patterns():
        assert fusebackend.verify(pattern).ok, str(fusebackend.verify(pattern))
