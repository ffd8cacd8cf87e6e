"""The lock files of locks/: whole, with hashes, of the pinned versions, and what is installed here."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
LOCKS = {file.stem: file.read_text() for file in (ROOT / "locks").glob("*.txt")}
OURS = ("engine", "cuda", "gpu", "service", "image", "image-ray", "torch-cpu")
HERE: dict[str, str] = {canonicalize_name(dist.name): dist.version for dist in metadata.distributions()}
# what asks for other versions than it is installed with, see the Makefile
ASK_FOR_OTHERS = {"mem0ai", "google-adk"}


def pinned(text: str) -> dict[str, Requirement]:
    """The packages of a lock or a list of pins, by their names."""
    lines = [line.removesuffix("\\") for line in text.splitlines() if re.match("[A-Za-z]", line)]
    return {canonicalize_name(wanted.name): wanted for wanted in map(Requirement, lines)}


def version_of(wanted: Requirement) -> str:
    return str(wanted.specifier).removeprefix("==")


def wanted_here(names: list[str]) -> dict[str, Requirement]:
    """What these locks install on this machine."""
    every = [of for lock in names for of in pinned(LOCKS[lock]).items()]
    return {name: of for name, of in every if of.marker is None or of.marker.evaluate({"extra": ""})}


@pytest.mark.parametrize("name", LOCKS)
def test_every_package_has_a_version_and_hashes_and_no_index_is_named(name: str) -> None:
    entries = re.split(r"^(?=[a-z])", LOCKS[name], flags=re.MULTILINE)[1:]
    assert len(entries) == len(pinned(LOCKS[name])) > 0
    form = r"[^ ]+==[^ ]+( ; [^\\\n]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+\n"
    assert [entry for entry in entries if not re.fullmatch(form, entry)] == []
    assert not re.search("://|index-url|find-links", LOCKS[name])


def test_the_locks_have_the_versions_that_are_pinned() -> None:
    files = dict.fromkeys(OURS, "constraints.txt")
    files |= {"peers": "bench/peers/constraints.txt", "vllm": "serving/requirements-vllm.txt"}
    for name, file in files.items():
        versions = pinned((ROOT / file).read_text())
        for package, wanted in pinned(LOCKS[name]).items():
            same = package in versions and Version(version_of(wanted)).public == version_of(versions[package])
            assert same, f"{name}: {package} is not as it is pinned; pin it, then run: make lock"
    assert pinned(LOCKS["vllm"]).keys() == versions.keys(), (
        "it is installed as it is, without what else it needs"
    )


@pytest.mark.parametrize(
    ("extras", "locks"),
    [
        ("dev", ("engine", "cuda")),
        ("serve cluster offline streams", ("service", "cuda")),
        ("serve cluster offline gpu", ("image",)),
    ],
)
def test_a_lock_has_what_the_extras_need_within_their_ranges(extras: str, locks: tuple[str, ...]) -> None:
    seen: set[str] = set()
    have = wanted_here(list(locks))
    have.setdefault("faiss-cpu", have.get("faiss-gpu", Requirement("none")))
    asked = [Requirement(f"undertow[{extras.replace(' ', ',')}]")]
    while asked:
        wanted = asked.pop()
        name = canonicalize_name(wanted.name)
        locked = "0" if name == "undertow" else version_of(have[name])
        assert wanted.specifier.contains(locked, prereleases=True), f"{wanted}: the lock has {locked}"
        if str(wanted) not in seen and name not in ASK_FOR_OTHERS and name in HERE:
            needs = map(Requirement, metadata.requires(name) or [])
            extra = [{"extra": e} for e in (*wanted.extras, "")]
            asked += [need for need in needs if need.marker is None or any(map(need.marker.evaluate, extra))]
        seen.add(str(wanted))


def test_what_is_installed_is_what_the_lock_has() -> None:
    locks = ["engine", "torch-cpu" if metadata.version("torch").endswith("+cpu") else "cuda"]
    locks += ["gpu"] if "faiss-gpu" in HERE else []
    wanted = {name: version_of(of) for name, of in wanted_here(locks).items()}
    if "faiss-gpu" in HERE:  # in the place of
        del wanted["faiss-cpu"]
    assert {name for name, _ in wanted.items() ^ HERE.items()} <= {"pip", "undertow"}, "run: make setup"


def test_each_environment_and_ci_install_from_locks_alone() -> None:
    """By `make`, as CI does; pip adds and takes nothing that has no hash."""
    made = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    commands = re.findall(r"bin/pip install [^|]*", made)
    bare = [line for line in commands if "$(LOCKED) --requirement locks/" not in line]
    assert len(commands) == 8 and len(bare) == 1 and "--no-deps --no-build-isolation --editable ." in bare[0]
    assert "LOCKED := $(PIP_FLAGS) --no-deps --require-hashes\n" in made
    named = set(re.findall(r"--requirement locks/([\w-]+)\.txt", made))
    assert named == {"engine", "cuda", "gpu", "peers", "vllm", "tools", "torch-cpu"}
    ci = (ROOT / ".ci/run").read_text() + (ROOT / ".github/workflows/ci.yml").read_text()
    assert "run setup\n" in ci and "run setup-vllm" in ci and "pip install" not in ci
