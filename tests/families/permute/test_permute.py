"""permute -> contiguous: found in every spelling, refused with a reason where it does not pay, bitwise equal to eager always."""

import itertools
import math

import pytest
import torch
from torch import nn
from torch._inductor import config as inductor_config

import fusebackend
from fusebackend.bench import case_lists
from fusebackend.patterns.permute import match as family

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8),
    *(torch.bool, torch.complex64, torch.complex128, torch.float8_e4m3fn),
]


@pytest.fixture(autouse=True)
def any_site(monkeypatch, request):
    """Sites that don't pay are found here all the same: the tests are about shapes."""
    if request.function is not test_what_does_not_pay_stays_with_inductor:
        monkeypatch.setattr(family, "_loses", lambda *site: None)


def tensor(*shape, dtype=torch.float32, device="cpu"):
    bits = torch.randint(0, 2 if dtype == torch.bool else 120, (*shape, dtype.itemsize), dtype=torch.uint8, device=device)
    return bits.view(dtype).squeeze(-1)


def check(interpreted, fn, *inputs, count=1, **kwargs):
    """The result equals eager's to the bit, strides included, and the family was applied ``count`` times."""
    expected = fn(*inputs)
    result = interpreted(fn, options={"fuse.patterns": "permute"}, **kwargs)(*inputs)
    assert result.dtype == expected.dtype and result.stride() == expected.stride()
    bits = [t.contiguous().view(torch.uint8) for t in (result, expected)]
    assert torch.equal(*bits)
    report = fusebackend.last_report()
    assert len(report.substitutions) == count, report
    return report


def shuffle(x):
    n, c, h, w = x.shape
    return x.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)


def windows(x, size=7):
    b, h, w, c = x.shape
    return x.view(b, h // size, size, w // size, size, c).permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, size, size, c)


CASES = {
    "contiguous": (lambda x: x.permute(0, 2, 1).contiguous(), (3, 65, 130)),
    "clone": (lambda x: x.transpose(0, 1).clone(memory_format=torch.contiguous_format), (65, 131)),
    "reshape that copies": (lambda x: x.permute(0, 2, 1).reshape(-1), (3, 65, 130)),
    "flatten": (lambda x: x.transpose(1, 2).flatten(1), (3, 65, 130)),
    "to NHWC": (lambda x: x.permute(0, 2, 3, 1).contiguous(), (2, 65, 17, 18)),
    "to NCHW": (lambda x: x.permute(0, 3, 1, 2).contiguous(), (2, 17, 18, 65)),
    "channels last": (lambda x: x.contiguous(memory_format=torch.channels_last), (2, 65, 17, 18)),
    "channels last 3d": (lambda x: x.contiguous(memory_format=torch.channels_last_3d), (2, 65, 5, 9, 8)),
    "reversed": (lambda x: x.permute(4, 3, 2, 1, 0).contiguous(), (5, 7, 3, 9, 11)),
    "channel shuffle": (shuffle, (2, 66, 9, 11)),
    "window partition": (windows, (2, 14, 21, 33)),
    "attention heads": (lambda x: x.view(2, 50, 4, 31).transpose(1, 2).reshape(8, 50, 31), (2, 50, 124)),
    "heads back": (lambda x: x.transpose(1, 2).reshape(2, 50, 124), (2, 4, 50, 31)),
    "a slice, misaligned": (lambda x: x[:, 1:, 3:].transpose(1, 2).contiguous(), (3, 67, 134)),
    "rows of odd length": (lambda x: x.transpose(0, 1).contiguous(), (50, 40, 33)),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_spellings(interpreted, device, name, dynamic):
    fn, shape = CASES[name]
    check(interpreted, fn, tensor(*shape, device=device), dynamic=dynamic)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_moved(interpreted, device, dtype):
    check(interpreted, lambda x: x.transpose(1, 2).contiguous(), tensor(3, 71, 130, dtype=dtype, device=device))


def test_a_transposed_graph_input_needs_no_permute_in_the_graph(interpreted, device):
    check(interpreted, lambda x: x.contiguous(), tensor(130, 67, device=device).t())


def test_other_sizes_are_served_without_recompiling(interpreted, device):
    compiled = interpreted(lambda x: x.permute(2, 0, 1).contiguous(), dynamic=True)
    compiled(tensor(5, 66, 130, device=device))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for shape in [(9, 131, 70), (64, 32, 80), (17, 3, 1000)]:
            x = tensor(*shape, device=device)
            assert torch.equal(compiled(x), x.permute(2, 0, 1))


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
def test_a_near_miss_says_why(interpreted, fn, shape, reason):
    x = tensor(*shape)
    torch.testing.assert_close(interpreted(fn, options={"fuse.patterns": "permute"})(x), fn(x))
    report = fusebackend.last_report()
    assert not report.substitutions
    assert any(reason in r.reason for r in report.rejections), report


@pytest.mark.parametrize("fn", [lambda x: x.clone(), lambda x: x[:, ::2].contiguous(), lambda x: x[:, None].expand(-1, 3, -1).contiguous()])
def test_copies_in_the_same_order_are_not_near_misses(interpreted, fn):
    x = tensor(80, 70)
    interpreted(fn, options={"fuse.patterns": "permute"})(x)
    report = fusebackend.last_report()
    assert not report.rejections and not report.substitutions


def test_a_conjugate_is_not_only_moved(interpreted):
    x = tensor(80, 70, dtype=torch.complex64)
    result = interpreted(lambda x: x.mH.contiguous(), options={"fuse.patterns": "permute"})(x)
    assert torch.equal(result, x.mH)


@pytest.mark.parametrize("dynamic", [False, True])
@inductor_config.patch(shape_padding=False)  # whether it gives a product other strides, Inductor settles by timing
def test_an_operand_that_bmm_would_copy(interpreted, device, dynamic):
    x, y = tensor(60, 70, 9, dtype=torch.int8, device=device).float(), tensor(9, 70, 30, dtype=torch.int8, device=device).float()
    check(interpreted, lambda x, y: torch.bmm(x.permute(2, 0, 1), y), x, y, dynamic=dynamic)
    check(interpreted, lambda x, y: torch.bmm(y.transpose(1, 2), y), x, y, count=0)


def test_the_input_of_a_convolution_over_time(interpreted, device):
    conv = nn.Conv1d(33, 20, 3, padding=1).to(device)
    x = torch.randn(4, 65, 33, device=device)
    compiled = interpreted(lambda x: conv(x.transpose(1, 2)), options={"fuse.patterns": "permute"})
    torch.testing.assert_close(compiled(x), conv(x.transpose(1, 2)))
    found = [s for s in fusebackend.last_report().substitutions if s.graph != "backward"]
    assert len(found) == 1 and any("permute_copy" in r for r in found[0].replacement)


def test_what_does_not_pay_stays_with_inductor(interpreted):
    def reasons(*shape, dtype=torch.float32, **kwargs):
        torch._dynamo.reset()
        options = {"fuse.patterns": "permute", "fuse.gate": "auto"}
        interpreted(lambda x: x.transpose(0, 1).contiguous(), options=options, **kwargs)(tensor(*shape, dtype=dtype))
        return [r.reason for r in fusebackend.last_report().rejections]

    assert "4160 bytes" in reasons(26, 40)[0]
    assert "long" in reasons(260, 300)[0] and "long" in reasons(260, 300, dynamic=True)[0]
    assert "whole" in reasons(260, 30, 40)[0]
    assert reasons(3, 20000) == [] and reasons(4, 40000, dtype=torch.float16) == []
    assert "long" in reasons(20000, 3)[0] and reasons(20000, 3, dynamic=True) == []
    assert "2 or 4 bytes" in reasons(3, 20000, dtype=torch.float64)[0]


@pytest.mark.parametrize(
    ("sizes", "itemsize", "before", "after", "static", "reason"),
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
def test_where_a_gpu_gains(sizes, itemsize, before, after, static, reason):
    strides = [math.prod(sizes[e] for e in before[before.index(d) + 1 :]) for d in range(len(sizes))]
    move = family.Move(sizes, strides, itemsize, before, after, static)
    found = family._loses_to_triton(move) or family._unproven_on_gpus(move)
    assert not found if reason is None else reason in found


def test_training_gives_eagers_gradients(interpreted, device):
    def fn(x, w):
        return (x.transpose(1, 2).reshape(x.shape[0] * x.shape[2], -1) @ w).square().mean()

    def gradients(f):
        inputs = [t.detach().clone().requires_grad_() for t in origin]
        f(*inputs).backward()
        return [t.grad for t in inputs]

    origin = torch.randn(3, 65, 66, device=device), torch.randn(65, 7, device=device)
    torch.testing.assert_close(gradients(interpreted(fn)), gradients(fn))


SAMPLES = [((5, 7), [0, 1]), ((5, 7), [1, 0]), ((3, 5, 7), [2, 0, 1]), ((5, 1, 4), [1, 0, 2]), ((0, 4), [0, 1]), ((), [])]


@pytest.mark.parametrize(("shape", "order"), SAMPLES)
def test_opcheck(device, shape, order):
    torch.library.opcheck(family.permute_copy, (torch.randn(shape, device=device), order))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_operator_equals_its_reference(device, dtype):
    x = tensor(3, 20, 17, dtype=dtype, device=device)
    for permutation in itertools.permutations(range(3)):
        got, expected = (f(x.permute(permutation), [0, 1, 2]) for f in (family.permute_copy, family.reference))
        assert got.stride() == expected.stride() and torch.equal(got.view(torch.uint8), expected.view(torch.uint8))


def test_random_shapes_are_as_announced():
    for case in case_lists.random_cases("permute", 20, seed=3):
        (x,) = case.inputs(torch.device("meta"))
        assert 2 <= x.dim() <= 5 and x.nbytes >= 1 << 20 and case.fn(x).is_contiguous() and not math.prod(x.shape) == 0
