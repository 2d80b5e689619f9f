"""What ``calibrate`` compiles and times of a random site."""

import itertools
import multiprocessing
import random
import time

import pytest
import torch

from fusebackend.bench import calibration_sites
from fusebackend.bench.calibration_sites import Measured
from fusebackend.bench.case import Case
from fusebackend.bench.kernel_time import KernelTimer
from fusebackend.rewriting.registry import families
from fusebackend.rewriting.workload import log2

CPU = torch.device("cpu")


def square(device):
    return torch.ones(3, 4, device=device), torch.ones(3, 4, device=device)


class Counting:
    """In place of a timer: a call takes one microsecond, and is run twice."""

    def us(self, call):
        call()
        call()
        return 1.0


@pytest.mark.parametrize(("whole_step", "us"), [(False, 1.0), (True, 2.0)])
def test_a_forward_is_timed_with_its_backward_where_both_were_replaced_together(whole_step, us):
    case = Case("square", lambda x, y: x * x * y, square, backward=(0,))
    prepared = calibration_sites._Prepared("f", case, "site", whole_step)
    prepared.calls["ours"], prepared.kernels["ours"] = torch.compile(case.fn), []
    assert list(calibration_sites._timed(prepared, Counting(), CPU)) == [Measured("f", "site", "ours", [], us)]


def test_a_graph_whose_inputs_require_gradients_is_called_by_itself():
    """Inductor's code writes a library's product into a tensor, which autograd refuses: AOTAutograd runs it where nothing is recorded."""
    x, y = torch.randn(2, 3, 4, requires_grad=True), torch.randn(2, 4, 5)
    compiled = torch.compile(lambda x, y: torch.bmm(x, y).sin())
    call = calibration_sites._inner(lambda: compiled(x, y))
    torch.testing.assert_close(call()[0], torch.bmm(x, y).sin().detach())


def test_only_the_gradients_that_a_case_names_are_computed():
    case = Case("product", lambda x, y: x * y, lambda device: tuple(t.requires_grad_() for t in square(device)), backward=(1,))
    forward, backward = calibration_sites._steps(lambda x, y: (x * y) + (0 if not x.requires_grad else 1), case, CPU)
    assert torch.equal(forward(), torch.ones(3, 4)) and len(backward()) == 1


@pytest.mark.codegen
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("direction", ["forward", "backward of x", "backward of w"])
def test_sites_of_convolutions_are_compiled_once_and_timed_both_ways(direction, dynamic, library):
    cases = families()["depthwise_conv"].bench.random_cases(random.Random(0), 2e-4)
    case = next(c for c in cases if c.name.endswith(direction) and "fp32" in c.name)
    with calibration_sites._compiling(CPU):
        prepared = calibration_sites._prepare("depthwise_conv", case, dynamic, CPU)
    assert prepared is not None
    with torch.compiler.set_stance("fail_on_recompile"):
        found = list(calibration_sites._timed(prepared, KernelTimer(CPU), CPU))
    kind = {"forward": "depthwise_conv", "backward of x": "depthwise_conv of x", "backward of w": "depthwise_conv of weight"}[direction]
    assert [m.way for m in found] == ["ours", "inductor"]
    assert [work.kind for (work,) in found[0].kernels] == [f"{kind} cpu"]


def late_worker(index, workers, gpus, drawn, seed, kind, turn, results, compile_until, end):
    """Stands for a worker; the first never ends to compile."""
    if index == 0:
        time.sleep(600)
    results.put(calibration_sites._Ready(index))
    turn.recv()
    results.put(Measured("f", f"site of {index}", "ours", [], 1.0))
    results.put(index)


def test_a_site_that_never_ends_to_compile_keeps_no_other_from_being_timed(monkeypatch):
    monkeypatch.setattr(calibration_sites, "_worker", late_worker)
    monkeypatch.setattr(calibration_sites.os, "sched_getaffinity", lambda pid: {0, 1, 2})
    forked = multiprocessing.get_context("fork")  # ready at once: how long a new process imports depends on what else runs
    monkeypatch.setattr(calibration_sites.multiprocessing, "get_context", lambda method: forked)
    found = list(calibration_sites.measure(["permute"], 0.25, 0, CPU, lambda text: None))
    assert sorted(m.site for m in found if isinstance(m, Measured)) == ["site of 1", "site of 2"]
    assert [f.reason for f in found if isinstance(f, calibration_sites.Failure)] == ["compiling took longer than --minutes allow"]


def test_workers_share_the_draws():
    """Together they time what one worker alone would."""
    device, families = torch.device("cpu"), ["permute", calibration_sites.STREAM]

    def first(count, index, workers):
        cases = calibration_sites._cases(families, 3, index, workers, device)
        return [(family, case.name) for family, case, *_ in (next(cases) for _ in range(count))]

    alone = first(12, 0, 1)
    assert sorted(first(6, 0, 2) + first(6, 1, 2)) == sorted(alone) and len(set(alone)) > 10


def test_products_are_drawn_of_all_forms_and_described():
    """Inductor compiles them as part of nothing else: a sample of the library's time by itself."""
    from fusebackend.bench import random_products

    device = torch.device("cpu")
    drawn = random_products.random_cases(random.Random(0), 1.0)
    works = []
    for case, dynamic in zip((next(drawn) for _ in range(60)), itertools.cycle((False, True))):
        work = random_products.work(case, dynamic, device)
        left, right = case.inputs(torch.device("meta"))
        batch = left.shape[0] if left.dim() == 3 else 1
        assert work.kind == "cublas 16 bits" and work.shape["dynamic"] == dynamic
        assert work.quantities["flops"] == 2 * batch * left.shape[-2] * left.shape[-1] * right.shape[-1]
        assert case.fn(left, right).shape[-2:] == (left.shape[-2], right.shape[-1])
        works.append(work)
    for name in ("batched", "a by columns", "b by columns"):
        assert {work.shape[name] for work in works} == {0.0, 1.0}


def test_products_are_timed_for_attention():
    """No other family is estimated by them, and a CPU's are not."""
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert calibration_sites.PRODUCT in calibration_sites._drawn(["attention", "permute"], cuda)
    assert calibration_sites.PRODUCT not in calibration_sites._drawn(["permute"], cuda)
    assert calibration_sites.PRODUCT not in calibration_sites._drawn(["attention"], cpu)


@pytest.mark.codegen
def test_a_site_in_which_another_family_alone_finds_something_is_none(library):
    """What that one describes would have to account for the time of all that the site does."""
    device = torch.device("cpu")
    cases = calibration_sites._cases(["permute"], 1, 0, 1, device)
    with calibration_sites._compiling(device):
        found, case = next(
            (p, case) for _, case, *_ in cases if (p := calibration_sites._prepare("permute", case, False, device)) is not None
        )
        assert found.kernels["ours"]
        assert calibration_sites._prepare("index_add", case, False, device) is None


@pytest.mark.codegen
def test_attention_of_dynamic_sizes_is_drawn(library):
    device = torch.device("cpu")
    (_, case, *_) = next(calibration_sites._cases(["sdpa"], 1, 0, 1, device))
    with calibration_sites._compiling(device):
        prepared = calibration_sites._prepare("sdpa", case, True, device)
    assert {way.kind for ways in prepared.kernels["ours"] for way in ways} >= {"sdpa cpu"}
    assert all(way.shape["dynamic"] for ways in prepared.kernels["ours"] for way in ways if way.kind == "sdpa cpu")


@pytest.mark.codegen
@pytest.mark.parametrize("family", ["index_add", calibration_sites.STREAM, calibration_sites.STRIDED_COPY])
def test_a_site_is_compiled_and_timed(library, family):
    device = torch.device("cpu")
    cases = calibration_sites._cases([family], 1, 0, 1, device)
    with calibration_sites._compiling(device):
        prepared = next(p for _, case, *_ in cases if (p := calibration_sites._prepare(family, case, False, device)) is not None)
    found = {m.way: m for m in calibration_sites._timed(prepared, KernelTimer(device), device)}
    assert set(found) == ({"ours", "inductor"} if family == "index_add" else {"inductor"})
    for measured in found.values():
        assert 0 < measured.us < 1e6 and measured.kernels and measured.family == family
        assert all(way.kind.endswith(" cpu") for ways in measured.kernels for way in ways)
    if family == calibration_sites.STREAM:
        (((work,),),) = (m.kernels for m in found.values())
        assert work.quantities["bytes"] > 0 and 1 <= work.shape["log2 itemsize"] <= log2(8)
