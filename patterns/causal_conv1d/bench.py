"""What ``python -m fusebackend bench kernels`` times of this family: the cases of its page, and random shapes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from fusebackend.bench.case import Case
from fusebackend.bench.random_shapes import FLOATS, size


def cases() -> list[Case]:
    """Each convolution forward and backward, those of few taps with bias and SiLU. The floor is a copy of x."""
    fp32, bf16 = torch.float32, torch.bfloat16
    if not torch.cuda.is_available():
        return [
            *_both_directions("long fp32 B4 C64 T256", (4, 64, 256), 256, fp32, False, {}, {}),
            *_both_directions("short bf16 B2 C256 T512", (2, 256, 512), 4, bf16, False, {}, {}),
            *_normed("Conformer fp32 B4 C64 T256 K31", (4, 64, 256), 31, fp32),
            *_by_fft("FFT-written fp32 B4 C64 T256", (4, 64, 256), fp32),
        ]
    wide = (8, 4096, 2048)
    return [
        *_both_directions("long fp32 B32 C768 T768", (32, 768, 768), 768, fp32, False, {"ms": 0.16}, {"ms": 0.40}),
        *_both_directions("long fp32 B8 C768 T2048", (8, 768, 2048), 2048, fp32, False, {"ms": 0.30}, {}),
        *_both_directions("long fp32 B4 C768 T8192", (4, 768, 8192), 8192, fp32, False, {"ms": 0.60}, {}),
        *_both_directions("short bf16 B8 C4096 T2048", wide, 4, bf16, False, {"floor": 1.2}, {"floor": 2.2}),
        *_both_directions("short bf16 B8 C4096 T2048 as (B, T, C)", wide, 4, bf16, True, {"floor": 1.3}, {"floor": 2.2}),
        *_both_directions("short fp32 B8 C4096 T2048", wide, 4, fp32, False, {"floor": 1.2}, {"floor": 2.2}),
        *_normed("Conformer bf16 B32 C512 T1000 K31", (32, 512, 1000), 31, bf16),
        *_normed("Conformer bf16 B32 C512 T1000 K31 as (B, T, C)", (32, 512, 1000), 31, bf16, True),
        *_by_fft("FFT-written fp32 B8 C768 T2048", (8, 768, 2048), fp32),
        *_by_fft("FFT-written bf16 B8 C768 T2048", (8, 768, 2048), bf16),
        *_by_fft("FFT-written fp32 B32 C768 T768", (32, 768, 768), fp32),
        *_by_fft("FFT-written fp32 B4 C768 T8192", (4, 768, 8192), fp32),
    ]


def _both_directions(
    name: str, shape: tuple[int, ...], taps: int, dtype: torch.dtype, btc: bool, forward_goals: dict, backward_goals: dict
) -> Iterator[Case]:
    batch, channels, length = shape
    short = taps <= 4

    def inputs(device: torch.device) -> tuple:
        def rows():
            return torch.randn(batch, length, channels, device=device).transpose(1, 2) if btc else torch.randn(shape, device=device)

        weight, bias = torch.randn(channels, 1, taps, device=device) / taps**0.5, torch.randn(channels, device=device)
        return rows().to(dtype).requires_grad_(), *(torch.nn.Parameter(t.to(dtype)) for t in (weight, bias))

    def convolve(x, weight, bias):
        y = F.conv1d(F.pad(x, (weight.shape[2] - 1, 0)), weight, bias if short else None, groups=weight.shape[0])
        return F.silu(y) if short else y

    def fft(x, weight, bias):
        def call():
            k = torch.fft.rfft(weight.flip(-1).squeeze(1), 2 * length)
            return torch.fft.irfft(torch.fft.rfft(x, 2 * length) * k, 2 * length)[..., :length]

        return call

    def copy(x, weight, bias):
        return x.detach().clone()

    peers: dict[str, Callable] = {} if short else {"torch FFT": fft}
    yield Case(f"{name}, forward", convolve, inputs, copy, goals=forward_goals, peers=peers)
    yield Case(f"{name}, backward", convolve, inputs, copy, goals=backward_goals, backward=(0, 1, 2) if short else (0, 1))


def _normed(name: str, shape: tuple[int, ...], taps: int, dtype: torch.dtype, btc: bool = False) -> Iterator[Case]:
    """The middle of a Conformer's convolution module in inference: batch norm and SiLU follow."""
    batch, channels, length = shape

    def inputs(device: torch.device) -> tuple:
        x = torch.randn(batch, length, channels, device=device).transpose(1, 2) if btc else torch.randn(shape, device=device)
        weight = torch.randn(channels, 1, taps, device=device) / taps**0.5
        vectors = (torch.randn(channels, device=device), torch.rand(channels, device=device) + 0.5)
        return tuple(t.to(dtype) for t in (x, weight, *vectors))

    def convolve(x, weight, vector, variance):
        y = F.conv1d(x, weight, None, padding=taps // 2, groups=channels)
        return F.silu(F.batch_norm(y, vector, variance, vector, vector))

    def copy(x, weight, vector, variance):
        return x.clone()

    yield Case(f"{name}, batch norm and SiLU", convolve, inputs, copy, goals={"inductor": 1.0})


def _by_fft(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[Case]:
    """A long convolution as Hyena writes it, with the skip connection. The FFT is always in fp32."""
    _, channels, length = shape

    def inputs(device: torch.device) -> tuple:
        taps = torch.randn(channels, length, device=device) / length**0.5
        return (
            torch.randn(shape, device=device).to(dtype).requires_grad_(),
            taps.requires_grad_(),
            torch.nn.Parameter(torch.randn(channels, device=device)),
        )

    def convolve(u, k, skip):
        n = 2 * u.shape[-1]
        k_f = torch.fft.rfft(k, n=n) / n
        u_f = torch.fft.rfft(u.to(k.dtype), n=n)
        y = torch.fft.irfft(u_f * k_f, n=n, norm="forward")[..., : u.shape[-1]]
        return (y + u * skip.unsqueeze(-1)).to(u.dtype)

    def copy(u, k, skip):
        return u.detach().clone()

    yield Case(f"{name}, forward", convolve, inputs, copy, goals={"inductor": 1.0})
    yield Case(f"{name}, backward", convolve, inputs, copy, goals={"inductor": 1.0}, backward=(0, 1, 2))


def random_cases(draw: random.Random, scale: float) -> Iterator[Case]:
    """Endless: one direction each, of 2 taps up to as many as samples; every fourth written by FFT."""
    by_fft = _random_by_fft(draw, scale)
    while True:
        if draw.random() < 0.25:
            yield next(by_fft)
            continue
        kind, batch, channels, length = draw.choice(list(FLOATS)), size(draw, 1, 64), size(draw, 4, 8192), size(draw, 16, 8192)
        taps = min(draw.choice([2, 3, 4, 4, 4, 5, 7, 9, 16, 31, 64, 128, length]), length)
        elements = batch * channels * length / scale
        if not 2**16 <= elements <= 2**26 or elements * taps > 2**34:
            continue
        btc, silu, backward = draw.random() < 0.3, draw.random() < 0.5, draw.random() < 0.5
        normed = not backward and draw.random() < 0.3

        def inputs(device, dtype=FLOATS[kind], batch=batch, channels=channels, length=length, taps=taps, btc=btc):
            shape = (batch, length, channels) if btc else (batch, channels, length)
            x = torch.randn(shape, device=device).to(dtype)
            weight = torch.nn.Parameter((torch.randn(channels, 1, taps, device=device) / taps**0.5).to(dtype))
            return x.transpose(1, 2) if btc else x, weight, torch.nn.Parameter(torch.randn(channels, device=device).to(dtype))

        def fn(x, weight, bias, silu=silu, normed=normed):
            y = F.conv1d(F.pad(x, (weight.shape[2] - 1, 0)), weight, bias, groups=weight.shape[0])
            y = F.batch_norm(y, bias.detach(), bias.detach().square() + 0.5, bias, bias) if normed else y
            return F.silu(y) if silu else y

        what = f"{kind} B{batch} C{channels} T{length} K{taps}{' (B, T, C)' if btc else ''}"
        what += f"{' batch norm' if normed else ''}{' silu' if silu else ''}"
        yield Case(f"{what}, {'backward' if backward else 'forward'}", fn, inputs, backward=(0, 1, 2) if backward else ())


def _random_by_fft(draw: random.Random, scale: float) -> Iterator[Case]:
    while True:
        batch, channels, length = size(draw, 1, 64), size(draw, 4, 4096), size(draw, 32, 8192)
        taps = min(draw.choice([4, 16, 40, 128, 512, length, length, length, length]), length)
        elements = batch * channels * length / scale
        if not 2**16 <= elements <= 2**25 or elements * taps > 2**35:
            continue
        backward = draw.random() < 0.5
        more = draw.choice([length, length, length, taps - 1, 0 if taps == length else taps])  # zeros behind the rows
        if more < taps - 1:
            continue

        def inputs(device, batch=batch, channels=channels, length=length, taps=taps):
            u = torch.randn(batch, channels, length, device=device)
            return u, torch.nn.Parameter(torch.randn(channels, taps, device=device) / taps**0.5)

        def fn(u, k, more=more):
            n = u.shape[-1] + more
            return 2 * torch.fft.irfft(torch.fft.rfft(u, n=n) * torch.fft.rfft(k, n=n), n=n)[..., : u.shape[-1]]

        what = f"FFT of {length + more} fp32 B{batch} C{channels} T{length} K{taps}"
        yield Case(f"{what}, {'backward' if backward else 'forward'}", fn, inputs, backward=(0, 1) if backward else ())
