"""More than 2^31 elements in x, the result and the gradients: what a few images give alone, the whole batch gives at the same places."""

import pytest
import torch
from one_depthwise_convolution import TOLERANCE, Case

pytestmark = pytest.mark.usefixtures("library")
bf16, f32 = torch.bfloat16, torch.float32

CASES = {
    "planes": ((400_000, 16, 20, 20), 7, bf16, {}),
    "planes of an odd width": ((400_000, 16, 19, 19), 3, bf16, {}),
    "planes 9x9": ((400_000, 16, 20, 20), 9, bf16, {}),
    "channels last": ((60_000, 96, 20, 20), 7, bf16, {"orders": (True, True)}),
    "channels last 3x3": ((60_000, 96, 20, 20), 3, bf16, {"orders": (True, True)}),
    "stride 2": ((60_000, 96, 21, 21), 3, bf16, {"stride": 2}),
    "dilation": ((60_000, 96, 20, 20), 3, bf16, {"dilation": 2}),
    "fp32 planes": ((400_000, 16, 20, 20), 5, f32, {}),
    "fp32 channels last": ((60_000, 96, 20, 20), 3, f32, {"orders": (True, True)}),
    "large planes": ((6, 2, 14_000, 14_000), 5, bf16, {}),
    "large planes, channels last": ((6, 2, 14_000, 14_000), 5, bf16, {"orders": (True, True)}),
}


def drawn(shape, dtype, channels_last):
    """Random numbers, without a copy of them in another dtype."""
    n, c, h, w = shape
    numbers = torch.empty((n, h, w, c) if channels_last else shape, dtype=dtype, device="cuda").normal_()
    return numbers.permute(0, 3, 1, 2) if channels_last else numbers


@pytest.mark.cuda
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("large_memory")
def test_more_than_2_to_the_31_elements(name):
    shape, taps, dtype, options = CASES[name]
    orders = options.get("orders", (False, False))
    few = Case((3, *shape[1:2], 8, 8), taps, dtype, "cuda", **options)
    whole = Case((3, *shape[1:2], 8, 8), taps, dtype, "cuda", **options)
    whole.weight, whole.bias = few.weight, few.bias
    whole.x = drawn(shape, dtype, orders[0])
    out = whole.forward()
    whole.grad = drawn(out.shape, dtype, orders[1])
    assert whole.x.numel() > 2**31
    images = [0, shape[0] // 2, shape[0] - 1]
    few.x = torch.stack([whole.x[i] for i in images])
    few.grad = torch.stack([whole.grad[i] for i in images])

    def check(name, got, want):
        error = (got.double() - want.double()).norm() / want.double().norm()
        assert error < 2 * TOLERANCE[dtype], f"{name}: {error:.1e}"

    check("y", torch.stack([out[i] for i in images]), few.forward())
    dx, _, _ = whole.backward()
    of_few, *sums = few.backward()
    check("dx", torch.stack([dx[i] for i in images]), of_few)
    # Of images whose gradient is zero there is nothing in the gradients of weight and bias: what is left can be told from the few.
    middle = images[1]
    whole.grad[1:middle].zero_()
    whole.grad[middle + 1 : -1].zero_()
    _, dw, db = whole.backward()
    check("dw", dw, sums[0])
    check("db", db, sums[1])
