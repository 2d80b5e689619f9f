"""Patterns given as ordinary PyTorch: what they find, what they refuse and why, and how they are registered."""

import itertools

import pytest
import torch
from torch.nn import functional as F

import fusebackend
from fusebackend import RegistrationError, VerificationError
from fusebackend.backend import fuse
from fusebackend.rewriting import registry, switches
from fusebackend.testing import PatternAssertion, assert_pattern

counter = itertools.count()


@pytest.fixture
def pattern():
    """Registers a pattern for one test and gives its name."""
    names = []

    def add(search_fn, replace_fn, *example, verify=False, **kwargs):
        name = f"test_traced_{next(counter)}"
        fusebackend.register_replacement(
            search_fn, replace_fn, example[0] if len(example) == 1 else list(example), name=name, verify=verify, **kwargs
        )
        names.append(name)
        return name

    yield add
    for name in names:
        fusebackend.unregister(name)


def pair(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)


def silu_mul(x, y):
    return F.silu(x) * y


def other_silu_mul(x, y):
    return y * (x * torch.sigmoid(x))


def test_found_in_either_order_at_any_size_static_and_dynamic(pattern):
    name = pattern(silu_mul, other_silu_mul, pair(4, 8))
    for fn in (lambda x, y: F.silu(x) * y, lambda x, y: y * F.silu(x), lambda x, y: F.silu(x - 1) * y.sin() + 2):
        for dynamic in (False, True):
            assert_pattern(fn, *pair(5, 7), pattern=name, count=1, dynamic=dynamic)


def test_seen_through_views_between_pointwise_operators(pattern):
    name = pattern(silu_mul, other_silu_mul, pair(4, 8))
    x, y = torch.randn(2, 3, 8), torch.randn(6, 8)
    assert_pattern(lambda x, y: F.silu(x.sin()).view(6, 8) * y, x, y, pattern=name, count=1)
    assert_pattern(lambda x, y: F.silu(x.t().sin()).t() * y, torch.randn(4, 5), torch.randn(4, 5), pattern=name, count=1)


def test_a_view_that_cannot_be_moved_is_a_reason(pattern):
    name = pattern(silu_mul, other_silu_mul, pair(4, 8))
    fn = lambda x, y: F.silu(x.sum(0, keepdim=True).expand(3, 8).sin() + x)[:, :4] * y  # noqa: E731
    assert_pattern(fn, torch.randn(3, 8), torch.randn(3, 4), pattern=name, count=0)


def test_numbers_stand_for_any_number_unless_pinned(pattern):
    def scaled(x, a):
        return torch.tanh(x) * a

    name = pattern(scaled, lambda x, a: a * torch.tanh(x), (torch.randn(4, 8), 0.5))
    assert_pattern(lambda x: torch.tanh(x) * 3.25, torch.randn(4, 8), pattern=name, count=1)
    assert_pattern(lambda x: torch.tanh(x) * 7, torch.randn(4, 8), pattern=name, count=1)
    pinned = pattern(scaled, lambda x, a: a * torch.tanh(x), (torch.randn(4, 8), 0.5), pin=("a",))
    assert_pattern(lambda x: torch.tanh(x) * 0.5, torch.randn(4, 8), pattern=pinned, count=1)
    assert_pattern(lambda x: torch.tanh(x) * 0.25, torch.randn(4, 8), pattern=pinned, rejected="other is 0.25, the pattern has 0.5")


def test_other_alpha_is_a_reason(pattern):
    """The match that Inductor's own matcher makes, with an error of 3.2."""
    name = pattern(lambda x, y: x.t() + y, lambda x, y: torch.sub(x.t(), -y), (torch.randn(4, 8), torch.randn(8, 4)))
    x, y = torch.randn(5, 6), torch.randn(6, 5)
    assert_pattern(lambda x, y: torch.add(x.t(), y, alpha=2), x, y, pattern=name, rejected="alpha is 2, the pattern has 1")
    assert_pattern(lambda x, y: torch.add(x.t(), y), x, y, pattern=name, count=1)
    assert_pattern(lambda x, y: torch.add(y, x.t()), x, y, pattern=name, rejected="stride (5, 1) became (1, 6)")


def test_wrong_dtype_and_rank_are_reasons(pattern):
    name = pattern(silu_mul, other_silu_mul, pair(4, 8))
    assert_pattern(silu_mul, *pair(4, 8, dtype=torch.float64), pattern=name, rejected="wrong dtype: torch.float64")
    assert_pattern(silu_mul, *pair(2, 4, 8), pattern=name, rejected="wrong rank: 3 where the pattern was registered with 2")


def test_a_broadcast_that_changes_shape_is_a_reason(pattern):
    name = pattern(silu_mul, other_silu_mul, pair(4, 8))
    assert_pattern(silu_mul, torch.randn(4, 8), torch.randn(1, 8), pattern=name, rejected="a broadcast?")


def test_an_extra_user_of_the_interior_is_a_reason(pattern):
    name = pattern(lambda x, y: torch.tanh(x) * y, lambda x, y: y * torch.tanh(x), pair(4, 8))

    def fn(x, y):
        t = torch.tanh(x)
        return t * y, t

    assert_pattern(fn, *pair(4, 8), pattern=name, rejected="aten.tanh.default inside the match is also used by output")


def test_a_mutated_input_in_between_is_not_passed_over(pattern):
    name = pattern(lambda x, y: torch.tanh(x) * y, lambda x, y: y * torch.tanh(x), pair(4, 8))

    def fn(x, y):
        t = torch.tanh(x)
        x.add_(1)
        return t * y, x * 2

    assert_pattern(fn, *pair(4, 8), pattern=name, count=1)  # functionalised: the tanh reads what x was


@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (lambda x, w: F.conv1d(F.pad(x, (0, 2)), w, groups=6), "pad is 0, the pattern has 2"),
        (lambda x, w: F.conv1d(F.pad(x, (2, 0), value=1.0), w, groups=6), "value is 1.0, the pattern has 0.0"),
        (lambda x, w: F.conv1d(F.pad(x, (2, 0)), w.repeat(1, 2, 1), groups=3), "groups"),
    ],
)
def test_guards_on_a_convolution(pattern, fn, reason):
    def search(x, w):
        return F.conv1d(F.pad(x, (2, 0)), w, groups=6)

    name = pattern(
        search, lambda x, w: F.conv1d(x, w, groups=6, padding=2)[..., :-2].contiguous(), (torch.randn(2, 6, 10), torch.randn(6, 1, 3))
    )
    assert_pattern(search, torch.randn(2, 6, 16), torch.randn(6, 1, 3), pattern=name, count=1)
    assert_pattern(fn, torch.randn(2, 6, 16), torch.randn(6, 1, 3), pattern=name, rejected=reason)


def test_random_operators_are_not_moved_or_duplicated(pattern):
    name = pattern(lambda x, y: F.dropout(x, 0.5) * y, lambda x, y: y * x, pair(4, 8))
    report = assert_pattern(lambda x, y: F.dropout(x, 0.25) * y, torch.zeros(4, 8), torch.randn(4, 8), pattern=name, count=0)
    assert not report.substitutions


def test_when_sees_the_match_and_may_say_no(pattern):
    seen = []

    def when(candidate):
        seen.append((set(candidate.kwargs), candidate.kwargs["x"].shape, candidate.output_node.target))
        return True if candidate.kwargs["x"].shape[0] < 10 else "too many rows"

    name = pattern(silu_mul, other_silu_mul, pair(4, 8), extra_check=lambda c: when(c))
    assert_pattern(silu_mul, *pair(5, 7), pattern=name, count=1)
    assert_pattern(silu_mul, *pair(50, 7), pattern=name, rejected="too many rows")
    assert ({"x", "y"}, torch.Size([5, 7]), torch.ops.aten.mul.Tensor) in seen


def test_training_graphs_are_rewritten_forward_and_backward_together(pattern):
    def squash(x, w):
        return torch.tanh(x * w)

    class Squash(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            out = torch.tanh(x * w)
            ctx.save_for_backward(out, x, w)
            return out

        @staticmethod
        def backward(ctx, g):
            out, x, w = ctx.saved_tensors
            g = (1 - out.square()) * g
            return g * w, g * x

    example = tuple(t.requires_grad_() for t in pair(4, 8))
    name = pattern(squash, lambda x, w: Squash.apply(x, w), example, verify=True)
    inputs = tuple(t.requires_grad_() for t in pair(5, 9))
    report = assert_pattern(lambda x, w: squash(x.sin(), w).cos() + x, *inputs, pattern=name, training=True)
    assert {s.graph for s in report.substitutions} == {"joint"}
    assert len(report.substitutions[0].outputs) == 3
    assert_pattern(lambda x, w: squash(x.sin(), w).cos() + x, *inputs, pattern=name, training=True, dynamic=True)


def test_several_examples_give_several_traces(pattern):
    name = pattern(silu_mul, other_silu_mul, pair(4, 8), pair(2, 4, 8), pair(4, 8, dtype=torch.float64))
    for inputs in (pair(5, 7), pair(3, 5, 7), pair(5, 7, dtype=torch.float64)):
        assert_pattern(silu_mul, *inputs, pattern=name, count=1)


def test_post_grad_level(pattern):
    name = pattern(silu_mul, other_silu_mul, pair(4, 8), level="post_grad")
    assert_pattern(silu_mul, *pair(5, 7), pattern=name, count=1)


A, B = pair(4, 8)
TENSOR = torch.randn(8)


@pytest.mark.parametrize(
    ("search", "replace", "example", "kwargs", "words"),
    [
        (silu_mul, lambda x, y: other_silu_mul(x, y).sum(0), (A, B), {}, "output 0 differs: the search function gives float32 of shape"),
        (silu_mul, lambda x, y: other_silu_mul(x, y).double(), (A, B), {}, "float64"),
        (silu_mul, lambda x, y: other_silu_mul(x, y).t().contiguous().t(), (A, B), {}, "strides"),
        (silu_mul, lambda x, y: (x + 1, y + 1), (A, B), {}, "returns 1 tensors, the replacement 2"),
        (silu_mul, lambda x: x, (A, B), {}, "takes (x, y), the replacement (x)"),
        (silu_mul, other_silu_mul, (A,), {}, "do not fit the search function"),
        (silu_mul, other_silu_mul, (1.0, 2.0), {}, "must hold a tensor"),
        (silu_mul, other_silu_mul, (A, B), {"pin": ("z",)}, "pin names 'z'; the arguments are x, y"),
        (lambda x, y: x * TENSOR, lambda x, y: x * y, (A, B), {}, "uses a tensor that is not one of its arguments"),
        (lambda x, y: x.sin(), lambda x, y: x.sin(), (A, B), {}, "does not use its argument 'y'"),
        (lambda x, a: x * (a + 1), lambda x, a: x * (a + 1), (A, 2.0), {}, "pin it: pin=('a',)"),
        (lambda x, y: print(x) or x * y, other_silu_mul, (A, B), {}, "can't be traced"),
        (silu_mul, other_silu_mul, (A, B), {"name": "transpose_add"}, "'transpose_add' is taken"),
        (
            silu_mul,
            other_silu_mul,
            (A, B),
            {"extra_check": lambda c, held=TENSOR: True},
            "a Tensor: compiled graphs are cached by what a pattern does",
        ),
        (silu_mul, other_silu_mul, (A.clone().requires_grad_(), B), {"level": "post_grad"}, "need level='joint'"),
    ],
)
def test_registering_wrongly_says_what_to_do(search, replace, example, kwargs, words):
    with pytest.raises(RegistrationError) as error:
        fusebackend.register_replacement(search, replace, example, **{"name": "test_wrong", **kwargs})
    assert words in str(error.value)
    assert "test_wrong" not in registry.known_names()


@pytest.mark.parametrize(
    ("replace", "words"),
    [
        (lambda x, y: F.silu(x) * y * 1.0001, "largest error"),
        (lambda x, y: F.silu(x.clamp(max=100)) * y, "large values"),
        (lambda x, y: F.silu(x) * torch.nan_to_num(y), "inf or nan"),
    ],
)
def test_a_replacement_that_computes_something_else_is_not_registered(replace, words):
    with pytest.raises(VerificationError) as error:
        fusebackend.register_replacement(silu_mul, replace, (A, B), name="test_wrong")
    assert words in str(error.value) and "test_wrong" not in registry.known_names()


def test_the_decorators():
    @fusebackend.register_pattern("test_decorated", example_inputs=(A, B))
    def search(x, y):
        return F.silu(x) * y

    try:
        replacement = search.replace_with(other_silu_mul)
        assert torch.equal(search(A, B), silu_mul(A, B))
        assert fusebackend.verify("test_decorated").ok and replacement.name == "test_decorated"
        assert_pattern(silu_mul, A, B, pattern="test_decorated", count=1)
    finally:
        fusebackend.unregister("test_decorated")


def test_a_failed_assertion_shows_the_report(pattern):
    name = pattern(silu_mul, other_silu_mul, pair(4, 8))
    with pytest.raises(PatternAssertion, match=f"expected 2 substitution.s. by '{name}', found 1"):
        assert_pattern(silu_mul, *pair(5, 7), pattern=name, count=2)
    with pytest.raises(PatternAssertion, match="expected a near miss"):
        assert_pattern(torch.sin, A, pattern=name, rejected="anything")


def test_the_fingerprint_follows_what_the_pattern_does():
    def make(factor=1.0, limit=3, priority=0, dtype=torch.float32):
        return fusebackend.declarative.register.TracedPattern(
            "test_print",
            lambda x, y: F.silu(x) * y,
            lambda x, y: y * F.silu(x) * factor,
            pair(4, 8, dtype=dtype),
            when=lambda c: len(c.nodes) < limit,
            priority=priority,
        ).fingerprint()

    first = make()
    assert make() == first
    others = {make(factor=2.0), make(limit=4), make(priority=1), make(dtype=torch.float64)}
    assert len(others) == 4 and first not in others


def test_patterns_are_switched_off_and_on_for_a_block():
    names = lambda: {p.name for p in switches.select(("all",))}  # noqa: E731
    with fusebackend.disable("transpose_add"):
        assert "transpose_add" not in names()
        with fusebackend.enable("transpose_add"):
            assert "transpose_add" in names()
        assert "transpose_add" not in names()
        assert "transpose_add" in {p.name for p in switches.select(("transpose_add",))}
    assert "transpose_add" in names()
    with pytest.raises(ValueError, match="did you mean 'transpose_add'"):
        fusebackend.disable("transpose_ad")


def test_another_packages_patterns_come_by_entry_point(monkeypatch):
    calls = []

    class Entry:
        name = "theirs"

        def __init__(self, load):
            self.load = load

    monkeypatch.setattr(registry, "entry_points", lambda group: [Entry(lambda: lambda: calls.append(group)), Entry(lambda: 1 / 0)])
    registry._load.__wrapped__()
    assert calls == ["fusebackend.patterns"]


def test_matching_a_large_graph_takes_less_than_a_second(pattern):
    pattern(silu_mul, other_silu_mul, pair(4, 8))

    def fn(x, w):
        for i in range(1250):
            x = torch.relu(x * w + i) - 0.5
        return (x,)

    # As Dynamo gives it, which takes longer than all the rest.
    options = {"fuse.interpret": True, "fuse.gate": "off"}
    fuse(torch.fx.symbolic_trace(fn), [torch.randn(4, 4), torch.randn(4, 4)], options=options)
    report = fusebackend.last_report()
    assert report.graphs[-1].nodes >= 5000
    assert report.seconds < 5  # 0.3 s alone; the machine is shared
