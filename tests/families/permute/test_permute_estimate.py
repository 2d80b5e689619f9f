"""Whether a copy pays: what is left to Inductor by default, with the reason, and what ``fuse.gate="off"`` applies all the same."""

import math
import random

import pytest
import torch
from families.tile_tensors import MOVABLE, assert_same_bits, values

import fusebackend
from fusebackend.patterns.permute.estimate import estimate_on_gpu
from fusebackend.patterns.permute.sites import Reordering


@pytest.mark.parametrize(
    ("fn", "shape", "reason"),
    [
        (lambda x: x.t().contiguous().relu(), (80, 70), "neighbour aten.relu.default"),
        (lambda x: x.exp().t().contiguous(), (80, 70), "neighbour aten.exp.default"),
        (lambda x: x.t().contiguous().half(), (80, 70), "neighbour prims.convert_element_type.default"),
        (lambda x: x.t().contiguous() * 2, (80, 70), "neighbour aten.mul.Tensor"),
        (lambda x: torch.cat([x.t().contiguous(), x.t().contiguous()]), (80, 70), "neighbour aten.cat.default"),
        (lambda x: x.t().contiguous().sum(0), (80, 70), "neighbour aten.sum.dim_IntList"),
    ],
)
def test_a_copy_that_inductor_fuses_stays_with_it(interpreted, fn, shape, reason):
    x = values(shape)
    torch.testing.assert_close(interpreted(fn, options={"fuse.patterns": "permute", "fuse.gate": "auto"})(x), fn(x))
    report = fusebackend.last_report()
    assert not report.substitutions
    assert any(reason in r.reason for r in report.rejections), report


def test_what_does_not_pay_stays_with_inductor(interpreted):
    def reasons(*shape, dtype=torch.float32, **kwargs):
        torch._dynamo.reset()
        options = {"fuse.patterns": "permute", "fuse.gate": "auto"}
        interpreted(lambda x: x.transpose(0, 1).contiguous(), options=options, **kwargs)(values(shape, dtype=dtype))
        return [r.reason for r in fusebackend.last_report().rejections]

    assert "4160 bytes" in reasons(26, 40)[0]
    assert "long" in reasons(260, 300)[0] and "long" in reasons(260, 300, dynamic=True)[0]
    assert "whole" in reasons(260, 30, 40)[0]
    assert reasons(3, 20000) == [] and reasons(4, 40000, dtype=torch.float16) == []
    assert "long" in reasons(20000, 3)[0] and reasons(20000, 3, dynamic=True) == []
    assert "2 or 4 bytes" in reasons(3, 20000, dtype=torch.float64)[0]


def test_of_two_operands_only_the_one_whose_copy_pays_is_copied(interpreted):
    x, y = values((2, 2, 10_000), torch.int8).float(), values((2, 1, 10_000), torch.int8).float()  # 160 and 80 KB

    def fn(x, y):
        return torch.bmm(x.permute(2, 0, 1), y.permute(2, 0, 1))

    for gate, copies in (("auto", 1), ("off", 2)):  # off applies whatever is legal
        torch._dynamo.reset()
        assert torch.equal(interpreted(fn, options={"fuse.patterns": "permute", "fuse.gate": gate})(x, y), fn(x, y))
        (substitution,) = fusebackend.last_report().substitutions
        assert len([node for node in substitution.replacement if "permute_copy" in node]) == copies


SITES = {
    "alone": lambda x, permutation: x.permute(permutation).contiguous(),
    "after a sum": lambda x, permutation: (x + x).permute(permutation).contiguous(),
    "before a sum": lambda x, permutation: (copy := x.permute(permutation).contiguous()) + copy,
    "before a comparison": lambda x, permutation: x.permute(permutation).contiguous() == x.permute(permutation),
}


@pytest.mark.parametrize("seed", range(6))
def test_with_the_gate_off_what_does_not_pay_is_applied(interpreted, library, seed):
    """Random copies, alone or beside a neighbour that Inductor fuses, of which the default leaves all these to Inductor."""
    draw, refused = random.Random(seed), 0
    while refused < 4:
        shape = [draw.choice([2, 3, 5, 8, 17, 33, 64]) for _ in range(draw.randint(2, 4))]
        x, permutation = values(shape, draw.choice(MOVABLE)), draw.sample(range(len(shape)), len(shape))
        site = SITES[draw.choice(list(SITES))]

        def report(gate):
            torch._dynamo.reset()
            result = interpreted(lambda x: site(x, permutation), options={"fuse.patterns": "permute", "fuse.gate": gate})(x)
            assert_same_bits(result, site(x, permutation))
            return fusebackend.last_report()

        by_default = report("auto")
        assert not by_default.substitutions or not by_default.rejections
        if by_default.rejections:
            assert len(report("off").substitutions) == 1
            refused += 1


@pytest.mark.parametrize(
    ("sizes", "itemsize", "source_order", "result_order", "static", "reason"),
    [
        ([64, 1024, 1024], 2, [0, 2, 1], [0, 1, 2], False, None),
        ([4096, 3, 512], 2, [0, 2, 1], [0, 1, 2], False, None),
        ([2048, 3, 512], 2, [0, 2, 1], [0, 1, 2], False, "so few bytes"),
        ([40960, 3, 512], 2, [0, 2, 1], [0, 1, 2], False, None),
        ([40960, 3, 512], 4, [0, 2, 1], [0, 1, 2], False, "few rows"),
        ([4096, 512, 3], 2, [0, 2, 1], [0, 1, 2], False, None),
        ([72450, 171], 4, [1, 0], [0, 1], False, "large"),
        ([64, 256, 56, 56], 4, [0, 2, 3, 1], [0, 1, 2, 3], False, "even"),  # 56 x 56 is one dim to both
        ([64, 1024, 1024], 4, [0, 2, 1], [0, 1, 2], False, "even"),
        ([256, 256, 1024], 4, [1, 0, 2], [0, 1, 2], False, None),
        ([256, 256, 1024], 4, [1, 0, 2], [0, 1, 2], True, "rows stay whole"),
        ([180, 401, 471], 2, [1, 0, 2], [0, 1, 2], True, None),  # an odd number of halves
        ([120, 101, 451], 2, [1, 0, 2], [0, 1, 2], True, "so few bytes"),
        ([120, 401, 451], 2, [1, 0, 2], [0, 1, 2], True, "rows stay whole"),  # 43 MB
        ([180, 401, 472], 2, [1, 0, 2], [0, 1, 2], True, "rows stay whole"),
        ([120, 401, 852], 1, [1, 0, 2], [0, 1, 2], True, None),
        ([5, 2624, 2879], 2, [1, 2, 0], [0, 1, 2], True, "waste little"),
        ([2879, 2624, 5], 2, [1, 0, 2], [0, 1, 2], True, None),  # pieces of 10 bytes
        ([64, 1024, 1024], 4, [0, 2, 1], [0, 1, 2], True, "even"),
        ([64, 1024, 1024], 2, [0, 2, 1], [0, 1, 2], True, None),  # neighbours in the result are far apart in the source
        ([64, 40, 1024, 32], 2, [0, 1, 3, 2], [0, 1, 2, 3], True, "waste little"),
        ([4096, 2000], 4, [1, 0], [0, 1], True, "even"),
        ([3001, 3001], 2, [1, 0], [0, 1], True, "waste little"),  # 17 MB
        ([5001, 5001], 2, [1, 0], [0, 1], True, None),  # rows of the result begin within sectors
        ([5001, 5001], 4, [1, 0], [0, 1], True, None),
        ([5001, 5001], 1, [1, 0], [0, 1], True, "not of 2, 4 or 8 bytes"),
        ([5001, 5008], 2, [1, 0], [0, 1], True, None),
        ([5001, 5008], 8, [1, 0], [0, 1], True, "waste little"),
        ([60001, 301], 2, [1, 0], [0, 1], True, "short rows"),
        ([60001, 391], 2, [1, 0], [0, 1], True, None),
        ([90001, 201], 2, [1, 0], [0, 1], True, "short rows"),
        ([64, 1001, 201], 2, [0, 2, 1], [0, 1, 2], True, "short rows"),  # on both sides
        ([60001, 201], 4, [1, 0], [0, 1], True, None),
        ([32, 16, 70, 1000], 2, [0, 1, 3, 2], [0, 1, 2, 3], True, None),
        ([3, 6238327, 2], 4, [2, 1, 0], [0, 1, 2], True, "waste little"),  # three rows: blocks of 4 x 256
        ([451, 9497, 8], 2, [2, 1, 0], [0, 1, 2], True, "short rows"),
        ([451, 9497, 3], 2, [2, 1, 0], [0, 1, 2], True, "short rows"),  # of 6 bytes
        ([451, 99497, 3], 4, [2, 1, 0], [0, 1, 2], True, None),
        ([33, 3000, 300], 2, [1, 2, 0], [0, 1, 2], True, None),  # blocks of 32 x 32, of which every other one holds one row
        ([4096, 3, 512], 2, [0, 2, 1], [0, 1, 2], True, None),  # short rows of the source
        ([629, 6, 2, 32, 131], 2, [3, 0, 2, 4, 1], [0, 1, 2, 3, 4], True, "short rows"),  # pieces of 12 bytes, rows of 262
        ([285, 7, 160, 1024], 2, [3, 0, 1, 2], [0, 1, 2, 3], True, None),  # a plane
        ([1024, 160, 8, 656], 2, [3, 2, 0, 1], [0, 1, 2, 3], True, "waste little"),  # rows of several dims
        ([96, 48, 128, 64], 2, [3, 2, 1, 0], [0, 1, 2, 3], True, None),  # of whole lines
        ([7110, 5, 3, 8, 26], 2, [4, 3, 0, 2, 1], [0, 1, 2, 3, 4], True, "short rows"),  # on both sides
        ([2000, 3, 512], 2, [0, 2, 1], [0, 1, 2], True, "so few bytes"),
        ([2, 160, 34176 * 2], 2, [2, 1, 0], [0, 1, 2], True, None),  # pieces of 4 bytes, each of a sector of its own
    ],
)
def test_where_a_gpu_gains(sizes, itemsize, source_order, result_order, static, reason):
    strides = [math.prod(sizes[e] for e in source_order[source_order.index(d) + 1 :]) for d in range(len(sizes))]
    estimate = estimate_on_gpu(Reordering(sizes, strides, itemsize, source_order, result_order, static))
    assert (estimate.pays is True) == (reason is None)
    assert estimate.reason == "" if reason is None else reason in estimate.reason
