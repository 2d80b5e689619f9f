"""Tensors of any strides, for the families whose kernels move strided tensors (csrc/common/tile)."""

import math
import random

import torch

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
MOVABLE = FLOATS + INTEGERS + [torch.bool, torch.complex64, torch.complex128]


def values(shape, dtype=torch.float32, device="cpu"):
    """Random values: normal ones of floating types, of other types all that they hold (of 64-bit integers, 32 bits)."""
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, device=device, dtype=torch.complex64 if dtype.is_complex else torch.float32).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, device=device).to(dtype)
    info = torch.iinfo(dtype)
    return torch.randint(max(info.min, -(2**31)), min(info.max, 2**31 - 1), shape, device=device).to(dtype)


def strided(rng: random.Random, shape, dtype, device, *, expand=False):
    """A tensor of ``shape`` in a random memory order, of slices at random offsets and steps, and with expanded dims if asked."""
    rank = len(shape)
    base = [1 if expand and rng.random() < 0.25 else n for n in shape]
    memory = list(range(rank))
    if rng.random() < 0.8:
        rng.shuffle(memory)
    steps = [2 if rng.random() < 0.08 else 1 for _ in memory]
    pads = [rng.choice([1, 3, 8]) if rng.random() < 0.3 else 0 for _ in memory]
    full_shape = [base[d] * s + p for d, s, p in zip(memory, steps, pads)]
    if math.prod(full_shape) > 2_000_000:
        steps, pads = [1] * rank, [0] * rank
        full_shape = [base[d] for d in memory]
    full = values(full_shape, dtype, device)
    for i, (d, s, p) in enumerate(zip(memory, steps, pads)):
        offset = rng.randint(0, p)
        full = full.narrow(i, offset, base[d] * s)
        full = full[(slice(None),) * i + (slice(None, None, s),)]
    inverse = [memory.index(d) for d in range(rank)]
    return full.permute(inverse).expand(shape)


SIZES = [1, 2, 3, 4, 5, 7, 8, 12, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 130, 257, 513]


def random_shape(rng: random.Random, max_rank=6):
    rank = rng.randint(0, max_rank)
    limit = rng.choice([200, 5000, 100_000])
    shape = [rng.choice(SIZES) for _ in range(rank)]
    while math.prod(shape) > limit:
        shape[rng.randrange(rank)] = rng.choice([1, 2, 3, 4, 8])
    if shape and rng.random() < 0.02:
        shape[rng.randrange(rank)] = 0
    return shape


def assert_same_bits(result, expected):
    assert result.shape == expected.shape and result.stride() == expected.stride() and result.dtype == expected.dtype
    if result.numel():
        raw = [t.permute(sorted(range(t.dim()), key=lambda d: (-t.stride(d), d))).reshape(-1).view(torch.uint8) for t in (result, expected)]
        assert torch.equal(*raw)
