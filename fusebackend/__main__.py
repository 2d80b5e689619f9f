"""``python -m fusebackend``: env, build, patterns, explain, verify, bisect, gate, demo, bench."""

from __future__ import annotations

import argparse
import importlib
import platform
import sys
import warnings
from pathlib import Path

import torch

from fusebackend import __version__
from fusebackend.bench import cli as bench_cli
from fusebackend.native import build, cache, loader, manifest
from fusebackend.native.architectures import cpu_baseline
from fusebackend.native.toolchain import Toolchain, compiler_version
from fusebackend.options import OPTIONS
from fusebackend.rewriting.registry import all_patterns
from fusebackend.tools.object_reference import FACTORY_RETURNS, UsageError, call_factory, resolve


def main(arguments: list[str] | None = None) -> int:
    # torch warns when it is imported where NumPy is not installed; nothing here needs NumPy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    parser = argparse.ArgumentParser(prog="python -m fusebackend", description="A torch.compile backend of compiled kernels.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    commands.add_parser("env", help="versions, devices, compilers, cache, what is built, and what is missing").set_defaults(run=env)

    command = commands.add_parser("build", help="build the native library ahead of time; needs no GPU")
    command.add_argument("--arch", help="GPU architectures, e.g. 90a,80,75; default: this machine's GPUs; 'none': CPU only")
    command.add_argument("--output", type=Path, help="folder for the library (FUSEBACKEND_LIBRARY=folder uses it); default: the cache")
    command.add_argument("--wheel", action="store_true", help="pack package and library into a wheel (needs a clone); --output: its folder")
    command.set_defaults(run=build_ahead)

    commands.add_parser("patterns", help="the patterns that are looked for, and why").set_defaults(run=patterns)

    command = commands.add_parser("explain", help="what would be rewritten in a model, and why the rest would not")
    command.add_argument("factory", help=f"package.module:function, which returns {FACTORY_RETURNS}")
    command.add_argument("--html", type=Path, metavar="FILE.html", help="write the report as a page, with the graphs drawn")
    command.add_argument("--dynamic", action="store_true", help="compile with dynamic=True")
    command.set_defaults(run=explain)

    command = commands.add_parser("verify", help="compare patterns with what they replace")
    command.add_argument("names", nargs="*", metavar="pattern", help="default: all")
    command.add_argument("--import", dest="module", help="a module that registers patterns, imported first")
    command.set_defaults(run=verify)

    command = commands.add_parser("bisect", help="find the substitution after which a check of yours fails")
    command.add_argument("check", help="package.module:function, which returns False or raises if the result is wrong")
    command.set_defaults(run=bisect)

    command = commands.add_parser("fuzz", help="compare random programs with eager; needs the test extra")
    command.add_argument("--minutes", type=float, help="stop after so long (default: 1, unless --programs is given)")
    command.add_argument("--programs", type=int, help="stop after so many")
    command.add_argument("--seed", type=int, default=0, help="of the first 100 programs, the next 100 have the next (default 0)")
    command.add_argument("--device", default="cpu", help="cpu or cuda (default cpu)")
    command.add_argument("--codegen-every", type=int, default=0, metavar="N", help="every Nth through Inductor's code generation")
    command.add_argument("--output", type=Path, default=Path("fuzz-failures"), help="folder for failures, as files that run")
    command.set_defaults(run=fuzz)

    command = commands.add_parser("gate", help="what was timed to see whether substitutions pay")
    command.add_argument("what", choices=("list", "clear"), help="show the kept verdicts, or forget them: they are timed again")
    command.set_defaults(run=gate)

    command = commands.add_parser("demo", help="train a small language model eagerly, with Inductor and with fuse")
    command.add_argument("--steps", type=int, default=20, help="training steps (default 20)")
    command.set_defaults(run=demo)

    bench_cli.add_to(commands)

    chosen = parser.parse_args(arguments)
    try:
        return chosen.run(chosen)
    except (build.BuildError, cache.CacheError, UsageError, ValueError) as error:
        print(f"fusebackend: {error}", file=sys.stderr)
        return 1


def env(_: argparse.Namespace) -> int:
    tools = Toolchain.find()
    rows = [
        ("fusebackend", f"{__version__} in {Path(__file__).parent}"),
        ("python", platform.python_version()),
        ("torch", f"{torch.__version__} (CUDA {torch.version.cuda or 'none'})"),
        ("CPU", f"{platform.machine()}, {torch.get_num_threads()} threads, kernels for {cpu_baseline()}"),
    ]
    for i in range(torch.cuda.device_count()):
        rows.append((f"GPU {i}", f"{torch.cuda.get_device_name(i)}, compute capability {torch.cuda.get_device_capability(i)}"))
    if not torch.cuda.is_available():
        rows.append(("GPU", "none that torch sees: CUDA kernels are neither built nor used"))
    rows.append(("C++ compiler", f"{tools.cxx}: {compiler_version(tools.cxx)}" if tools.cxx else "none: apt-get install g++, or set CXX"))
    missing = "none: install the CUDA toolkit, or set CUDA_HOME (needed for CUDA kernels only)"
    rows.append(("nvcc", f"{tools.nvcc}: {compiler_version(tools.nvcc)}" if tools.nvcc else missing))
    try:
        rows.append(("cache", str(cache.directory())))
    except cache.CacheError as error:
        rows.append(("cache", str(error)))
    library = loader.load()
    if library.path:
        rows.append(("library", f"{library.path}, for CPU{''.join(f', sm_{a}' for a in library.architectures)}"))
    if library.reason:
        rows.append(("missing", library.reason))
    rows.append(("patterns", ", ".join(p.name for p in all_patterns())))
    rows += [(name, f"{does}; accepts {accepts}") for name, (accepts, does) in OPTIONS.items()]
    for name, text in rows:
        print(f"{name:14} {text}")
    return 0 if library.path else 1


def build_ahead(chosen: argparse.Namespace) -> int:
    architectures = {None: None, "none": ()}.get(chosen.arch, (chosen.arch or "").split(","))
    wanted = build.plan(architectures)
    if chosen.wheel:
        from fusebackend.native.wheel import pack

        with loader.progress_line("building kernels") as progress:
            made = pack(wanted, chosen.output or Path("dist"), progress)
        print(f"{made} ({made.stat().st_size / 1e6:.1f} MB): CPU{''.join(f', sm_{a}' for a in wanted.architectures)}")
        return 0
    (cache.directory("native") / f"{wanted.key}.failed").unlink(missing_ok=True)
    with loader.progress_line("building kernels") as progress:
        folder = build.build(wanted, chosen.output, progress)
    print(f"{folder / manifest.LIBRARY}: CPU{''.join(f', sm_{a}' for a in wanted.architectures)}")
    return 0


def patterns(_: argparse.Namespace) -> int:
    for pattern in all_patterns():
        anchors = ", ".join(map(str, pattern.anchors))
        summary = (sys.modules[type(pattern).__module__].__doc__ or "").strip().split("\n")[0]
        print(f"{pattern.name} ({pattern.level}, at {anchors})\n    {summary}")
    return 0


def explain(chosen: argparse.Namespace) -> int:
    from fusebackend.tools.explain import explain

    if chosen.html and chosen.html.suffix != ".html":  # before the work, not after it
        raise UsageError(f"--html writes a page: FILE.html is accepted, got {str(chosen.html)!r}")
    fn, args, kwargs = call_factory(chosen.factory, "explain")
    report = explain(torch.compile(fn, backend="fuse", dynamic=True) if chosen.dynamic else fn, *args, **kwargs)
    print(report)
    if chosen.html:
        print(f"written: {report.save(chosen.html)}")
    return 0


def verify(chosen: argparse.Namespace) -> int:
    from fusebackend.declarative.verify import verify

    if chosen.module:
        sys.path.insert(0, str(Path.cwd()))
        importlib.import_module(chosen.module)
    results = [verify(name) for name in chosen.names or [p.name for p in all_patterns()]]
    print("\n".join(map(str, results)))
    return 0 if all(r.ok for r in results) else 1


def bisect(chosen: argparse.Namespace) -> int:
    from fusebackend.tools.bisect import bisect

    found = bisect(resolve(chosen.check, "bisect"), print)
    print(found)
    return 0 if found.passes_without and found.culprit is None else 1


def fuzz(chosen: argparse.Namespace) -> int:
    try:
        from fusebackend.fuzz import run
    except ModuleNotFoundError as error:
        if error.name != "hypothesis":
            raise
        raise UsageError("fuzz needs hypothesis: pip install 'fusebackend[test]'") from error

    minutes = 1.0 if chosen.minutes is None and chosen.programs is None else chosen.minutes
    result = run.fuzz(
        count=chosen.programs,
        minutes=minutes,
        start=chosen.seed,
        device=chosen.device,
        codegen_every=chosen.codegen_every,
        save_to=chosen.output,
        say=lambda line: print(line, flush=True),
    )
    print(f"torch {torch.__version__}, {chosen.device}, seed {chosen.seed}: {result}")
    return 1 if result.wrong else 0


def gate(chosen: argparse.Namespace) -> int:
    from fusebackend.profitability import verdict_store as verdicts

    if chosen.what == "clear":
        print(f"{verdicts.clear()} verdicts forgotten")
        return 0
    kept = list(verdicts.stored())
    for _, verdict in kept:
        print(f"{verdict} ({verdict.how}): {verdict.subject} on {verdict.machine}")
    print(f"{len(kept)} verdicts in {cache.directory('gate')}")
    return 0


def demo(chosen: argparse.Namespace) -> int:
    from fusebackend.tools.demo import run

    return run(chosen.steps)


if __name__ == "__main__":
    sys.exit(main())
