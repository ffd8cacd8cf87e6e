"""Dockerfile and Dockerfile.vllm, read by BuildKit's own parser; no image is built here."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import dockerfile  # type: ignore[import-not-found]
import pytest

ROOT = Path(__file__).resolve().parents[3]
FILES = ("Dockerfile", "Dockerfile.vllm")
# what the vLLM actor must be able to do without, as Dockerfile.vllm installs none of it
HEAVY = {
    *("faiss", "jinja2", "lance", "numba", "numpy"),
    *("openai", "pyarrow", "pydantic_settings", "torch", "transformers"),
}


def commands(name: str) -> list[Any]:
    return list(dockerfile.parse_file(str(ROOT / name)))


def values(name: str, cmd: str) -> list[str]:
    return [" ".join(command.value) for command in commands(name) if command.cmd == cmd]


def steps(name: str) -> list[list[str]]:
    """The words of every command of a RUN step."""
    lines = [part for run in values(name, "RUN") for part in run.split("&&")]
    return [shlex.split(line) for line in lines]


def installs(name: str) -> list[list[str]]:
    return [words[2:] for words in steps(name) if words[0].endswith("pip")]


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", FILES)
def test_it_parses_and_names_its_base_by_version(name: str) -> None:
    args = dict(value.split("=", 1) for value in values(name, "ARG"))
    (base,) = values(name, "FROM")
    assert re.fullmatch(r"nvidia/cuda:\$\{CUDA\}-\w+-ubuntu\d\d\.04", base)
    assert re.fullmatch(r"\d+\.\d+\.\d+", args["CUDA"])
    known = {"ARG", "FROM", "RUN", "ENV", "WORKDIR", "COPY", "USER", "CMD"}
    assert {command.cmd for command in commands(name)} <= known


def test_both_have_the_same_system_and_so_the_same_python() -> None:
    """Ray refuses a node whose Python is another."""
    assert len({values(name, "FROM")[0].rpartition("-")[2] for name in FILES}) == 1
    assert len({tuple(v for v in values(name, "ARG") if v.startswith("CUDA")) for name in FILES}) == 1
    for name in FILES:
        assert ["python3", "-m", "venv", "/opt/undertow"] in steps(name)


@pytest.mark.parametrize(
    ("name", "locks"), [("Dockerfile", ["image"]), ("Dockerfile.vllm", ["image-vllm", "image-ray"])]
)
def test_packages_come_from_locks_alone(name: str, locks: list[str]) -> None:
    """tests/repository/test_locks.py says that these have the versions of constraints.txt."""
    *locked, ours = installs(name)
    assert ours == ["--no-deps", "--no-build-isolation", "."]
    for words, lock in zip(locked, locks, strict=True):
        assert words[:3] == ["--no-deps", "--require-hashes", "--requirement"]
        assert words[3].endswith(f"locks/{lock}.txt") and (ROOT / "locks" / f"{lock}.txt").exists()


@pytest.mark.parametrize("name", FILES)
def test_the_last_word_is_a_user_without_root(name: str) -> None:
    kinds = [command.cmd for command in commands(name)]
    assert kinds[-3:] == ["USER", "WORKDIR", "CMD"] and values(name, "USER") == ["10001:10001"]
    assert "HOME /home/undertow" in values(name, "ENV")[-1], "Ray reads the image's HOME"
    assert values(name, "WORKDIR")[-1] == "/home/undertow"


@pytest.mark.parametrize("name", FILES)
def test_login_shells_find_ray_and_the_command_line(name: str) -> None:
    """`ray up` runs everything through login shells, and Ubuntu's set PATH anew."""
    (profile,) = (words for words in steps(name) if words[-1].startswith("/etc/profile.d/"))
    assert profile[0] == "echo" and profile[1].startswith("export PATH=/opt/undertow/bin:")


@pytest.mark.parametrize("name", FILES)
def test_the_last_folder_has_no_kernels_in_it(name: str) -> None:
    """A folder of that name on Python's path would be taken for a package of Hugging Face's."""
    assert values(name, "WORKDIR")[-1] != values(name, "WORKDIR")[0]


def test_the_build_context_has_the_package_and_nothing_else() -> None:
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert lines[0] == "*", "all is left out but what is named"
    kept = {line[1:] for line in lines if line.startswith("!")}
    assert all((ROOT / name).exists() for name in kept)
    linked = {link.resolve().name for link in (ROOT / "src/undertow").iterdir() if link.is_symlink()}
    assert linked | {"src", "pyproject.toml", "locks"} <= kept
    assert {project()["readme"], *project()["license-files"]} <= kept
    secret = [
        path for path in (".venv", ".git", ".models", "tests", ".env") if any(fnmatch(path, k) for k in kept)
    ]
    assert not secret
    assert {copy for name in FILES for copy in values(name, "COPY")} == {". .", "locks /usr/src/locks"}


def test_the_actor_needs_only_what_its_image_has() -> None:
    lock = (ROOT / "locks" / "image-ray.txt").read_text()
    assert all(f"\n{package}==" in lock for package in ("ray", "aiohttp-cors", "pydantic", "typer"))
    program = "import sys, undertow.serving.vllm.ray_actor; print(*{m.split('.')[0] for m in sys.modules})"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert not HEAVY & set(done.stdout.split())


@pytest.mark.parametrize("name", (*FILES, "ray_cluster.yaml", ".dockerignore"))
def test_no_registry_is_named(name: str) -> None:
    text = (ROOT / name).read_text()
    assert "://" not in text.replace("s3://", "")
    assert not re.search(r"index-url|find-links|PIP_", text)
    assert ":latest" not in text
