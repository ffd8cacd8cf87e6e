"""Each policy, driven without an engine, decides any log as its oracle does, whatever the LLM replies."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from undertow.bench.mock.llm import MockLLM
from undertow.bench.mock.replies import Messages, MockReplies
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Decision, Turn
from undertow.engine.policies.registry import policy_of
from undertow.engine.storage.row_codec import LlmJob

from ..support.engine import ENCODER, ORACLES, by_birth, settings_of, turn_of
from ..support.oracles.run import Oracle
from ..support.policies.streamed import Streamed
from ..support.policies.variants import VARIANTS
from ..support.soak.rare import COMPARED

OPTIONS: dict[str, Mapping[str, Any]] = {
    "recmem": {"policy": "recmem"},
    "recmem, calls of the paper": {"policy": "recmem", "calls": "paper"},
    "recmem, direct extraction": {"policy": "recmem", "ablation": "direct-extraction"},
    "recmem without facts": {"policy": "recmem", "ablation": "without-facts"},
    "eager": {"policy": "eager"},
    "nemori, calls of the paper": {"policy": "nemori", "calls": "paper"},
    "a-mem": {"policy": "a-mem"},
    "memory-os": {"policy": "memory-os"},
    **{name: variant.options for name, variant in VARIANTS.items() if "k_epi" not in variant.options},
}
RARE = (*COMPARED, *VARIANTS.keys() - {"nemori", "himem"})  # see test_variants.py
WORDS = ("boat", "sail", "harbour", "violin", "bow", "bread")


@dataclass(frozen=True, slots=True)
class Careless(MockReplies):
    """Valid replies whose numbers are often wrong, repeated or missing, and whose texts repeat."""

    def reply(self, messages: Messages, schema: Mapping[str, Any] | None) -> str:
        text = MockReplies.reply(self, messages, schema)
        digest = hashlib.blake2b(f"{self.seed} {messages[-1]['content']}".encode(), digest_size=64)
        chance = iter(digest.digest() * 99)
        try:
            given = json.loads(text)
        except ValueError:
            return text
        return json.dumps(_spoilt(given, chance))


def _spoilt(value: Any, chance: Iterator[int]) -> Any:
    match value:
        case bool() | None:
            return value
        case int():
            return value if (n := next(chance)) < 150 else n % 7 - 1
        case str():
            first_word, space, rest = value.partition(" ")
            n = next(chance)
            return first_word if n < 60 else f"{first_word}\n {rest}" if space and n < 90 else value
        case [first, *_] if isinstance(first, int):
            numbers = [_spoilt(n, chance) for n in value]
            return [] if (n := next(chance)) < 40 else numbers * (2 if n < 60 else 1)
        case [first, *_]:
            return [_spoilt(item, chance) for item in (value if next(chance) < 170 else [*value, first])][:9]
        case dict():
            spoilt = {name: _spoilt(item, chance) for name, item in value.items()}
            decides = {"action", "relation", "same_as"} & value.keys()
            return spoilt | {"text": ""} if decides and next(chance) < 80 else spoilt
    return value


# a turn, a question that the facts missed, or a flush
Record = Turn | str | None


@st.composite
def logs(draw: st.DrawFn) -> list[Record]:
    """Turns of sessions, some of them undated, with flushes and missed questions between them."""
    records: list[Record] = []
    for n in range(draw(st.integers(4, 22))):
        said = " ".join(draw(st.lists(st.sampled_from(WORDS), min_size=1, max_size=4)))
        day = draw(st.one_of(st.none(), st.integers(1, 9)))
        turn = turn_of("ann", n, said, timestamp=None if day is None else f"2026-04-0{day}T10:00:00")
        messages = turn.messages[: draw(st.integers(1, 2))]
        records.append(replace(turn, messages=messages, session_id=f"s{n // draw(st.integers(1, 4))}"))
        records += draw(st.sampled_from([[], [], [], [None], [said]]))
    return records


def policy_settings(name: str, seed: int, theta: float) -> Settings:
    return settings_of(
        **OPTIONS[name],
        theta_sim=theta,
        theta_merge=theta + 0.1,
        theta_count=2 + seed % 2,
        theta_evoke=theta,
        theta_compare=theta,
        window_messages=1 + seed % 6,
        short_term_pages=1 + seed % 4,
        heat_threshold=1 + seed % 3,
    )


def take(decides: Streamed | Oracle, seq: int, record: Record, episodes: list[str]) -> None:
    match record:
        case Turn():
            decides.take(seq, record)
        case None:
            decides.flush(seq)
        case question if episodes:
            decides.reconsolidate(seq, question, episodes[:3])


property_test = hypothesis_settings(
    max_examples=20,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink a log takes minutes
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.rarely(name=RARE)
@pytest.mark.parametrize("name", OPTIONS)
@property_test
@given(
    records=logs(),
    seed=st.integers(0, 99),
    rates=st.tuples(*[st.sampled_from([0.0, 0.2, 0.5])] * 2),
    theta=st.sampled_from([0.3, 0.6]),
)
def test_a_policy_decides_as_its_oracle_whatever_the_replies(
    name: str, records: list[Record], seed: int, rates: tuple[float, float], theta: float
) -> None:
    replies = Careless(seed, *rates, malformed_rate=0.02, malformed_sticky=True)
    settings = policy_settings(name, seed, theta)
    streamed = Streamed(policy_of(settings), settings, MockLLM(replies))
    oracle = ORACLES[settings.policy]("ann", ENCODER, MockLLM(replies), settings)
    for seq, record in enumerate(records):
        episodes = [m.id for m in streamed.view.current("episode")][::-1]
        for decides in (streamed, oracle):
            take(decides, seq, record, episodes)
    assert streamed.decisions == oracle.decisions
    assert by_birth(streamed.versions) == by_birth(oracle.versions)
    assert streamed.prompts == oracle.prompts
    made = [draft.memory for result in streamed.results for draft in result.drafts]
    assert {m.prompt_version for m in made} <= {p.version for p in streamed.prompts}
    for result in streamed.results:
        if result.decision is Decision.PARKED:
            assert result.operation and result.reason


def resting_on(streamed: Streamed, turn_seq: int) -> set[str]:
    """The current memories that may hold a turn's words."""
    current = [*streamed.view.current("episode"), *streamed.view.current("fact")]
    return {m.id for m in current if turn_seq in m.reach}


@pytest.mark.rarely(name=RARE)
@pytest.mark.parametrize("name", OPTIONS)
@property_test
@given(records=logs(), seed=st.integers(0, 99), place=st.integers(0, 99), fails=st.booleans())
def test_what_rests_on_a_deleted_turn_goes_whatever_the_replies(
    name: str, records: list[Record], seed: int, place: int, fails: bool
) -> None:
    """At once, even if the LLM can make nothing in its place, and it does not come back with a replay."""
    settings = policy_settings(name, seed, 0.3)
    replies = Careless(seed, malformed_rate=0.02, malformed_sticky=True)
    streamed = Streamed(policy_of(settings), settings, MockLLM(replies))
    for seq, record in enumerate(records):
        take(streamed, seq, record, [m.id for m in streamed.view.current("episode")][::-1])
    turn_seq, end = sorted(streamed.view.turns)[place % len(streamed.view.turns)], len(records)
    # those deleted before too: their history has the words
    resting = {m.id for m in streamed.view.memories if turn_seq in m.reach}
    streamed.llm = MockLLM(replace(replies, malformed_rate=1.0 if fails else 0.02))
    streamed.delete(end, turn_seq)
    forgotten = streamed.results[-1]
    versions = {draft.memory.id: draft.memory for draft in forgotten.drafts}
    assert resting <= versions.keys() and not resting_on(streamed, turn_seq)
    assert all(m.made_at_seq == end for m in versions.values())
    assert not fails or all(m.deleted for m in versions.values())
    if forgotten.decision is Decision.PARKED:
        job = LlmJob("j", end, "parked", forgotten.operation or "", forgotten.cluster)
        streamed.replay(end + 1, job)
        if streamed.results[-1].decision is Decision.PARKED:
            assert streamed.results[-1].cluster == forgotten.cluster
        streamed.llm = MockLLM(MockReplies(seed))
        streamed.replay(end + 2, job)
        assert streamed.results[-1].decision is not Decision.PARKED
        assert all(draft.memory.made_at_seq == end + 2 for draft in streamed.results[-1].drafts)
        assert not resting_on(streamed, turn_seq)
