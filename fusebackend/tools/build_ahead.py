"""``python -m fusebackend build``: builds the native library ahead of time."""

from __future__ import annotations

from pathlib import Path

from fusebackend.native import build, cache, manifest
from fusebackend.progress import progress_line


def build_ahead(architectures: str | None, output: Path | None, wheel: bool) -> int:
    """Builds the library, or a wheel with it, and prints where it is.

    Args:
        architectures: of GPUs, separated by commas; ``"none"`` for the CPU only; None for this machine's.
        output: a folder; by default the cache, for a wheel ``dist``.

    Raises:
        build.BuildError: a compiler is missing or failed.
    """
    listed = () if architectures == "none" else architectures and architectures.split(",")
    wanted = build.plan(listed)
    compiled_for = f"CPU{''.join(f', sm_{a}' for a in wanted.architectures)}"
    if wheel:
        from fusebackend.native.wheel import pack

        with progress_line("building kernels") as progress:
            made = pack(wanted, output or Path("dist"), progress)
        print(f"{made} ({made.stat().st_size / 1e6:.1f} MB): {compiled_for}")
        return 0
    (cache.directory("native") / f"{wanted.key}.failed").unlink(missing_ok=True)
    with progress_line("building kernels") as progress:
        folder = build.build(wanted, output, progress)
    print(f"{folder / manifest.LIBRARY}: {compiled_for}")
    return 0
