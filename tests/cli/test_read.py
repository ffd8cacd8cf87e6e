"""The commands that only read: search, ask, list, explain, history, export."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from undertow.engine.storage.journal import Journal
from undertow.serving.cli import output
from undertow.serving.cli.commands import read
from undertow.serving.cli.commands.read import _filters

from ..support.cli import contents, run, tenants, turn_line, write_log

TURNS = 24


def test_search_ranks_and_bounds_and_filters_by_time(built: Path) -> None:
    of = ("--tenant", "ada", "--store", built)
    hits = run("search", "boat planks varnish", *of, "-k", "4", "--json").lines
    assert len(hits) == 4
    assert [h["score"] for h in hits] == sorted((h["score"] for h in hits), reverse=True)
    assert "boat" in hits[0]["memory"]
    one_day = ("--since", "2026-01-05", "--until", "2026-01-05")
    dated = run("search", "anything", *of, *one_day, "--json").lines
    assert {h["timestamp"] for h in dated} == {"2026-01-05T10:00:00"}
    assert "boat" in run("search", "boat planks", *of).out


@pytest.mark.parametrize("command", [("list", "--kind", "turns"), ("search", "boat", "-k", "30")])
def test_texts_are_not_squeezed_on_a_narrow_terminal(
    built: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    command += ("--tenant", "ada", "--store", str(built))
    records = run(*command, "--json").lines
    monkeypatch.setattr(output, "PIPED_WIDTH", 80)
    shown = run(*command).out
    assert max(map(len, shown.splitlines())) <= 80
    joined = "".join(shown.split())
    for record in records:
        text = (record.get("text") or record["memory"])[: output.SHOWN_CHARS]
        assert all("".join(s.split()) in joined for s in (text, record["id"][:8], record["timestamp"]))


def test_ask_answers_with_its_memories_and_cost(store: Path, server: str) -> None:
    def stats(*of: str) -> dict[str, Any]:
        return run("stats", "--store", store, *of, "--json").doc

    asked = ("ask", "what about the boat?", "--tenant", "ada", "--store", store, "--llm", server)
    answer = run(*asked, "--json").doc
    assert answer["answer"] and answer["memories"] and answer["usage"]["prompt_tokens"] > 0
    assert run(*asked, "--mode", "hybrid").out.strip() == answer["answer"].strip()
    refused = run(*asked, "--mode", "best_effort")
    assert refused.code == 3 and "'best_effort' is of the policy 'himem'" in refused.err
    ada, bo = stats("--tenant", "ada"), stats("--tenant", "bo")
    assert ada["usage"]["answer"]["calls"] == 2
    assert ada["prompt_tokens"] == stats()["prompt_tokens"] - bo["prompt_tokens"]


def test_export_has_every_version_and_vectors_on_demand(built: Path) -> None:
    lines = run("export", "--tenant", "ada", "--store", built).lines
    inner = {"turn", "episode", "fact", "decision", "control"}
    assert {line["kind"] for line in lines} == inner | {"export", "end"}
    assert (lines[0]["kind"], lines[-1]["kind"], lines[-1]["records"]) == ("export", "end", len(lines) - 2)
    assert {line["tenant"] for line in lines} == {"ada"}
    found = contents(built, "ada")
    for kind in ("turn", "episode", "fact"):
        exported = sorted((m for m in lines if m["kind"] == kind), key=lambda m: (m["id"], m.get("version")))
        keys = [m.pop("dedupe_key") for m in exported if kind == "turn"]
        assert len(keys) == len(set(keys)), "they identify repeated turns"
        assert exported == sorted(found[f"{kind}s"], key=lambda m: (m["id"], m.get("version")))
        assert not any("vector" in m for m in exported)
    for line in run("export", "--tenant", "ada", "--store", built, "--vectors").lines:
        if line["kind"] in ("turn", "episode", "fact"):
            assert len(line["vector"]) == 384
            assert sum(x * x for x in line["vector"]) == pytest.approx(1.0, abs=1e-2)


@pytest.mark.parametrize(
    ("options", "filters"),
    [
        (["topic=work"], {"topic": ["work"]}),
        (["topic=work", "topic=home", "n=3"], {"topic": ["work", "home"], "n": [3]}),
        (['n="3"', "n=true", "n=[1]", "a=b=c"], {"n": ["3", True, "[1]"], "a": ["b=c"]}),
        (['n={"$gte": 3, "$lt": 9}', "a=b"], {"n": {"$gte": 3, "$lt": 9}, "a": ["b"]}),
    ],
)
def test_metadata_filters_are_json_values_operators_or_plain_words(
    options: list[str], filters: dict[str, Any]
) -> None:
    assert _filters(options) == filters


def test_the_beginning_of_an_id_and_no_kind_are_enough(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = ("--store", built, "--json")
    turns = run("list", "--tenant", "ada", *of).lines
    assert turns == run("list", "--tenant", "ada", "--kind", "turns", *of).lines
    assert run("list", *of).lines == run("list", "--kind", "tenants", *of).lines
    whole = turns[3]["id"]
    assert run("get", whole[:8], *of).doc == run("get", whole, *of).doc == turns[3]
    assert run("history", whole[:8], *of).lines == [turns[3]]
    assert "no memory has the id" in run("get", "ffff", *of).err
    assert "give 4 characters or more" in run("get", whole[:1], *of).err
    monkeypatch.setattr(read, "FEWEST_ID_CHARS", 1)
    refused = [run("get", digit, *of).err for digit in "0123456789abcdef"]
    assert any("memories have ids that begin with" in told for told in refused), "of 48 turns"


def test_search_by_metadata(tmp_path: Path) -> None:
    marks: tuple[dict[str, Any], ...] = ({"topic": "work"}, {"topic": "home", "n": 3}, {})
    lines = [turn_line("ada", n, f"the boat by the quay {n}", metadata=m) for n, m in enumerate(marks)]
    store = tmp_path / "s"
    log = write_log(tmp_path / "log.jsonl", lines)
    assert run("ingest", log, "--store", store, "--llm", "off").code == 0
    search = ("search", "boat", "--tenant", "ada", "--store", store, "--json", "--where")
    assert [hit["source_seqs"] for hit in run(*search, "topic=home", "--where", "n=3").lines] == [[1]]
    why = run(*search, "topic=home", "--explain").doc
    assert [hit["reason"] for hit in why["explanation"]["left_out"]] == ["filters", "filters"]
    assert why["explanation"]["scores"].keys() >= {hit["id"] for hit in why["results"]}
    table = run(*search[:6], "--explain", "--where", "topic=home")
    assert "left out by" in table.out and "metadata" in table.out
    assert "1 of 3 turns pass the filter by metadata" in table.err
    assert [hit["source_seqs"] for hit in run(*search, 'n={"$gte": 3, "$lt": 4}').lines] == [[1]]
    other = run(*search, 'topic={"$ne": "home"}').lines
    assert sorted(hit["source_seqs"] for hit in other) == [[0], [2]]
    for wrong, words in (
        (["topic"], "KEY=VALUE"),
        (["=work"], "KEY=VALUE"),
        (['n={"$gte": 3'], "is no JSON"),
        (['n={"$over": 3}'], "'n' has the operator '$over'. Use one of $eq"),
        (["n=3", "--where", 'n={"$gt": 3}'], "Give it once"),
        (['n={"$gt": 3}', "--where", "n=3"], "Give it once"),
    ):
        done = run(*search, *wrong)
        assert (done.code, words in done.err) == (2, True), done.err


def test_readers_work_beside_a_writer_and_a_second_writer_is_refused(
    store: Path, log: Path, server: str
) -> None:
    with closing(Journal.open(store, writable=True)):
        assert tenants(store)
        assert run("search", "boat", "--tenant", "bo", "--store", store, "--json").lines
        asked = run("ask", "the boat?", "--tenant", "bo", "--store", store, "--llm", server)
        assert (asked.code, bool(asked.out.strip())) == (0, True)
        assert "cost of this call is not recorded" in asked.err
        second = run("ingest", log, "--store", store, "--llm", "off")
        assert (second.code, second.out) == (1, "")
        assert "is being written by process" in second.err
