"""The line of dependencies: who may import whom, read from the files, imports inside functions included.

A room is a module or a sub-package directly under `fairmt`. A new room needs its place in `CORE` or `OUTER`.
"""

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parent.parent / "src"

# A room may import those of its own line and of the lines before it, as long as no circle comes of it.
CORE = [
    ["errors"],
    ["state", "ranks", "watch"],
    ["tasks"],
    ["groups"],
    ["layout"],
    ["labels"],
    ["batch"],
    ["moments"],
    ["blocks"],
    ["disparity"],
    ["simplex"],
    ["aggregation"],
    ["constraint"],
    ["geometry"],
    ["weighting"],
    ["multiplier"],
    ["surrogate"],
    ["methods"],
    ["functional"],
]
OUTER = [
    ["metrics"],
    ["config*", "data", "models", "training"],
    ["report", "benchmark"],
    ["cli*", "sklearn*", "__main__"],
]
LAYERS = CORE + OUTER

# Outside the core, and yet in need of torch alone.
ALSO_TORCH_ALONE = ("fairmt.data", "fairmt.data.planted")

# Torch, and what it brings along. NumPy is not among it: torch works without.
TORCH = ["torch", "torchgen", "functorch", "triton", "nvidia", "cuda"]
ITS_OWN = ["filelock", "fsspec", "jinja2", "markupsafe", "mpmath", "networkx", "setuptools", "sympy"]
TORCH_AND_ITS_OWN = [*TORCH, *ITS_OWN, "typing_extensions"]

MAX_LINES = 400


def _module_name(path: Path) -> str:
    parts = path.relative_to(SRC).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {_module_name(path): path for path in sorted((SRC / "fairmt").rglob("*.py"))}


def _room(module: str) -> str:
    """The room that a module is in; "" for the front door, `fairmt` itself."""
    return module.partition(".")[2].partition(".")[0]


def _layer(room: str) -> int | None:
    """The number of the room's line in LAYERS; None for a room that has no place yet."""
    for number, patterns in enumerate(LAYERS):
        if any(fnmatch(room, pattern) for pattern in patterns):
            return number
    return None


def _is_core(module: str) -> bool:
    layer = _layer(_room(module))
    return layer is None or layer < len(CORE)


def _imports(module: str, path: Path) -> Iterator[tuple[int, str]]:
    """Each import of a file, as its line and the absolute name of the module imported."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *filter(None, [base])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                yield node.lineno, inner if inner in MODULES else base


def _import_faults(module: str, path: Path) -> Iterator[str]:
    also = module in ALSO_TORCH_ALONE
    for line, name in _imports(module, path):
        root = name.partition(".")[0]
        if root == "fairmt":
            known = any(name == m or m.startswith(f"{name}.") for m in MODULES)
            if known and not _is_core(name) and not (also and name in ALSO_TORCH_ALONE):
                yield f"{path.relative_to(SRC)}:{line} imports {name}, which is outside the core"
        elif root not in ("torch", "triton") and root not in sys.stdlib_module_names:  # triton comes with torch, or not
            yield f"{path.relative_to(SRC)}:{line} imports {name}: neither torch nor the standard library"


def test_there_is_something_to_look_at():
    assert MODULES


@pytest.mark.parametrize("room", sorted({_room(module) for module in MODULES} - {""}))
def test_every_room_has_its_place(room):
    assert _layer(room) is not None, f"fairmt.{room} has no place: give it one in CORE or OUTER of {__file__}"


@pytest.mark.parametrize("module", [m for m in MODULES if m in ALSO_TORCH_ALONE or _is_core(m)])
def test_the_core_imports_torch_and_nothing_else(module):
    faults = list(_import_faults(module, MODULES[module]))
    assert not faults, "\n".join(faults)


def _edges() -> Iterator[tuple[str, str, str]]:
    """Every import from one room into another: the rooms, and where it stands."""
    for module, path in MODULES.items():
        for line, name in _imports(module, path):
            if name.partition(".")[0] == "fairmt" and _room(module) and _room(name) != _room(module):
                yield _room(module), _room(name), f"{path.relative_to(SRC)}:{line}"


def test_rooms_import_in_one_direction():
    faults = []
    for room, imported, where in _edges():
        if not imported:
            faults.append(f"{where} imports from fairmt itself: name the module that defines it")
            continue
        below, above = _layer(imported), _layer(room)
        if below is not None and above is not None and below > above:
            faults.append(f"{where}: {room} comes before {imported} and may not import it")
    assert not faults, "\n".join(faults)


def test_rooms_make_no_circle():
    graph: dict[str, set[str]] = {}
    for room, imported, _ in _edges():
        if imported:
            graph.setdefault(room, set()).add(imported)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("rooms import one another in a circle: " + " <- ".join(error.args[1]))


IN_A_BARE_PLACE = """
import importlib, sys, warnings

allowed = set(sys.argv[1].split(",")) | sys.stdlib_module_names | {"fairmt"}

class Bare:
    @staticmethod
    def find_spec(name, path=None, target=None):
        root = name.partition(".")[0]
        if root not in allowed and not root.startswith("_sysconfigdata"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Bare)
warnings.filterwarnings("ignore", "Failed to initialize NumPy")
import fairmt
loaded = set(sys.argv[2].split(",")) & set(sys.modules)
assert not loaded, f"import fairmt loads {sorted(loaded)}"
for module in sys.argv[3].split(","):
    importlib.import_module(module)
assert "numpy" not in sys.modules, "numpy was not kept out: this test shows nothing"
"""


def test_the_core_works_where_there_is_only_torch():
    outer = [m for m in MODULES if not _is_core(m)]
    alone = [m for m in MODULES if m in ALSO_TORCH_ALONE or _is_core(m)]
    arguments = [",".join(names) for names in (TORCH_AND_ITS_OWN, outer, alone)]
    run = subprocess.run(
        [sys.executable, "-c", IN_A_BARE_PLACE, *arguments],
        env={**os.environ, "PYTHONPATH": str(SRC)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("module", MODULES)
def test_files_stay_short(module):
    lines = len(MODULES[module].read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_LINES, f"{module}: {lines} lines, at most {MAX_LINES}: split it along a concept"
