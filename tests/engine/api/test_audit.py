"""An audit names the doubtful memories of a world made by hand, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.api.views.audit import REPEATED, _Claims, audit
from undertow.engine.base.results import Report
from undertow.engine.tenants.registry import UnknownTenant

from ...support.cli import run
from ...support.engine import open_engine, turns_of

# fact -> the earlier one that it repeats or may contradict
FACTS = (
    "Ann keeps a green boat in the harbour near the mill",
    "Ann keeps a green boat in the harbour near the mill.",
    "Ann does not keep a green boat in the harbour near the mill",
    "Bo moved to Lisbon with his two cats in March",
    "Bo moved to Lisbon with his two cats in April",
    "Cy has 2 daughters and lives in Paris",
    "Cy has two daughters and lives in London",
)
REPEATS = {FACTS[1]: FACTS[0]}
CONTRADICTIONS = {FACTS[2]: FACTS[0], FACTS[4]: FACTS[3]}


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    """Facts of a tenant, one from each turn, put in other words."""
    with open_engine(tmp_path / "s", MockLLM(MockReplies()), policy="eager") as opened:
        opened.add_batch(turns_of("ann", 5 * len(FACTS)))
        assert opened.drain()
        facts = [memory for memory in opened.get_all("ann") if memory.kind == "fact"]
        for fact, text in zip(facts, FACTS, strict=False):
            opened.update(fact.id, text)
        for fact in facts[len(FACTS) :]:
            opened.delete(fact.id)
        assert opened.drain()
        yield opened


def pairs(found: Report, name: str) -> dict[str, str]:
    return {item["text"]: item["earlier"]["text"] for item in found[name]}


def test_repeats_and_contradictions_are_told_apart(engine: Engine) -> None:
    found = audit(engine._reports, "ann", 10)
    assert [memory.text for memory in engine.get_all("ann")] == list(FACTS)
    assert pairs(found, "repeats") == REPEATS
    assert pairs(found, "contradictions") == CONTRADICTIONS
    assert all(REPEATED <= item["cosine"] <= 1.001 for item in found["repeats"])
    assert (found["facts"], found["episodes"]) == (len(FACTS), 0)


def test_ranks_and_sources_are_those_of_a_count_by_hand(engine: Engine) -> None:
    vectors = [vector.astype(np.float64) for _, vector in engine._reports.memory_vectors("ann", "fact")]
    turns = dict(engine._reports.turns_with_vectors("ann"))
    facts = engine.get_all("ann")
    ranks = {}
    for fact, own in zip(facts, vectors, strict=True):
        of = [turns[seq].astype(np.float64) for seq in fact.source_seqs]
        ranks[fact.id] = 1 + min(sum(other @ turn > own @ turn for other in vectors) for turn in of)
    for k in (1, 2, 4):
        found = audit(engine._reports, "ann", k)
        hidden = {item["id"]: item["rank"] for item in found["never_shown"]}
        assert hidden == {id_: rank for id_, rank in ranks.items() if rank > k}
        single = {fact.id for fact in facts if len(fact.source_seqs) == 1}
        assert {item["id"] for item in found["single_source"]} == single
    assert max(ranks.values()) > 2


def test_the_program_prints_it_and_knows_its_tenants(engine: Engine) -> None:
    of = ("--store", engine.journal.location.uri)
    shown = run("audit", "--tenant", "ann", *of)
    assert shown.code == 0
    for words in ("Other numbers, or a negation more: 2", "An earlier memory says the same: 1", "Lisbon"):
        assert words in shown.out
    assert run("audit", "--tenant", "ann", *of, "-k", "2", "--json").doc == audit(engine._reports, "ann", 2)
    assert "nobody" in run("audit", "--tenant", "nobody", *of).err
    with pytest.raises(UnknownTenant):
        audit(engine._reports, "nobody", 10)


@pytest.mark.parametrize(
    ("one", "other", "doubtful"),
    [
        ("Ann has 2 cats", "Ann has two cats", False),
        ("Ann has two cats", "Ann has three cats", True),
        ("Ann weighs 60 kilograms", "Ann weighs 61 kilograms", True),
        ("Ann didn't sell her boat", "Ann did sell her boat", True),
        ("Ann did not, not ever, sell her boat", "Ann did sell her boat", False),
        ("Ann met Bo on Monday", "Cy sold nine radios in June", False),
        ("Ann was born in March", "Ann was born in April 1999", True),
        ("Ann was born in March", "Ann was born", False),
    ],
)
def test_numbers_dates_and_negations_make_a_doubt(one: str, other: str, doubtful: bool) -> None:
    assert _Claims.of(one).may_contradict(_Claims.of(other)) == doubtful
    assert _Claims.of(other).may_contradict(_Claims.of(one)) == doubtful
