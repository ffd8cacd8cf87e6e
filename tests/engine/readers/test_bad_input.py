"""Bad input and bad places: each error names file, line and cure, and the good lines around it are taken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ...support.cli import Ran, conversation, run, turn_line, write_log

BAD_LINES: tuple[tuple[Any, str], ...] = (
    ('{"tenant": "ada", "messages": [', "is not JSON"),
    (turn_line("ada", 0, "a line") | {"timestamp": "last tuesday"}, "field 'timestamp'"),
    (turn_line("ada", 0, "x" * 2_000_000), "content"),
)


def ingest(log: Path, store: Path, *flags: str) -> Ran:
    return run("ingest", log, "--store", store, "--llm", "off", "--json", *flags)


def test_bad_lines_are_named_and_the_good_ones_are_taken(tmp_path: Path) -> None:
    good = conversation("ada", 4)
    log = write_log(tmp_path / "log.jsonl", [*good[:2], *(bad for bad, _ in BAD_LINES), *good[2:]])
    done = ingest(log, tmp_path / "s")
    assert (done.code, done.doc["turns"], done.doc["errors"]) == (3, 4, 3)
    named = [line for line in done.err.splitlines() if str(log) in line]
    for number, ((_, says), told) in enumerate(zip(BAD_LINES, named, strict=True), 3):
        assert told.startswith(f"{log}:{number}: ")
        assert says in told
        assert told.count(". ") >= 1, "a cure follows the reason"
        assert len(told) < 1_000
    assert "Traceback" not in done.err


def test_strict_stores_nothing_of_the_batch_with_the_bad_line(tmp_path: Path) -> None:
    good = conversation("ada", 6)
    log = write_log(tmp_path / "log.jsonl", [*good[:5], "{broken", good[5]])
    whole = ingest(log, tmp_path / "a", "--strict")
    assert (whole.code, whole.doc["turns"], whole.doc["errors"]) == (3, 0, 1)
    assert f"{log}:6" in whole.err and "--strict" in whole.err
    by_two = ingest(log, tmp_path / "b", "--strict", "--batch-turns", "2")
    assert (by_two.code, by_two.doc["turns"]) == (3, 4)
    write_log(log, good)
    mended = ingest(log, tmp_path / "b", "--strict", "--resume")
    assert (mended.code, mended.doc["turns"]) == (0, 6)


def test_many_bad_lines_are_counted_not_all_told(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", ["{broken"] * 200 + conversation("ada", 2))
    done = ingest(log, tmp_path / "s")
    assert (done.code, done.doc["errors"], done.doc["turns"]) == (3, 200, 2)
    assert len(done.err.splitlines()) < 100
    assert "150 more errors" in done.err


def test_files_that_are_no_logs_do_not_stop_the_others(tmp_path: Path) -> None:
    write_log(tmp_path / "a.jsonl", conversation("ada", 2))
    (tmp_path / "b.json").write_text('{"something": "else"}')
    (tmp_path / "c.parquet").write_bytes(b"PAR1 and then nothing")
    pq.write_table(pa.table({"tenant": ["bo"]}), tmp_path / "d.parquet")
    (tmp_path / "e.jsonl.gz").write_bytes(b"\x1f\x8b not gzip at all")
    done = ingest(tmp_path, tmp_path / "s")
    assert (done.code, done.doc["turns"], done.doc["errors"]) == (3, 2, 4)
    for name in ("b.json", "c.parquet", "d.parquet", "e.jsonl.gz"):
        assert str(tmp_path / name) in done.err


def test_an_unknown_tenant_or_id_or_store_is_said(tmp_path: Path) -> None:
    store = tmp_path / "s"
    ingest(write_log(tmp_path / "log.jsonl", conversation("ada", 2)), store)
    for command in ("explain", "export"):
        done = run(command, "--tenant", "nobody", "--store", store)
        assert (done.code, done.out) == (1, "")
        assert "no tenant 'nobody'" in done.err and "--kind tenants" in done.err
    for args in (("get", "abc"), ("history", "abc"), ("update", "abc", "words"), ("delete", "abc")):
        done = run(*args, "--store", store)
        assert done.code == 1
        assert "abc" in done.err and "undertow list" in done.err
    missing = run("search", "boat", "--tenant", "ada", "--store", tmp_path / "nowhere")
    assert missing.code == 1
    assert "not an Undertow store" in missing.err
    assert not (tmp_path / "nowhere").exists()


NO_DESCRIPTIONS: dict[str, Any] = {
    "a list": [1],
    "a text": "store",
    "format only": {"format_version": 2},
    "no number": {"dim": "384"},
    "a truth for a number": {"dim": True},
    "no object": {"encoder": ["hash:384"]},
    "no key": {"hash_key": "xyz"},
    "an unknown field": {"colour": "red"},
    "a journal elsewhere": {"journal": "../other.lance"},
    "an encoder without fields": {"encoder": {}},
    "an encoder of wrong types": {"encoder": {"model": 7, "digest": "", "dim": 1, "dtype": "", "device": ""}},
}


@pytest.mark.parametrize("name", NO_DESCRIPTIONS)
def test_json_that_describes_no_store_is_refused_with_the_cure(tmp_path: Path, name: str) -> None:
    store = tmp_path / "s"
    ingest(write_log(tmp_path / "log.jsonl", conversation("ada", 2)), store)
    written = NO_DESCRIPTIONS[name]
    if isinstance(written, dict) and name != "format only":
        written = json.loads((store / "store.json").read_text()) | written
    (store / "store.json").write_text(json.dumps(written))
    done = run("search", "boat", "--tenant", "ada", "--store", store)
    assert (done.code, done.out) == (1, "")
    assert "store.json" in done.err and "backup" in done.err
    findings = {f["what"]: f for f in run("doctor", "--store", store, "--json").doc["findings"]}
    assert not findings["store"]["ok"] and "backup" in findings["store"]["text"]


def test_a_store_among_the_logs_is_no_log(tmp_path: Path) -> None:
    write_log(tmp_path / "a.jsonl", conversation("ada", 2))
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "store.json").write_text("{}")  # without a journal it is only a file
    store = tmp_path / "sub" / "mem"
    first = ingest(tmp_path, store)
    again = ingest(tmp_path, store)
    assert (first.code, again.code) == (3, 3), "sub/store.json is no log"
    assert (again.doc["turns"], again.doc["errors"]) == (2, 1)
    assert str(store) not in again.err
    itself = ingest(store, store)
    assert itself.code == 2 and "is an Undertow store" in itself.err


def test_a_trace_that_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", conversation("ada", 2))
    for trace in (tmp_path / "nowhere" / "trace.json", tmp_path):
        done = ingest(log, tmp_path / "s", "--trace", str(trace))
        assert (done.code, done.out) == (2, "")
        assert f"--trace {trace} cannot be written" in done.err
    assert not (tmp_path / "s").exists()


def test_a_value_error_of_the_engine_is_not_blamed_on_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "s"
    ingest(write_log(tmp_path / "log.jsonl", conversation("ada", 2)), store)
    broken = Mock(side_effect=ValueError("shapes do not match"))
    monkeypatch.setattr("undertow.engine.api.engine.Engine.search", broken)
    command = ("search", "boat", "--tenant", "ada", "--store", store)
    done = run(*command)
    assert (done.code, done.out) == (1, "")
    assert "shapes do not match" in done.err and "report" in done.err and "--debug" in done.err
    with pytest.raises(ValueError, match="shapes do not match"):
        run("--debug", *command)
    assert run("search", "boat", "--tenant", "ada", "--store", store, "--until", "soon").code == 2
    for bad in (("demo", "--llm", "no url"), ("reindex", "--store", store, "--encoder", "hash:x")):
        refused = run(*bad)
        assert refused.code == 2 and "report" not in refused.err
