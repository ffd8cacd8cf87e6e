"""Updating a memory: new words in its place, through the log, whatever the batching and whenever it dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.model import InputError, MemoryKind, Message, Turn, UndertowError

from ....support.api.updates import GARDEN, GARDENS, NEW, PAIRS, current, one, reports_of
from ....support.engine import MARKER, NEVER, RecordingLLM, bytes_hold, open_engine, turn_of


def found(engine: Engine, text: str, tenant: str = "ann") -> list[str]:
    return [hit.memory for hit in engine.search(tenant, text, k_sub=50, k_epi=50, k_sem=50).ranked()]


# ---- episodes and facts


@pytest.mark.parametrize("kind", ["episode", "fact"])
def test_an_update_is_a_new_version_with_the_users_words(kind: MemoryKind, tmp_path: Path) -> None:
    llm = RecordingLLM(MockReplies(2))
    with open_engine(tmp_path, llm, **PAIRS, search="dense") as engine:
        engine.add_batch(GARDENS)
        assert engine.drain()
        old, others = one(engine, kind), engine.get_all("ann")
        asked, stats = len(llm.prompts["ann"]), engine.stats()
        updated = engine.update(old.id, f"  {NEW}\n", tenant="ann")
        assert (updated.id, updated.kind) == (old.id, kind)
        assert old.text not in found(engine, old.text) or any(m.text == old.text for m in others if m != old)
        assert engine.drain()
        new = current(engine, old)
        assert (new.text, new.version, new.made_at_seq) == (NEW, old.version + 1, 6)
        assert (new.model, new.prompt_version) == (None, None)
        for name in ("source_seqs", "timestamp", "born_at_seq", "ordinal", "episode_id", "fact_kind"):
            assert getattr(new, name) == getattr(old, name), name
        assert [m for m in engine.get_all("ann") if m.id != old.id] == [m for m in others if m.id != old.id]
        assert (len(llm.prompts["ann"]), engine.stats()) == (asked, stats), (
            "no LLM call, nothing more or less"
        )
        best = engine.search("ann", NEW).ranked(1)[0]
        assert (best.id, best.memory) == (old.id, NEW)
        assert best.score == pytest.approx(1.0, abs=1e-3)
        history = engine.history(old.id)
        assert [v["text"] for v in history][-2:] == [old.text, NEW]
        assert (history[-2]["superseded_at_seq"], history[-1]["superseded_at_seq"]) == (6, None)
        live = (engine.stats(), engine.get_all("ann"), engine.search("ann", NEW), engine.get(old.id))
    with open_engine(tmp_path, **PAIRS, search="dense") as engine:
        assert (engine.stats(), engine.get_all("ann"), engine.search("ann", NEW), engine.get(old.id)) == live
        exported = [r for r in reports_of(tmp_path) if r.get("control") == "update"]
        assert [r["body"] for r in exported] == [{"memory_id": old.id, "kind": kind, "text": NEW}]


@pytest.mark.parametrize("change", ["update", "delete"])
def test_what_a_user_has_changed_is_out_of_search_before_the_cursor_reaches_it(
    change: str, engine: Engine
) -> None:
    fact = one(engine, "fact")
    engine.add_batch([turn_of("ann", 50, fact.text)])
    assert engine.drain()
    engine._llm = engine.scheduler.llm_calls.llm = None
    engine.add_batch([turn_of("ann", n, f"{GARDEN} {n % 2}") for n in range(60, 64)])
    assert not engine.drain(), "an undecided turn stands in front of the change"
    assert fact.id in [hit.id for hit in engine.search("ann", fact.text, k_sem=50).facts]
    if change == "update":
        engine.update(fact.id, NEW)
    else:
        engine.delete(fact.id)
    after = engine.search("ann", fact.text, k_sem=50)
    assert fact.id not in [hit.id for hit in after.facts] and after.facts and after.turns
    engine._llm = engine.scheduler.llm_calls.llm = MockLLM(MockReplies(2))
    engine.resume()
    assert engine.drain()
    left = [hit.memory for hit in engine.search("ann", NEW, k_sem=50).facts if hit.id == fact.id]
    assert left == ([NEW] if change == "update" else [])


def test_the_last_of_several_changes_counts(engine: Engine) -> None:
    first, second = engine.tenants.get("ann").current("fact")[:2]
    for words in ("one", "two", NEW):
        engine.update(first.id, words)
    engine.delete(second.id)
    engine.update(second.id, "too late")
    assert engine.drain()
    assert current(engine, first).version == first.version + 3
    assert current(engine, first).text == NEW
    assert second.id not in [m.id for m in engine.get_all("ann")]
    assert [v["deleted"] for v in engine.history(second.id)] == [False, True]
    late = [
        r
        for r in reports_of(Path(str(engine.journal.location)))
        if "deleted before" in (r.get("reason") or "")
    ]
    assert [r["seq"] for r in late] == [engine.tenants.get("ann").next_seq - 1]


@pytest.mark.parametrize(
    ("kind", "text", "match"),
    [
        ("fact", " \n", "'text': is empty"),
        ("fact", "x" * 601, "601 characters, 600 are allowed in facts"),
        ("episode", "x" * 4001, "4,001 characters"),
        ("fact", "half \ud800", "surrogate"),
        ("fact", "a\x00b", "NUL"),
        ("episode", [{"role": "user", "content": "x"}], "Messages are for turns"),
        ("turn", " ", r"messages\[0\].content': is empty"),
        ("turn", [{"role": "user", "content": "a"}] * 2, "make 2 turns"),
        ("turn", [{"content": "a"}], "role"),
        ("turn", [], "is empty"),
    ],
)
def test_words_that_cannot_be_stored_are_refused_and_change_nothing(
    kind: str, text: Any, match: str, engine: Engine
) -> None:
    memory_id = engine.search("ann", GARDEN).turns[0].id
    if kind != "turn":
        memory_id = one(engine, "fact" if kind == "fact" else "episode").id
    before, known = engine.journal.next_lsn, engine.get(memory_id)
    with pytest.raises(InputError, match=match):
        engine.update(memory_id, text)
    assert engine.journal.next_lsn == before
    assert engine.get(memory_id) == known
    engine.update(memory_id, NEW)
    assert engine.drain()


# ---- turns


def test_a_turns_update_is_a_deletion_and_a_turn_at_the_logs_end(tmp_path: Path) -> None:
    llm = RecordingLLM(MockReplies(2))
    messages = (Message("user", f"{GARDEN} {MARKER}", name="Ada"), Message("assistant", f"ah, {MARKER}"))
    thresholds: dict[str, Any] = {"theta_sim": 0.2, "theta_merge": 1.0, "theta_count": 3}
    with open_engine(tmp_path, llm, **thresholds) as engine:
        turn = Turn("ann", messages, "key", "s1", "2026-03-04T10:00:00", {"topic": "home"})
        (old,) = engine.add_batch([turn])
        engine.add_batch([turn_of("ann", n, GARDEN) for n in range(1, 4)])
        assert engine.drain()
        resting = [m for m in engine.get_all("ann") if 0 in m.source_seqs]
        assert resting, "so that something has to be remade"
        sent = len(llm.prompts["ann"])
        updated = engine.update(old.id or "", "a garden of tulips")
        assert updated.kind == "turn" and updated.id != old.id
        assert MARKER not in repr(engine.search("ann", MARKER).ranked())
        known = engine.get(updated.id)
        assert known["messages"] == [{"role": "user", "name": "Ada", "content": "a garden of tulips"}]
        assert (known["session"], known["timestamp"]) == ("s1", "2026-03-04T10:00:00")
        assert (known["metadata"], known["seq"]) == (
            {"topic": "home"},
            engine.tenants.get("ann").next_seq - 1,
        )
        assert updated.id in [hit.id for hit in engine.search("ann", "a garden of tulips").turns]
        with pytest.raises(UndertowError, match="no memory has the id"):
            engine.get(old.id or "")
        assert engine.drain()
        assert all(0 not in m.source_seqs for m in engine.get_all("ann"))
        assert MARKER not in repr(llm.prompts["ann"][sent:])
        assert engine.stats()["turns"] == 4
        assert engine.add_batch([turn])[0].duplicate, "the same log again brings nothing back"
        engine.purge()
        assert not bytes_hold(tmp_path, MARKER)
        live = (engine.stats(), engine.get_all("ann"), engine.search("ann", "tulips"), engine.get(updated.id))
    with open_engine(tmp_path, **thresholds) as engine:
        again = (
            engine.stats(),
            engine.get_all("ann"),
            engine.search("ann", "tulips"),
            engine.get(updated.id),
        )
        assert again == live


def test_a_turn_may_be_replaced_by_an_exchange_and_replaced_again(tmp_path: Path) -> None:
    with open_engine(tmp_path, **NEVER) as engine:
        (receipt,) = engine.add_batch([turn_of("ann", 0, "old words")])
        said = [
            {"role": "user", "content": "the boat is green", "timestamp": "2026-05-01T08:00:00"},
            {"role": "assistant", "content": "green it is"},
        ]
        first = engine.update(receipt.id or "", said)
        assert engine.get(first.id)["messages"] == said
        assert engine.get(first.id)["timestamp"] == "2026-05-01T08:00:00"
        second = engine.update(first.id, "the boat is blue")
        assert found(engine, "boat") == ["user: the boat is blue"]
        assert (engine.get(second.id)["seq"], engine.stats()["turns"]) == (4, 1)
