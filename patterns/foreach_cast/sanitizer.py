"""What compute-sanitizer watches of this family: its kernel, of each pair of dtypes; whole chunks, parts, misaligned, launched twice."""

from __future__ import annotations

import torch

from fusebackend.patterns.foreach_cast.ops import CASTS, foreach_cast, reference


def launch_every_kernel() -> None:
    for before, after in sorted(CASTS, key=str):
        whole = torch.randn(9000, device="cuda").to(before)
        tensors = [whole, whole[:8192], whole[1:8], whole[3:8000], whole[:1], whole[:8190].view(90, 91).t(), whole[:0]]
        tensors += [whole[:i] for i in range(1, 140)]
        for found, wanted in zip(foreach_cast(tensors, after), reference(tensors, after)):
            if found.stride() != wanted.stride() or not torch.equal(found, wanted):
                raise AssertionError(f"foreach_cast: {before} to {after} of {tuple(wanted.shape)} is wrong")
