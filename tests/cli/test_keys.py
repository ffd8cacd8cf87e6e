"""`undertow keys`: keys made and changed at the command line, under a service that has them open."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from undertow.engine.storage.store_info import read_info
from undertow.serving.auth.audit import FILE_NAME as AUDIT
from undertow.serving.auth.authenticator import Authenticator, KeyRefused
from undertow.serving.auth.key_file import KEY_TEXT, KeyFile
from undertow.serving.auth.principal import KeyLimits, Scope, TenantScope

from ..support.cli import conversation, run, write_log

READ_ALL = ("--all-tenants", "--scope", "read")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


@pytest.fixture
def keys(file: Path) -> Iterator[Authenticator]:
    """As a service has them, opened before any of the commands."""
    opened = Authenticator(file)
    yield opened
    opened.close()


def audit(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / AUDIT).read_text().splitlines()]


def test_a_key_is_alone_on_standard_output_and_works_at_once(tmp_path: Path, keys: Authenticator) -> None:
    done = run("keys", "create", "--store", tmp_path, "--tenant", "ada", "--scope", "read")
    assert done.code == 0, done.err
    text = done.out.removesuffix("\n")
    assert KEY_TEXT.fullmatch(text)
    principal = keys.check(text)
    assert (principal.reach, principal.scopes) == (TenantScope(("ada",)), frozenset({Scope.READ}))
    assert "cannot be shown again" in done.err and text[16:] not in done.err


def test_create_takes_all_that_a_key_can_be(file: Path, keys: Authenticator) -> None:
    options = ("--scope", "read", "--scope", "write", "--label", "the app", "--expires-days", "30")
    limits = ("--requests-per-s", "2.5", "--burst", "10", "--tokens-per-day", "1000")
    made = run("keys", "create", "--keys", file, "--tenant-prefix", "acme/", *options, *limits, "--json").doc
    principal = keys.check(made["key"])
    assert principal.reach == TenantScope(prefix="acme/")
    assert principal.scopes == {Scope.READ, Scope.WRITE}
    assert principal.limits == KeyLimits(2.5, 10, 1000)
    (listed,) = run("keys", "list", "--keys", file, "--json").lines
    assert {"key": made["key"], **listed} == made
    assert (listed["label"], listed["prefix"], listed["state"]) == ("the app", "acme/", "active")
    kept = KeyFile(file).read()[made["id"]]
    assert kept.expires_at is not None and (kept.expires_at - kept.created_at).days == 30


def test_rotating_says_how_long_the_earlier_secret_holds(file: Path) -> None:
    key_id = run("keys", "create", "--keys", file, *READ_ALL, "--json").doc["id"]
    assert "86,400 more seconds; --grace-s 0" in run("keys", "rotate", key_id, "--keys", file).err
    assert "Earlier" not in run("keys", "rotate", key_id, "--keys", file, "--grace-s", "0").err


def test_rotate_and_revoke_take_effect_under_a_running_service(file: Path, keys: Authenticator) -> None:
    first = run("keys", "create", "--keys", file, *READ_ALL, "--json").doc
    second = run("keys", "rotate", first["id"], "--keys", file, "--json").doc
    assert second["id"] == first["id"] and second["former_until"] is not None
    assert keys.check(first["key"]) == keys.check(second["key"])
    third = run("keys", "rotate", first["id"], "--keys", file, "--grace-s", "0").out.strip()
    for ended in (first["key"], second["key"]):
        with pytest.raises(KeyRefused):
            keys.check(ended)
    assert keys.check(third).key_id == first["id"]
    revoked = run("keys", "revoke", first["id"], "--keys", file)
    assert (revoked.code, revoked.out) == (0, f"Key {first['id']} is revoked.\n")
    with pytest.raises(KeyRefused):
        keys.check(third)
    again = run("keys", "revoke", first["id"], "--keys", file, "--json")
    assert (again.code, again.doc["state"]) == (0, "revoked")
    refused = run("keys", "rotate", first["id"], "--keys", file)
    assert (refused.code, refused.out) == (1, "")
    assert "is revoked. Create a new one" in refused.err


def test_the_list_shows_no_secret_and_no_digest(file: Path) -> None:
    made = run(
        "keys", "create", "--keys", file, "--tenant", "ada", "--tenant", "bo", "--scope", "erase", "--json"
    )
    kept = KeyFile(file).read()[made.doc["id"]]
    for args in ((), ("--json",)):
        shown = run("keys", "list", "--keys", file, *args).out
        assert made.doc["id"] in shown and "ada" in shown and "erase" in shown
        assert kept.digest[:16] not in shown and made.doc["key"][16:] not in shown


def test_keys_of_a_store_that_is_not_there_are_not_none(tmp_path: Path) -> None:
    for args in (("list",), ("rotate", "0" * 12), ("revoke", "0" * 12)):
        for where in (("--store", tmp_path / "typo"), ("--keys", tmp_path / "none.json")):
            done = run("keys", *args, *where)
            assert (done.code, done.out) == (1, "")
            assert f"Check {where[0]}" in done.err and "undertow keys create" in done.err
    store = tmp_path / "store"
    log = write_log(tmp_path / "log.jsonl", conversation("bo", 1))
    assert run("ingest", log, "--store", store, "--llm", "off").code == 0
    assert run("keys", "list", "--store", store, "--json").lines == []


def test_a_budget_without_room_for_an_answer_is_told(file: Path) -> None:
    def told(tokens: str, *scopes: str) -> str:
        named = [part for scope in scopes for part in ("--scope", scope)]
        done = run("keys", "create", "--keys", file, "--all-tenants", *named, "--tokens-per-day", tokens)
        assert done.code == 0
        return done.err

    assert "too few for any answer: each sets 16,384" in told("16383", "read")
    assert "warning" not in told("16384", "read") + told("100", "write") + told("0", "read")


def test_what_is_done_to_keys_is_audited(tmp_path: Path, file: Path) -> None:
    made = run("keys", "create", "--keys", file, "--tenant", "walter", "--scope", "read", "--json").doc
    run("keys", "rotate", made["id"], "--keys", file)
    run("keys", "revoke", made["id"], "--keys", file)
    run("keys", "rotate", made["id"], "--keys", file)
    assert [(line["act"], line["outcome"], line.get("key_id")) for line in audit(tmp_path)] == [
        ("keys.create", "begun", None),
        ("keys.create", "done", made["id"]),
        ("keys.rotate", "begun", made["id"]),
        ("keys.rotate", "done", made["id"]),
        ("keys.revoke", "begun", made["id"]),
        ("keys.revoke", "done", made["id"]),
        ("keys.rotate", "begun", made["id"]),
        ("keys.rotate", "failed", made["id"]),
    ]
    assert {line["by"] for line in audit(tmp_path)} == {f"local:{os.getuid()}"}
    # a name that no id can hold: those are hexadecimal
    assert "walter" not in (tmp_path / AUDIT).read_text()


def test_wrong_usage_is_told_and_nothing_is_made(tmp_path: Path, file: Path) -> None:
    at = ("--keys", file)
    for args, told in (
        (("create", *at, "--scope", "read"), "give one"),
        (("create", *at, "--scope", "read", "--tenant", "ada", "--all-tenants"), "give one"),
        (("create", *at, "--scope", "read", "--tenant-prefix", ""), "empty"),
        (("create", *at, "--all-tenants"), "--scope"),
        (("create", *at, "--all-tenants", "--scope", "fly"), "--scope"),
        (("create", *at, *READ_ALL, "--burst", "3"), "requests_per_s"),
        (("create", *at, *READ_ALL, "--requests-per-s", "0"), "requests_per_s"),
        (("create", *READ_ALL), "--store FOLDER"),
        (("create", *at, "--store", tmp_path, *READ_ALL), "--store FOLDER"),
        (("create", "--store", "s3://bucket/x", *READ_ALL), "--keys FILE"),
        (("list",), "--store FOLDER"),
    ):
        done = run("keys", *args)
        assert (done.code, done.out) == (2, ""), args
        assert told in done.err, args
    assert list(tmp_path.iterdir()) == []


def test_an_id_that_no_key_has_is_not_repeated(tmp_path: Path, file: Path) -> None:
    """It may be a whole key."""
    text = run("keys", "create", "--keys", file, *READ_ALL).out.strip()
    before = (tmp_path / AUDIT).read_bytes()
    for command in ("rotate", "revoke"):
        done = run("keys", command, text, "--keys", file)
        assert (done.code, done.out) == (1, "")
        assert "undertow keys list" in done.err and text[16:] not in done.err
        assert run("keys", command, "0" * 12, "--store", tmp_path / "typo").code == 1
    assert (tmp_path / AUDIT).read_bytes() == before
    assert not (tmp_path / "typo").exists()


def test_a_broken_file_is_told_and_left_alone(file: Path) -> None:
    file.write_text("{")
    for args in (("create", *READ_ALL), ("list",), ("revoke", "0" * 12)):
        done = run("keys", *args, "--keys", file)
        assert (done.code, done.out) == (1, "")
        assert "Restore it from a backup" in done.err
    assert file.read_text() == "{"


def test_an_erased_tenant_s_name_leaves_the_keys_and_the_erasure_is_audited(tmp_path: Path) -> None:
    store = tmp_path / "store"
    log = write_log(tmp_path / "log.jsonl", [*conversation("eve-17", 2), *conversation("bo", 2)])
    assert run("ingest", log, "--store", store, "--llm", "off").code == 0
    alone, shared = (
        run("keys", "create", "--store", store, "--scope", "read", *tenants, "--json").doc
        for tenants in (("--tenant", "eve-17"), ("--tenant", "eve-17", "--tenant", "bo"))
    )
    keys = Authenticator(store / "keys.json")
    assert run("erase", "--tenant", "eve-17", "--store", store, "--yes").code == 0
    assert keys.check(alone["key"]), "its bytes are there until the purge, and so is its name"
    done = run("erase", "--tenant", "eve-17", "--store", store, "--now", "--yes", "--json")
    assert (done.code, done.doc["turns_removed"]) == (0, 2)
    assert alone["id"] in done.err and shared["id"] in done.err
    assert not [p for p in store.rglob("*") if p.is_file() and b"eve-17" in p.read_bytes()]
    with pytest.raises(KeyRefused):
        keys.check(alone["key"])
    assert keys.check(shared["key"]).reach == TenantScope(("bo",))
    keys.close()
    erasures = [line for line in audit(store) if line["act"] == "erase"]
    assert [line["outcome"] for line in erasures] == ["begun", "done"] * 2
    assert {line["tenant_key"] for line in erasures} == {read_info(store).tenant_key("eve-17")}
    assert [line["counts"]["tenants_purged"] for line in erasures[1::2]] == [0, 1]
