"""What compute-sanitizer watches of this family: nothing. It has no kernels of its own."""

from __future__ import annotations


def launch_every_kernel() -> None:
    """There is none."""
