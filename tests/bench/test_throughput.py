"""`undertow bench ingest`: what it feeds, what it measures, and what it writes."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest

from undertow.bench.mock.llm import MODEL
from undertow.bench.mock.server import spawn_server
from undertow.bench.system.throughput import MOCK_REFUSALS, PhaseTimes, ingest, mock_llm, settings_for
from undertow.bench.system.throughput_load import copies, salted
from undertow.engine.base.config import Settings
from undertow.engine.base.model import LINKED_PAIRS, Turn, UndertowError
from undertow.engine.base.trace import Phase
from undertow.engine.encoders.factory import make_encoder
from undertow.engine.llm.client import ServerRefused

from ..support.cli import conversation, run, turn_line, write_log

MERGING = {"UNDERTOW_THETA_SIM": "0.5", "UNDERTOW_THETA_COUNT": "3"}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log.jsonl", [*conversation("ann", 9), *conversation("bea", 12)])


def texts_by_tenant(turns: list[Turn]) -> Counter[str]:
    """Of each message, how many tenants have it."""
    return Counter(text for _, text in {(t.tenant, m.content) for t in turns for m in t.messages})


def test_copies_share_their_texts_and_salted_ones_do_not(log: Path) -> None:
    plain = list(copies(log, 5))
    assert [t.tenant for t in plain[:5]] == [f"tenant-{n}" for n in range(5)]  # interleaved
    assert Counter(t.tenant for t in plain) == {
        "tenant-0": 9, "tenant-1": 12, "tenant-2": 9, "tenant-3": 12, "tenant-4": 9
    }  # fmt: skip
    assert texts_by_tenant(plain)["noted 0"] == 5
    own = list(salted(plain))
    assert set(texts_by_tenant(own).values()) == {1}
    assert [t.dedupe_key for t in own] == [t.dedupe_key for t in plain]


def test_a_short_conversation_begins_anew(log: Path) -> None:
    turns = list(copies(log, 1, 20))
    assert [t.text for t in turns[9:18]] == [t.text for t in turns[:9]]
    assert len({t.dedupe_key for t in turns}) == 20


def test_a_log_without_turns_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UndertowError, match=r"empty\.jsonl"):
        list(copies(write_log(tmp_path / "empty.jsonl", [""]), 2))


def test_a_phase_is_not_charged_for_those_inside_it() -> None:
    times = PhaseTimes()
    for name in ("admit", "encode"):
        times.began(name)
    times.ended(Phase("encode", 1, 2.0, 5.0))
    times.began("append")
    times.ended(Phase("append", 1, 5.0, 6.0))
    times.ended(Phase("admit", 1, 0.0, 10.0))
    assert times.seconds == {"encode": 3.0, "append": 1.0, "admit": 6.0}


def test_every_turn_is_followed_until_it_is_decided(log: Path) -> None:
    turns = list(salted(copies(log, 4, 15)))
    settings = Settings(encoder="hash:384", theta_sim=0.5, theta_count=3, batch_turns=8)
    with mock_llm(0.05) as url:
        settings = settings_for(settings.model_copy(update={"llm_url": url}), turns)
        told = ingest(turns, settings, make_encoder(settings))
    over_time = told["over_time"]
    assert over_time["searchable_turns"][-1] == over_time["consolidated_turns"][-1] == len(turns)
    assert over_time["queued_turns"][-1] == over_time["undecided_turns"][-1] == 0
    assert max(over_time["jobs_running"]) >= 1
    assert told["llm_calls"] > 0
    assert told["llm_calls"] == sum(used["calls"] for used in told["usage"].values())
    waits = told["wait_s"]
    assert waits["searchable"]["max"] <= waits["consolidated"]["max"]
    assert waits["consolidated"]["max"] >= 0.05  # a turn that waited for the LLM
    assert told["searchable_turns_per_s"] >= told["consolidated_turns_per_s"] > 0
    assert {"admit", "encode", "gate", "commit", "other"} <= told["time_s"].keys()
    assert sum(told["time_s"].values()) == pytest.approx(told["elapsed_s"], abs=0.05)


def test_as_many_pairs_are_linked_as_by_the_papers_theta(tmp_path: Path) -> None:
    words, chance = [f"word{n}" for n in range(30)], random.Random(5)
    said = [turn_line("ann", n, " ".join(chance.choices(words, k=12))) for n in range(90)]
    turns = list(salted(copies(write_log(tmp_path / "log.jsonl", said), 2)))
    settings = settings_for(Settings(encoder="hash:384"), turns)
    linked = total = 0
    for tenant in ("tenant-0", "tenant-1"):
        vectors = make_encoder(settings).encode([t.text for t in turns if t.tenant == tenant])
        wide = vectors.astype(np.float64)
        cosines = (wide @ wide.T)[np.triu_indices(len(wide), 1)]
        linked += int((cosines >= settings.similarity_threshold).sum())
        total += len(cosines)
    assert linked == pytest.approx(LINKED_PAIRS * total, rel=0.1)  # cosines are counted in bins


def test_thresholds_that_were_given_stay(log: Path) -> None:
    turns = list(copies(log, 2, 12))
    assert settings_for(Settings(encoder="hash:384", theta_sim=0.4), turns).similarity_threshold == 0.4
    assert settings_for(Settings(theta_sim=0.7), turns).similarity_threshold == 0.7
    assert settings_for(Settings(encoder="hash:384"), turns[:1]).theta_sim is None  # nothing to link


def test_a_server_that_refuses_is_no_rate(log: Path) -> None:
    turns = list(copies(log, 3, 15))
    with spawn_server(api_key="right") as url:
        settings = Settings(
            encoder="hash:384",
            theta_sim=0.5,
            theta_count=3,
            llm_url=url,
            llm_api_key="wrong",
            llm_model=MODEL,
        )
        with pytest.raises(ServerRefused, match=r"not all turns were decided.*3 tenants"):
            ingest(turns, settings, make_encoder(settings))


def test_the_command_writes_figures_picture_and_trace(log: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is missing: pip install 'undertow[eval]'")
    out = tmp_path / "out"
    done = run(
        *("bench", "ingest", "--data", log, "--tenants", "3", "--turns", "24", "--copies"),
        *("--llm-latency", "0.01", "--out", out, "--json"),
        env=MERGING,
    )
    assert (done.code, done.err) == (0, "")
    told = done.doc
    assert (told["tenants"], told["turns"], told["texts"]) == (3, 72, "plain copies")
    assert (told["encoder"], told["theta_sim"], told["llm"]) == ("hash:384", 0.5, "mock, 0.01 s")
    assert (told["encoder_dtype"], told["encoder_device"]) == ("float64", "cpu")
    assert (told["policy"], told["mock_refusal_rate"]) == ("recmem", MOCK_REFUSALS)
    assert told["merges"] > 0 < told["merge_refusals"]
    assert json.loads((out / "ingest.json").read_text()) == told
    assert (out / "ingest.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((out / "trace.json").read_text())["traceEvents"]
    assert told["llm_calls"] == sum(event["tid"].startswith("llm ") for event in events)


def test_the_command_prints_tables(log: Path) -> None:
    done = run("bench", "ingest", "--data", log, "--tenants", "2", "--turns", "4", "--llm-latency", "0")
    assert done.code == 0
    for name in ("salted", "searchable turns per s", "consolidated p95", "encode"):
        assert name in done.out


def ask(url: str, **body: object) -> dict[str, object]:
    request = Request(
        f"{url}/chat/completions",
        json.dumps({"model": MODEL, **body}).encode(),
        {"content-type": "application/json"},
    )
    with urlopen(request) as reply:
        choice: dict[str, object] = json.load(reply)["choices"][0]
    return choice


def test_the_mock_server_answers_other_memory_systems() -> None:
    """As mem0ai 2 and langmem ask; the same request gets the same reply."""
    new = "user: Ann sails to Norway in the summer with her sister and a red boat, says she on Monday"
    as_mem0 = [
        {"role": "user", "content": f"## Old\nold\n\n## New Messages\n{new}\n\n## Observation Date\nx"}
    ]
    as_langmem = [{"role": "user", "content": f"Keep memories. <session_1>\n{new}\n</session_1>"}]
    make = {"name": "Memory", "parameters": {"properties": {"content": {}}, "required": ["content"]}}
    tools = [{"type": "function", "function": f} for f in ({"name": "PatchDoc", "parameters": {}}, make)]
    with spawn_server() as url:
        choices = [ask(url, messages=as_mem0, response_format={"type": "json_object"}) for _ in range(2)]
        assert choices[0] == choices[1]
        content = json.loads(choices[0]["message"]["content"])  # type: ignore[index]
        assert content["memory"]
        assert all(memory["text"] and memory["text"] in new for memory in content["memory"])
        free = ask(url, messages=as_langmem, tools=tools)
        assert free["finish_reason"] == "stop"
        assert str(free["message"]["content"]).startswith("```json")  # type: ignore[index]
        choice = ask(url, messages=as_langmem, tools=tools, tool_choice="required")
        assert choice["finish_reason"] == "tool_calls"
        calls = choice["message"]["tool_calls"]  # type: ignore[index]
        assert {call["function"]["name"] for call in calls} == {"Memory"}
        assert all(json.loads(call["function"]["arguments"])["content"] in new for call in calls)
        with pytest.raises(HTTPError, match="400"):
            ask(url, messages=as_langmem, tools=tools[:1], tool_choice="required")
