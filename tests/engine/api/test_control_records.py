"""What users do to their memories, through the log: deletion, replay, and the turns behind them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.mock.llm import MockLLM
from undertow.bench.mock.replies import Messages, MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.model import PolicyName

from ...support.engine import (
    ALONE,
    ENCODER,
    MARKER,
    HeldLLM,
    RecordingLLM,
    both_ways,
    bytes_hold,
    open_engine,
    opened,
    put,
    settings_of,
    settle,
    turn_of,
    turns_of,
)

# ---- deletion of turns


OF_THE_FIRST = "trumpet, drums, piano,"
"""Words of the first turn alone, most of those of a fact: so it rests on that turn, as the reply says."""


@dataclass(frozen=True)
class Misnaming(MockReplies):
    """Wherever it is shown the secret it replies with `tells`, which names the first turn alone for it."""

    tells: Mapping[str, Any] = field(default_factory=dict)

    def reply(self, messages: Messages, schema: Mapping[str, Any] | None) -> str:
        told: dict[str, Any] = json.loads(super().reply(messages, schema))
        if MARKER in messages[-1]["content"]:
            told |= {name: drafts for name, drafts in self.tells.items() if name in told}
            if "facts" in str(schema):  # a fused reply
                fact = {
                    "text": f"Ann has {OF_THE_FIRST} {MARKER}.",
                    "kind": "user_event",
                    "turns": [1],
                    "replaces": None,
                }
                told["episodes"] = [{**episode, "facts": [fact]} for episode in told.get("episodes", ())]
        return json.dumps(told)


TELLS: dict[str, dict[str, Any]] = {
    "recmem": {"episodes": [{"text": f"Ann spoke of {MARKER}.", "turns": [1]}]},
    "himem": {
        "episodes": [
            {"first": 1, "topic": f"Of {MARKER}", "summary": "A talk."},
            {"first": 2, "topic": "Of the band", "summary": "A talk."},
        ],
        "notes": [{"turns": [1], "text": f"Ann has {OF_THE_FIRST} {MARKER}.", "kind": "fact"}],
    },
}


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        ({"policy": "recmem"}, {"episode", "fact"}),
        ({"policy": "recmem", "calls": "paper"}, {"episode"}),
        ({"policy": "himem", "himem_align_notes": False}, {"episode", "fact"}),
    ],
)
def test_words_in_a_memory_that_does_not_name_their_turn_go_with_the_turn(
    options: dict[str, Any], kinds: set[str], tmp_path: Path
) -> None:
    options = {"theta_sim": 0.3, "theta_merge": 1.0, "theta_count": 3, **options}
    llm = MockLLM(Misnaming(2, tells=TELLS[options["policy"]]))
    with open_engine(tmp_path, llm, **options) as engine:
        said = [f"the band on friday {last}" for last in (OF_THE_FIRST, MARKER, "2")]
        receipts = engine.add_batch([turn_of("ann", n, text) for n, text in enumerate(said)])
        assert engine.flush("ann")
        telling = [m for m in engine.get_all("ann") if MARKER in m.text and m.source_seqs == (0,)]
        assert {m.kind for m in telling} == kinds
    with open_engine(tmp_path, None, **options) as engine:
        assert receipts[1].id is not None
        engine.delete(receipts[1].id)
        assert not engine.drain(), "no LLM: what may hold its words is yet to be made anew"
        found = engine.search("ann", MARKER)
        assert found.turns and not found.episodes and not found.facts
        assert MARKER not in repr((found, engine.recall("ann", MARKER), engine.list("ann")))
    with open_engine(tmp_path, MockLLM(Misnaming(2)), **options) as engine:
        assert engine.drain()
        remade = engine.get_all("ann")
        assert {m.kind for m in remade} == {"episode", "fact"} and not [m for m in remade if 1 in m.reach]
        engine.purge()
        assert not bytes_hold(tmp_path, MARKER)


@pytest.mark.parametrize(
    ("policy", "operation"),
    [
        ("recmem", "episode"),
        ("recmem", "refine"),
        ("eager", "extract"),
        ("nemori", "partition"),
        ("nemori", "narrate"),
        ("himem", "segment"),
        ("himem", "traits"),
        ("a-mem", "annotate"),
        ("a-mem", "connect"),
        ("memory-os", "topic"),
    ],
)
def test_a_turn_deleted_while_the_llm_reads_it_leaves_no_byte(
    policy: PolicyName, operation: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {**ALONE, "policy": policy, "window_messages": 4, "short_term_pages": 2}
    options |= {"calls": "paper"} if operation in ("refine", "traits") else {}
    llm = HeldLLM(MockReplies(2))
    texts = ["the boat and the harbour", f"the boat of the {MARKER}", *[f"the boat {n}" for n in range(6)]]
    turns = [replace(turn_of("ann", n, text), session_id=f"s{n // 4}") for n, text in enumerate(texts)]
    with open_engine(tmp_path, llm, **options) as engine:
        receipts = engine.add_batch(turns)
        while not any(p.operation == operation and MARKER in p.user for _, p, _ in llm.held):
            assert not engine.idle
            llm.release()
            engine.step(0.01)
        assert receipts[1].id is not None
        engine.delete(receipts[1].id)
        settle(engine)
        live = engine.get_all("ann")
        assert live and MARKER not in repr(live) and not [m for m in live if 1 in m.reach]
        engine.purge()
    assert not bytes_hold(tmp_path, MARKER)
    with open_engine(tmp_path, **options) as engine:
        assert engine.get_all("ann") == live


# ---- control records, batched and streamed


def test_turns_behind_the_deletion_of_an_episode_do_not_see_it(tmp_path: Path) -> None:
    def act(engine: Engine, pause: Callable[[], object]) -> None:
        engine.add_batch([turn_of("ann", n, "a garden of roses") for n in range(2)])
        engine.drain()
        for episode in engine.tenants.get("ann").current("episode"):
            engine.delete(episode.id)
        pause()
        for n in range(2, 5):
            put(engine, [turn_of("ann", n, "a garden of roses")])
            pause()

    settings = settings_of(theta_sim=0.9, theta_merge=0.5, theta_count=2)
    run = both_ways(tmp_path, settings, MockReplies(), act)
    after = [d for d in run.decisions["ann"] if d.seq >= 3]
    assert after[0].nearest_episode is None or after[1].nearest_episode is None


def test_turns_behind_one_that_parks_without_a_call_do_not_count_it(tmp_path: Path) -> None:
    """A turn too long for the merge question leaves the gates; the gates behind it must know."""

    def act(engine: Engine, pause: Callable[[], object]) -> None:
        engine.add_batch([turn_of("ann", n, "a garden of roses") for n in range(2)])
        engine.drain()
        long = "a garden of roses user: assistant: I see. " * 160
        for n, text in enumerate([long, *["a garden of roses and tulips"] * 3], 2):
            put(engine, [turn_of("ann", n, text)])
            pause()

    settings = settings_of(
        theta_sim=0.6, theta_merge=0.7, theta_count=2, context_tokens=2_048, reply_tokens=64
    )
    run = both_ways(tmp_path, settings, MockReplies(refusal_rate=1.0), act)
    parked = [d for d in run.decisions["ann"] if d.decision == "parked"]
    assert [d.cluster for d in parked] == [(2,)]
    assert all(2 not in d.cluster for d in run.decisions["ann"] if d.seq > 2)


def test_turns_behind_a_replay_count_the_turns_it_revives(tmp_path: Path) -> None:
    def act(engine: Engine, pause: Callable[[], object]) -> None:
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
    run = both_ways(tmp_path, settings_of(theta_sim=0.9, theta_merge=0.5, theta_count=3), ill, act)
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
