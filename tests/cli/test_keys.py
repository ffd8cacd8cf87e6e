"""`undertow keys`: keys made and changed at the command line, under a service that has them open."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from undertow.engine.storage.store_info import read_info
from undertow.serving.auth.audit import FILE_NAME as AUDIT
from undertow.serving.auth.authenticator import Authenticator, KeyRefused
from undertow.serving.auth.key_file import KEY_TEXT, KeyFile, utc_now
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


def refused(keys: Authenticator, *texts: str) -> bool:
    for text in texts:
        with pytest.raises(KeyRefused):
            keys.check(text)
    return True


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
    began = utc_now()
    made = run("keys", "create", "--keys", file, "--tenant-prefix", "acme/", *options, *limits, "--json").doc
    principal = keys.check(made["key"])
    assert principal.reach == TenantScope(prefix="acme/")
    assert principal.scopes == {Scope.READ, Scope.WRITE}
    assert principal.limits == KeyLimits(2.5, 10, 1000)
    (listed,) = run("keys", "list", "--keys", file, "--json").lines
    assert {"key": made["key"], **listed} == made
    assert (listed["label"], listed["prefix"], listed["state"]) == ("the app", "acme/", "active")
    kept = KeyFile(file).read()[made["id"]]
    assert kept.expires_at is not None and began <= kept.expires_at - timedelta(days=30) <= utc_now()


def test_rotate_and_revoke_take_effect_under_a_running_service_and_are_audited(
    tmp_path: Path, file: Path, keys: Authenticator
) -> None:
    at = ("--keys", file)
    first = run("keys", "create", *at, "--tenant", "walter", "--scope", "read", "--json").doc
    key_id = first["id"]
    second = run("keys", "rotate", key_id, *at, "--json").doc
    assert second["id"] == key_id and second["former_until"] is not None
    assert keys.check(first["key"]) == keys.check(second["key"])
    third = run("keys", "rotate", key_id, *at, "--grace-s", "0")
    assert refused(keys, first["key"], second["key"]) and "Earlier" not in third.err
    fourth = run("keys", "rotate", key_id, *at)
    assert "86,400 more seconds; --grace-s 0" in fourth.err
    assert keys.check(third.out.strip()).key_id == keys.check(fourth.out.strip()).key_id == key_id
    revoked = run("keys", "revoke", key_id, *at)
    assert (revoked.code, revoked.out) == (0, f"Key {key_id} is revoked.\n")
    assert refused(keys, third.out.strip(), fourth.out.strip())
    again = run("keys", "revoke", key_id, *at, "--json")
    assert (again.code, again.doc["state"]) == (0, "revoked")
    late = run("keys", "rotate", key_id, *at)
    assert (late.code, late.out, "is revoked. Create a new one" in late.err) == (1, "", True)

    done = ["keys.create", *["keys.rotate"] * 3, *["keys.revoke"] * 2]
    expected = [(act, end, key_id) for act in done for end in ("begun", "done")]
    expected += [("keys.rotate", end, key_id) for end in ("begun", "failed")]
    expected[0] = ("keys.create", "begun", None)
    assert [(line["act"], line["outcome"], line.get("key_id")) for line in audit(tmp_path)] == expected
    assert {line["by"] for line in audit(tmp_path)} == {f"local:{os.getuid()}"}
    # a name that no id can contain: ids are hexadecimal
    assert "walter" not in (tmp_path / AUDIT).read_text()


def test_the_list_shows_no_secret_and_no_digest(file: Path) -> None:
    two = ("--tenant", "ada", "--tenant", "bo")
    made = run("keys", "create", "--keys", file, *two, "--scope", "erase", "--json").doc
    kept = KeyFile(file).read()[made["id"]]
    for args in ((), ("--json",)):
        shown = run("keys", "list", "--keys", file, *args).out
        assert made["id"] in shown and "ada" in shown and "erase" in shown
        assert kept.digest[:16] not in shown and made["key"][16:] not in shown


def test_a_missing_store_or_file_is_an_error_and_a_store_without_keys_is_not(tmp_path: Path) -> None:
    for args in (("list",), ("rotate", "0" * 12), ("revoke", "0" * 12)):
        for where in (("--store", tmp_path / "typo"), ("--keys", tmp_path / "none.json")):
            done = run("keys", *args, *where)
            assert (done.code, done.out) == (1, "")
            assert f"Check {where[0]}" in done.err and "undertow keys create" in done.err
    assert list(tmp_path.iterdir()) == []
    store = tmp_path / "store"
    log = write_log(tmp_path / "log.jsonl", conversation("bo", 1))
    assert run("ingest", log, "--store", store, "--llm", "off").code == 0
    assert run("keys", "list", "--store", store, "--json").lines == []


def test_a_budget_too_small_for_an_answer_is_warned_about(file: Path) -> None:
    def warning(tokens: str, scope: str) -> str:
        at = ("--keys", file, "--all-tenants")
        done = run("keys", "create", *at, "--scope", scope, "--tokens-per-day", tokens)
        assert done.code == 0
        return done.err

    assert "too few for any answer: each sets 16,384" in warning("16383", "read")
    assert "warning" not in warning("16384", "read") + warning("100", "write") + warning("0", "read")


def test_wrong_usage_is_reported_and_nothing_is_made(tmp_path: Path, file: Path) -> None:
    at = ("--keys", file)
    for args, says in (
        (("create", *at, "--scope", "read"), "give one"),
        (("create", *at, "--scope", "read", "--tenant", "ada", "--all-tenants"), "give one"),
        (("create", *at, "--scope", "read", "--tenant-prefix", ""), "empty"),
        (("create", *at, "--scope", "read", *("--tenant-prefix", "a/") * 2), "takes one --tenant-prefix"),
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
        assert (done.code, done.out, says in done.err) == (2, "", True), args
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_id_which_may_be_a_whole_key_is_not_repeated(tmp_path: Path, file: Path) -> None:
    text = run("keys", "create", "--keys", file, *READ_ALL).out.strip()
    before = (tmp_path / AUDIT).read_bytes()
    for command in ("rotate", "revoke"):
        done = run("keys", command, text, "--keys", file)
        assert (done.code, done.out) == (1, "")
        assert "undertow keys list" in done.err and text[16:] not in done.err
    assert (tmp_path / AUDIT).read_bytes() == before


def test_a_broken_file_is_reported_and_left_alone(file: Path) -> None:
    file.write_text("{")
    for args in (("create", *READ_ALL), ("list",), ("revoke", "0" * 12)):
        done = run("keys", *args, "--keys", file)
        assert (done.code, done.out, "Restore it from a backup" in done.err) == (1, "", True)
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
    erase = ("erase", "--tenant", "eve-17", "--store", store, "--yes")
    assert run(*erase).code == 0
    assert keys.check(alone["key"]), "until the purge, the tenant's bytes and name remain"
    done = run(*erase, "--now", "--json")
    assert (done.code, done.doc["turns_removed"]) == (0, 2)
    assert alone["id"] in done.err and shared["id"] in done.err
    assert not [p for p in store.rglob("*") if p.is_file() and b"eve-17" in p.read_bytes()]
    assert refused(keys, alone["key"])
    assert keys.check(shared["key"]).reach == TenantScope(("bo",))
    keys.close()
    erasures = [line for line in audit(store) if line["act"] == "erase"]
    assert [line["outcome"] for line in erasures] == ["begun", "done"] * 2
    assert {line["tenant_key"] for line in erasures} == {read_info(store).tenant_key("eve-17")}
    assert [line["counts"]["tenants_purged"] for line in erasures[1::2]] == [0, 1]
