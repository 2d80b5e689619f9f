"""What is said of a matrix product and of Inductor's loop, and where no product is offered."""

import itertools
import math
import random

import pytest
import torch
from families.contraction.random_contractions import traced

from fusebackend.patterns.contraction.bench import CASES, random_cases
from fusebackend.patterns.contraction.match import Contraction
from fusebackend.patterns.contraction.sites import SUMS, Site
from fusebackend.rewriting.pattern import Generated, Match, Workload


@pytest.fixture
def estimates(monkeypatch):
    """The estimates of a function's sums, on a device that need not be there."""

    def of(fn, *shapes, dtype=torch.float32, device="cuda"):
        inputs = [
            torch.empty_strided(*s, device="meta", dtype=dtype) if isinstance(s[1], tuple) else torch.empty(s, device="meta", dtype=dtype)
            for s in shapes
        ]
        pattern, graph = Contraction(), traced(fn, *inputs).graph
        monkeypatch.setattr(Site, "device", torch.device("cpu"))
        monkeypatch.setattr("fusebackend.patterns.contraction.sites.DEVICES", ("meta",))
        answers = [pattern.match(n) for n in graph.nodes if n.target in SUMS]
        monkeypatch.setattr(Site, "device", torch.device(device))
        return [pattern.estimate(match) for match in answers if isinstance(match, Match)]

    return of


def rows(x, y):
    return (x[:, :, None] * y[:, None]).sum(-1)


def described(workload):
    (ours,), loop = workload.ours, described_loop(workload)
    return ours, loop


def described_loop(workload):
    """What is said of the loop where Inductor is not asked: on a CPU, or where it does not answer."""
    (loop,) = workload.inductor
    return loop.otherwise if isinstance(loop, Generated) else loop


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_products_of_a_state_space_model(estimates, name, dtype):
    fn, equation = CASES[name]
    sizes = dict(b=4, c=16, l=64, s=64, h=24, p=64, n=128)
    shapes = [[sizes[d] for d in dims] for dims in equation.split("->")[0].split(",")]
    (workload,) = estimates(fn, *shapes, dtype=dtype)
    (ours, *sums), loop = workload.ours, described_loop(workload)
    products = math.prod(sizes[d] for d in {*equation} & {*sizes})
    assert ours.quantities[f"flops in {8 * dtype.itemsize} bits"] == 2 * products
    assert loop.quantities["products"] == loop.quantities["padded products"] == products
    operands, result = sum(map(math.prod, shapes)), math.prod(sizes[d] for d in equation.split("->")[1])
    chunks = products // result // 16 if dtype == torch.float32 else 1
    assert loop.quantities["bytes"] == dtype.itemsize * (operands + result)
    assert ours.quantities["bytes"] == dtype.itemsize * (operands + chunks * result)
    assert [total.quantities["read"] for total in sums] == ([4 * chunks * result] if chunks > 1 else [])


def test_copies_of_operands_and_of_results_are_counted(estimates):
    (workload,) = estimates(rows, (64, 512, 256), (64, 512, 256), dtype=torch.bfloat16)
    ours, loop = described(workload)
    assert ours.quantities["launches"] == 1 and not ours.quantities["copied bytes"] and not ours.quantities["reordered bytes"]

    def apart(x, y):  # batch and rows do not lie in memory as matrices do, and the result is asked for in another order
        return (x[:, :, :, None].sigmoid() * y[:, :, None]).sum(0).transpose(0, 1).contiguous()

    (workload,) = estimates(apart, (256, 24, 64), (256, 24, 32), dtype=torch.bfloat16)
    ours, loop = described(workload)
    assert ours.quantities["copied bytes"] == 0 and ours.quantities["computed bytes"] == 2 * 2 * 256 * 24 * 64
    assert ours.quantities["launches"] == 2 and loop.shape["the larger is computed"] == 1

    def expanded(x, y):
        return (x[:, :, None].expand(-1, -1, 32, -1).clone().mul(2) * y[:, None]).sum(-1)

    (workload,) = estimates(expanded, (8, 512, 256), (8, 32, 256), dtype=torch.bfloat16)
    ours, loop = described(workload)
    assert ours.quantities["copied bytes"] == 2 * 2 * 8 * 512 * 256 and ours.quantities["launches"] == 2
    assert loop.shape["the larger is computed"] == 1


def test_what_a_loop_reads_along_the_rows(estimates):
    (workload,) = estimates(rows, (64, 512, 256), (64, 100, 256))
    shape = described_loop(workload).shape
    assert shape["rows of the larger are summed"] == shape["rows of the smaller are summed"] == 1
    assert shape["log2 reads of the larger"] == pytest.approx(math.log2(100)) and shape["log2 reads of the smaller"] == 9

    def columns(x, y):
        return (x[..., None] * y[:, None]).sum(2)

    (workload,) = estimates(columns, (64, 512, 256), (64, 256, 100))
    shape = described_loop(workload).shape
    assert shape["rows of the larger are summed"] == 1 and shape["rows of the smaller are the result's"] == 1


@pytest.mark.parametrize(("device", "suffix"), [("cuda", ""), ("cpu", " cpu")])
def test_each_type_of_device_has_its_kinds_of_work(estimates, device, suffix):
    (workload,) = estimates(rows, (64, 512, 16), (64, 100, 16), device=device)
    ours, loop = described(workload)
    assert (ours.kind, loop.kind) == (f"contraction{suffix}", f"sum of products{suffix}")
    assert ("depth in waves of 64" in ours.quantities) is (device == "cuda")


def test_random_cases_are_described(estimates):
    draw = random.Random(3)
    found = 0
    for case in itertools.islice(random_cases(draw, 1e-4), 40):
        arguments = case.inputs(torch.device("meta"))
        for workload in estimates(case.fn, *[(a.shape, a.stride()) for a in arguments], dtype=arguments[0].dtype):
            works = *workload.ours, described_loop(workload)
            assert all(amount >= 0 for work in works for amount in work.quantities.values())
            found += 1
    assert found > 20


def test_inductor_is_asked_for_all_that_it_computes_in_the_loop(estimates):
    def fn(x, y):
        decay = torch.where(x > 0, x, -torch.inf).exp()  # computed for each product anew
        return (decay[:, :, None] * y[:, None]).sum(-1), decay.sum()

    (workload,) = estimates(fn, (64, 512, 256), (64, 100, 256))
    (asked,) = workload.inductor
    names = {n.target._opname for n in asked.nodes}
    assert {"mul", "sum", "exp", "where"} <= names and asked.outputs == (asked.nodes[-1],)

    def kept(x, y):
        decay = x.exp()
        return (decay[:, :, None] * y[:, None]).sum(-1), decay  # a tensor anyway, which is loaded

    (workload,) = estimates(kept, (64, 512, 256), (64, 100, 256))
    assert "exp" not in {n.target._opname for n in workload.inductor[0].nodes}


def test_chunks_and_their_sum_are_described(estimates):
    (workload,) = estimates(rows, (8, 64, 8192), (8, 100, 8192))
    product, total = workload.ours
    assert 2 ** product.shape["log2 batch"] == pytest.approx(8 * 256) and 2 ** product.shape["log2 k"] == pytest.approx(32)
    assert total.quantities["read"] == 4 * 8 * 256 * 64 * 100 and total.quantities["written"] == 4 * 8 * 64 * 100
    assert 2 ** described_loop(workload).shape["log2 summed"] == pytest.approx(8192)


def test_padded_operands_are_copied_with_their_zeros(estimates):
    (workload,) = estimates(rows, (8, 64, 37), (8, 100, 37))
    product, total = workload.ours
    assert 2 ** product.shape["log2 batch"] == pytest.approx(8 * 3) and 2 ** product.shape["log2 k"] == pytest.approx(13)
    assert product.quantities["copied bytes"] == 2 * 4 * 8 * (64 + 100) * 39 and total.quantities["read"] == 4 * 8 * 3 * 64 * 100
    assert described_loop(workload).quantities["products"] == 8 * 64 * 100 * 37


def test_on_a_cpu_chunks_are_added_in_groups(estimates):
    (workload,) = estimates(rows, (8, 64, 1072), (8, 100, 1072), device="cpu")
    product, *sums = workload.ours
    assert 2 ** product.shape["log2 batch"] == pytest.approx(8 * 67)
    moved = [total.quantities["bytes"] // (4 * 8 * 64 * 100) for total in sums]
    assert moved == [9 * 8 + 9, 2 * 8 + 2, 2 + 1]  # 67 results in 9 groups, these in 2


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

    assert all(isinstance(e, Workload) for e in estimates(fn, (4, 512, 256), (4, 256, 512)))


@pytest.mark.parametrize("supported", [False, True])
def test_16_bit_products_need_a_library_on_a_cpu(estimates, monkeypatch, supported):
    monkeypatch.setattr("fusebackend.patterns.contraction.estimate._has_cpu_library", lambda dtype: supported)
    (answer,) = estimates(rows, (8, 64, 64), (8, 64, 64), dtype=torch.float16, device="cpu")
    assert isinstance(answer, Workload) is supported and (supported or "element by element" in answer.reason)


def test_a_product_stays_where_one_of_its_sums_does(estimates):
    """The second sum is over a dim of one factor alone, too."""

    def fn(x, y):
        product = x[:, :, :, None] * y[:, None]
        return product.sum(2), product.sum((1, 2))

    (estimate,) = estimates(fn, (61, 512, 257), (61, 257, 512), dtype=torch.float64)
    assert estimate.pays is False and estimate.code == "fused_neighbour"
