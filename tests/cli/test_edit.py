"""The commands that change a store: update, delete, erase, policy, flush, jobs, reindex, import."""

from __future__ import annotations

from pathlib import Path

import pytest

from undertow.bench.mock.server import spawn_server

from ..support.cli import THETAS, Ran, contents, listed, run, tenants, turn_line, write_log

TURNS = 24


def test_a_deleted_turn_is_gone_and_its_memories_are_remade(store: Path, server: str) -> None:
    source = listed(store, "episodes", "ada")[0]["source_seqs"][0]
    turn = listed(store, "turns", "ada")[source]
    done = run("delete", turn["id"], "--store", store, "--llm", server, "--json")
    assert (done.code, done.doc["kind"], done.doc["settled"]) == (0, "turn", True)
    after = contents(store, "ada")
    assert source not in [t["seq"] for t in after["turns"] if not t.get("deleted")]
    assert [t["id"] for t in after["turns"] if t.get("deleted")] == [turn["id"]]
    assert after["explain"][source]["deleted"] is True
    current = [m for m in after["episodes"] + after["facts"] if m["superseded_at_seq"] is None]
    assert current and all(source not in m["source_seqs"] for m in current)
    assert run("delete", turn["id"], "--store", store).code == 1


def test_a_deletion_that_embeds_before_it_asks_needs_no_server(store: Path, server: str) -> None:
    """An episode that was never shown the turn has its facts written again: they are embedded for that."""

    def delete(seq: int, llm: str) -> Ran:
        turn = next(t for t in contents(store, "ada")["turns"] if t["seq"] == seq)
        return run("delete", turn["id"], "--store", store, "--llm", llm, "--json")

    before = contents(store, "ada")
    with_facts = {f["episode_id"] for f in before["facts"]}
    told = next(e for e in before["episodes"] if e["shown_seqs"] and e["id"] in with_facts)
    first, second = told["source_seqs"][0], told["shown_seqs"][0]
    assert delete(first, server).doc["settled"], "the episode is written again from the turns that it names"
    after = contents(store, "ada")
    (remade,) = [e for e in after["episodes"] if e["id"] == told["id"] and e["superseded_at_seq"] is None]
    assert second not in {*remade["source_seqs"], *remade["shown_seqs"]}
    resting = [f for f in after["facts"] if f["episode_id"] == told["id"] and second in f["source_seqs"]]
    assert any(f["superseded_at_seq"] is None for f in resting), "facts are written from all turns"
    done = delete(second, "off")
    assert (done.code, done.doc["deleted"], done.doc["settled"]) == (0, True, False), done.err
    assert "no LLM server" in done.err


def test_deleting_a_fact_needs_no_server_and_keeps_history(store: Path) -> None:
    fact = listed(store, "facts", "ada")[0]
    done = run("delete", fact["id"], "--store", store, "--llm", "off", "--json")
    assert (done.code, done.doc) == (0, {"id": fact["id"], "kind": "fact", "deleted": True, "settled": True})
    assert fact["id"] not in [f["id"] for f in listed(store, "facts", "ada")]
    versions = run("history", fact["id"], "--store", store, "--json").lines
    assert [v["deleted"] for v in versions] == [False, True]
    assert versions[0]["superseded_at_seq"] == versions[1]["made_at_seq"] == TURNS


def test_updating_a_fact_needs_no_server_and_keeps_history(store: Path) -> None:
    fact, text = listed(store, "facts", "ada")[0], "Ada sold the boat."
    of = ("--store", store, "--llm", "off")
    refused = run("update", fact["id"], text, *of, "--tenant", "bea")
    assert (refused.code, "no memory of 'bea'" in refused.err) == (1, True)
    done = run("update", fact["id"], text, *of, "--tenant", "ada", "--json")
    assert (done.code, done.doc) == (0, {"id": fact["id"], "kind": "fact", "updated": True, "settled": True})
    versions = run("history", fact["id"], "--store", store, "--json").lines
    assert [v["text"] for v in versions] == [fact["text"], text]
    known = run("get", fact["id"], "--store", store, "--json").doc
    assert known == versions[-1] == listed(store, "facts", "ada")[0]
    assert text in run("get", fact["id"], "--store", store).out
    assert (
        run("search", text, "--store", store, "--tenant", "ada", "-k", "1", "--json").doc["id"] == fact["id"]
    )
    empty = run("update", fact["id"], " ", "--store", store)
    assert (empty.code, "the text is empty" in empty.err) == (2, True)
    long = run("update", fact["id"], "x" * 601, *of)
    assert (long.code, "600 are allowed" in long.err) == (3, True)


def test_an_updated_turn_has_another_id(store: Path, server: str) -> None:
    turn = listed(store, "turns", "ada")[3]
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
    assert again.code == 0 and f"Updated turn {done.doc['id']}: it is replaced by " in again.out


def test_a_tenant_is_given_another_policy(store: Path, server: str) -> None:
    of = ("--tenant", "ada", "--store", store, "--json")
    first = {"tenant": "ada", "policy": "recmem", "generation": 1, "change": None}
    assert run("policy", *of).doc == first
    facts = listed(store, "facts", "ada")
    assert run("policy", "lazy", *of).code == 2
    waiting = run("policy", "eager", *of, "--llm", "off")
    change = {"policy": "eager", "generation": 2, "decided": 0, "records": TURNS + 1}
    assert (waiting.code, waiting.doc) == (0, {**first, "change": change})
    assert listed(store, "facts", "ada") == facts, "until the change is complete"
    shown = run("policy", "--tenant", "ada", "--store", store)
    assert "recmem" in shown.out and f"eager, 0 of {TURNS + 1} records" in shown.out
    done = run("policy", "eager", *of, "--llm", server)
    assert (done.code, done.doc) == (0, {**first, "policy": "eager", "generation": 2})
    assert run("policy", *of).doc == done.doc
    assert listed(store, "episodes", "ada") == []
    now = listed(store, "facts", "ada")
    assert now and not {m["id"] for m in now} & {m["id"] for m in facts}
    assert run("delete", now[0]["id"], "--store", store, "--json").code == 0
    refused = run("policy", "recmem", *of, "--llm", server)
    assert refused.code == 1 and "--drop-edits" in refused.err
    back = run("policy", "recmem", *of, "--llm", server, "--drop-edits")
    assert (back.code, back.doc) == (0, {**first, "generation": 3})
    assert run("policy", *of, "--drop-edits").code == 2


def test_after_a_flush_no_turn_waits_for_others(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "s"
    lines = [turn_line(who, n, f"the boat by the quay {n}") for who in ("ada", "bo") for n in (1, 2)]
    monkeypatch.setenv("UNDERTOW_POLICY", "nemori")
    log = write_log(tmp_path / "log.jsonl", lines)
    assert run("ingest", log, "--store", store, "--llm", server).code == 0
    flush = ("flush", "--store", store, "--json", "--llm")
    assert listed(store, "episodes", "ada") == listed(store, "episodes", "bo") == []
    waits = run(*flush, "off", "--tenant", "bo")
    assert (waits.code, waits.doc) == (0, {"tenants": 1, "settled": False}), waits.err
    done = run(*flush, server, "--tenant", "bo")
    assert (done.code, done.doc) == (0, {"tenants": 1, "settled": True}), done.err
    assert listed(store, "episodes", "bo") and listed(store, "episodes", "ada") == []
    done = run(*flush, server)
    assert (done.code, done.doc) == (0, {"tenants": 2, "settled": True}), done.err
    assert listed(store, "episodes", "ada")
    assert run(*flush, server, "--tenant", "nobody").code == 1


def test_erase_asks_first_then_leaves_no_byte(store: Path, built: Path) -> None:
    def held() -> bytes:
        return b"".join(p.read_bytes() for p in store.rglob("*") if p.is_file())

    erase = ("erase", "--tenant", "ada", "--store", store)
    assert b"ada day3 item21" in held()
    assert run(*erase, "--json").code == 2
    assert run(*erase, answer="n\n").code == 1
    done = run(*erase, "--now", "--yes", "--json")
    assert (done.code, done.doc["purged"], done.doc["turns_removed"]) == (0, True, TURNS)
    assert done.doc["rows_removed"] > TURNS
    assert b"ada day" not in held()
    assert list(tenants(store)) == ["bo"]
    assert run("explain", "--tenant", "ada", "--store", store).code == 1
    assert contents(store, "bo") == contents(built, "bo")


def test_erase_later_says_that_bytes_remain_and_now_certifies(store: Path) -> None:
    erase = ("erase", "--tenant", "ada", "--store", store)
    first = run(*erase, answer="y\n")
    assert (first.code, "until the next purge" in first.out) == (0, True)
    assert run("search", "boat", "--tenant", "ada", "--store", store).code == 1
    second = run(*erase, "--now", "--yes", "--json")
    assert (second.code, second.doc["turns_removed"]) == (0, TURNS)
    assert run(*erase, "--now", "--yes").code == 1


def test_parked_jobs_are_listed_and_replayed(tmp_path: Path, log: Path, server: str) -> None:
    store = tmp_path / "s"
    with spawn_server(malformed_rate=0.5, malformed_sticky=True) as bad:
        done = run("ingest", log, "--store", store, "--llm", bad, *THETAS, "--json")
    jobs = ("jobs", "--store", store, "--json")
    parked = run(*jobs).lines
    assert len(parked) == done.doc["dead_letters"] > 0
    assert {j["state"] for j in parked} == {"parked"}
    assert all(j["cluster_seqs"] and "no usable reply" in j["reason"] for j in parked)
    assert run(*jobs, "--replay", "--llm", "off").code == 2
    replayed = run(*jobs, "--replay", "--llm", server)
    assert (replayed.code, replayed.lines) == (0, [])
    assert f"{len(parked)} parked jobs" in replayed.err
    assert run("stats", "--store", store, "--json").doc["dead_letters"] == 0


def test_reindex_changes_vectors_and_nothing_else(store: Path, built: Path) -> None:
    done = run("reindex", "--store", store, "--encoder", "hash:128", "--json")
    assert (done.code, done.doc["encoder"]) == (0, "hash:128")
    for tenant in ("ada", "bo"):
        assert contents(store, tenant) == contents(built, tenant)
    search = ("search", "boat", "--tenant", "ada", "--store", store, "--json")
    old = run(*search)
    assert (old.code, "hash:128" in old.err and "reindex" in old.err) == (1, True)
    assert run(*search, "--encoder", "hash:128").lines
    assert sum(p.name.startswith("journal") for p in store.iterdir()) == 1


def test_an_export_is_imported_under_another_name_in_another_store(
    built: Path, tmp_path: Path, server: str
) -> None:
    lines = run("export", "--tenant", "ada", "--store", built).out
    file, store = tmp_path / "ada.jsonl", tmp_path / "other"
    file.write_text(lines)
    done = run("import", file, "--tenant", "acme/ada", "--store", store, "--llm", server, "--json")
    assert (done.code, done.doc["settled"], done.doc["tenant"]) == (0, True, "acme/ada")
    before, after = contents(built, "ada"), contents(store, "acme/ada")
    for kind in ("turns", "episodes", "facts"):
        assert [m["text"] for m in after[kind]] == [m["text"] for m in before[kind]]
    again = run("import", file, "--tenant", "acme/ada", "--store", store)
    assert (again.code, "is here already" in again.err) == (1, True)
    file.write_text(lines[: len(lines) // 2])
    cut = run("import", file, "--tenant", "bob", "--store", store)
    assert (cut.code, f"import:{len(file.read_text().splitlines())}:" in cut.err) == (3, True)
    assert list(tenants(store)) == ["acme/ada"]
