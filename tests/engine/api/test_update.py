"""Updating a memory: new words in its place, through the log, whatever the batching and whenever it dies."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.model import (
    InputError,
    Memory,
    MemoryKind,
    Message,
    PolicyName,
    Turn,
    UndertowError,
)
from undertow.engine.encoders.hashing import HashingEncoder

from ...support.engine import (
    ALONE,
    ENCODER,
    MARKER,
    NEVER,
    HeldLLM,
    RecordingLLM,
    Run,
    assert_same,
    bytes_hold,
    open_engine,
    opened,
    read_back,
    settings_of,
    turn_of,
    turns_of,
)
from ...support.faults.harness import (
    THETA,
    WINDOWS,
    Driver,
    assert_same_state,
    end_state,
    reports,
    shared_driver,
)
from .test_erase import turns_of_topics

GARDEN = "a garden of roses"
GARDENS = [turn_of("ann", n, f"{GARDEN} and tulips number{n}") for n in range(6)]
NEW = "The user moved to Lisbon in May."
# two turns fire, the next ones may merge
PAIRS: dict[str, Any] = {"theta_sim": 0.6, "theta_merge": 0.7, "theta_count": 2}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """A tenant with memories, and one with none."""
    with open_engine(tmp_path / "store", MockLLM(MockReplies(2)), **PAIRS) as engine:
        engine.add_batch(GARDENS)
        engine.add_batch(turns_of("bob", 2))
        assert engine.drain()
        assert {m.kind for m in engine.get_all("ann")} == {"episode", "fact"}
        yield engine


def one(engine: Engine, kind: MemoryKind, tenant: str = "ann") -> Memory:
    return engine.tenants.get(tenant).current(kind)[0]


def current(engine: Engine, memory: Memory) -> Memory:
    return next(m for m in engine.get_all(memory.tenant) if m.id == memory.id)


def found(engine: Engine, text: str, tenant: str = "ann") -> list[str]:
    return [hit.memory for hit in engine.search(tenant, text, k_sub=50, k_epi=50, k_sem=50).ranked()]


# ---- get and history


def test_get_is_the_newest_version_and_history_all_of_them(engine: Engine) -> None:
    with reports(Path(str(engine.journal.location))) as of:
        turns, facts = of.turns("ann"), of.memories("ann", "fact")
        episodes = of.memories("ann", "episode")
    assert len(turns) == 6 and facts and any(e["version"] > 1 for e in episodes)
    for known in (*turns, *facts, *episodes):
        assert engine.get(known["id"]) == engine.get(known["id"], tenant="ann") == known
        versions = engine.history(known["id"], tenant="ann")
        assert versions[-1] == known
        assert [v.get("version", 1) for v in versions] == list(range(1, known.get("version", 1) + 1))


@pytest.mark.parametrize("call", ["get", "history", "update", "delete"])
def test_what_is_not_the_tenants_is_unknown(call: str, engine: Engine) -> None:
    def ask(memory_id: str, **whose: str) -> object:
        words = (NEW,) if call == "update" else ()
        return getattr(engine, call)(memory_id, *words, **whose)

    fact, turn = one(engine, "fact"), engine.search("ann", GARDEN).turns[0]
    before = engine.journal.next_lsn
    for memory_id in (fact.id, turn.id):
        with pytest.raises(UndertowError, match="no memory of 'bob' has the id"):
            ask(memory_id, tenant="bob")
        with pytest.raises(UndertowError, match="no memory of 'nobody' has the id"):
            ask(memory_id, tenant="nobody")
    with pytest.raises(UndertowError, match="no memory has the id"):
        ask("0" * 32)
    assert engine.journal.next_lsn == before
    engine.erase("ann")
    for memory_id in (fact.id, turn.id):
        with pytest.raises(UndertowError, match="no memory has the id"):
            ask(memory_id)


def test_of_a_deleted_memory_there_is_its_history_alone(engine: Engine) -> None:
    fact, turn = one(engine, "fact"), engine.search("bob", "word1").turns[0]
    engine.delete(fact.id)
    engine.delete(turn.id)
    assert engine.drain()
    assert [v["deleted"] for v in engine.history(fact.id)] == [False, True]
    for memory_id in (fact.id, turn.id):
        with pytest.raises(UndertowError, match="no memory has the id"):
            engine.get(memory_id)
        with pytest.raises(UndertowError, match="no memory has the id"):
            engine.update(memory_id, NEW)
    with pytest.raises(UndertowError, match="no memory has the id"):
        engine.history(turn.id)


# ---- episodes and facts


@pytest.mark.parametrize("kind", ["episode", "fact"])
def test_an_update_is_a_new_version_with_the_users_words(kind: MemoryKind, tmp_path: Path) -> None:
    llm = RecordingLLM(MockReplies(2))
    with open_engine(tmp_path, llm, **PAIRS) as engine:
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
    with open_engine(tmp_path, **PAIRS) as engine:
        assert (engine.stats(), engine.get_all("ann"), engine.search("ann", NEW), engine.get(old.id)) == live
        exported = [r for r in reports_of(tmp_path) if r.get("control") == "update"]
        assert [r["body"] for r in exported] == [{"memory_id": old.id, "kind": kind, "text": NEW}]


def reports_of(store: Path, tenant: str = "ann") -> list[dict[str, Any]]:
    with reports(store) as of:
        return list(of.export(tenant))


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


# ---- batched and streamed


class Patient(HeldLLM):
    """Its replies come only once `finish` lets them."""

    def finish(self, engine: Engine) -> None:
        while not engine.idle:
            self.release()
            engine.step(0.01)


Act = Callable[[Engine, Callable[[], object]], None]


def streamed(store: Path, settings: Settings, replies: MockReplies, act: Act) -> Run:
    llm = RecordingLLM(replies)
    with opened(store, settings, ENCODER, llm) as engine:
        act(engine, engine.drain)
        assert engine.drain()
    return read_back(store, llm.prompts)


def batched(store: Path, settings: Settings, replies: MockReplies, act: Act, *, reopened: bool) -> Run:
    """All that `act` does is logged before the LLM says a word; `reopened`: and lost from memory then."""
    llm = Patient(replies)
    with opened(store, settings, ENCODER, llm) as engine:
        act(engine, lambda: None)
        if not reopened:
            llm.finish(engine)
    if reopened:
        llm = Patient(replies)
        with opened(store, settings, ENCODER, llm) as engine:
            engine.resume()
            llm.finish(engine)
    return read_back(store, llm.prompts)


# the eager policy may delete any fact on the way, and what is gone cannot be updated
@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize(("policy", "seed"), [("recmem", 0), ("recmem", 1), ("nemori", 2), ("himem", 3)])
def test_updates_between_turns_give_the_same_however_they_are_batched(
    policy: PolicyName, seed: int, reopened: bool, tmp_path: Path
) -> None:
    """Of memories and of a turn; turns behind an update see the new words, those before it the old ones."""
    sick = 0.1 if policy == "recmem" else 0.02  # a window takes more calls, and is parked by any of them
    replies = MockReplies(seed, refusal_rate=0.3, empty_rate=0.2, malformed_rate=sick, malformed_sticky=True)
    thresholds = {"theta_sim": 0.5, "theta_merge": 0.6, "theta_count": 2, "window_messages": 4}
    settings = settings_of(policy=policy, batch_turns=3, **thresholds)
    turns = turns_of_topics("ann", 40)
    base = tmp_path / "base"
    with opened(base, settings, ENCODER, MockLLM(replies)) as engine:
        receipts = engine.add_batch(turns[:20])
        assert engine.drain()
        memories = engine.get_all("ann")
    replaced = min(range(20), key=lambda seq: (abs(len(shaken(memories, seq, policy)) - 3), seq))
    gone = shaken(memories, replaced, policy)
    steady = [m for m in memories if m not in gone and lasts(m, policy)]
    assert gone and len(steady) > 3

    def act(engine: Engine, pause: Callable[[], object]) -> None:
        rng, there = random.Random(seed), list(steady)
        engine.update(receipts[replaced].id or "", turns[rng.randrange(20, 40)].text)
        for n in range(20, 40, 2):
            engine.add_batch(turns[n : n + 2])
            pause()
            memory = rng.choice(there)
            if n % 3:
                engine.update(memory.id, f"{turns[rng.randrange(40)].messages[0].content} changed at {n}")
            else:
                engine.delete(memory.id)
                there.remove(memory)
            pause()

    for name in ("streamed", "batched"):
        shutil.copytree(base, tmp_path / name)
    expected = streamed(tmp_path / "streamed", settings, replies, act)
    run = batched(tmp_path / "batched", settings, replies, act, reopened=reopened)
    if reopened:  # prompts that the first engine had sent are sent again
        run.prompts = expected.prompts
    assert_same(run, expected)
    texts = [m.text for m in expected.versions["ann"]]
    assert sum("changed at" in text for text in texts) >= 7


def lasts(memory: Memory, policy: PolicyName) -> bool:
    """Whether no later turn ends it: NEMORI's facts give way to others."""
    return policy != "nemori" or memory.kind == "episode"


def shaken(memories: list[Memory], seq: int, policy: PolicyName) -> list[Memory]:
    """What is remade when this turn is deleted: what rests on it, and the facts beside those.

    Under HiMem all that rests on any turn of its window.
    """
    if policy == "himem":
        windows = {m.born_at_seq for m in memories if m.kind == "episode" and seq in m.source_seqs}
        reach = {s for m in memories if m.born_at_seq in windows for s in m.source_seqs}
        return [m for m in memories if reach.intersection(m.source_seqs)]
    resting = [m for m in memories if seq in m.source_seqs]
    episodes = {m.id if m.kind == "episode" else m.episode_id for m in resting}
    return [m for m in memories if m.id in episodes or m.episode_id in episodes or m in resting]


# ---- words that must go with a deleted turn


@pytest.mark.parametrize("cut_off", [False, True])
def test_an_updates_words_go_with_a_turn_that_they_were_written_of(
    cut_off: bool, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may repeat the turn's. `cut_off`: the rows stay, as after a kill right after the commit."""
    store = Path(str(engine.journal.location))
    fact = one(engine, "fact")
    engine.update(fact.id, f"a {MARKER}")
    assert engine.drain()
    assert bytes_hold(store, MARKER)
    if cut_off:
        monkeypatch.setattr(engine.journal, "delete_rows", lambda lsns: None)
    turn = next(r for r in reports_of(store) if r["kind"] == "turn" and r["seq"] in fact.source_seqs)
    engine.delete(turn["id"])
    assert engine.drain()
    monkeypatch.undo()
    left = [row for row in engine.journal.read(kinds=["control"]) if MARKER.encode() in row.payload]
    assert len(left) == cut_off
    shown = reports_of(store)
    assert MARKER not in repr(shown)
    updates = [r for r in shown if r.get("control") == "update"]
    assert [r["body"] for r in updates] == [{"memory_id": fact.id, "kind": "fact"}], (
        "its place in the log stays"
    )
    live = engine.get_all("ann")
    engine.resume()
    engine.purge()
    assert not bytes_hold(store, MARKER)
    engine.tenants.evict("ann")
    assert engine.get_all("ann") == live
    assert engine.tenants.get("ann").cursor == engine.tenants.get("ann").next_seq


def test_what_users_write_after_a_turn_was_deleted_stays(engine: Engine) -> None:
    episode = next(m for m in engine.tenants.get("ann").current("episode") if len(m.source_seqs) > 1)
    store = Path(str(engine.journal.location))
    turn = next(r for r in reports_of(store) if r["kind"] == "turn" and r["seq"] == episode.source_seqs[0])
    engine.delete(turn["id"])
    engine.update(episode.id, NEW)
    assert engine.drain()
    assert current(engine, episode).text == NEW
    assert current(engine, episode).source_seqs == episode.source_seqs[1:]
    updates = [r["body"] for r in reports_of(store) if r.get("control") == "update"]
    assert [body["text"] for body in updates] == [NEW]


# ---- killed


REPLIES = MockReplies(1, 0.3, 0.1)
SETTINGS = {**THETA, **WINDOWS, "encoder": "hash:384"}


@pytest.fixture(scope="module")
def driver() -> Driver:
    return shared_driver()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Callable[[PolicyName], Path]:
    @cache
    def of(policy: PolicyName) -> Path:
        store = tmp_path_factory.mktemp("built") / "store"
        with opened_384(store, policy) as engine:
            engine.add_batch(turns_of_topics("bob", 30))
            assert engine.drain()
        return store

    return of


def opened_384(store: Path, policy: PolicyName) -> Engine:
    settings = Settings(device="cpu", policy=policy, **SETTINGS)
    return Engine(store, settings, HashingEncoder(384), llm=MockLLM(REPLIES))


@pytest.mark.parametrize("kind", ["turns", "episodes", "facts"])
@pytest.mark.parametrize(
    ("method", "n", "after", "policy"),
    [
        ("append", 1, False, "recmem"),
        ("append", 1, True, "nemori"),
        ("append", 2, False, "recmem"),
        ("append", 2, True, "himem"),
    ],
)
def test_killed_at_any_commit_an_update_is_done_once_or_not_at_all(
    kind: str,
    method: str,
    n: int,
    after: bool,
    policy: PolicyName,
    built: Callable[[PolicyName], Path],
    tmp_path: Path,
    driver: Driver,
) -> None:
    base = built(policy)
    store, undisturbed = (Path(shutil.copytree(base, tmp_path / name)) for name in ("killed", "whole"))
    with reports(base) as of:
        episode, fact = of.memories("bob", "episode")[0], of.memories("bob", "fact")[0]
        turn = of.turns("bob")[episode["source_seqs"][0]]
    memory_id = {"turns": turn, "episodes": episode, "facts": fact}[kind]["id"]
    with opened_384(undisturbed, policy) as engine:
        made = engine.update(memory_id, NEW)
        assert engine.drain()
    settings = {**SETTINGS, "policy": policy}
    task = {"task": "update", "memory_id": memory_id, "text": NEW, "settings": settings}
    outcome = driver.run(store=store, kill={"method": method, "n": n, "after": after}, **task)
    assert outcome.status == -signal.SIGKILL
    logged = (n, after) != (1, False)
    with opened_384(store, policy) as engine:
        engine.resume()
        hits = [hit.id for hit in engine.search("bob", NEW, k_sub=50).turns]
        if kind == "turns":
            assert (memory_id in hits, made.id in hits) == (not logged, logged)
        if not logged:
            engine.update(memory_id, NEW)
        assert engine.drain()
        engine.purge()
    assert_same_state(end_state(store), end_state(undisturbed))


def test_a_turn_that_fires_by_itself_is_told_of_in_its_new_words(tmp_path: Path) -> None:
    with open_engine(tmp_path, MockLLM(), **ALONE) as engine:
        (receipt,) = engine.add_batch([turn_of("ann", 0, f"the {MARKER} plays")])
        assert engine.drain()
        engine.update(receipt.id or "", "the cellist plays")
        assert engine.drain()
        made = engine.get_all("ann")
        assert made and all(m.source_seqs == (2,) and m.born_at_seq == 2 for m in made)
        assert any("cellist" in m.text for m in made) and MARKER not in repr(made)
