"""The arguments of ``python -m fusebackend``. What a command does stands in its own module, which is imported when it runs."""

from __future__ import annotations

import argparse
import sys
import warnings
from pathlib import Path

from fusebackend import __version__
from fusebackend.tools.command_line import Parser, exit_status, positive, whole
from fusebackend.tools.object_reference import FACTORY_RETURNS


def main(arguments: list[str] | None = None) -> int:
    """Runs a command line; by default that of this process. Returns its exit status: see :mod:`fusebackend.tools.command_line`."""
    # torch warns when it is imported where NumPy is not installed; nothing here needs NumPy.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)
    arguments = sys.argv[1:] if arguments is None else arguments

    def run() -> int:
        chosen = _parser(with_bench=arguments[:1] == ["bench"]).parse_args(arguments)
        return chosen.run(chosen)

    return exit_status(run)


def _parser(with_bench: bool) -> argparse.ArgumentParser:
    """The parser of all commands; that of ``bench`` is given its arguments only where they are asked for."""
    parser = Parser(prog="python -m fusebackend", description="A torch.compile backend of compiled kernels.")
    parser.add_argument("--version", action="version", version=f"fusebackend {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")

    commands.add_parser("env", help="versions, devices, compilers, cache, what is built, and what is missing").set_defaults(run=_env)

    command = commands.add_parser("build", help="build the native library ahead of time; needs no GPU")
    command.add_argument("--arch", help="GPU architectures, e.g. 90a,80,75; default: this machine's GPUs; 'none': CPU only")
    command.add_argument("--output", type=Path, help="folder for the library (FUSEBACKEND_LIBRARY=folder uses it); default: the cache")
    command.add_argument("--wheel", action="store_true", help="pack package and library into a wheel (needs a clone); --output: its folder")
    command.set_defaults(run=_build)

    commands.add_parser("patterns", help="the patterns that are looked for, and why").set_defaults(run=_patterns)

    command = commands.add_parser("explain", help="what would be rewritten in a model, and why the rest would not")
    command.add_argument("factory", help=f"package.module:function, which returns {FACTORY_RETURNS}")
    command.add_argument("--html", type=Path, metavar="FILE.html", help="write the report as a page, with the graphs drawn")
    command.add_argument("--json", type=Path, metavar="FILE.json", help="write the report as JSON")
    command.add_argument("--compare", type=Path, metavar="OLD.json", help="say what changed since a report that --json wrote")
    command.add_argument("--dynamic", action="store_true", help="compile with dynamic=True")
    command.add_argument("--pattern", metavar="NAME", help="say where this pattern came nearest, and what differed")
    command.add_argument("--at", metavar="FILE.py:LINE", help="say which patterns look at the operators of this line")
    command.set_defaults(run=_explain)

    command = commands.add_parser("verify", help="compare patterns with what they replace")
    command.add_argument("names", nargs="*", metavar="pattern", help="default: all")
    command.add_argument("--import", dest="module", help="a module that registers patterns, imported first")
    command.set_defaults(run=_verify)

    command = commands.add_parser("bisect", help="find the substitution after which a check of yours fails")
    command.add_argument("check", help="package.module:function, which returns False or raises if the result is wrong")
    command.set_defaults(run=_bisect)

    command = commands.add_parser("fuzz", help="compare random programs with eager; needs the test extra")
    command.add_argument("--minutes", type=positive, help="stop after so long (default: 1, unless --programs is given)")
    command.add_argument("--programs", type=whole(1), help="stop after so many")
    command.add_argument("--seed", type=whole(0), default=0, help="of the first 100 programs, the next 100 have the next (default 0)")
    device = "default: cpu; imagined: a CPU, with what is rewritten on a GPU, computed by references"
    command.add_argument("--device", choices=("cpu", "cuda", "imagined"), default="cpu", help=device)
    command.add_argument("--codegen-every", type=whole(0), default=0, metavar="N", help="every Nth through Inductor's code generation")
    command.add_argument("--output", type=Path, default=Path("fuzz-failures"), help="folder for failures, as files that run")
    command.set_defaults(run=_fuzz)

    command = commands.add_parser("calibrate", help="time random sites here, so that estimates fit this machine; needs the calibrate extra")
    command.add_argument("--family", action="append", default=[], metavar="NAME", help="of one family, or several; default: all")
    command.add_argument("--minutes", type=positive, default=5.0, help="how long to compile and time (default 5); then it fits")
    command.add_argument("--seed", type=whole(0), default=0, help="of the sites that are drawn (default 0)")
    command.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if torch sees a GPU")
    command.add_argument("--output", type=Path, metavar="FILE.json", help="default: in the cache folder, where it is found")
    command.add_argument("--check", action="store_true", help="write nothing; judge the calibration that is in use by fresh sites")
    command.add_argument("--sites", type=Path, metavar="FILE", help="only time, and write what was timed")
    command.add_argument(
        "--from", dest="timed", type=Path, action="append", metavar="FILE", help="take what --sites wrote instead of timing"
    )
    command.set_defaults(run=_calibrate)

    command = commands.add_parser("gate", help="what was timed to see whether substitutions pay")
    command.add_argument("what", choices=("list", "clear"), help="show the kept verdicts, or forget them: they are timed again")
    command.set_defaults(run=_gate)

    command = commands.add_parser("demo", help="train a small language model eagerly, with Inductor and with fuse")
    command.add_argument("--steps", type=whole(1), default=20, help="training steps (default 20)")
    command.set_defaults(run=_demo)

    if with_bench:
        from fusebackend.bench import cli

        cli.add_to(commands)
    else:
        commands.add_parser("bench", help="measure the peers and ours in one run")
    return parser


def _env(_: argparse.Namespace) -> int:
    from fusebackend.tools.environment import print_environment

    return print_environment()


def _build(chosen: argparse.Namespace) -> int:
    from fusebackend.tools.build_ahead import build_ahead

    return build_ahead(chosen.arch, chosen.output, chosen.wheel)


def _patterns(_: argparse.Namespace) -> int:
    from fusebackend.tools.list_patterns import print_patterns

    return print_patterns()


def _explain(chosen: argparse.Namespace) -> int:
    from fusebackend.tools.explain import print_explanation

    return print_explanation(chosen.factory, chosen.html, chosen.dynamic, chosen.json, chosen.compare, pattern=chosen.pattern, at=chosen.at)


def _verify(chosen: argparse.Namespace) -> int:
    from fusebackend.tools.verify import print_verifications

    return print_verifications(chosen.names, chosen.module)


def _bisect(chosen: argparse.Namespace) -> int:
    from fusebackend.tools.bisect import print_bisection

    return print_bisection(chosen.check)


def _fuzz(chosen: argparse.Namespace) -> int:
    from fusebackend.tools.fuzz import fuzz

    return fuzz(
        count=chosen.programs,
        minutes=chosen.minutes,
        start=chosen.seed,
        device=chosen.device,
        codegen_every=chosen.codegen_every,
        save_to=chosen.output,
    )


def _calibrate(chosen: argparse.Namespace) -> int:
    from fusebackend.bench.calibrate import calibrate
    from fusebackend.bench.environment import default_device

    device = chosen.device or default_device().type
    return calibrate(chosen.family, chosen.minutes, chosen.seed, device, chosen.output, chosen.check, chosen.sites, chosen.timed)


def _gate(chosen: argparse.Namespace) -> int:
    from fusebackend.tools.kept_verdicts import clear_verdicts, print_verdicts

    return print_verdicts() if chosen.what == "list" else clear_verdicts()


def _demo(chosen: argparse.Namespace) -> int:
    from fusebackend.tools.demo import run

    return run(chosen.steps)


if __name__ == "__main__":
    sys.exit(main())
