"""Managements, ablations and switches of the policies: each decides any log as its oracle does."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from undertow.engine.api.engine import Engine
from undertow.engine.base.model import Turn
from undertow.engine.llm.client import BadReply
from undertow.engine.policies.registry import tiers_of

from ..support.engine import (
    ENCODER,
    RecordingLLM,
    assert_same,
    construction,
    interleaved,
    opened,
    oracle_of_log,
    read_back,
    settings_of,
    turn_of,
)
from ..support.faults.harness import TOPICS
from ..support.policies.himem import Judging
from ..support.policies.variants import VARIANTS

# no notes are sufficient, so that questions change them
REPLIES = Judging(2, 0.3, 0.1, malformed_rate=0.02, malformed_sticky=True, lines=())
QUESTION = "Who has a harbour?"


def talk(tenant: str, count: int) -> list[Turn]:
    """Sessions of four turns on two recurring topics; of some turns the time is not known."""
    rng = random.Random(tenant)
    turns = []
    for n in range(count):
        said = " ".join(rng.sample(rng.choice(TOPICS[:2]).split(), 5))
        stamp = f"2026-04-{rng.randrange(1, 29):02d}T10:00:00" if n % 5 else None
        turns.append(replace(turn_of(tenant, n, said, timestamp=stamp), session_id=f"s{n // 4}"))
    return turns


def live(engine: Engine, turns: Sequence[Turn], rng: random.Random) -> None:
    """Turns in batches of any size, flushes and questions between them; some of it decided meanwhile."""
    left = list(turns)
    while left:
        size = rng.randrange(1, 9)
        engine.add_batch(left[:size])
        tenant, left = left[0].tenant, left[size:]
        match rng.randrange(4):
            case 0:
                engine.log_flush(tenant)
            case 1:
                engine.step()
            case _:
                engine.drain()
                with suppress(BadReply):
                    engine.answer(tenant, f"{QUESTION} {len(left)}")
    for tenant in {turn.tenant: None for turn in turns}:
        engine.flush(tenant)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_decides_any_log_as_its_oracle_does(name: str, tmp_path: Path) -> None:
    variant = VARIANTS[name]
    rng = random.Random(3)
    turns = {tenant: talk(tenant, 18) for tenant in ("ann", "bob")}
    sizes = {"window_messages": 6, "short_term_pages": 2, "batch_turns": rng.randrange(1, 6)}
    settings = settings_of(theta_evoke=0.3, heat_threshold=1.0, **sizes, **variant.options)
    llm = RecordingLLM(REPLIES)
    with opened(tmp_path, settings, ENCODER, llm) as engine:
        live(engine, interleaved(turns, seed=5), rng)
        assert engine.drain()
        stored = [memory for tenant in turns for memory in engine.get_all(tenant)]
        found = engine.recall("ann", QUESTION)
        run = read_back(tmp_path, construction(llm.prompts))
        assert_same(run, oracle_of_log(tmp_path, settings, ENCODER, REPLIES, turns))
        hit = engine.search("ann", QUESTION).turns[0]
        engine.delete(hit.id)
        assert engine.drain()
        left = engine.get_all("ann")
        assert left and not any(set(hit.source_seqs) & m.reach for m in left)
    with opened(tmp_path, settings, ENCODER, None) as engine:
        assert engine.get_all("ann") == left

    assert {p.operation for of in run.prompts.values() for p in of} == variant.operations
    assert {memory.kind for memory in stored} == variant.kinds
    assert bool(found.episodes) == ("episode" in variant.kinds and tiers_of(settings).k_epi != 0)
    assert bool(found.facts) == ("fact" in variant.kinds)
    facts = [m for m in stored if m.kind == "fact"]
    versions = [m for of in run.versions.values() for m in of if m.kind == "fact"]
    if settings.management == "summary":
        assert len(facts) == len(turns) and all(m.version > 3 for m in facts)
    if settings.management == "append":
        assert all(m.version == 1 for m in versions)
    if (most := settings.himem_max_notes) is not None:
        assert len(facts) == most * len(turns) < len({m.id for m in versions})
