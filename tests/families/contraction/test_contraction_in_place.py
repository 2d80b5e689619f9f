"""fp32 sums that a library needs chunks for, by ``strided_bmm``, whose reference in PyTorch runs on CPUs."""

import pytest
import torch
from families.contraction.random_contractions import aten, calls, rewritten

from fusebackend.patterns.contraction import in_place

STRIDED = torch.ops.fusebackend.strided_bmm.default


@pytest.fixture(autouse=True)
def on_cpus(monkeypatch):
    monkeypatch.setattr(in_place, "unavailable", lambda device: None)


def values(scores, x, decay):
    """Mamba-2's: the scores are multiplied by decays first, which the product is the only reader of."""
    return ((scores * decay)[..., None] * x[:, :, None]).sum(3)


def folded(x, y, w):
    return (x[:, :, None] * y[:, None] * w).sum(-1)


def scaled(x, y):
    """Numbers below 1 scale a factor, so that no sum overflows."""
    return (x[:, :, None] * y[:, None]).div(8).sum(-1)


def rows(x, y):
    return (x[:, :, None] * y[:, None]).sum(-1)


def of_heads(terms=64, rows=12):
    """Chunks of positions: (batch, chunks, rows, terms, heads), (batch, chunks, terms, heads, channels), and as the first."""
    return torch.randn(2, 3, rows, terms, 8), torch.randn(2, 3, terms, 8, 16), torch.rand(2, 3, rows, terms, 8)


CASES = {
    "both where they lie": (rows, (torch.randn(3, 8, 64), torch.randn(3, 12, 64)), 0),
    "computed element by element": (values, of_heads(), 0),
    "three factors": (folded, (torch.randn(3, 8, 64), torch.randn(3, 12, 64), torch.randn(64)), 1),
    "scaled": (scaled, (torch.randn(3, 8, 64), torch.randn(3, 12, 64)), 1),
    "vectors along the others alone": (rows, (torch.randn(3, 8, 54), torch.randn(3, 12, 54)), 2),
    "one beside a column": (lambda x, y: rows(x[:, :, 1:], y), (torch.randn(3, 8, 65), torch.randn(3, 12, 64)), 1),
}


@pytest.mark.parametrize("name", CASES)
def test_operands_that_kernels_cannot_read_are_copied(name):
    fn, inputs, copies = CASES[name]
    module, outcome = rewritten(fn, *inputs)
    (substitution,) = outcome.substitutions
    assert "chunks" not in substitution.note, substitution.note
    assert ("read where they lie" in substitution.note) == (copies == 0), substitution.note
    assert copies == 0 or f"{copies} factors are copied" in substitution.note, substitution.note
    assert len(calls(module.graph, STRIDED)) == 1 and not calls(module.graph, aten.bmm.default)
    found, eager = module(*inputs), fn(*inputs)
    assert found.stride() == eager.stride()
    torch.testing.assert_close(found, eager, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("terms, rows_of_x", [(144, 12), (54, 6)])
def test_what_the_kernels_do_not_compute_is_left_to_a_library(terms, rows_of_x):
    """More than 128 terms; no vectors along either dim."""
    module, outcome = rewritten(rows, torch.randn(3, rows_of_x, terms), torch.randn(3, 12, terms))
    assert len(calls(module.graph, aten.bmm.default)) == 1, outcome


def test_a_copy_serves_two_products():
    def fn(x, y, z):
        x = x[:, :, 1:]
        return rows(x, y), rows(x, z)

    inputs = torch.randn(3, 8, 65), torch.randn(3, 12, 64), torch.randn(3, 4, 64)
    module, outcome = rewritten(fn, *inputs)
    assert len(calls(module.graph, STRIDED)) == 2, outcome
    assert len(calls(module.graph, aten.clone.default)) == 1
    for found, wanted in zip(module(*inputs), fn(*inputs)):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
