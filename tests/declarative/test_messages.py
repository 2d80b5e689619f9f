"""What people are told who registered something wrongly, or whose pattern is nowhere: the cause, their own line, what to change."""

import re
import types

import pytest
import torch
from example_pattern import other_silu_mul, pair, silu_mul
from torch import nn
from torch.nn import functional as F

import fusebackend
from fusebackend import RegistrationError
from fusebackend.declarative.variant import Candidate
from fusebackend.testing import assert_pattern

X = torch.randn(4, 8)
LIBRARY = torch.library.Library("test_messages", "FRAGMENT")
LIBRARY.define("no_fake(Tensor x) -> Tensor")
LIBRARY.impl("no_fake", lambda x: x * 2, "CPU")


@torch.library.custom_op("test_messages::angry", mutates_args=())
def angry(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@angry.register_fake
def _(x):
    raise RuntimeError("only rows of 16")


SETTINGS = types.SimpleNamespace(two=2)


def twice(x):
    return x * 2


def prints(x):
    print("here")
    return x * 2


def branches(x):
    return x * 2 if x.sum() > 0 else x


def helper(x):
    return x.view(3, 5, 7)


def reshapes(x):
    return helper(x) * 2


def no_fake(x):
    return torch.ops.test_messages.no_fake(x)


def calls_angry(x):
    return angry(x)


def misspelled(x):
    return x * factr  # noqa: F821


def no_such_function(x):
    return torch.no_such_function(x)


def no_such_key(x):
    return x * {"two": 2}["too"]


def no_such_attribute(x):
    return x * SETTINGS.too


@pytest.mark.parametrize(
    ("fn", "cause", "line", "cure"),
    [
        (no_such_function, "AttributeError: module 'torch' has no attribute 'no_such_function'", "return torch.no_such_function(x)", ""),
        (no_such_key, "'too'", 'return x * {"two": 2}["too"]', ""),
        (no_such_attribute, "has no attribute 'too'", "return x * SETTINGS.too", ""),
        (prints, "print", 'print("here")', "move this out of the function"),
        (branches, "data-dependent branching", "return x * 2 if x.sum() > 0 else x", "use torch.where"),
        (reshapes, "RuntimeError: shape '[3, 5, 7]' is invalid", "return x.view(3, 5, 7)", ""),
        (no_fake, "the operator test_messages::no_fake has no fake", "no_fake(x)", 'torch.library.register_fake("test_messages::no_fake")'),
        (calls_angry, "RuntimeError: only rows of 16", 'raise RuntimeError("only rows of 16")', ""),
        (misspelled, "factr", "return x * factr", ""),
    ],
)
def test_a_function_that_cannot_be_traced(fn, cause, line, cure):
    for functions in ((fn, twice), (twice, fn)):
        with pytest.raises(RegistrationError) as error:
            fusebackend.register_replacement(*functions, (X,), name="test_wrong")
        message = str(error.value)
        assert "\n" not in message and f"{fn.__name__} can't be traced" in message and "ConstantVariable" not in message
        assert (
            cause in message and f"at test_messages.py:{fn.__code__.co_firstlineno}"[:20] in message and line in message and cure in message
        )


@pytest.mark.parametrize("argument", ["when", "extra_check"])
def test_both_names_of_the_check_are_accepted_in_both_forms(pattern, argument):
    def refuses(candidate: Candidate):
        return "not today"

    name = pattern(silu_mul, other_silu_mul, pair(4, 8), **{argument: refuses})
    assert_pattern(silu_mul, *pair(5, 7), pattern=name, rejected="not today")
    fusebackend.register_pattern("test_decorated", example_inputs=pair(4, 8), **{argument: refuses})(silu_mul).replace_with(other_silu_mul)
    try:
        assert_pattern(silu_mul, *pair(5, 7), pattern="test_decorated", rejected="not today")
    finally:
        fusebackend.unregister("test_decorated")
    with pytest.raises(RegistrationError, match="when= and extra_check= are two names of one argument"):
        pattern(silu_mul, other_silu_mul, pair(4, 8), when=refuses, extra_check=refuses)


def test_gradients_of_a_modules_parameters_are_compared(pattern):
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return w * torch.tanh(x)

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            t = torch.tanh(x)
            return g * w * (1 - t * t), g * t * 1.5

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.ones(4, 8))

        def forward(self, x):
            return torch.tanh(x) * self.w

    example = tuple(t.requires_grad_() for t in pair(4, 8))
    name = pattern(lambda x, w: torch.tanh(x) * w, lambda x, w: Wrong.apply(x, w), example)
    with pytest.raises(fusebackend.testing.PatternAssertion, match="the result differs from eager"):
        assert_pattern(Scale(), torch.randn(4, 8), pattern=name, training=True)
    with pytest.raises(ValueError, match="an argument or a parameter must require grad"):
        assert_pattern(torch.tanh, torch.randn(4, 8), pattern=name, training=True)


def test_a_pattern_of_inference_that_a_backward_reads(pattern):
    name = pattern(lambda x, y: torch.tanh(x) * y, lambda x, y: y * torch.tanh(x), pair(4, 8))
    inputs = tuple(t.requires_grad_() for t in pair(4, 8))
    fn = lambda x, y: torch.tanh(x) * y  # noqa: E731
    assert_pattern(
        fn, *inputs, pattern=name, training=True, rejected="example_inputs that require grad match forward and backward together"
    )


def gelu_mul(x, y):
    return F.gelu(x.relu() + 1) * y


def test_explain_says_where_a_pattern_came_nearest(pattern):
    name = pattern(silu_mul, other_silu_mul, pair(4, 8))
    (note,) = fusebackend.explain(gelu_mul, *pair(4, 8), pattern=name).notes[:1]
    assert f"{name}: nearest at test_messages.py:{gelu_mul.__code__.co_firstlineno + 1} in forward" in note and "expected aten." in note
    (note,) = fusebackend.explain(torch.sort, X, pattern=name).notes
    assert note.startswith(f"{name}: no graph holds an operator at which it begins (aten.mul")
    notes = fusebackend.explain(silu_mul, *pair(4, 8, dtype=torch.float64), pattern=name).notes
    assert "1 near misses (above)" in notes[0]
    assert fusebackend.explain(silu_mul, *pair(4, 8), pattern=name).notes[0].startswith(f"{name}: 1 substitutions")
    with pytest.raises(ValueError, match="no pattern is called 3"):
        fusebackend.verify(3)
    with pytest.raises(ValueError, match="no pattern is called 'no_such'"):
        fusebackend.explain(silu_mul, *pair(4, 8), pattern="no_such")


def test_explain_says_what_looked_at_a_line(pattern):
    name = pattern(silu_mul, other_silu_mul, pair(4, 8))
    line = gelu_mul.__code__.co_firstlineno + 1
    notes = fusebackend.explain(gelu_mul, *pair(4, 8), at=f"test_messages.py:{line}").notes
    assert f"at test_messages.py:{line}: aten.relu.default f32[4, 8]" in notes[0]
    assert f"at test_messages.py:{line}: {name} looked, and found nothing like it; explain(..., pattern={name!r}) says more" in notes
    assert any("begins at none of these operators" in n and "permute" in n for n in notes)
    notes = fusebackend.explain(silu_mul, *pair(4, 8), pattern=name, at=f"example_pattern.py:{silu_mul.__code__.co_firstlineno + 1}").notes
    assert any(f"{name} replaced it by" in n for n in notes)
    notes = fusebackend.explain(gelu_mul, *pair(4, 8), at="test_messages.py:1").notes
    assert f"no operator comes from there; lines of the graphs: test_messages.py:{line}" in notes[0]
    for at in ("here", "model.py:0", "model.py:²", 12):
        with pytest.raises(ValueError, match=re.escape(f"at={at!r}; a line of the program is accepted, e.g. 'model.py:12'")):
            fusebackend.explain(gelu_mul, *pair(4, 8), at=at)
