"""The error that products with sums in fp32 may have."""

import torch


def assert_rounded_once(got, exact, magnitude, terms):
    """Each element has the error of one rounding, and of a sum in fp32 of its terms.

    Args:
        exact: in fp64.
        magnitude: the sums of the terms' absolute values, in fp64.
        terms: how many there are.
    """
    kind = torch.finfo(got.dtype)
    bound = kind.eps / 2 * exact.abs() + terms * torch.finfo(torch.float32).eps / 2 * magnitude + kind.tiny
    assert bool(((got.double() - exact).abs() <= bound * 1.001).all())
