"""The command line as a user meets it: every command on small stores, its JSON and its exit codes."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.mock.server import spawn_server
from undertow.engine.api.views.reports import Reports
from undertow.engine.storage.journal import Journal

from ..support.cli import (
    ENV,
    PROGRAM,
    SUMMARY_KEYS,
    THETAS,
    Ran,
    contents,
    conversation,
    run,
    turn_line,
    write_log,
)

LOCOMO = Path(__file__).resolve().parents[3] / "shared" / "data" / "locomo_dev.json"
TURNS = 24


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with spawn_server(refusal_rate=0.2) as url:
        yield url


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lines = [
        line
        for pair in zip(conversation("ada", TURNS), conversation("bo", TURNS), strict=True)
        for line in pair
    ]
    return write_log(tmp_path_factory.mktemp("log") / "log.jsonl", lines)


@pytest.fixture(scope="module")
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


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from undertow.serving.cli import app\n"
        "heavy = {'torch', 'sentence_transformers', 'lance', 'pyarrow', 'numba', 'openai', 'pydantic'}\n"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_it_says_which_version_it_is() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    shown = run("--version")
    assert (shown.code, shown.out) == (0, f"undertow {project['version']}\n")


def test_every_command_of_the_contract_exists() -> None:
    shown = run("--help").out
    for command in [
        "ingest",
        "search",
        "ask",
        "list",
        "explain",
        "get",
        "history",
        "export",
        "update",
        "delete",
        "erase",
        "jobs",
        "stats",
        "calibrate",
        "reindex",
        "doctor",
    ]:
        assert f" {command} " in shown
    assert "Exit codes" in shown


def test_summary_has_the_contract_s_keys_and_stdout_nothing_else(tmp_path: Path, log: Path) -> None:
    done = run("ingest", log, "--store", tmp_path / "s", "--llm", "off", "--json")
    assert list(done.doc) == [*SUMMARY_KEYS, "errors", "warnings"]
    assert done.out.count("\n") == 1
    assert (done.code, done.doc["tenants"], done.doc["turns"], done.doc["llm_calls"]) == (0, 2, 2 * TURNS, 0)


def test_the_same_log_twice_changes_nothing(store: Path, log: Path, server: str) -> None:
    before = contents(store, "ada")
    again = run("ingest", log, "--store", store, "--llm", server, *THETAS, "--json").doc
    assert again["turns"] == 2 * TURNS
    assert again["turns_per_s"] == 0
    assert contents(store, "ada") == before


def test_llm_off_then_a_server_is_as_if_it_had_always_been_there(
    tmp_path: Path, log: Path, built: Path, server: str
) -> None:
    store = tmp_path / "s"
    off = run("ingest", log, "--store", store, "--llm", "off", *THETAS, "--json")
    assert (off.code, off.doc["pending_jobs"], off.doc["llm_calls"]) == (0, 2, 0)
    assert "no LLM server" in off.err
    why = run("explain", "--store", store, "--tenant", "ada", "--json").lines
    decisions = [r["decision"] for r in why]
    at = decisions.index("pending")
    assert set(decisions[:at]) == {"waits"}
    assert set(decisions[at + 1 :]) == {"undecided"}
    waiting = run("jobs", "--store", store, "--json").lines
    assert [(j["tenant"], j["seq"], j["state"]) for j in waiting if j["tenant"] == "ada"] == [
        ("ada", at, "pending")
    ]

    on = run("ingest", log, "--store", store, "--llm", server, "--resume", *THETAS, "--json")
    assert (on.code, on.doc["pending_jobs"], on.doc["undecided_turns"]) == (0, 0, 0)
    for tenant in ("ada", "bo"):
        assert contents(store, tenant) == contents(built, tenant)
    assert run("jobs", "--store", store, "--json").lines == []


def test_resume_reads_on_where_the_file_was_left(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", ["{broken", *conversation("ada", 5)])
    first = run("ingest", log, "--store", tmp_path / "s", "--llm", "off", "--json")
    assert (first.code, first.doc["errors"], first.doc["turns"]) == (3, 1, 5)
    with log.open("a") as file:
        file.write(json.dumps(turn_line("ada", 5, "one more turn")) + "\n")
    resumed = run("ingest", log, "--store", tmp_path / "s", "--llm", "off", "--resume", "--json")
    assert (resumed.code, resumed.doc["errors"], resumed.doc["turns"]) == (0, 0, 6)
    again = run("ingest", log, "--store", tmp_path / "s", "--llm", "off", "--json")
    assert (again.code, again.doc["errors"], again.doc["turns"]) == (3, 1, 6)


def test_resume_starts_over_when_the_file_is_another(tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", conversation("ada", 3))
    run("ingest", log, "--store", tmp_path / "s", "--llm", "off")
    write_log(log, conversation("bo", 4))
    done = run("ingest", log, "--store", tmp_path / "s", "--llm", "off", "--resume", "--json")
    assert "reading it from the start" in done.err
    assert (done.doc["tenants"], done.doc["turns"], done.doc["warnings"]) == (2, 7, 1)


def test_locomo_conversations_are_taken_whole(tmp_path: Path) -> None:
    if not LOCOMO.exists():
        pytest.skip("the LoCoMo development conversations are not here")
    store = tmp_path / "s"
    done = run("ingest", LOCOMO, "--store", store, "--llm", "off", "--batch-turns", "100", "--json")
    assert (done.code, done.doc["tenants"], done.doc["turns"]) == (0, 5, 1414)
    sizes = run("list", "--kind", "tenants", "--store", store, "--json").lines
    assert [t["tenant"] for t in sizes] == ["conv-26", "conv-30", "conv-41", "conv-42", "conv-43"]
    assert [t["turns"] for t in sizes] == [214, 188, 340, 323, 349]


def test_search_ranks_and_bounds_and_filters_by_time(built: Path) -> None:
    hits = run(
        "search", "boat planks varnish", "--tenant", "ada", "--store", built, "-k", "4", "--json"
    ).lines
    assert len(hits) == 4
    assert [h["score"] for h in hits] == sorted((h["score"] for h in hits), reverse=True)
    assert "boat" in hits[0]["memory"]
    one_day = ("--since", "2026-01-05", "--until", "2026-01-05")
    dated = run("search", "anything", "--tenant", "ada", "--store", built, *one_day, "--json").lines
    assert dated
    assert {h["timestamp"] for h in dated} == {"2026-01-05T10:00:00"}
    assert "boat" in run("search", "boat planks", "--tenant", "ada", "--store", built).out


def test_ask_answers_with_its_memories_and_cost(store: Path, server: str) -> None:
    asked = ("ask", "what about the boat?", "--tenant", "ada", "--store", store, "--llm", server)
    answer = run(*asked, "--json").doc
    assert answer["answer"] and answer["memories"] and answer["usage"]["prompt_tokens"] > 0
    assert run(*asked, "--mode", "hybrid").out.strip() == answer["answer"].strip()
    refused = run(*asked, "--mode", "best_effort")
    assert refused.code == 3 and "'best_effort' is of the policy 'himem'" in refused.err
    spent = run("stats", "--store", store, "--tenant", "ada", "--json").doc
    assert spent["usage"]["answer"]["calls"] == 2
    assert (
        spent["prompt_tokens"]
        == run("stats", "--store", store, "--json").doc["prompt_tokens"]
        - (run("stats", "--store", store, "--tenant", "bo", "--json").doc["prompt_tokens"])
    )


def test_memories_explain_and_history_agree(built: Path) -> None:
    found = contents(built, "ada")
    why = {record["seq"]: record for record in found["explain"]}
    assert list(why) == list(range(TURNS))
    for kind, field in (("episodes", "episode_ids"), ("facts", "fact_ids")):
        assert found[kind]
        for memory in found[kind]:
            assert memory["id"] in why[memory["made_at_seq"]][field]
    episodes = found["episodes"]
    replaced = [m for m in episodes if m["superseded_at_seq"] is not None]
    assert replaced
    current = run("list", "--store", built, "--tenant", "ada", "--kind", "episodes", "--json").lines
    assert current == [m for m in episodes if m["superseded_at_seq"] is None]
    one = replaced[0]["id"]
    assert run("history", one, "--store", built, "--json").lines == [m for m in episodes if m["id"] == one]


def test_readable_output_holds_no_escape_codes(built: Path) -> None:
    for args in (
        ("list", "--kind", "tenants"),
        ("list", "--kind", "episodes", "--tenant", "ada", "--all"),
        ("explain", "--tenant", "ada"),
        ("stats",),
        ("jobs",),
        ("calibrate",),
    ):
        done = run(*args, "--store", built)
        assert (done.code, "\x1b" in done.out) == (0, False)
        assert done.out.strip()


def test_export_has_every_version_and_vectors_on_demand(built: Path) -> None:
    lines = run("export", "--tenant", "ada", "--store", built).lines
    inner = {"turn", "episode", "fact", "decision", "control"}
    assert {line["kind"] for line in lines} == inner | {"export", "end"}
    assert (lines[0]["kind"], lines[-1]["kind"], lines[-1]["records"]) == ("export", "end", len(lines) - 2)
    assert {line["tenant"] for line in lines} == {"ada"}
    found = contents(built, "ada")
    for kind, listed in (("turn", "turns"), ("episode", "episodes"), ("fact", "facts")):
        exported = sorted((m for m in lines if m["kind"] == kind), key=lambda m: (m["id"], m.get("version")))
        keys = [m.pop("dedupe_key") for m in exported if kind == "turn"]
        assert len(keys) == len(set(keys)), "what tells a repeated turn"
        assert exported == sorted(found[listed], key=lambda m: (m["id"], m.get("version")))
        assert not any("vector" in m for m in exported)
    for line in run("export", "--tenant", "ada", "--store", built, "--vectors").lines:
        if line["kind"] in ("turn", "episode", "fact"):
            assert len(line["vector"]) == 384
            assert sum(x * x for x in line["vector"]) == pytest.approx(1.0, abs=1e-2)


def test_a_deleted_turn_is_gone_and_its_memories_are_remade(store: Path, server: str) -> None:
    source = next(
        m for m in run("list", "--store", store, "--tenant", "ada", "--kind", "episodes", "--json").lines
    )["source_seqs"][0]
    turn = run("list", "--store", store, "--tenant", "ada", "--kind", "turns", "--json").lines[source]
    done = run("delete", turn["id"], "--store", store, "--llm", server, "--json")
    assert (done.code, done.doc["kind"], done.doc["settled"]) == (0, "turn", True)
    after = contents(store, "ada")
    assert source not in [t["seq"] for t in after["turns"] if not t.get("deleted")]
    assert [t["id"] for t in after["turns"] if t.get("deleted")] == [turn["id"]]
    assert after["explain"][source]["deleted"] is True
    current = [m for m in after["episodes"] + after["facts"] if m["superseded_at_seq"] is None]
    assert current
    assert all(source not in m["source_seqs"] for m in current)
    assert run("delete", turn["id"], "--store", store).code == 1


def test_a_deletion_that_embeds_before_it_asks_needs_no_server(store: Path, server: str) -> None:
    """An episode that was never shown the turn has its facts written anew: it is embedded for that."""

    def delete(seq: int, llm: str) -> Ran:
        turn = next(t for t in contents(store, "ada")["turns"] if t["seq"] == seq)
        return run("delete", turn["id"], "--store", store, "--llm", llm, "--json")

    before = contents(store, "ada")
    with_facts = {f["episode_id"] for f in before["facts"]}
    told = next(e for e in before["episodes"] if e["shown_seqs"] and e["id"] in with_facts)
    first, second = told["source_seqs"][0], told["shown_seqs"][0]
    assert delete(first, server).doc["settled"], "the episode is told anew of the turns that it names"
    after = contents(store, "ada")
    (remade,) = [e for e in after["episodes"] if e["id"] == told["id"] and e["superseded_at_seq"] is None]
    assert second not in {*remade["source_seqs"], *remade["shown_seqs"]}
    resting = [f for f in after["facts"] if f["episode_id"] == told["id"] and second in f["source_seqs"]]
    assert any(f["superseded_at_seq"] is None for f in resting), "facts are written of all turns"
    done = delete(second, "off")
    assert (done.code, done.doc["deleted"], done.doc["settled"]) == (0, True, False), done.err
    assert "no LLM server" in done.err


def test_deleting_a_fact_needs_no_server_and_keeps_history(store: Path) -> None:
    fact = run("list", "--store", store, "--tenant", "ada", "--kind", "facts", "--json").lines[0]
    done = run("delete", fact["id"], "--store", store, "--llm", "off", "--json")
    assert (done.code, done.doc) == (0, {"id": fact["id"], "kind": "fact", "deleted": True, "settled": True})
    left = run("list", "--store", store, "--tenant", "ada", "--kind", "facts", "--json").lines
    assert fact["id"] not in [f["id"] for f in left]
    versions = run("history", fact["id"], "--store", store, "--json").lines
    assert [v["deleted"] for v in versions] == [False, True]
    assert versions[0]["superseded_at_seq"] == versions[1]["made_at_seq"] == TURNS


def test_updating_a_fact_needs_no_server_and_keeps_history(store: Path) -> None:
    listed = ("list", "--store", store, "--tenant", "ada", "--kind", "facts", "--json")
    fact = run(*listed).lines[0]
    command = ("update", fact["id"], "Ada sold the boat.", "--store", store, "--llm", "off")
    refused = run(*command, "--tenant", "bea")
    assert (refused.code, "no memory of 'bea'" in refused.err) == (1, True)
    done = run(*command, "--tenant", "ada", "--json")
    assert (done.code, done.doc) == (0, {"id": fact["id"], "kind": "fact", "updated": True, "settled": True})
    versions = run("history", fact["id"], "--store", store, "--json").lines
    assert [v["text"] for v in versions] == [fact["text"], "Ada sold the boat."]
    assert run("get", fact["id"], "--store", store, "--json").doc == versions[-1] == run(*listed).lines[0]
    assert "Ada sold the boat." in run("get", fact["id"], "--store", store).out
    assert (
        run("search", "Ada sold the boat.", "--store", store, "--tenant", "ada", "-k", "1", "--json").doc[
            "id"
        ]
        == (fact["id"])
    )
    empty = run("update", fact["id"], " ", "--store", store)
    assert (empty.code, "the text is empty" in empty.err) == (2, True)
    long = run("update", fact["id"], "x" * 601, "--store", store, "--llm", "off")
    assert (long.code, "600 are allowed" in long.err) == (3, True)


def test_an_updated_turn_has_another_id(store: Path, server: str) -> None:
    turn = run("list", "--store", store, "--tenant", "ada", "--kind", "turns", "--json").lines[3]
    done = run("update", turn["id"], "The boat is green.", "--store", store, "--llm", server, "--json")
    assert (done.code, done.doc["kind"], done.doc["settled"]) == (0, "turn", True), done.err
    assert done.doc["id"] != turn["id"]
    known = run("get", done.doc["id"], "--store", store, "--json").doc
    assert (known["text"], known["seq"]) == ("user: The boat is green.", TURNS + 1)
    assert (known["timestamp"], known["session"]) == (turn["timestamp"], turn["session"])
    for command in ("get", "history"):
        gone = run(command, turn["id"], "--store", store)
        assert (gone.code, "no memory has the id" in gone.err) == (1, True)
    again = run("update", done.doc["id"], "It is blue.", "--store", store, "--llm", server)
    assert again.code == 0 and f"Updated turn {done.doc['id']}: in its place is " in again.out


def test_a_tenant_is_given_another_policy(store: Path, server: str) -> None:
    of = ("--tenant", "ada", "--store", store, "--json")
    first = {"tenant": "ada", "policy": "recmem", "generation": 1, "change": None}
    assert run("policy", *of).doc == first
    facts = run("list", *of, "--kind", "facts").lines
    assert run("policy", "lazy", *of).code == 3
    waiting = run("policy", "eager", *of, "--llm", "off")
    change = {"policy": "eager", "generation": 2, "decided": 0, "records": TURNS + 1}
    assert (waiting.code, waiting.doc) == (0, {**first, "change": change})
    assert run("list", *of, "--kind", "facts").lines == facts, "until it is done"
    shown = run("policy", "--tenant", "ada", "--store", store)
    assert "recmem" in shown.out and f"eager, 0 of {TURNS + 1} records" in shown.out
    done = run("policy", "eager", *of, "--llm", server)
    assert (done.code, done.doc) == (0, {**first, "policy": "eager", "generation": 2})
    assert run("policy", *of).doc == done.doc
    assert run("list", *of, "--kind", "episodes").lines == []
    now = run("list", *of, "--kind", "facts").lines
    assert now and not {m["id"] for m in now} & {m["id"] for m in facts}
    assert run("delete", now[0]["id"], "--store", store, "--json").code == 0
    refused = run("policy", "recmem", *of, "--llm", server)
    assert refused.code == 1 and "--drop-edits" in refused.err
    back = run("policy", "recmem", *of, "--llm", server, "--drop-edits")
    assert (back.code, back.doc) == (0, {**first, "generation": 3})
    assert run("policy", *of, "--drop-edits").code == 2


def test_after_a_flush_no_turn_waits_for_others(tmp_path: Path, server: str) -> None:
    log, store = tmp_path / "log.jsonl", tmp_path / "s"
    lines = [turn_line(who, n, f"the boat by the quay {n}") for who in ("ada", "bo") for n in (1, 2)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UNDERTOW_POLICY", "nemori")
        assert run("ingest", log, "--store", store, "--llm", server).code == 0

        def episodes(tenant: str) -> list[dict[str, Any]]:
            return run("list", "--store", store, "--tenant", tenant, "--kind", "episodes", "--json").lines

        assert episodes("ada") == episodes("bo") == []
        waits = run("flush", "--store", store, "--tenant", "bo", "--llm", "off", "--json")
        assert (waits.code, waits.doc) == (0, {"tenants": 1, "settled": False}), waits.err
        done = run("flush", "--store", store, "--tenant", "bo", "--llm", server, "--json")
        assert (done.code, done.doc) == (0, {"tenants": 1, "settled": True}), done.err
        assert episodes("bo") and episodes("ada") == []
        done = run("flush", "--store", store, "--llm", server, "--json")
        assert (done.code, done.doc) == (0, {"tenants": 2, "settled": True}), done.err
        assert episodes("ada")
        assert run("flush", "--store", store, "--tenant", "nobody", "--llm", server).code == 1


def test_search_by_metadata(tmp_path: Path) -> None:
    marks: list[dict[str, Any]] = [{"topic": "work"}, {"topic": "home", "n": 3}, {"n": "3"}, {"n": True}, {}]
    lines = [turn_line("ada", n, f"the boat by the quay {n}", metadata=m) for n, m in enumerate(marks)]
    store = tmp_path / "s"
    log = write_log(tmp_path / "log.jsonl", lines)
    assert run("ingest", log, "--store", store, "--llm", "off").code == 0

    def seqs(*filters: str) -> list[int]:
        options = [part for text in filters for part in ("--where", text)]
        done = run("search", "boat", "--tenant", "ada", "--store", store, *options, "--json")
        assert done.code == 0, done.err
        return sorted(hit["source_seqs"][0] for hit in done.lines)

    assert seqs() == [0, 1, 2, 3, 4]
    assert seqs("topic=work") == [0]
    assert seqs("topic=work", "topic=home") == [0, 1]
    assert seqs("topic=home", "n=3") == [1]
    assert (seqs("n=3"), seqs('n="3"'), seqs("n=true"), seqs("n=4")) == ([1], [2], [3], [])
    for wrong in ("topic", "=work"):
        done = run("search", "boat", "--tenant", "ada", "--store", store, "--where", wrong)
        assert (done.code, "KEY=VALUE" in done.err) == (2, True)


def test_erase_asks_first_then_leaves_no_byte(store: Path, built: Path) -> None:
    held = b"".join(p.read_bytes() for p in store.rglob("*") if p.is_file())
    assert b"ada day3 item21" in held
    assert run("erase", "--tenant", "ada", "--store", store, "--json").code == 2
    assert run("erase", "--tenant", "ada", "--store", store, answer="n\n").code == 1
    done = run("erase", "--tenant", "ada", "--store", store, "--now", "--yes", "--json")
    assert done.code == 0
    assert (done.doc["purged"], done.doc["turns_removed"]) == (True, TURNS)
    assert done.doc["rows_removed"] > TURNS
    for path in store.rglob("*"):
        assert not path.is_file() or b"ada day" not in path.read_bytes()
    assert [t["tenant"] for t in run("list", "--kind", "tenants", "--store", store, "--json").lines] == ["bo"]
    assert run("explain", "--tenant", "ada", "--store", store).code == 1
    assert contents(store, "bo") == contents(built, "bo")


def test_erase_later_says_that_bytes_remain_and_now_certifies(store: Path) -> None:
    first = run("erase", "--tenant", "ada", "--store", store, answer="y\n")
    assert first.code == 0
    assert "until the next purge" in first.out
    assert run("search", "boat", "--tenant", "ada", "--store", store).code == 1
    assert run("history", "0" * 32, "--store", store).code == 1
    second = run("erase", "--tenant", "ada", "--store", store, "--now", "--yes", "--json")
    assert (second.code, second.doc["turns_removed"]) == (0, TURNS)
    assert run("erase", "--tenant", "ada", "--store", store, "--now", "--yes").code == 1


def test_parked_jobs_are_listed_and_replayed(tmp_path: Path, log: Path, server: str) -> None:
    store = tmp_path / "s"
    with spawn_server(malformed_rate=0.5, malformed_sticky=True) as bad:
        done = run("ingest", log, "--store", store, "--llm", bad, *THETAS, "--json")
    parked = run("jobs", "--store", store, "--json").lines
    assert len(parked) == done.doc["dead_letters"] > 0
    assert {j["state"] for j in parked} == {"parked"}
    assert all(j["cluster_seqs"] and "no usable reply" in j["reason"] for j in parked)
    assert run("jobs", "--store", store, "--replay", "--llm", "off").code == 2
    replayed = run("jobs", "--store", store, "--replay", "--llm", server, "--json")
    assert (replayed.code, replayed.lines) == (0, [])
    assert f"{len(parked)} parked jobs" in replayed.err
    assert run("stats", "--store", store, "--json").doc["dead_letters"] == 0


def test_a_server_that_is_gone_or_refuses_leaves_work_pending_with_exit_4(
    tmp_path: Path, log: Path, built: Path, server: str
) -> None:
    gone = run("ingest", log, "--store", tmp_path / "s", "--llm", "http://127.0.0.1:9/v1", *THETAS, "--json")
    assert (gone.code, gone.doc["turns"], gone.doc["pending_jobs"]) == (4, 2 * TURNS, 2)
    assert "does not answer" in gone.err
    refusing = ("--llm", server, "--model", "another")
    refused = run("ingest", log, "--store", tmp_path / "s", *refusing, *THETAS, "--json")
    assert (refused.code, refused.doc["pending_jobs"]) == (4, 2)
    assert "UNDERTOW_LLM_MODEL" in refused.err
    assert run("search", "boat", "--tenant", "ada", "--store", tmp_path / "s", "-k", "1", "--json").lines
    fine = run("ingest", log, "--store", tmp_path / "s", "--llm", server, *THETAS)
    assert fine.code == 0
    assert contents(tmp_path / "s", "ada") == contents(built, "ada")


def test_a_spent_budget_is_said_and_is_no_failure(tmp_path: Path, log: Path, server: str) -> None:
    env = {"UNDERTOW_TENANT_TOKEN_BUDGET": "1"}
    done = run("ingest", log, "--store", tmp_path / "s", "--llm", server, *THETAS, "--json", env=env)
    assert (done.code, done.doc["pending_jobs"]) == (0, 2)
    assert "budget of 1 tokens" in done.err


def test_trace_holds_steps_and_calls(tmp_path: Path, log: Path, server: str) -> None:
    trace = tmp_path / "trace.json"
    run("ingest", log, "--store", tmp_path / "s", "--llm", server, *THETAS, "--trace", trace)
    events = json.loads(trace.read_text())["traceEvents"]
    assert {"admit", "decide", "gate", "commit", "episode", "merge", "refine"} <= {e["name"] for e in events}
    assert all(e["ph"] == "X" and e["dur"] >= 0 for e in events)


def test_readers_work_beside_a_writer_and_a_second_writer_is_refused(
    store: Path, log: Path, server: str
) -> None:
    with_lock = Journal.open(store, writable=True)
    try:
        assert run("list", "--kind", "tenants", "--store", store, "--json").lines
        assert run("search", "boat", "--tenant", "bo", "--store", store, "--json").lines
        asked = run("ask", "the boat?", "--tenant", "bo", "--store", store, "--llm", server)
        assert (asked.code, bool(asked.out.strip()), "cost of this call is not recorded" in asked.err) == (
            0,
            True,
            True,
        )
        second = run("ingest", log, "--store", store, "--llm", "off")
        assert (second.code, second.out) == (1, "")
        assert "is being written by process" in second.err
    finally:
        with_lock.close()


def test_calibrate_proposes_the_quantile_of_pair_cosines(built: Path) -> None:
    wide = run("calibrate", "--store", built, "--share", "0.3", "--theta-count", "3", "--json").doc
    tight = run("calibrate", "--store", built, "--share", "0.01", "--tenant", "bo", "--json").doc
    assert wide["theta_sim"] < tight["theta_sim"]
    assert (wide["tenants"], wide["turns"], wide["pairs"]) == (2, 2 * TURNS, TURNS * (TURNS - 1))
    assert (tight["tenants"], tight["theta_count"]) == (1, 5)
    assert all(p["triggers"] > 0 for p in wide["proposals"] if p["share"] >= 0.3)
    assert run("calibrate", "--store", built, "--share", "2").code == 2


def test_reindex_changes_vectors_and_nothing_else(store: Path, built: Path) -> None:
    done = run("reindex", "--store", store, "--encoder", "hash:128", "--json")
    assert (done.code, done.doc["encoder"]) == (0, "hash:128")
    for tenant in ("ada", "bo"):
        assert contents(store, tenant) == contents(built, tenant)
    old = run("search", "boat", "--tenant", "ada", "--store", store)
    assert old.code == 1
    assert "hash:128" in old.err and "reindex" in old.err
    new = run("search", "boat", "--tenant", "ada", "--store", store, "--encoder", "hash:128", "--json")
    assert new.lines
    assert sum(p.name.startswith("journal") for p in store.iterdir()) == 1


def test_doctor_finds_what_is_wrong(built: Path, server: str) -> None:
    def by_name(*args: str | Path) -> dict[str, bool]:
        return {f["what"]: f["ok"] for f in run("doctor", *args, "--json").doc["findings"]}

    fine = by_name("--store", built, "--llm", server)
    assert fine["encoder"] and fine["store"] and fine["llm server"] and fine["python"]
    wrong = run("doctor", "--store", built, "--llm", "http://127.0.0.1:9/v1", "--encoder", "hash:x", "--json")
    found = {f["what"]: f for f in wrong.doc["findings"]}
    assert wrong.code == 1
    assert "cannot be reached" in found["llm server"]["text"]
    assert "hash:384" in found["encoder"]["text"]
    assert "attention" in run("doctor", "--llm", "off").out


def test_wrong_usage_is_exit_2(tmp_path: Path, log: Path, built: Path) -> None:
    for args in (
        ("ingest", log, "--store", tmp_path / "s", "--theta-sim", "1.5"),
        ("ingest", log, "--store", tmp_path / "s", "--llm", "not a url"),
        ("ingest", tmp_path / "nothing.jsonl", "--store", tmp_path / "s"),
        ("ingest", log, "--store", tmp_path / "s", "--format", "xml"),
        ("list", "--kind", "turns", "--store", built),
        ("list", "--kind", "tenants", "--tenant", "ada", "--store", built),
        ("search", "boat", "--tenant", "ada", "--store", built, "--since", "yesterday"),
        ("search", "  ", "--tenant", "ada", "--store", built),
    ):
        done = run(*args)
        assert (done.code, done.out) == (2, ""), args
        assert done.err.strip()
    assert not (tmp_path / "s").exists()
    bad_env = run("stats", "--store", built, env={"UNDERTOW_THETA_COUNT": "0"})
    assert bad_env.code == 0  # reading needs no threshold
    refused = run("ingest", log, "--store", tmp_path / "s", env={"UNDERTOW_THETA_COUNT": "0"})
    assert (refused.code, "theta_count" in refused.err) == (2, True)


def test_ctrl_c_ends_after_a_commit_and_resume_completes(tmp_path: Path, log: Path, built: Path) -> None:
    store = tmp_path / "s"
    with spawn_server(refusal_rate=0.2, latency_ms=150) as slow:
        command = ["ingest", str(log), "--store", str(store), "--llm", slow, "--batch-turns", "8", *THETAS]
        running = subprocess.Popen(
            [*PROGRAM, *command, "--json"],
            env=ENV | {"PATH": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        _wait_for_an_episode(store)
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
    assert running.returncode == 130, err
    assert "--resume" in err and "Traceback" not in err
    assert json.loads(out)["undecided_turns"] > 0
    with spawn_server(refusal_rate=0.2) as url:
        done = run("ingest", log, "--store", store, "--llm", url, "--resume", *THETAS)
    assert done.code == 0
    for tenant in ("ada", "bo"):
        assert contents(store, tenant) == contents(built, tenant)


def _wait_for_an_episode(store: Path) -> None:
    for _ in range(3600):
        time.sleep(0.05)
        if (store / "store.json").exists():
            journal = Journal.open(store, writable=False)
            reports = Reports(journal)
            if "ada" in reports.tenants and reports.memories("ada", "episode"):
                return
    pytest.fail("no episode came within three minutes")


def test_the_program_runs_as_a_process(tmp_path: Path, log: Path) -> None:
    command = [*PROGRAM, "ingest", str(log), "--store", str(tmp_path / "s"), "--llm", "off", "--json"]
    done = subprocess.run(command, env=ENV | {"PATH": ""}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["turns"] == 2 * TURNS
    closed = subprocess.run(
        f"{' '.join(PROGRAM)} export --tenant ada --store {tmp_path / 's'} --vectors | head -c 10",
        shell=True,
        env=ENV | {"PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )
    assert (len(closed.stdout), closed.stderr) == (10, "")


def test_an_export_is_imported_under_another_name_in_another_store(
    built: Path, tmp_path: Path, server: str
) -> None:
    lines = run("export", "--tenant", "ada", "--store", built).out
    file, store = tmp_path / "ada.jsonl", tmp_path / "other"
    file.write_text(lines)
    done = run("import", file, "--tenant", "acme/ada", "--store", store, "--llm", server, "--json")
    assert (done.code, done.doc["settled"], done.doc["tenant"]) == (0, True, "acme/ada")
    before, after = contents(built, "ada"), contents(store, "acme/ada")
    for listed in ("turns", "episodes", "facts"):
        assert [m["text"] for m in after[listed]] == [m["text"] for m in before[listed]]
    again = run("import", file, "--tenant", "acme/ada", "--store", store)
    assert (again.code, "has memories here" in again.err) == (1, True)
    file.write_text(lines[: len(lines) // 2])
    cut = run("import", file, "--tenant", "bob", "--store", store)
    assert (cut.code, f"import:{len(file.read_text().splitlines())}:" in cut.err) == (3, True)
    assert [r["tenant"] for r in run("list", "--store", store, "--kind", "tenants", "--json").lines] == [
        "acme/ada"
    ]
