"""``python -m fusebackend build``: builds the native library ahead of time."""

from __future__ import annotations

from pathlib import Path

from fusebackend.log import log
from fusebackend.native import build, cache, manifest, trust
from fusebackend.native.architectures import is_architecture
from fusebackend.progress import progress_line
from fusebackend.tools.command_line import check_folder_to_write
from fusebackend.tools.object_reference import UsageError


def build_ahead(architectures: str | None, output: Path | None, wheel: bool) -> int:
    """Builds the library, or a wheel with it, and prints where it is.

    Args:
        architectures: of GPUs, separated by commas; ``"none"`` for the CPU only; None for this machine's.
        output: a folder; by default the cache, for a wheel ``dist``.

    Raises:
        UsageError: no such architecture, or ``output`` can't be written.
        build.BuildError: a compiler is missing or failed.
    """
    listed = None if architectures is None else _listed(architectures)
    if wheel and output is None:
        output = Path("dist")
    if output is not None:
        check_folder_to_write(output, "--output")
    wanted = build.plan(listed)
    compiled_for = f"CPU{''.join(f', sm_{a}' for a in wanted.architectures)}"
    if wheel and output:
        from fusebackend.native.wheel import pack

        with progress_line("building kernels", in_logs=True) as progress:
            made = pack(wanted, output, progress)
        print(f"{made} ({made.stat().st_size / 1e6:.1f} MB): {compiled_for}")
        return 0
    (cache.directory("native") / f"{wanted.key}.failed").unlink(missing_ok=True)
    with progress_line("building kernels", in_logs=True) as progress:
        folder = build.build(wanted, output, progress)
    print(f"{folder / manifest.LIBRARY}: {compiled_for}")
    try:
        trust.check_folder(folder)
    except trust.UntrustedError as error:
        log.warning("a library is not loaded from this folder as it is: %s", error)
    return 0


def _listed(architectures: str) -> tuple[str, ...]:
    """The architectures in ``--arch``."""
    listed = () if architectures == "none" else tuple(dict.fromkeys(part.strip() for part in architectures.split(",")))
    wrong = next((a for a in listed if not is_architecture(a)), None)
    if wrong is not None:
        raise UsageError(f"--arch takes 'none', or compute capabilities without the dot, e.g. 90a,80,75; got {wrong!r}")
    return listed
