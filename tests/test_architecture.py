"""The architecture: which room may import which, and how large things may grow.

Imports are read from the source, wherever they stand: at the top of a file, in a function, under
TYPE_CHECKING, or as the text given to `import_module`.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("engine", "kernels", "prompts", "bench", "serving")
# lowest first; rooms of one floor do not import each other
FLOORS = (
    ("engine/base", "kernels", "prompts"),
    ("engine/storage", "engine/llm"),
    ("engine/encoders", "engine/readers", "engine/policies"),
    ("engine/tenants",),
    ("engine/search", "engine/step"),
    ("engine/api",),
    ("engine/estimate", "engine/cluster"),
    ("bench",),
    ("serving",),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
KERNEL_PACKAGES = {"torch", "cupy", "numpy", "faiss", "numba", "llvmlite", "triton"}

# Upper bounds that only go down, but for what a new feature is allowed (docs/decisions/0030).
SOURCE_LINES = 71_463
TEST_LINES = 62_180
# Made by `make client` from the asynchronous client, and compared with it by a test.
GENERATED = "serving/client/_sync/"
FOLDER_ENTRIES = 15
FILE_LINES = 450
FUNCTION_LINES = 60
FUNCTION_LINES_P90 = 20
CLASS_METHODS = 30
# one method for each public call
MANY_METHODS = {"Engine", "Client", "AsyncClient", "MemoryApi"}
LANGUAGES = {".py", ".cu", ".cpp", ".c", ".h", ".j2"}

Sources = Mapping[str, str]
"""The text of each file by its path from the project's root, such as `engine/base/model.py`."""


def tracked(*folders: str) -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *folders],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listed.returncode:
        pytest.skip(f"the files of the project are listed by git: {listed.stderr.strip()}")
    return [name for name in listed.stdout.splitlines() if (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def sources() -> Sources:
    return {name: (ROOT / name).read_text() for name in tracked(*ROOMS) if name.endswith(".py")}


def room_of(path: str) -> str:
    """The room of a file or folder: the longest prefix that has a floor; else its top folder."""
    parts = PurePosixPath(path).parts
    found = ("/".join(parts[:n]) for n in range(len(parts), 0, -1))
    return next((room for room in found if room in FLOOR_OF), parts[0])


def resolved(name: str, sources: Sources) -> str | None:
    """The file that a dotted name below `undertow` stands for: a module, or the module that has the name."""
    parts = name.split(".")[1:]
    while parts:
        for path in ("/".join(parts) + ".py", "/".join([*parts, "__init__.py"])):
            if path in sources:
                return path
        parts.pop()
    return None


def named(path: str, tree: ast.AST) -> Iterator[tuple[str, int]]:
    """The dotted names that a file imports, with their lines."""
    package = ["undertow", *PurePosixPath(path).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if called in ("import_module", "__import__"):
                yield beginning([*node.args, *(word.value for word in node.keywords)][0]), node.lineno


def beginning(name: ast.expr) -> str:
    """The text of a module's name, as far as it is literal; one that is not may be anything of ours."""
    first = name.values[0] if isinstance(name, ast.JoinedStr) else name
    text = first.value if isinstance(first, ast.Constant) else ""
    return str(text).rstrip(".") or "undertow"


def imports(sources: Sources) -> dict[str, dict[str, int]]:
    """For each file the files that it imports, with the line of the first import."""
    found: dict[str, dict[str, int]] = {}
    for path, text in sources.items():
        into = found.setdefault(path, {})
        for name, line in named(path, ast.parse(text)):
            if name.split(".")[0] == "undertow" and (target := resolved(name, sources)) not in (None, path):
                assert target is not None
                into.setdefault(target, line)
    return found


def wrong_directions(sources: Sources) -> Iterator[str]:
    """Imports that do not point down, and those that go through the public names of `undertow`."""
    for path, into in imports(sources).items():
        here = room_of(path)
        for target, line in into.items():
            there = room_of(target)
            if here not in FLOOR_OF or there not in FLOOR_OF:
                continue  # an empty __init__.py: see `homeless`
            if here != there and FLOOR_OF[there] >= FLOOR_OF[here]:
                yield f"{path}:{line} imports {target}: {here} may not import {there}"
    for path, text in sources.items():
        for name, line in named(path, ast.parse(text)):
            if room_of(path) != "serving" and name.startswith("undertow") and not resolved(name, sources):
                yield f"{path}:{line} imports {name}: the public names are for users"


def homeless(sources: Sources) -> list[str]:
    """Files that stand on no floor, but for an __init__.py without imports."""
    return [
        path
        for path, text in sources.items()
        if room_of(path) not in FLOOR_OF
        and (not path.endswith("/__init__.py") or list(named(path, ast.parse(text))))
    ]


def folder_circles(sources: Sources) -> list[str]:
    """Pairs of folders, neither inside the other, that import each other."""
    edges: dict[str, set[str]] = {}
    for path, into in imports(sources).items():
        folder = str(PurePosixPath(path).parent)
        edges.setdefault(folder, set()).update(str(PurePosixPath(target).parent) for target in into)
    return [
        f"{a} and {b} import each other"
        for a, into in sorted(edges.items())
        for b in sorted(into)
        if a < b
        and a in edges.get(b, ())
        and not (f"{b}/".startswith(f"{a}/") or f"{a}/".startswith(f"{b}/"))
    ]


def foreign_packages(sources: Sources) -> Iterator[str]:
    """Packages in `kernels/` beyond those of device arithmetic and the standard library."""
    for path, text in sources.items():
        if room_of(path) == "kernels":
            for name, line in named(path, ast.parse(text)):
                top = name.split(".")[0]
                if top not in KERNEL_PACKAGES | {"undertow", "__future__"} | set(sys.stdlib_module_names):
                    yield f"{path}:{line} imports {top}: kernels/ is for device arithmetic"


# ---- imports


def test_imports_point_down(sources: Sources) -> None:
    assert not homeless(sources)
    assert not list(wrong_directions(sources))


def test_no_imports_in_a_circle(sources: Sources) -> None:
    TopologicalSorter(imports(sources)).prepare()
    assert not folder_circles(sources)


def test_kernels_import_device_arithmetic_only(sources: Sources) -> None:
    assert not list(foreign_packages(sources))


BASE, GATE, STEP, SEARCH = (
    "engine/base/model.py",
    "kernels/gate/gate.py",
    "engine/step/scheduler.py",
    "engine/search/ranking.py",
)
BENCH, SERVING = "bench/machine.py", "serving/doctor.py"
PLANTED = {
    "a plain import upward": (BASE, "import undertow.engine.step.scheduler"),
    "a name from above": (BASE, "from undertow.engine.step.scheduler import Scheduler"),
    "a module from above": (GATE, "from undertow.engine.base import model"),
    "a sideways import": (STEP, "from undertow.engine.search.ranking import Ranker"),
    "inside a function": (BASE, "def f():\n    from undertow.serving.doctor import examine"),
    "for types alone": (BASE, "if TYPE_CHECKING:\n    from undertow.engine.search.ranking import Ranker"),
    "a relative import": (BASE, "from ..step import scheduler"),
    "a text": (BASE, 'importlib.import_module("undertow.engine.step.scheduler")'),
    "a benchmark that imports the service": (BENCH, "from undertow.serving.doctor import examine"),
    "part of a text": (BASE, 'import_module(f"undertow.engine.step.{name}")'),
    "a text that is computed": (BASE, "import_module(name=name)"),
    "a public name": (STEP, "from undertow import Engine"),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_import_in_a_wrong_direction_is_found(kind: str) -> None:
    sources = dict.fromkeys((BASE, GATE, STEP, SEARCH, BENCH, SERVING), "")
    assert not list(wrong_directions(sources))
    path, text = PLANTED[kind]
    assert [found.split(":")[0] for found in wrong_directions({**sources, path: text})] == [path]


def test_a_planted_file_on_no_floor_is_found() -> None:
    planted = {"engine/newroom/x.py": "", "engine/helper.py": "", "engine/__init__.py": "import numpy"}
    assert homeless(planted) == list(planted)
    assert not homeless({"engine/__init__.py": "", BASE: ""})


def test_planted_circles_are_found() -> None:
    package = "engine/policies/nemori"
    a, b, c = (f"{package}/{name}.py" for name in ("policy", "job", "knowledge"))
    ring = {
        a: "from undertow.engine.policies.nemori.job import NemoriJob",
        b: "if TYPE_CHECKING:\n    from undertow.engine.policies.nemori import knowledge",
        c: "def late():\n    from undertow.engine.policies.nemori.policy import Nemori",
    }
    with pytest.raises(CycleError):
        TopologicalSorter(imports(ring)).prepare()
    TopologicalSorter(imports({**ring, c: ""})).prepare()
    folders = {
        "engine/api/views/a.py": "from undertow.engine.api.transfer import b",
        "engine/api/transfer/b.py": "",
        "engine/api/transfer/c.py": "from undertow.engine.api.views import d",
        "engine/api/views/d.py": "",
    }
    TopologicalSorter(imports(folders)).prepare()
    assert len(folder_circles(folders)) == 1


def test_a_planted_package_in_the_kernels_is_found() -> None:
    assert not list(foreign_packages({GATE: "import math\nimport numpy as np"}))
    assert len(list(foreign_packages({GATE: "def f():\n    import pyarrow as pa"}))) == 1


# ---- sizes


def lines_of(names: Iterable[str]) -> int:
    return sum((ROOT / name).read_text().count("\n") for name in names if Path(name).suffix in LANGUAGES)


def functions(sources: Sources) -> list[tuple[int, str]]:
    """Every function with its length in lines, the longest first."""
    return sorted(
        (
            (node.end_lineno or node.lineno) - node.lineno + 1,
            f"{path}:{node.lineno} {node.name}",
        )
        for path, text in sources.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )[::-1]


def test_the_project_stays_small(sources: Sources, capsys: pytest.CaptureFixture[str]) -> None:
    written = [name for name in tracked(*ROOMS) if not name.startswith(GENERATED)]
    source, tests = lines_of(written), lines_of(tracked("tests"))
    lengths = [length for length, _ in functions(sources)]
    p90 = sorted(lengths)[int(0.9 * len(lengths))]
    with capsys.disabled():
        print(
            f"\nsource {source:,} lines of {SOURCE_LINES:,}, tests {tests:,} of {TEST_LINES:,}; "
            f"functions: median {sorted(lengths)[len(lengths) // 2]}, p90 {p90}, longest {lengths[0]}"
        )
    assert source <= SOURCE_LINES
    assert tests <= TEST_LINES
    assert p90 <= FUNCTION_LINES_P90


def test_no_function_is_long(sources: Sources) -> None:
    assert [where for length, where in functions(sources) if length > FUNCTION_LINES] == []


def test_no_file_is_long() -> None:
    names = [name for name in tracked(*ROOMS, "tests") if Path(name).suffix in LANGUAGES]
    lengths = {name: lines_of([name]) for name in names}
    assert {name: length for name, length in lengths.items() if length > FILE_LINES} == {}


def test_no_folder_is_crowded() -> None:
    entries: dict[str, set[str]] = {}
    for name in tracked(*ROOMS, "tests"):
        path = PurePosixPath(name)
        if path.suffix in LANGUAGES:
            for depth in range(1, len(path.parts)):
                entries.setdefault("/".join(path.parts[:depth]), set()).add(path.parts[depth])
    assert {folder: len(held) for folder, held in entries.items() if len(held) > FOLDER_ENTRIES} == {}


def test_no_class_has_too_many_methods(sources: Sources) -> None:
    counts = {
        f"{path} {node.name}": sum(isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef) for n in node.body)
        for path, text in sources.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and node.name not in MANY_METHODS
    }
    assert {name: count for name, count in counts.items() if count > CLASS_METHODS} == {}
