"""Where a matrix product pays beside Inductor's loop."""

import pytest
import torch
from families.contraction.random_contractions import traced

from fusebackend.patterns.contraction.bench import CASES
from fusebackend.patterns.contraction.match import Contraction
from fusebackend.patterns.contraction.sites import SUMS, Site
from fusebackend.rewriting.pattern import Match


@pytest.fixture
def estimates(monkeypatch):
    """The estimates of a function's sums, on a device that need not be there."""

    def of(fn, *shapes, dtype=torch.float32, device="cuda"):
        inputs = [torch.empty(s, device="meta", dtype=dtype) for s in shapes]
        pattern, graph = Contraction(), traced(fn, *inputs).graph
        monkeypatch.setattr(Site, "device", torch.device("cpu"))
        monkeypatch.setattr("fusebackend.patterns.contraction.sites.DEVICES", ("meta",))
        answers = [pattern.match(n) for n in graph.nodes if n.target in SUMS]
        monkeypatch.setattr(Site, "device", torch.device(device))
        return [pattern.estimate(match) for match in answers if isinstance(match, Match)]

    return of


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_products_of_a_state_space_model_pay(estimates, name, dtype):
    fn, equation = CASES[name]
    sizes = dict(b=4, c=16, l=64, s=64, h=24, p=64, n=128)
    shapes = [[sizes[d] for d in dims] for dims in equation.split("->")[0].split(",")]
    (estimate,) = estimates(fn, *shapes, dtype=dtype)
    assert estimate.pays is True


def rows(x, y):
    return (x[:, :, None] * y[:, None]).sum(-1)


@pytest.mark.parametrize(
    ("x", "y", "device", "pays", "reason"),
    [
        ((64, 512, 256), (64, 512, 256), "cuda", True, ""),
        ((2, 32, 32), (2, 32, 32), "cuda", False, "launching"),
        ((4096, 4096, 128), (4096, 2, 128), "cuda", False, "moves as much"),
        ((4096, 16, 8), (4096, 16, 8), "cuda", False, "launching"),
        ((8, 64, 64), (8, 64, 64), "cpu", True, ""),
        ((1, 16, 16), (1, 16, 16), "cpu", False, "launching"),
    ],
)
def test_small_and_thin_products_stay_loops(estimates, x, y, device, pays, reason):
    (estimate,) = estimates(rows, x, y, device=device)
    assert estimate.pays is pays and reason in estimate.reason


def test_a_product_that_is_needed_anyway_stays(estimates):
    def fn(x, y):
        product = x[:, :, None] * y[:, None]
        return product.sum(-1), product.exp()

    (estimate,) = estimates(fn, (64, 512, 256), (64, 512, 256))
    assert estimate.pays is False and estimate.code == "fused_neighbour" and "aten.exp" in estimate.reason


def test_one_product_of_two_sums_goes_with_both(estimates):
    def fn(x, y):
        product = x[:, :, :, None] * y[:, None]
        return product.sum(2), product.sum((0, 2))

    assert all(e.pays for e in estimates(fn, (4, 512, 256), (4, 256, 512)))


@pytest.mark.parametrize("supported", [False, True])
def test_16_bit_products_need_a_library_on_a_cpu(estimates, monkeypatch, supported):
    monkeypatch.setattr("fusebackend.patterns.contraction.estimate._has_cpu_library", lambda dtype: supported)
    (estimate,) = estimates(rows, (8, 64, 64), (8, 64, 64), dtype=torch.float16, device="cpu")
    assert estimate.pays is supported and supported == ("element by element" not in estimate.reason)


def test_a_product_stays_where_one_of_its_sums_does(estimates):
    """The second sum is of 16384 terms, which are not added one after another."""

    def fn(x, y):
        product = x[:, :, :, None] * y[:, None]
        return product.sum(2), product.sum((0, 2))

    (estimate,) = estimates(fn, (64, 512, 256), (64, 256, 512))
    assert estimate.pays is False and estimate.code == "fused_neighbour"
