"""A pattern, an equivalent of it, and inputs, which several tests use."""

import torch
from torch.nn import functional as F


def pair(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)


def silu_mul(x, y):
    return F.silu(x) * y


def other_silu_mul(x, y):
    return y * (x * torch.sigmoid(x))
