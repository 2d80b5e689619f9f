"""The fuzzer finds nothing in a short run, finds what is broken on purpose, and what it found once stays right."""

import subprocess
import sys

import pytest
import torch

pytest.importorskip("hypothesis", reason="the test extra is not installed")

from fusebackend.fuzz import build, run  # noqa: E402
from fusebackend.fuzz.compare import check  # noqa: E402
from fusebackend.fuzz.programs import Program  # noqa: E402
from fusebackend.fuzz.tensors import Spec  # noqa: E402
from fusebackend.patterns.transpose_add import fuzz as transpose_add  # noqa: E402
from fusebackend.rewriting.pattern import Emitter  # noqa: E402

SEED, COUNT = 0, 120

#: Programs that were wrong once: what they showed -> the smallest that did.
FOUND = {
    "a copy of a mutated input is no alias of it": Program(
        inputs=(
            Spec((3, 3), torch.int64),
            Spec((5,), torch.int64, fill="index", bound=3, seed=1),
            Spec((5, 3), torch.int64, seed=2),
        ),
        body=("v0 = x0.index_add_(0, x1, x2)", "v1 = v0.clone()"),
        outputs=("v1",),
    ),
    "a backward gets the input as it was before it was mutated": Program(
        inputs=(Spec((2, 4, 9)), Spec((4, 1, 4), seed=1, grad="leaf"), Spec((2, 4, 9), seed=2)),
        body=("v0 = F.conv1d(F.pad(x0, (3, 0)), x1, groups=4)", "x0.add_(x2)"),
        outputs=("v0",),
    ),
    "and so when the mutated input has a gradient": Program(
        inputs=(Spec((2, 4, 9), grad="inner"), Spec((4, 1, 4), seed=1, grad="leaf"), Spec((2, 4, 9), seed=2)),
        body=("v0 = F.conv1d(F.pad(x0, (3, 0)), x1, groups=4)", "x0.add_(x2)"),
        outputs=("v0",),
    ),
    "a gather refuses what indexing counts from the end": Program(
        inputs=(
            Spec((4, 3)),
            Spec((6,), torch.int64, fill="index", bound=4, seed=2),
            Spec((7, 3)),
            Spec((6,), torch.int64, fill="bad index", bound=7, seed=3),
        ),
        body=("v0 = torch.zeros_like(x0).index_add(0, x1, x2.gather(0, x3.view(-1, 1).expand(6, 3)))",),
        outputs=("v0",),
    ),
    "addmm with alpha 0 does not look at infinities": Program(
        inputs=(Spec((130, 64), fill="special"), Spec((64, 130), fill="special", seed=1), Spec((130,), seed=2)),
        body=("v0 = torch.addmm(x2, x0, x1, beta=2, alpha=0)",),
        outputs=("v0",),
    ),
}


def test_a_short_run_finds_nothing_wrong():
    result = run.fuzz(count=COUNT, start=SEED)
    assert not result.wrong, result.wrong[0]
    assert result.programs >= COUNT - result.skipped
    assert result.substituted > 0.4 * result.programs
    for family in ("causal_conv1d", "causal_conv1d_backward", "index_add", "transpose_add"):
        assert result.families[family], f"{family} did not fire"


@pytest.mark.parametrize("what", FOUND)
def test_found_once(what, device):
    if device.type == "cuda" and any(spec.fill == "bad index" for spec in FOUND[what].inputs):
        pytest.skip("on a GPU the assertion ends the process")
    assert not check(FOUND[what], device.type).wrong


def test_a_wrong_replacement_is_found_shrunk_and_saved(monkeypatch, tmp_path):
    call = Emitter.call

    def operands_exchanged(self, target, *args):
        if target is torch.ops.fusebackend.transpose_add.default:
            args = (args[1], args[0], *args[2:])  # alpha meets the wrong one
        return call(self, target, *args)

    monkeypatch.setattr(Emitter, "call", operands_exchanged)
    monkeypatch.setattr(run, "SHRINKING", 100)  # enough for this one, whichever way the shrinker takes
    monkeypatch.setattr(build, "_cores", lambda device: transpose_add.CORES)
    result = run.fuzz(count=100, start=1, most_failures=1, save_to=tmp_path)
    ((program, verdict, _),) = result.wrong
    assert "values" in verdict.wrong[0]
    assert len(program.body) <= 4 and len(program.inputs) <= 4
    (saved,) = tmp_path.iterdir()
    finished = subprocess.run([sys.executable, saved], capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr  # in that process the replacement is right


def test_a_program_survives_its_file(tmp_path):
    for program in FOUND.values():
        names: dict = {}
        exec(program.file("", "cpu", codegen=False), names)
        assert names["PROGRAM"] == program
