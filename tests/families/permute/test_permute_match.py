"""permute -> contiguous: found in every spelling, with the bits and strides that eager gives."""

import pytest
import torch
from families.tile_tensors import MOVABLE, values
from torch import nn
from torch._inductor import config as inductor_config
from torch.fx.experimental import _config as symbolic_shapes_config

import fusebackend
from fusebackend.fuzz.imagined_gpu import imagined_gpu


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
    check(interpreted, fn, values(shape, device=device), dynamic=dynamic)


@pytest.mark.parametrize("dtype", [*MOVABLE, torch.float8_e4m3fn], ids=str)
def test_every_dtype_is_moved(interpreted, device, dtype):
    check(interpreted, lambda x: x.transpose(1, 2).contiguous(), values((3, 71, 130), dtype=dtype, device=device))


def test_a_transposed_graph_input_needs_no_permute_in_the_graph(interpreted, device):
    check(interpreted, lambda x: x.contiguous(), values((130, 67), device=device).t())


def test_other_sizes_are_served_without_recompiling(interpreted, device):
    compiled = interpreted(lambda x: x.permute(2, 0, 1).contiguous(), dynamic=True)
    compiled(values((5, 66, 130), device=device))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for shape in [(9, 131, 70), (64, 32, 80), (17, 3, 1000)]:
            x = values(shape, device=device)
            assert torch.equal(compiled(x), x.permute(2, 0, 1))


@pytest.mark.parametrize("fn", [lambda x: x.clone(), lambda x: x[:, ::2].contiguous(), lambda x: x[:, None].expand(-1, 3, -1).contiguous()])
def test_copies_in_the_same_order_are_not_near_misses(interpreted, fn):
    x = values((80, 70))
    interpreted(fn, options={"fuse.patterns": "permute"})(x)
    report = fusebackend.last_report()
    assert not report.rejections and not report.substitutions


def test_a_conjugate_is_right(interpreted):
    x = values((80, 70), dtype=torch.complex64)
    result = interpreted(lambda x: x.mH.contiguous(), options={"fuse.patterns": "permute"})(x)
    assert torch.equal(result, x.mH)


@pytest.mark.parametrize("dynamic", [False, True])
@inductor_config.patch(shape_padding=False)  # whether it gives a product other strides, Inductor settles by timing
def test_an_operand_that_bmm_would_copy(interpreted, device, dynamic):
    x, y = values((60, 70, 9), dtype=torch.int8, device=device).float(), values((9, 70, 30), dtype=torch.int8, device=device).float()
    check(interpreted, lambda x, y: torch.bmm(x.permute(2, 0, 1), y), x, y, dynamic=dynamic)
    check(interpreted, lambda x, y: torch.bmm(y.transpose(1, 2), y), x, y, count=0)


@inductor_config.patch(shape_padding=False)
def test_an_operand_of_two_products_is_copied_once(interpreted, device):
    x, y, z = (values(shape, dtype=torch.int8, device=device).float() for shape in ((60, 70, 9), (9, 70, 30), (9, 20, 60)))

    def fn(x, y, z):
        return torch.cat([torch.bmm(x.permute(2, 0, 1), y).flatten(), torch.bmm(z, x.permute(2, 0, 1)).flatten()])

    report = check(interpreted, fn, x, y, z, count=2)
    assert report.graphs[0].after.count("fusebackend.permute_copy") == 1


def test_the_input_of_a_convolution_over_time(interpreted, device):
    conv = nn.Conv1d(33, 20, 3, padding=1).to(device)
    x = torch.randn(4, 65, 33, device=device)
    compiled = interpreted(lambda x: conv(x.transpose(1, 2)), options={"fuse.patterns": "permute"})
    torch.testing.assert_close(compiled(x), conv(x.transpose(1, 2)))
    found = [s for s in fusebackend.last_report().substitutions if s.graph != "backward"]
    assert len(found) == 1 and any("permute_copy" in r for r in found[0].replacement)


def test_training_gives_eagers_gradients(interpreted, device):
    def fn(x, w):
        return (x.transpose(1, 2).reshape(x.shape[0] * x.shape[2], -1) @ w).square().mean()

    def gradients(f):
        inputs = [t.detach().clone().requires_grad_() for t in origin]
        f(*inputs).backward()
        return [t.grad for t in inputs]

    origin = torch.randn(3, 65, 66, device=device), torch.randn(65, 7, device=device)
    torch.testing.assert_close(gradients(interpreted(fn)), gradients(fn))


@pytest.mark.parametrize("dims", [16, 17, 20])
def test_more_dimensions_than_the_kernels_take_are_refused(interpreted, library, dims):
    x = torch.randn(*[2] * 6, *[1] * (dims - 12), *[2] * 6)
    found = interpreted(lambda x: x.permute(*reversed(range(x.dim()))).contiguous(), options={"fuse.patterns": "permute"})(x)
    assert torch.equal(found, (lambda x: x.permute(*reversed(range(x.dim()))).contiguous())(x))
    report = fusebackend.last_report()
    if dims <= 16:
        assert len(report.substitutions) == 1
    else:
        assert f"{dims} dimensions; up to 16 are accepted" in report.rejections[0].reason


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_operands_of_a_float8_product_stay_as_they_are(interpreted, dtype):
    """The library multiplies such matrices, but not their dense copies."""
    a, b = torch.randn(8, 12, 50).to(dtype), torch.randn(12, 8, 50).to(dtype)
    check(interpreted, lambda a, b: torch.einsum("ijn,jkn->ikn", a, b), a, b, count=0)


def test_a_convolution_of_nothing_is_left(interpreted):
    """The fake of a convolution divides by the sizes that it sees."""
    w = torch.randn(8, 1, 4)

    def fn(x):
        return nn.functional.conv1d(x.transpose(1, 2), w, groups=8)

    x = torch.randn(0, 21, 8)
    torch._dynamo.mark_dynamic(x, 0)
    with imagined_gpu(), symbolic_shapes_config.patch(backed_size_oblivious=True):
        compiled = interpreted(fn, options={"fuse.patterns": "permute", "fuse.strict": True})
        assert compiled(x).shape == (0, 8, 18)
        torch.testing.assert_close(compiled(torch.randn(5, 21, 8).fill_(0.5)), fn(torch.full((5, 21, 8), 0.5)))
