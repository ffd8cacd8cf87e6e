"""Updates under kills and deletions: words that must go, and changes that are done once or not at all."""

from __future__ import annotations

import random
import shutil
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Memory, PolicyName
from undertow.engine.encoders.hashing import HashingEncoder

from ....support.api.erasure import turns_of_topics
from ....support.api.updates import NEW, current, one, reports_of
from ....support.engine import (
    ALONE,
    ENCODER,
    MARKER,
    HeldLLM,
    both_ways,
    bytes_hold,
    open_engine,
    opened,
    settings_of,
    turn_of,
)
from ....support.faults.harness import THETA, WINDOWS, Driver, assert_same_state, end_state, reports


# the eager policy may delete any fact on the way, and what is gone cannot be updated
@pytest.mark.rarely(seed=(1, 4))
@pytest.mark.parametrize("reopened", [False, True])
@pytest.mark.parametrize(("policy", "seed"), [("recmem", 0), ("recmem", 1), ("nemori", 4), ("himem", 3)])
def test_updates_between_turns_give_the_same_however_they_are_batched(
    policy: PolicyName, seed: int, reopened: bool, tmp_path: Path
) -> None:
    """Of memories and of a turn; turns behind an update see the new words, those before it the old ones."""
    sick = 0.1 if policy == "recmem" else 0.02  # a window takes more calls, and is parked by any of them
    replies = MockReplies(seed, refusal_rate=0.3, empty_rate=0.2, malformed_rate=sick, malformed_sticky=True)
    thresholds = {"theta_sim": 0.5, "theta_merge": 0.6, "theta_count": 2, **WINDOWS, "window_messages": 4}
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
    expected = both_ways(tmp_path, settings, replies, act, batched=HeldLLM, reopened=reopened)
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
    resting = [m for m in memories if seq in m.reach]
    episodes = {m.id if m.kind == "episode" else m.episode_id for m in resting} - {None}
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
