"""What users do to their memories, through the log: deletion, replay, and the turns behind them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.mock.llm import MockLLM
from undertow.bench.mock.replies import Messages, MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings

from ...support.engine import (
    ALONE,
    ENCODER,
    MARKER,
    HeldLLM,
    RecordingLLM,
    Run,
    assert_same,
    bytes_hold,
    open_engine,
    opened,
    put,
    read_back,
    settings_of,
    turn_of,
    turns_of,
)

# ---- deletion of turns


class Misnaming(MockReplies):
    """Tells the secret in an episode, which it says to rest on the first turn alone."""

    def reply(self, messages: Messages, schema: Mapping[str, Any] | None) -> str:
        told: dict[str, Any] = json.loads(super().reply(messages, schema))
        if "episodes" in told and MARKER in messages[-1]["content"]:
            told["episodes"] = [{"text": f"Ann spoke of {MARKER}.", "turns": [1]}]
        return json.dumps(told)


def test_words_in_an_episode_that_does_not_name_their_turn_go_with_the_turn(tmp_path: Path) -> None:
    cluster: dict[str, Any] = {"theta_sim": 0.3, "theta_merge": 1.0, "theta_count": 3}
    with open_engine(tmp_path, MockLLM(Misnaming(2)), **cluster) as engine:
        said = [f"the band on friday {MARKER if n == 1 else n}" for n in range(3)]
        receipts = engine.add_batch([turn_of("ann", n, text) for n, text in enumerate(said)])
        assert engine.drain()
        (episode,) = [m for m in engine.get_all("ann") if m.kind == "episode"]
        assert (episode.source_seqs, episode.shown_seqs) == ((0,), (1, 2))
        assert MARKER in episode.text
    with open_engine(tmp_path, None, **cluster) as engine:
        assert receipts[1].id is not None
        engine.delete(receipts[1].id)
        assert not engine.drain(), "no LLM: what may hold its words is yet to be made anew"
        found = engine.search("ann", MARKER)
        assert found.turns and not found.episodes and not found.facts
        assert MARKER not in repr((found, engine.list("ann")))
    with open_engine(tmp_path, MockLLM(Misnaming(2)), **cluster) as engine:
        engine.resume()
        assert engine.drain()
        (remade,) = [m for m in engine.get_all("ann") if m.kind == "episode"]
        assert (remade.id, remade.version, remade.shown_seqs) == (episode.id, 2, ())
        engine.purge()
        assert not bytes_hold(tmp_path, MARKER)


@pytest.mark.parametrize("replies_before_deletion", [0, 1])
def test_a_turn_deleted_while_its_job_is_in_flight_leaves_no_byte(
    replies_before_deletion: int, tmp_path: Path
) -> None:
    llm = HeldLLM()
    with open_engine(tmp_path, llm, **ALONE) as engine:
        (receipt,) = engine.add_batch([turn_of("ann", 0, f"the {MARKER} plays")])
        for _ in range(replies_before_deletion):
            llm.release()
            engine.step(0.05)
        assert llm.in_flight == 1 and receipt.id is not None
        engine.delete(receipt.id)
        while not engine.scheduler.idle:
            llm.release()
            engine.step(0.05)
        assert engine.get_all("ann") == []
        engine.purge()
        assert not bytes_hold(tmp_path, MARKER)


# ---- control records, batched and streamed


def both_ways(
    tmp_path: Path,
    replies: MockReplies,
    settings: Settings,
    act: Callable[[Engine, Callable[[], bool]], None],
) -> Run:
    """`act` with its pauses drained and with everything in one go: the journals must agree."""
    runs = []
    for name in ("streamed", "batched"):
        llm = RecordingLLM(replies)
        with opened(tmp_path / name, settings, ENCODER, llm) as engine:
            act(engine, engine.drain if name == "streamed" else (lambda: True))
            assert engine.drain()
        runs.append(read_back(tmp_path / name, llm.prompts))
    assert_same(runs[1], runs[0])
    return runs[0]


def test_turns_behind_the_deletion_of_an_episode_do_not_see_it(tmp_path: Path) -> None:
    def act(engine: Engine, pause: Callable[[], bool]) -> None:
        engine.add_batch([turn_of("ann", n, "a garden of roses") for n in range(2)])
        engine.drain()
        for episode in engine.tenants.get("ann").current("episode"):
            engine.delete(episode.id)
        pause()
        for n in range(2, 5):
            put(engine, [turn_of("ann", n, "a garden of roses")])
            pause()

    settings = settings_of(theta_sim=0.9, theta_merge=0.5, theta_count=2)
    run = both_ways(tmp_path, MockReplies(), settings, act)
    after = [d for d in run.decisions["ann"] if d.seq >= 3]
    assert after[0].nearest_episode is None or after[1].nearest_episode is None


def test_turns_behind_one_that_parks_without_a_call_do_not_count_it(tmp_path: Path) -> None:
    """A turn too long for the merge question leaves the gates; the gates behind it must know."""

    def act(engine: Engine, pause: Callable[[], bool]) -> None:
        engine.add_batch([turn_of("ann", n, "a garden of roses") for n in range(2)])
        engine.drain()
        long = "a garden of roses user: assistant: I see. " * 160
        for n, text in enumerate([long, *["a garden of roses and tulips"] * 3], 2):
            put(engine, [turn_of("ann", n, text)])
            pause()

    settings = settings_of(
        theta_sim=0.6, theta_merge=0.7, theta_count=2, context_tokens=2_048, reply_tokens=64
    )
    run = both_ways(tmp_path, MockReplies(refusal_rate=1.0), settings, act)
    parked = [d for d in run.decisions["ann"] if d.decision == "parked"]
    assert [d.cluster for d in parked] == [(2,)]
    assert all(2 not in d.cluster for d in run.decisions["ann"] if d.seq > 2)


def test_turns_behind_a_replay_count_the_turns_it_revives(tmp_path: Path) -> None:
    def act(engine: Engine, pause: Callable[[], bool]) -> None:
        put(engine, [turn_of("ann", 1, "a garden of roses")])
        engine.drain()
        assert engine.stats()["dead_letters"] == 1
        for episode in engine.tenants.get("ann").current("episode"):
            engine.delete(episode.id)
        engine.drain()
        assert engine.replay_jobs() == 1
        pause()
        for n in range(2, 5):
            put(engine, [turn_of("ann", n, "a garden of roses")])
            pause()

    settings = settings_of(theta_sim=0.9, theta_merge=0.5, theta_count=1)
    for name in ("streamed", "batched"):  # an episode to park at, from an LLM that was well
        with opened(tmp_path / name, settings, ENCODER, MockLLM()) as engine:
            engine.add_batch([turn_of("ann", 0, "a garden of roses")])
            assert engine.drain()
    ill = MockReplies(malformed_rate=1.0, malformed_sticky=True)
    later = settings_of(theta_sim=0.9, theta_merge=0.5, theta_count=3)
    run = both_ways(tmp_path, ill, later, act)
    fired = [d for d in run.decisions["ann"] if d.decision == "parked" and len(d.cluster) > 1]
    assert fired and 2 in fired[0].cluster, "seq 2 was revived; seq 1 is the change of settings"


def test_replaying_twice_runs_a_job_once(tmp_path: Path) -> None:
    ill = MockLLM(MockReplies(malformed_rate=1.0, malformed_sticky=True))
    with open_engine(tmp_path, ill, **ALONE) as engine:
        engine.add_batch(turns_of("ann", 2))
        assert engine.drain()
        assert engine.stats()["dead_letters"] == 2
    llm = RecordingLLM(MockReplies())
    with open_engine(tmp_path, llm, **ALONE) as engine:
        assert (engine.replay_jobs(), engine.replay_jobs()) == (2, 2)
        assert engine.drain()
        assert engine.stats()["dead_letters"] == 0
        assert len([p for p in llm.prompts["ann"] if p.operation == "episode"]) == 2
        made = engine.get_all("ann")
        assert {m.made_at_seq for m in made} == {2, 3}
    with open_engine(tmp_path, **ALONE) as engine:
        assert engine.get_all("ann") == made
