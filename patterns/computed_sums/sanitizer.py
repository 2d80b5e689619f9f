"""What compute-sanitizer watches of this family: its kernels, at small shapes."""

from __future__ import annotations

import torch

from fusebackend.patterns.computed_sums.ops import computed_rows, computed_sums, letters, reference, rows_reference
from fusebackend.tools.sanitizer import close, random, tolerance

_SILU = "t0=sub(i1,i2);t1=mul(t0,i3);t2=sigmoid(t1);t3=mul(i0,t2);out(t3);t4=mul(t3,t0);out(t4)"
_MASKED = "t0=where(i1,i0,0.0);t1=mul(t0,i2);t2=mul(t1,i3);t3=add(t2,i4);out(t3)"


def launch_every_kernel() -> None:
    """Vectors of each length, rows with gaps, blocks side by side, inputs of each kind, images one by one; with one kernel and with two."""

    def check(program: str, *inputs: torch.Tensor, dtypes: tuple[torch.dtype, ...]) -> None:
        wide = [t.cpu() if t.dtype is torch.bool else t.cpu().double() for t in inputs]
        exact_types = [torch.float64 for _ in dtypes]
        exact, exact_rows = (of(wide, program, exact_types) for of in (reference, rows_reference))
        for found, wanted, dtype in zip(computed_sums(inputs, program, letters(dtypes)), exact, dtypes):
            close(found, wanted, 4 * tolerance(dtype))
        for found, wanted, dtype in zip(computed_rows(inputs, program, letters(dtypes)), exact_rows, dtypes):
            close(found, wanted, 4 * tolerance(dtype))

    def check_images(program: str, *inputs: torch.Tensor) -> None:
        wide = [t.cpu() if t.dtype is torch.bool else t.cpu().double() for t in inputs]
        for means in (False, True):
            (exact,) = reference(wide, program, [torch.float64], 1, means)
            close(computed_sums(inputs, program, "f", 1, means)[0], exact, 4 * tolerance(torch.float32))

    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        f32, both = torch.float32, (torch.float32, dtype)
        for rows in (9, 3001):
            x, y = ((random((rows, 72), dtype) + 1).cuda() for _ in range(2))
            for columns in (slice(0, 64), slice(4, 68), slice(2, 66), slice(1, 68)):
                mean, scale = random((1, 72), f32).cuda()[:, columns], random((1, 72), f32).cuda()[:, columns]
                check(_SILU, x[:, columns], y[:, columns], mean, scale, dtypes=both)
        wide = [(random((300, 1032), dtype) + 1).cuda() for _ in range(2)]
        check(_SILU, *wide, random((1, 1032), f32).cuda(), random((1, 1032), f32).cuda(), dtypes=both)
        image, gates = (random((5, 200, 24), dtype) + 1).cuda(), (random((5, 1, 24), dtype) + 2).cuda()
        mask = (random((5, 200, 24), f32) > 0).cuda()
        masked = image, mask, gates, random((1, 200, 1), f32).cuda() + 2, random((1, 1, 1), dtype).cuda()
        check(_MASKED, *masked, dtypes=(f32,))
        check_images(_MASKED, *masked)
        check_images(_MASKED, *(t[..., :7] for t in masked))
        few = [(random((2, 4000, 24), dtype) + 1).cuda() for _ in range(2)]  # which blocks share
        check_images("t0=mul(i0,i1);out(t0)", *few)
