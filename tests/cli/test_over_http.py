"""The commands that read, over a service: they tell what they tell of the store itself."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from undertow.serving.auth.principal import Scope

from ..support.cli import run
from ..support.service.http import Running, serving


@pytest.fixture(scope="module")
def service(built: Path, tmp_path_factory: pytest.TempPathFactory, server: str) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("served") / "store"
    shutil.copytree(built, folder)
    with serving(folder, engine={"llm_url": server}) as running:
        yield running


def both(service: Running, built: Path, *command: str, **env: str) -> tuple[Any, Any]:
    """What a command prints of the store, and of the service."""
    key = service.key(Scope.READ)
    local = run(*command, "--store", built, "--json")
    served = run(*command, "--store", service.url, "--json", env={"UNDERTOW_API_KEY": key, **env})
    assert (local.code, served.code) == (0, 0), (local.err, served.err)
    return local.lines, served.lines


@pytest.mark.parametrize(
    "command",
    [
        ("list", "--tenant", "ada"),
        ("list", "--tenant", "ada", "--kind", "episodes"),
        ("list", "--tenant", "ada", "--kind", "facts", "--all"),
        ("explain", "--tenant", "ada"),
        ("export", "--tenant", "ada", "--vectors"),
    ],
)
def test_the_same_records(service: Running, built: Path, command: tuple[str, ...]) -> None:
    local, served = both(service, built, *command)
    assert local and local == served


def test_tenants_memories_searches_answers_and_counts(
    service: Running, built: Path, server: str, tmp_path: Path
) -> None:
    local, served = both(service, built, "list", UNDERTOW_API_KEY=service.key())
    assert [r["tenant"] for r in local] == [r["tenant"] for r in served] == ["ada", "bo"]
    local, served = both(service, built, "search", "item", "--tenant", "ada", "-k", "5", "--explain")
    assert [h["id"] for h in local[0]["results"]] == [h["id"] for h in served[0]["results"]]
    assert local[0]["explanation"].keys() == served[0]["explanation"].keys()
    episode = run("list", "--tenant", "ada", "--kind", "episodes", "--store", built, "--json").lines[0]
    for command in ("get", "history"):
        local, served = both(service, built, command, episode["id"][:10], "--tenant", "ada")
        assert [r["text"] for r in local] == [r["text"] for r in served]
    local, served = both(service, built, "stats", "--tenant", "ada")
    assert local[0]["turns"] == served[0]["turns"] == 24 and local[0]["usage"] == served[0]["usage"]
    key = {"UNDERTOW_API_KEY": service.key()}
    answered = run("ask", "Which item?", "--tenant", "ada", "--store", service.url, env=key)
    assert answered.code == 0 and answered.out.strip()
    tables = run("export", "--parquet", tmp_path / "out", "--store", service.url, env=key)
    assert (tables.code, tables.doc["turns"]) == (0, 48)
    told = run("export", "--parquet", tmp_path / "more", "--vectors", "--store", service.url, env=key)
    assert told.code == 2 and "does not tell its encoder" in told.err and not (tmp_path / "more").exists()


def test_what_a_service_cannot_do_is_refused_in_words(service: Running) -> None:
    url = service.url
    for bad in ("http://", "http://user:secret@localhost:1"):
        done = run("list", "--store", bad)
        assert done.code == 2 and "UNDERTOW_API_KEY" in done.err and "secret" not in done.err
    refused = {
        ("list",): "key",
        ("list", "--tenant", "nobody"): "no memories here",
        ("get", "0123456789"): "--tenant",
        ("search", "x", "--tenant", "ada", "--encoder", "hash:64"): "--encoder",
        ("ask", "x", "--tenant", "ada", "--llm", "off"): "leave those options out",
        ("flush", "--tenant", "ada"): "needs the store itself",
        ("import", __file__, "--tenant", "ada"): "POST /v1/tenants/NAME/import",
    }
    for command, words in refused.items():
        env = {} if command == ("list",) else {"UNDERTOW_API_KEY": service.key()}
        done = run(*command, "--store", url, env=env)
        assert done.code in (1, 2) and words in done.err, (command, done.err)
    gone = run("list", "--store", "http://127.0.0.1:9", env={"UNDERTOW_API_KEY": "ut_x"})
    assert gone.code == 1 and "127.0.0.1:9" in gone.err
