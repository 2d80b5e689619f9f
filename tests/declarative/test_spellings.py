"""One registration for other dtypes, ranks and spellings than its example's."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fusebackend
from fusebackend import RegistrationError
from fusebackend.declarative import wordings
from fusebackend.testing import assert_pattern

CLOSE = dict(rtol=2e-2, atol=2e-2)  # a few roundings to bfloat16


@torch.library.custom_op("test_spellings::rms_norm", mutates_args=())
def kernel(x: torch.Tensor, w: torch.Tensor, eps: float) -> torch.Tensor:
    h = x.float()
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * w).to(x.dtype).contiguous()


@kernel.register_fake
def _(x, w, eps):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:2])
    ctx.eps = inputs[2]


def gradients(ctx, g):
    x, w = ctx.saved_tensors
    h, g = x.float(), g.float()
    scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + ctx.eps)
    dx = scale * (g * w - h * scale**2 * (g * w * h).mean(-1, keepdim=True))
    return dx.to(x.dtype), (g * h * scale).flatten(0, -2).sum(0).to(w.dtype), None


kernel.register_autograd(gradients, setup_context=keep)


def rms_norm(x, w, eps):
    return F.rms_norm(x, (x.shape[-1],), w, eps)


class LlamaNorm(nn.Module):
    def __init__(self, dtype, size=16, eps=1e-5):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(size, dtype=dtype) + 0.5), eps

    def forward(self, x):
        h = x.to(torch.float32)
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * h.to(x.dtype)


@pytest.fixture(scope="module")
def rms():
    """The pattern is given once, in float32, and with three dims."""
    example = (torch.randn(2, 3, 8).requires_grad_(), torch.randn(8).requires_grad_(), 1e-6)
    settings = dict(dtypes=(torch.float32, torch.bfloat16), ranks="any")
    fusebackend.register_replacement(rms_norm, lambda x, w, eps: kernel(x, w, eps), example, name="test_rms", **settings)
    yield "test_rms"
    fusebackend.unregister("test_rms")


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_pattern_finds_every_norm(rms, dtype, training):
    """Other words, another eps, another rank, another dtype; in training, and where only the weight is trained."""
    for norm in (nn.RMSNorm(16, eps=1e-3, dtype=dtype), nn.RMSNorm(16, eps=None, dtype=dtype), LlamaNorm(dtype)):
        for shape in ((5, 16), (2, 5, 16)):
            x = torch.randn(shape, dtype=dtype).requires_grad_(training)
            report = assert_pattern(
                lambda x, norm=norm: norm(x.sin()), x, pattern=rms, count=1, training=training, **CLOSE if dtype != torch.float32 else {}
            )
            (made,) = [s for s in report.substitutions if s.graph == "joint"]
            assert made.graph == "joint" and len(made.outputs) == (3 if training else 2)
            assert ("roundings" in made.note) == (dtype == torch.bfloat16 and isinstance(norm, LlamaNorm)), made.note


@torch.no_grad()
def test_one_pattern_finds_every_norm_in_inference(rms):
    for dtype in (torch.float32, torch.bfloat16):
        for norm in (nn.RMSNorm(16, eps=1e-3, dtype=dtype), LlamaNorm(dtype)):
            report = assert_pattern(norm, torch.randn(4, 3, 2, 16, dtype=dtype), pattern=rms, count=1, **CLOSE)
            assert report.substitutions[0].graph == "forward (joint level)"


def test_a_norm_of_heads_that_are_transposed_behind_it(rms):
    """The gradient that it is given lies in another order than the one that the replacement was traced with."""
    norm = nn.RMSNorm(8)
    norm.forward = lambda x: F.rms_norm(x.sin(), (8,), norm.weight, 1e-6).transpose(1, 2).cos()
    for trained in (False, True):
        assert_pattern(norm, torch.randn(2, 5, 4, 8).requires_grad_(trained), pattern=rms, count=1, training=True)


def test_a_norm_of_heads_that_are_transposed_before_it(rms):
    """As in Gemma 3: the norm's result lies in the order of its input, the kernel's is contiguous."""
    norm = nn.RMSNorm(8, eps=1e-6)

    def heads(x):
        return norm(x.sin().view(2, 5, 4, 8).transpose(1, 2))

    with torch.no_grad():
        assert_pattern(heads, torch.randn(2, 5, 32), pattern=rms, count=1)
    assert_pattern(heads, torch.randn(2, 5, 32).requires_grad_(), pattern=rms, count=1, training=True)


def test_what_is_replaced_is_no_near_miss_too(rms):
    """In the backward of a norm other parts of the pattern begin, of which some are of another form."""
    norm, x = LlamaNorm(torch.float32), torch.randn(2, 5, 16).requires_grad_()
    report = assert_pattern(lambda x: norm(x.sin()), x, pattern=rms, count=1, training=True)
    assert not report.rejections


def test_a_frozen_weight(rms):
    norm = nn.RMSNorm(16).requires_grad_(False)
    report = assert_pattern(lambda x: norm(x.sin()), torch.randn(4, 16).requires_grad_(), pattern=rms, count=1, training=True)
    assert len(report.substitutions[0].outputs) == 2


def test_what_it_is_not_registered_for_is_a_reason(rms):
    x = torch.randn(4, 16, dtype=torch.float64)
    assert_pattern(
        nn.RMSNorm(16, dtype=torch.float64), x, pattern=rms, rejected="wrong dtype: x is torch.float64, the pattern is registered"
    )


def test_under_autocast(rms):
    norm = nn.RMSNorm(16)

    def fn(x):
        with torch.autocast("cpu", torch.bfloat16):
            return norm(x @ x.mT @ x)

    assert_pattern(fn, torch.randn(3, 16), pattern=rms, count=1, **CLOSE)


def test_a_replacement_never_rounds_more_than_the_graph(pattern):
    """Where the pattern rounds on its way and the graph does not."""

    def rounds(x, y):
        return (x.float() * y.float()).bfloat16().float().sin().bfloat16()

    name = pattern(rounds, lambda x, y: (y.float() * x.float()).bfloat16().float().sin().bfloat16(), torch_pair())
    x, y = torch_pair()
    assert_pattern(rounds, x, y, pattern=name, count=1)
    assert_pattern(lambda x, y: (x.float() * y.float()).sin().bfloat16(), x, y, pattern=name, rejected="wrong dtype")


@pytest.mark.parametrize("roundings", ["fewer", "exact"])
def test_whether_the_graph_may_round_more_often(pattern, roundings):
    def once(x, y):
        return (x.float() * y.float()).sin().bfloat16()

    def twice(x, y):
        return (x * y).float().sin().bfloat16()

    name = pattern(once, lambda x, y: (y.float() * x.float()).sin().bfloat16(), torch_pair(), roundings=roundings)
    assert_pattern(once, *torch_pair(), pattern=name, count=1)
    if roundings == "exact":
        assert_pattern(twice, *torch_pair(), pattern=name, rejected="the graph rounds to bfloat16 at aten.mul.Tensor")
        return
    report = assert_pattern(twice, *torch_pair(), pattern=name, count=1, **CLOSE)
    assert "leaves out roundings to bfloat16" in report.substitutions[0].note
    with torch._inductor.config.patch(emulate_precision_casts=True):
        assert_pattern(twice, *torch_pair(), pattern=name, count=0)


def torch_pair():
    return torch.randn(4, 8, dtype=torch.bfloat16), torch.randn(4, 8, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: torch.sin(x * x) * 0.1,
        lambda x: torch.sin(x.pow(2)) * 0.1,
        lambda x: torch.sin(x.square()) * torch.tensor(0.1),
        lambda x: torch.ops.aten.mul.Scalar(torch.sin(x * x), 0.1),
        lambda x: torch.ops.aten.mul.Tensor(torch.sin(x * x), torch.full((), 0.1)),
    ],
)
def test_one_computation_under_several_names(pattern, fn):
    name = pattern(lambda x: torch.sin(x.pow(2)) * 0.1, lambda x: 0.1 * torch.sin(x.pow(2)), (torch.randn(4, 8),))
    assert_pattern(fn, torch.randn(5, 9), pattern=name, count=1)


def test_a_number_is_compared_in_the_precision_that_the_graph_computes_in(pattern):
    name = pattern(lambda x: torch.sin(x) * 0.1, lambda x: 0.1 * torch.sin(x), (torch.randn(4, 8),), dtypes="any", verify=True)
    as_single = torch.tensor(0.1).item()
    assert as_single != 0.1
    assert_pattern(lambda x: torch.sin(x) * as_single, torch.randn(5, 9), pattern=name, count=1)
    x = torch.randn(5, 9, dtype=torch.float64)
    assert_pattern(lambda x: torch.sin(x) * 0.1, x, pattern=name, count=1)
    assert_pattern(lambda x: torch.sin(x) * as_single, x, pattern=name, rejected="other is 0.10000000149011612, the pattern has 0.1")


def test_optional_arguments(pattern):
    def scaled(x, w, bias):
        out = torch.tanh(x) * w
        return out if bias is None else out + bias

    def replacement(x, w, bias):
        out = w * torch.tanh(x)
        return out if bias is None else bias + out

    name = pattern(scaled, replacement, torch.randn(4, 8), torch.randn(8), torch.randn(8), optional="bias", verify=True)
    x, w, bias = torch.randn(5, 9), torch.randn(9), torch.randn(9)
    for fn in (lambda x, w, b: torch.tanh(x) * w + b, lambda x, w, b: torch.tanh(x) * w):
        report = assert_pattern(fn, x, w, bias, pattern=name, count=1)
    assert len(report.substitutions[0].inputs) == 2


def test_other_spellings_are_found_and_verified(pattern):
    def divided(x):
        return x / torch.sqrt(x * x + 1)

    def multiplied(x):
        return x * torch.rsqrt(x * x + 1)

    name = pattern(multiplied, lambda x: torch.rsqrt(1 + x * x) * x, (torch.randn(4, 8),), spellings=[divided], verify=True)
    for fn in (divided, multiplied):
        assert_pattern(fn, torch.randn(5, 9), pattern=name, count=1)
    with pytest.raises(fusebackend.VerificationError):
        pattern(multiplied, lambda x: torch.rsqrt(1 + x * x) * x, (torch.randn(4, 8),), spellings=[lambda x: x * x + 1], verify=True)


def test_what_the_graph_computes_twice_and_the_pattern_once(pattern):
    def centred(x):
        c = torch.tanh(x) - 1
        return c * torch.sin(c * c)

    name = pattern(centred, lambda x: torch.sin((torch.tanh(x) - 1) ** 2) * (torch.tanh(x) - 1), (torch.randn(4, 8),), verify=True)

    def twice(x):
        t = torch.tanh(x)
        return (t - 1) * torch.sin((t - 1) * (torch.tanh(x) - 1))

    assert_pattern(twice, torch.randn(5, 9), pattern=name, count=1)
    other = lambda x: (torch.tanh(x) - 1) * torch.sin((torch.tanh(x) - 2) * (torch.tanh(x) - 1))  # noqa: E731
    assert_pattern(other, torch.randn(5, 9), pattern=name, count=0)


def test_dtypes_that_the_replacement_fails_in_are_left_out_of_any(pattern, caplog):
    def replacement(x):
        torch._check(x.dtype != torch.float64, lambda: "no kernel for double")
        return 2 * torch.sin(x)

    name = pattern(lambda x: torch.sin(x) * 2, replacement, (torch.randn(4, 8),), dtypes="any", verify=True)
    assert "not for torch.float64" in caplog.text and "no kernel for double" in caplog.text
    fn = lambda x: torch.sin(x) * 2  # noqa: E731
    assert_pattern(fn, torch.randn(5, 9, dtype=torch.bfloat16), pattern=name, count=1, **CLOSE)
    assert_pattern(fn, torch.randn(5, 9, dtype=torch.float64), pattern=name, rejected="not for torch.float64: cpu")
    with pytest.raises(fusebackend.VerificationError, match="no kernel for double"):
        pattern(fn, replacement, (torch.randn(4, 8),), dtypes=[torch.float64], verify=True)


def test_another_rank_that_is_computed_wrongly_is_refused_where_it_is_met(pattern):
    def replacement(x):
        return 2 * torch.sin(x) if x.dim() == 2 else 3 * torch.sin(x)

    fn = lambda x: torch.sin(x) * 2  # noqa: E731
    name = pattern(fn, replacement, (torch.randn(4, 8),), ranks=(2, 3), verify=True)
    assert_pattern(fn, torch.randn(5, 9), pattern=name, count=1)
    assert_pattern(fn, torch.randn(2, 5, 9), pattern=name, rejected="verification failed: cpu, x f32[3, 4, 8], as given: output 0")
    assert_pattern(fn, torch.randn(2, 2, 5, 9), pattern=name, rejected="wrong rank: 4 where the pattern was registered with 2, 3")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"dtypes": "all"}, "dtypes='all'; 'any', or floating-point dtypes"),
        ({"dtypes": [torch.int64]}, "'any', or floating-point dtypes"),
        ({"ranks": [0]}, "ranks=[0]; 'any', or numbers of dims, e.g. (2, 3), are accepted"),
        ({"optional": ["z"]}, "optional names 'z'; the arguments are x"),
        ({"roundings": "none"}, "roundings='none'; 'fewer' or 'exact' is accepted"),
        ({"spellings": [lambda y: y]}, "the search function takes (x), a spelling (y)"),
    ],
)
def test_wrong_settings_are_refused(settings, words):
    with pytest.raises(RegistrationError) as error:
        fusebackend.register_replacement(torch_sin, torch_sin, (torch.randn(4),), name="test_wrong", **settings)
    assert words in str(error.value)


def torch_sin(x):
    return torch.sin(x)


def norm_and_scale(ctx, x, w, eps):
    h = x.float()
    scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    ctx.save_for_backward(x, w, scale)
    return (h * scale * w).to(x.dtype)


def gradients_of_norm(x, w, scale, g, h, wide):
    normal, gw = h * scale, g * wide
    dx = (gw - normal / x.shape[-1] * (normal * gw).sum(-1, keepdim=True)) * scale
    return dx.to(x.dtype), (g * normal).sum((0, 1)).to(w.dtype), None


class ConvertedAgain(torch.autograd.Function):
    """RMS norm whose backward converts its inputs again."""

    forward = staticmethod(norm_and_scale)

    @staticmethod
    def backward(ctx, grad):
        x, w, scale = ctx.saved_tensors
        return gradients_of_norm(x, w, scale, grad.float(), x.float(), w.float())


class ConvertedAndCopied(torch.autograd.Function):
    """As PyTorch traces it on GPUs, where what is converted in the backward is copied as well."""

    forward = staticmethod(norm_and_scale)

    @staticmethod
    def backward(ctx, grad):
        x, w, scale = ctx.saved_tensors
        copies = [t.float().clone(memory_format=torch.contiguous_format) for t in (grad, x, w)]
        return gradients_of_norm(x, w, scale, *copies)


def test_a_copy_of_what_was_converted_is_seen_through():
    x, w = torch.randn(4, 5, 16, dtype=torch.bfloat16).requires_grad_(), torch.rand(16, dtype=torch.bfloat16).requires_grad_()

    def searched(x, w, eps):
        return ConvertedAgain.apply(x, w, eps)

    fusebackend.register_replacement(searched, lambda x, w, eps: kernel(x, w, eps), (x, w, 1e-6), name="test_converted_again")
    try:
        for function in (ConvertedAgain, ConvertedAndCopied):
            call = lambda x, w, function=function: function.apply(x, w, 1e-3)  # noqa: E731
            assert_pattern(call, x, w, pattern="test_converted_again", training=True, count=1, **CLOSE)
    finally:
        fusebackend.unregister("test_converted_again")


def layer_norm(x, w, b, eps):
    return F.layer_norm(x, (x.shape[-1],), w, b, eps)


def layer_norm_replacement(x, w, b, eps):
    h = x.float() - x.float().mean(-1, keepdim=True)
    return (h * torch.rsqrt((h * h).mean(-1, keepdim=True) + eps) * w + b).to(x.dtype)


def by_mean_square(x, w, b):
    h = x.to(torch.float32)
    mean = h.mean(-1, keepdim=True)
    variance = (h - mean).pow(2).mean(-1, keepdim=True)
    return (w * ((h - mean) * torch.rsqrt(variance + 1e-3)) + b).to(x.dtype)


def by_variance(x, w, b):
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + 1e-3) * w + b


def divided(x, w, b):
    mean = x.float().mean(-1, keepdim=True)
    variance = (x.float() - mean).pow(2).mean(-1, keepdim=True)
    return w * ((x.float() - mean) / torch.sqrt(variance + 1e-3)).to(x.dtype) + b


def of_other_dims(x, w, b):
    """PyTorch copies such an input for its forward, and not for its backward."""
    return F.layer_norm(x.mT, (16,), w, b, 1e-3).mT


def rms_norm_with_or_without_weight(x, w, eps):
    h = x.float() * torch.rsqrt((x.float() * x.float()).mean(-1, keepdim=True) + eps)
    return (h if w is None else h * w).to(x.dtype)


def root_divides(x, w):
    return w * (x.float() / torch.sqrt(x.float().square().mean(-1, keepdim=True) + 1e-3)).to(x.dtype)


def power_multiplies(x, w):
    return (x.float() * torch.pow(x.float().pow(2).mean(-1, keepdim=True) + 1e-3, -0.5) * w.float()).to(x.dtype)


def weight_first(x, w):
    return (w * x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-3)).to(x.dtype)


def without_weight(x, w):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3)


@pytest.mark.parametrize("spelled", [root_divides, power_multiplies, weight_first, without_weight])
def test_an_rms_norm_is_found_where_it_is_written_out(pattern, spelled):
    example = torch.randn(2, 3, 8).requires_grad_(), torch.randn(8).requires_grad_(), 1e-6
    settings = dict(dtypes=(torch.float32, torch.bfloat16), optional="w", verify=False)
    name = pattern(rms_norm, rms_norm_with_or_without_weight, example, **settings)
    x, w = torch.randn(2, 5, 16), torch.randn(16)
    assert_pattern(spelled, x, w, pattern=name, count=1, rtol=1e-4, atol=1e-5)
    assert_pattern(spelled, x.bfloat16(), w.bfloat16(), pattern=name, count=1, rtol=5e-2, atol=5e-2)
    trained = [x.requires_grad_(), w.requires_grad_(spelled is not without_weight)]
    assert_pattern(spelled, *trained, pattern=name, count=1, training=True, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def layers():
    example = (torch.randn(2, 3, 8).requires_grad_(), torch.randn(8).requires_grad_(), torch.randn(8).requires_grad_(), 1e-6)
    fusebackend.register_replacement(
        layer_norm, layer_norm_replacement, example, name="test_layer_norm", dtypes=(torch.float32, torch.bfloat16), verify=False
    )
    yield "test_layer_norm"
    fusebackend.unregister("test_layer_norm")


@pytest.mark.parametrize("spelled", [by_mean_square, by_variance, divided, of_other_dims])
def test_a_function_of_pytorch_is_found_where_it_is_written_out(layers, spelled):
    x, w, b = (torch.randn(s) for s in ((2, 16, 5) if spelled is of_other_dims else (2, 5, 16), (16,), (16,)))
    assert_pattern(spelled, x, w, b, pattern=layers, count=1, rtol=1e-4, atol=1e-5)
    assert_pattern(spelled, *(t.bfloat16() for t in (x, w, b)), pattern=layers, count=1, rtol=5e-2, atol=5e-2)
    trained = [t.requires_grad_() for t in (x, w, b)]
    assert_pattern(spelled, *trained, pattern=layers, count=1, training=True, rtol=1e-4, atol=1e-4)


def test_what_is_no_wording_of_the_function_is_not_found(layers):
    x, w, b = torch.randn(2, 5, 16), torch.randn(16), torch.randn(16)

    def unbiased(x, w, b):
        return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-3) * w + b

    assert_pattern(unbiased, x, w, b, pattern=layers, count=0)


@pytest.mark.parametrize("function", wordings._WORDINGS)
def test_each_wording_computes_what_the_function_does(function):
    x, w, b = torch.randn(4, 6, 16, dtype=torch.float64) * 3 + 1, torch.randn(6, 16, dtype=torch.float64), torch.randn(6, 16).double()
    arguments = (x, (6, 16), w, b, 1e-3) if function is F.layer_norm else (x, (6, 16), w, 1e-3)
    for write, _ in wordings._WORDINGS[function]:
        torch.testing.assert_close(write(torch.float64, *arguments), function(*arguments))
        without = (x, (6, 16), *(None for _ in arguments[2:-1]), 1e-3)
        torch.testing.assert_close(write(torch.float64, *without), function(*without))
