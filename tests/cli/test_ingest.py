"""The ingest command: its summary, resuming, pending work and interrupts."""

from __future__ import annotations

import json
import signal
from contextlib import closing
from pathlib import Path

from undertow.bench.mock.server import spawn_server
from undertow.engine.api.views.reports import Reports
from undertow.engine.storage.journal import Journal

from ..engine.readers.exports.samples import ANDROID, boat_chat, write_zip
from ..support.cli import SUMMARY_KEYS, THETAS, contents, conversation, run, turn_line, write_log
from ..support.cluster.processes import Command

TURNS = 24


def test_stdout_is_one_summary_with_the_contract_s_keys(tmp_path: Path, log: Path) -> None:
    done = run("ingest", log, "--store", tmp_path / "s", "--llm", "off", "--json")
    assert list(done.doc) == [*SUMMARY_KEYS, "errors", "warnings", "run"]
    assert done.out.count("\n") == 1
    assert (done.code, done.doc["tenants"], done.doc["turns"], done.doc["llm_calls"]) == (0, 2, 2 * TURNS, 0)


def test_the_same_log_twice_changes_nothing(store: Path, log: Path, server: str) -> None:
    before = contents(store, "ada")
    again = run("ingest", log, "--store", store, "--llm", server, *THETAS, "--json").doc
    assert again["turns"] == 2 * TURNS
    assert again["turns_per_s"] == 0
    assert {name: n for name, n in again["run"].items() if n} == dict.fromkeys(
        ("read_turns", "known_turns"), 2 * TURNS
    )
    assert contents(store, "ada") == before


def test_llm_off_then_a_server_is_as_if_it_had_always_been_there(
    tmp_path: Path, log: Path, built: Path, server: str
) -> None:
    store = tmp_path / "s"
    off = run("ingest", log, "--store", store, "--llm", "off", *THETAS, "--json")
    assert (off.code, off.doc["pending_jobs"], off.doc["llm_calls"]) == (0, 2, 0)
    assert "no LLM server" in off.err
    decisions = [r["decision"] for r in contents(store, "ada")["explain"]]
    at = decisions.index("pending")
    assert set(decisions[:at]) == {"waits"}
    assert set(decisions[at + 1 :]) == {"undecided"}
    jobs = run("jobs", "--store", store, "--json").lines
    ada = [(j["seq"], j["state"]) for j in jobs if j["tenant"] == "ada"]
    assert ada == [(at, "pending")]
    on = run("ingest", log, "--store", store, "--llm", server, "--resume", *THETAS, "--json")
    assert (on.code, on.doc["pending_jobs"], on.doc["undecided_turns"]) == (0, 0, 0)
    for tenant in ("ada", "bo"):
        assert contents(store, tenant) == contents(built, tenant)
    assert run("jobs", "--store", store, "--json").lines == []


def test_resume_reads_on_where_the_file_was_left_and_starts_over_in_another_file(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", ["{broken", *conversation("ada", 5)])
    ingest = ("ingest", log, "--store", tmp_path / "s", "--llm", "off", "--json")
    first = run(*ingest)
    assert (first.code, first.doc["errors"], first.doc["turns"]) == (3, 1, 5)
    with log.open("a") as file:
        file.write(json.dumps(turn_line("ada", 5, "one more turn")) + "\n")
    resumed = run(*ingest, "--resume")
    assert (resumed.code, resumed.doc["errors"], resumed.doc["turns"]) == (0, 0, 6)
    told = {"read_turns": 1, "new_turns": 1, "resumed_turns": 5, "resumed_errors": 1}
    assert {name: n for name, n in resumed.doc["run"].items() if n} == told
    shown = run(*ingest[:-1], "--resume").out.split()
    assert "turns skipped by --resume 6" in " ".join(shown)
    again = run(*ingest)
    assert (again.code, again.doc["errors"], again.doc["turns"]) == (3, 1, 6)
    write_log(log, conversation("bo", 4))
    other = run(*ingest, "--resume")
    assert "reading it from the start" in other.err
    assert (other.doc["tenants"], other.doc["turns"], other.doc["warnings"]) == (2, 10, 1)


def test_a_server_that_is_gone_or_refuses_leaves_work_pending_with_exit_4(
    tmp_path: Path, log: Path, built: Path, server: str
) -> None:
    ingest = ("ingest", log, "--store", tmp_path / "s", *THETAS, "--json", "--llm")
    gone = run(*ingest, "http://127.0.0.1:9/v1")
    assert (gone.code, gone.doc["turns"], gone.doc["pending_jobs"]) == (4, 2 * TURNS, 2)
    assert "does not answer" in gone.err
    refused = run(*ingest, server, "--model", "another")
    assert (refused.code, refused.doc["pending_jobs"]) == (4, 2)
    assert "UNDERTOW_LLM_MODEL" in refused.err
    assert run("search", "boat", "--tenant", "ada", "--store", tmp_path / "s", "-k", "1", "--json").lines
    assert run(*ingest, server).code == 0
    assert contents(tmp_path / "s", "ada") == contents(built, "ada")


def test_a_spent_budget_is_reported_and_is_no_failure(tmp_path: Path, log: Path, server: str) -> None:
    env = {"UNDERTOW_TENANT_TOKEN_BUDGET": "1"}
    done = run("ingest", log, "--store", tmp_path / "s", "--llm", server, *THETAS, "--json", env=env)
    assert (done.code, done.doc["pending_jobs"]) == (0, 2)
    assert "budget of 1 tokens" in done.err


def test_trace_holds_steps_and_calls(tmp_path: Path, log: Path, server: str) -> None:
    trace = tmp_path / "trace.json"
    run("ingest", log, "--store", tmp_path / "s", "--llm", server, *THETAS, "--trace", trace)
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"admit", "decide", "gate", "commit", "episode", "merge"} <= {e["name"] for e in events}
    assert all(e["ph"] == "X" and e["dur"] >= 0 for e in events)


def test_ctrl_c_ends_after_a_commit_and_resume_completes(tmp_path: Path, log: Path, built: Path) -> None:
    store = tmp_path / "s"
    with spawn_server(refusal_rate=0.2, latency_ms=150) as slow:
        small = ("--batch-turns", "8")
        command = ("ingest", log, "--store", store, "--llm", slow, *small, *THETAS, "--json")
        with Command(tmp_path / "interrupted", *command) as running:
            running.wait_until(lambda: _has_episode(store))
            running.process.send_signal(signal.SIGINT)
            assert running.process.wait(timeout=60) == 130, running.err
    assert "--resume" in running.err and "Traceback" not in running.err
    assert json.loads(running.out)["undecided_turns"] > 0
    with spawn_server(refusal_rate=0.2) as url:
        done = run("ingest", log, "--store", store, "--llm", url, "--resume", *THETAS)
    assert done.code == 0
    for tenant in ("ada", "bo"):
        assert contents(store, tenant) == contents(built, tenant)


def _has_episode(store: Path) -> bool:
    if not (store / "store.json").exists():
        return False
    with closing(Journal.open(store, writable=False)) as journal:
        reports = Reports(journal)
        return "ada" in reports.tenants and bool(reports.memories("ada", "episode"))


def test_exports_are_ingested_and_found_for_their_owner(tmp_path: Path) -> None:
    store = tmp_path / "s"
    write_zip(tmp_path / "export.zip", {"conversations.json": [boat_chat()]})
    (tmp_path / "WhatsApp Chat with Ann.txt").write_text(ANDROID)
    logs = sorted(tmp_path.glob("*.*"))
    command: tuple[str | Path, ...] = ("ingest", *logs, "--store", store, "--llm", "off", "--json")
    refused = run(*command)
    assert (refused.code, refused.doc["turns"], refused.doc["errors"]) == (3, 0, 2)
    assert refused.err.count("Name the owner of its turns with --tenant.") == 2
    done = run(*command, "--tenant", "ann", "--resume")
    assert (done.code, done.doc["tenants"], done.doc["turns"], done.doc["errors"]) == (0, 1, 4, 0)
    assert "left out" in done.err
    other = run(*command, "--tenant", "bo", "--resume")
    assert (other.doc["tenants"], other.doc["turns"]) == (2, 8)
    again = run(*command, "--tenant", "ann")
    assert (again.doc["turns"], again.doc["run"]["new_turns"]) == (8, 0)
    for query, words in (("Marine varnish", "Marine varnish."), ("bring bread", "I bring bread")):
        assert words in run("search", "--tenant", "ann", query, "--store", store, "--json").out
