"""More than 2^31 elements in x, the result and the gradients: rows at the corners of the tensors against the same convolution in fp64."""

import pytest
import torch
from one_convolution import TOLERANCE, Case

pytestmark = pytest.mark.usefixtures("library")


def drawn(batch, channels, length, channels_last):
    """Random fp16 numbers, without a copy of them in another dtype."""
    shape = (batch, length, channels) if channels_last else (batch, channels, length)
    numbers = torch.empty(shape, dtype=torch.float16, device="cuda").normal_()
    return numbers.transpose(1, 2) if channels_last else numbers


def case_of(batch, channels, length, taps, order, silu):
    case = Case(1, 1, 1, taps, torch.float16, "cuda", silu=silu)
    case.x = drawn(batch, channels, length, order != "bct")
    case.grad = drawn(batch, channels, length, order == "btc")
    case.weight = torch.randn(channels, 1, taps, device="cuda").mul_(taps**-0.5).half()
    case.bias = torch.randn(channels, device="cuda").half()
    case.channels_last = order == "btc"
    return case


def check(case, rows):
    """Of the results, only `rows` of some channels, and those channels' weight gradients. A channel is a convolution of its own."""
    batch, channels, _ = case.x.shape
    out, (dx, dw, db) = case.forward(), case.backward()
    assert all(t.numel() > 2**31 for t in (case.x, out, dx)) or case.x.numel() < 1 << 24
    for c in (0, channels // 2 + 1, channels - 1):
        one = Case(1, 1, 1, case.weight.shape[2], torch.float16, "cuda", silu=case.silu)
        one.x, one.grad, one.weight, one.bias = case.x[:, c : c + 1], case.grad[:, c : c + 1], case.weight[c : c + 1], case.bias[c : c + 1]
        want_out, want_dx, want_dw, want_db = one.torchs()
        for b in rows:
            for name, got, want in (("out", out[b, c], want_out[b, 0]), ("dx", dx[b, c], want_dx[b, 0])):
                assert (got.double() - want).norm() <= TOLERANCE[torch.float16] * want.norm(), (name, b, c)
        scale = one.grad.double().norm()  # a sum of random gradients may be near zero by chance
        for name, got, want in (("dw", dw[c], want_dw[0]), ("db", db[c], want_db[0])):
            assert (got.double() - want).norm() <= TOLERANCE[torch.float16] * max(want.norm(), scale), (name, c)


@pytest.mark.cuda
@pytest.mark.parametrize("order", ["bct", "btc", "btc to bct"])
@pytest.mark.parametrize(
    "batch, channels, length, taps",
    [
        (3, 1024, 700_003, 4),
        (4, 1024, (1 << 19) + 8, 4),  # aligned rows
        (66_000, 4096, 8, 4),  # more batch entries than a grid has blocks in z
        (3, 1024, 700_003, 31),
        (3, 1024, 700_003, 100),
        (70, 8000, 4000, 64),
        (70, 8000, 4000, 1000),  # tensor cores
        (66, 8192, 4000, 4000),  # FFT
    ],
)
@pytest.mark.usefixtures("large_memory")
def test_more_than_2_to_the_31_elements(batch, channels, length, taps, order):
    check(case_of(batch, channels, length, taps, order, silu=taps == 4), (0, batch // 2, batch - 1))
