"""Packs this package and its native library, built here, into one wheel for machines without a compiler.

The library uses no Python and only torch's stable ABI, so the wheel is ``py3-none``. Its platform is read off the library:
the oldest manylinux whose glibc and libstdc++ have every symbol version that it asks for, as auditwheel finds it. torch's
own libraries are not packed, the torch that is installed beside it has them.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from fusebackend.native import build

# The newest versions that a platform's oldest distribution has (PEP 600; auditwheel's manylinux-policy.json): glibc's minor
# names the platform, and its libstdc++ and libgcc must have what we ask for too.
_PLATFORMS: tuple[dict[str, tuple[int, ...]], ...] = (
    {"GLIBC": (2, 17), "GLIBCXX": (3, 4, 19), "CXXABI": (1, 3, 7), "GCC": (4, 8, 0)},
    {"GLIBC": (2, 24), "GLIBCXX": (3, 4, 22), "CXXABI": (1, 3, 10), "GCC": (4, 8, 0)},
    {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)},
    {"GLIBC": (2, 31), "GLIBCXX": (3, 4, 28), "CXXABI": (1, 3, 12), "GCC": (7, 0, 0)},
    {"GLIBC": (2, 34), "GLIBCXX": (3, 4, 29), "CXXABI": (1, 3, 13), "GCC": (7, 0, 0)},
    {"GLIBC": (2, 35), "GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (12, 0, 0)},
    {"GLIBC": (2, 38), "GLIBCXX": (3, 4, 30), "CXXABI": (1, 3, 13), "GCC": (12, 0, 0)},
    {"GLIBC": (2, 39), "GLIBCXX": (3, 4, 33), "CXXABI": (1, 3, 15), "GCC": (14, 0, 0)},
)

# What a library of ours may need of a system: these, and torch.
_SYSTEM = re.compile(r"lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s)\.so\.\d+|ld-linux-.*|libtorch(_cpu)?\.so")

# setuptools would call a package without extension modules "any", and one with them "cp311": this is neither.
_SETUP = """
from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel

class Native(Distribution):
    def has_ext_modules(self):
        return True

class Tagged(bdist_wheel):
    def get_tag(self):
        return "py3", "none", {platform!r}

setup(distclass=Native, cmdclass={{"bdist_wheel": Tagged}})
"""


def pack(what: build.Plan, output: Path, progress: Callable[[str], None] | None = None) -> Path:
    """Builds ``what`` and a wheel with it inside; returns the wheel's path.

    Args:
        what: from :func:`fusebackend.native.build.plan`; its architectures are what the wheel runs on.
        output: the folder to write the wheel to.
        progress: called with one line per finished step.

    Raises:
        fusebackend.native.build.BuildError: this is not a clone of the repository, a compiler or pip failed, or the library needs
            something that no manylinux platform promises.
    """
    root = build.sources_root().parent
    if not (root / "pyproject.toml").is_file():
        raise build.BuildError(f"a wheel is made in a clone of the repository: no pyproject.toml in {root}")
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        for name in ("fusebackend", "patterns", "csrc"):
            shutil.copytree(root / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "lib"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(root / name, tree)
        folder = build.build(what, tree / "fusebackend" / "lib", progress)
        if build.content_hash(tree / "csrc") != build.content_hash():
            raise build.BuildError("csrc changed while it was compiled: try again")
        (tree / "setup.py").write_text(_SETUP.format(platform=manylinux(folder / build.LIBRARY)))
        made = Path(scratch) / "made"
        command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(made), str(tree)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise build.BuildError(f"packing the wheel failed ({' '.join(command)}):\n{done.stderr[-2000:]}")
        (wheel,) = made.glob("*.whl")
        output.mkdir(parents=True, exist_ok=True)
        return Path(shutil.move(wheel, output / wheel.name))


def manylinux(library: Path) -> str:
    """The platform tag of a wheel with ``library`` inside, e.g. ``manylinux_2_34_x86_64``.

    Raises:
        fusebackend.native.build.BuildError: there is no ``readelf``, the library needs libraries that not every Linux has, or
            newer symbols than any platform that is known here.
    """
    readelf = shutil.which("readelf")
    if readelf is None:
        raise build.BuildError("no readelf found: install binutils")
    listing = subprocess.run([readelf, "--version-info", "--dynamic", "--wide", str(library)], capture_output=True, text=True, check=True)
    foreign = [n for n in re.findall(r"\(NEEDED\).*\[(.*)\]", listing.stdout) if not _SYSTEM.fullmatch(n)]
    if foreign:
        raise build.BuildError(
            f"{library.name} needs {', '.join(foreign)}, which a machine may not have: a wheel with it would not run everywhere"
        )
    wanted: dict[str, tuple[int, ...]] = {}
    for name, version in re.findall(r"Name: (GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)", listing.stdout):
        wanted[name] = max(wanted.get(name, ()), tuple(map(int, version.split("."))))
    for promised in _PLATFORMS:
        if all(version <= promised[name] for name, version in wanted.items()):
            return f"manylinux_{'_'.join(map(str, promised['GLIBC']))}_{platform.machine()}"
    raise build.BuildError(
        f"{library.name} needs newer system libraries than any known platform has: {wanted}; build it on an older system"
    )
