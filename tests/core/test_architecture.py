"""How the package's files depend on one another: downwards along the floors, without circles, and nothing heavy before it is used.

Imports are read from the source, those within functions too; those for type checkers alone do not count.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import fusebackend
import fusebackend.patterns

#: From bottom to top. A file may import what stands on a lower floor or in its own entry; those of one floor do not import one another.
FLOORS = [
    [""],  # the package itself, which imports nothing when it is imported
    ["log", "progress", "garbage", "cotangent"],
    ["fx_utils", "identity"],
    ["cache_keys"],
    ["native"],
    ["rewriting"],
    ["declarative", "report", "profitability"],
    ["options"],
    ["session"],
    ["backend", "passes"],
    ["testing"],
    ["tools", "bench", "fuzz"],
    ["__main__"],
]
#: Rooms of one floor that import one another, file by file.
NEIGHBOURS = {"tools", "bench", "fuzz"}
#: What the files of a family may import besides those of their own package.
FAMILY = {"log", "fx_utils", "native", "rewriting", "patterns"}
FAMILY_TOOLS = FAMILY | {"bench", "fuzz", "tools", "testing"}
TOOLS = {"bench", "fuzz", "sanitizer"}

ROOT = Path(fusebackend.__file__).parent
PATTERNS = Path(next(iter(fusebackend.patterns.__path__)))


def module_name(path: Path, root: Path, package: str) -> str:
    return ".".join((package, *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")


FILES = {module_name(p, ROOT, "fusebackend"): p for p in sorted(ROOT.rglob("*.py")) if "__pycache__" not in p.parts}
FILES |= {module_name(p, PATTERNS, "fusebackend.patterns"): p for p in sorted(PATTERNS.rglob("*.py"))}


def imported(tree: ast.AST, module: str) -> set[str]:
    """The modules of ours that a file imports, absolutely or relatively."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            found |= {m for other in node.orelse for m in imported(other, module)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]
                base = ".".join((*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])))
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in FILES else base for name in names}
        else:
            found |= imported(node, module)
    return {m for m in found if m in FILES}


IMPORTS = {module: imported(ast.parse(path.read_text()), module) - {module} for module, path in FILES.items()}


def room(module: str) -> str:
    return module.removeprefix("fusebackend").removeprefix(".").split(".")[0]


FLOOR_OF = {name: i for i, names in enumerate(FLOORS) for name in names}


def test_every_file_has_a_floor():
    assert {room(m) for m in FILES} - {"patterns"} == set(FLOOR_OF)


@pytest.mark.parametrize("module", [m for m in FILES if room(m) != "patterns"])
def test_imports_run_downwards(module):
    mine = room(module)
    for other in map(room, IMPORTS[module]):
        assert other != "patterns", f"{module} imports a family: families are found through the registry"
        allowed = FLOOR_OF[other] < FLOOR_OF[mine] or other == mine or {mine, other} <= NEIGHBOURS
        assert allowed, f"{module} imports {other}, which stands on the same floor or a higher one"


@pytest.mark.parametrize("module", [m for m in FILES if room(m) == "patterns"])
def test_a_family_imports_what_it_may(module):
    last = module.rpartition(".")[2]
    allowed = FAMILY_TOOLS if last in TOOLS else FAMILY
    assert {room(m) for m in IMPORTS[module]} <= allowed
    relative = [n for n in ast.walk(ast.parse(FILES[module].read_text())) if isinstance(n, ast.ImportFrom) and n.level]
    assert not relative, f"{module} imports relatively"


def test_no_file_imports_itself_through_others():
    def circle(path: tuple[str, ...]) -> tuple[str, ...] | None:
        if path[-1] in path[:-1]:
            return path[path.index(path[-1]) :]
        if path[-1] in finished:
            return None
        found = next(filter(None, (circle((*path, m)) for m in sorted(IMPORTS[path[-1]]))), None)
        finished.add(path[-1])
        return found

    finished: set[str] = set()
    for module in FILES:
        assert not (found := circle((module,))), " -> ".join(found)


def loaded_after(*arguments: str) -> set[str]:
    """The modules that a Python process has imported once it has run ``arguments``."""
    program = (
        "import sys, runpy, json\n"
        "sys.argv = sys.argv[1:]\n"
        "try:\n"
        "    runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True) if len(sys.argv) > 1 else __import__(sys.argv[0])\n"
        "except SystemExit as end:\n"
        "    assert not end.code\n"
        "print(' '.join(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("arguments", ["fusebackend", "fusebackend --help", "fusebackend --version", "fusebackend explain --help"])
def test_what_is_heavy_is_not_imported_before_it_is_used(arguments):
    loaded = loaded_after(*arguments.split())
    assert "fusebackend" in loaded
    assert not loaded & {"torch", "numpy", "sympy", "fusebackend.backend", "fusebackend.bench", "fusebackend.rewriting"}


def test_every_public_name_is_found():
    for name in fusebackend.__all__:
        assert getattr(fusebackend, name) is not None
    assert set(fusebackend.__all__) <= set(dir(fusebackend))
    assert fusebackend.testing.assert_pattern
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        fusebackend.nothing  # noqa: B018


@pytest.mark.parametrize(("old", "name"), [("check", "numeric_errors"), ("graph", "fused_neighbour")])
def test_former_module_names_are_deprecated(old, name):
    with pytest.warns(DeprecationWarning, match=f"fusebackend.{old} is deprecated"):
        assert getattr(getattr(fusebackend, old), name)
