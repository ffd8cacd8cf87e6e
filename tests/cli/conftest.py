"""A mock LLM server and a small store, shared by the command-line tests."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from undertow.bench.mock.server import spawn_server

from ..support.cli import THETAS, conversation, run, write_log

TURNS = 24


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    with spawn_server(refusal_rate=0.2) as url:
        yield url


@pytest.fixture(scope="session")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pairs = zip(conversation("ada", TURNS), conversation("bo", TURNS), strict=True)
    lines = [line for pair in pairs for line in pair]
    return write_log(tmp_path_factory.mktemp("log") / "log.jsonl", lines)


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory, log: Path, server: str) -> Path:
    """A store with two tenants, decided to the end; not to be changed."""
    store = tmp_path_factory.mktemp("built") / "store"
    done = run("ingest", log, "--store", store, "--llm", server, *THETAS, "--json")
    assert done.code == 0, done.err
    counts = done.doc
    assert counts["merges"] and counts["merge_refusals"] and counts["consolidations"] and counts["facts"]
    return store


@pytest.fixture
def store(built: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(built, tmp_path / "store"))
