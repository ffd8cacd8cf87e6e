"""The package as users install it: what the wheel holds, and what runs with one extra and nothing else.

No network: an environment is a folder of links to the files of the distributions that an extra names here.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections import Counter
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from ..support.service.http import serving

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("bench", "engine", "kernels", "prompts", "serving")
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])(sys.argv[2]))"
# files that only a checkout needs
NOT_SHIPPED = {"bench/peers/constraints.txt", "bench/peers/requirements.txt", "serving/requirements-vllm.txt"}


def tracked() -> list[str]:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        pytest.skip("no checkout: git does not list the files")
    return [name for name in done.stdout.splitlines() if os.path.lexists(ROOT / name)]


def built(kind: str, source: Path, folder: Path, **env: str) -> Path:
    command = [sys.executable, "-c", BUILD, f"build_{kind}", str(folder)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, env={**os.environ, **env})
    assert done.returncode == 0, done.stderr
    return folder / done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A source distribution of the checkout, and the wheel that is made of it."""
    folder = tmp_path_factory.mktemp("package")
    for name in tracked():
        if not name.startswith(("tests/", "docs/")):
            (folder / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / "checkout" / name, follow_symlinks=False)
    sdist = built("sdist", folder / "checkout", folder)
    shutil.unpack_archive(sdist, folder / "unpacked", filter="data")
    return sdist, built("wheel", next((folder / "unpacked").iterdir()), folder)


def distributions(extra: str) -> dict[str, metadata.Distribution]:
    """What `pip install undertow[extra]` brings, as it is installed here."""
    found: dict[str, metadata.Distribution] = {}
    asked = [("undertow", frozenset([extra]))]
    seen = set(asked)
    while asked:
        name, extras = asked.pop()
        dist = metadata.distribution(name)
        if name != "undertow":
            found[dist.name.lower()] = dist
        for text in dist.requires or []:
            wanted = Requirement(text)
            if wanted.marker is None or any(wanted.marker.evaluate({"extra": e}) for e in (*extras, "")):
                more = (wanted.name, frozenset(wanted.extras))
                if more not in seen:
                    seen.add(more)
                    asked.append(more)
    return found


@pytest.fixture(scope="module")
def environments(archives: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each extra, "base" for none, with the wheel unpacked in it."""
    folder = tmp_path_factory.mktemp("environments")
    sharers = Counter(top for dist in metadata.distributions() for top in tops_of(dist))
    for extra in ("base", "engine", "serve", "adapters", "streams", "cluster"):
        (folder / extra).mkdir()
        for dist in distributions(extra).values():
            whole = {top for top in tops_of(dist) if sharers[top] == 1}
            parts = whole | {str(f) for f in dist.files or [] if f.parts[0] not in whole | {".."}}
            for part in parts:
                place = folder / extra / part
                place.parent.mkdir(parents=True, exist_ok=True)
                place.symlink_to(str(dist.locate_file(part)))
        with zipfile.ZipFile(archives[1]) as wheel:
            wheel.extractall(folder / extra)
    return folder


def tops_of(dist: metadata.Distribution) -> set[str]:
    """The files and folders of site-packages that a distribution has something in."""
    return {file.parts[0] for file in dist.files or []} - {".."}


def python(environment: Path, code: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run some code with nothing but that environment."""
    head = f"import sys; sys.path.insert(0, {str(environment)!r}); sys.argv[0] = 'undertow'\n"
    return subprocess.run(
        [sys.executable, "-I", "-S", "-c", head + code, *args],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": os.environ["PATH"], **env},
    )


def test_the_wheel_holds_every_file_of_the_packages(archives: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(archives[1]) as wheel:
        shipped = {name.removeprefix("undertow/") for name in wheel.namelist() if name[:9] == "undertow/"}
    ours = {name for name in tracked() if name.split("/")[0] in PACKAGES and not name.endswith(".sh")}
    ours = {name for name in ours if not name.startswith("serving/client/typescript/")}  # a package of npm
    assert shipped - {"__init__.py", "py.typed"} == ours - NOT_SHIPPED


def test_a_wheel_has_the_same_bytes_whenever_it_is_built(archives: tuple[Path, Path], tmp_path: Path) -> None:
    wheels = []
    for day in (1_600_000_000, 1_700_000_000):
        shutil.copytree(archives[0].parent / "checkout", tmp_path / str(day), symlinks=True)
        for file in (tmp_path / str(day)).rglob("*"):
            os.utime(file, (day, day), follow_symlinks=False)
        (tmp_path / f"of {day}").mkdir()
        wheels.append(
            built("wheel", tmp_path / str(day), tmp_path / f"of {day}", SOURCE_DATE_EPOCH="1500000000")
        )
    assert wheels[0].read_bytes() == wheels[1].read_bytes()


def test_the_base_is_a_client_without_an_engine(environments: Path, tmp_path: Path) -> None:
    assert not {"torch", "numpy", "pyarrow", "fastapi"} & distributions("base").keys()
    code = """
import undertow
with undertow.Client(sys.argv[1], sys.argv[2]) as client:
    client.add("ann", "the boat needs new planks")
    print(client.search("ann", "boat").results[0].memory)
for name in ("Engine", "Settings", "Cluster"):
    try:
        getattr(undertow, name)
    except ImportError as error:
        print(error)
"""
    with serving(tmp_path) as service:
        done = python(environments / "base", code, service.url, service.key())
    assert done.returncode == 0, done.stderr
    first, *refused = done.stdout.splitlines()
    assert first == "user: the boat needs new planks"
    assert len(refused) == 3
    assert all(line.endswith("is not installed: pip install 'undertow[engine]'") for line in refused)


PROGRAM = "from undertow.serving.cli import main; main()"


@pytest.mark.parametrize(
    ("extra", "args", "words"),
    [
        ("base", ("list", "--store", "x"), "pip install 'undertow[engine]'"),
        ("base", ("mcp", "--url", "nowhere"), "such as http://localhost:8080"),
        ("engine", ("serve", "--store", "x", "--encoder", "hash:384"), "pip install 'undertow[serve]'"),
        (
            "engine",
            ("ingest", "x.jsonl", "--store", "x", "--ray", "local", "--shards", "2"),
            "pip install 'undertow[cluster]'",
        ),
    ],
)
def test_a_missing_extra_is_named(
    environments: Path, tmp_path: Path, extra: str, args: tuple[str, ...], words: str
) -> None:
    (tmp_path / "x.jsonl").write_text("")
    args = tuple(str(tmp_path / arg) if arg in ("x", "x.jsonl") else arg for arg in args)
    done = python(environments / extra, PROGRAM, *args)
    assert done.returncode != 0
    assert words in done.stderr
    assert "Traceback" not in done.stderr


def test_the_engine_runs_with_its_extra_alone(environments: Path, tmp_path: Path) -> None:
    code = """
from pathlib import Path
from undertow import Engine, Settings, make_encoder
settings = Settings(encoder="hash:384")
with Engine(Path(sys.argv[1]), settings, make_encoder(settings)) as engine:
    engine.add("ann", [{"role": "user", "content": "the boat needs new planks"}])
    print(engine.search("ann", "boat").ranked(1)[0].memory)
print(sorted({"fastapi", "ray", "matplotlib", "langgraph", "llama_index"} & sys.modules.keys()))
"""
    done = python(environments / "engine", code, str(tmp_path / "s"))
    assert (done.returncode, done.stdout.splitlines()) == (0, ["user: the boat needs new planks", "[]"]), (
        done.stderr
    )


def test_the_service_imports_with_its_extra_alone(environments: Path) -> None:
    parts = "undertow.serving.http.hosting, undertow.serving.mcp.server, undertow.serving.inspector.pages"
    done = python(environments / "serve", f"import {parts}; print('ray' in sys.modules)")
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


@pytest.mark.parametrize(
    ("extra", "module"),
    [
        ("engine", "serving.streams.flight"),
        ("streams", "serving.streams.kafka"),
        ("streams", "serving.streams.redis_streams"),
        ("cluster", "engine.cluster.ray.datasink"),
    ],
)
def test_tables_and_streams_import_with_their_extra_alone(
    environments: Path, extra: str, module: str
) -> None:
    done = python(environments / extra, f"import undertow.{module}; print('fastapi' in sys.modules)")
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["False"]), done.stderr


@pytest.mark.parametrize("name", ["langgraph", "llama_index", "openai_agents"])
def test_an_adapter_imports_with_its_extra_alone(environments: Path, name: str) -> None:
    code = "print(sorted({'torch', 'fastapi', 'lance'} & sys.modules.keys()))"
    done = python(environments / "adapters", f"import undertow.serving.adapters.{name}; {code}")
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
