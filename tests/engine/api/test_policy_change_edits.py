"""Changes of policy beside edits, deletions, erasures, later changes, exports and imports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from undertow.engine.api.policy_change import PolicyConflict
from undertow.engine.base.model import PolicyName
from undertow.engine.storage.row_codec import turn_id

from ...support.engine import (
    MARKER,
    HeldLLM,
    RecordingLLM,
    bytes_hold,
    ingest,
    rows_of,
    settle,
    turn_of,
    turns_of,
)
from ...support.faults.harness import CHANGES, reports
from ...support.policies.change import REPLIES, begin, opened, topical
from ...support.soak.rare import COMPARED

# ---- what users do to their memories


def test_edits_stand_against_a_change_until_they_are_dropped(tmp_path: Path) -> None:
    with opened(tmp_path, "recmem") as engine:
        engine.add_batch(topical("ann", 20))
        assert engine.drain()
        first, second, *_ = engine.get_all("ann")
        engine.update(first.id, "Words of Ann's own.")
        engine.delete(second.id)
        with pytest.raises(PolicyConflict, match=r"2 memories of 'ann' were reworded or deleted.*drop_edits"):
            engine.set_policy("ann", "eager")
        assert engine.policy("ann")["change"] is None
        engine.set_policy("ann", "eager", drop_edits=True)
        with pytest.raises(PolicyConflict, match="being made anew"):
            engine.update(first.id, "Other words.")
        with pytest.raises(PolicyConflict, match="being made anew"):
            engine.delete(first.id)
        assert engine.drain()
        assert engine.history(first.id)[-1]["text"] == "Words of Ann's own."
        with pytest.raises(PolicyConflict, match="of generation 1, and 'ann' has generation 2"):
            engine.delete(first.id)
        engine.delete(engine.get_all("ann")[0].id)
        with pytest.raises(PolicyConflict, match="1 memories"):
            engine.set_policy("ann", "recmem")


@pytest.mark.rarely(before=COMPARED, after=COMPARED)
@pytest.mark.parametrize(("before", "after"), CHANGES)
@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_of_a_deleted_turn_no_generation_keeps_a_byte(
    before: PolicyName, after: PolicyName, moment: str, tmp_path: Path
) -> None:
    llm = HeldLLM(REPLIES)
    turns = topical("ann", 18)
    turns[2] = turn_of("ann", 2, f"boat sail harbour mast anchor {MARKER}")
    with opened(tmp_path, before, llm) as engine:
        engine.add_batch(turns)
        settle(engine)
        assert MARKER in repr([row.payload for row in rows_of(tmp_path, "episode", "fact")])
        victim = turn_id("ann", 1, 2)
        if moment == "before":
            engine.delete(victim)
        begin(engine, to=after, records=5)
        if moment == "during":
            engine.delete(victim)
            assert MARKER not in repr(engine.search("ann", "boat", k_sub=50, k_epi=50, k_sem=50))
        settle(engine)
        if moment == "after":
            engine.delete(victim)
            settle(engine)
        assert engine.policy("ann")["generation"] == 2
        live = engine.get_all("ann")
        assert live and MARKER not in repr(live)
        assert not any(2 in m.source_seqs for m in live)
        engine.purge()
    assert not bytes_hold(tmp_path, MARKER)
    if moment == "before":
        assert MARKER in repr([p.user for p in llm.prompts["ann"]])
    with opened(tmp_path, before) as engine:
        assert engine.get_all("ann") == live


def test_a_turn_deleted_before_a_change_is_not_read_again(tmp_path: Path) -> None:
    with opened(tmp_path, "recmem") as engine:
        engine.add_batch([turn_of("ann", 0, f"the {MARKER}"), *topical("ann", 8, 1)])
        assert engine.drain()
        engine.delete(turn_id("ann", 1, 0))
        assert engine.drain()
    llm = RecordingLLM(REPLIES)
    with opened(tmp_path, "recmem", llm) as engine:
        engine.set_policy("ann", "eager")
        assert engine.drain()
    assert [p.operation for p in llm.prompts["ann"]].count("extract") == 8, "each turn that is left, once"
    assert MARKER not in repr(llm.prompts["ann"])


@pytest.mark.parametrize("during", [True, False])
def test_an_erasure_takes_all_generations(during: bool, tmp_path: Path) -> None:
    with opened(tmp_path, "recmem", HeldLLM(REPLIES)) as engine:
        engine.add_batch(topical("ann", 18))
        settle(engine)
        ids = {m.id for m in engine.get_all("ann")}
        begin(engine)
        if not during:
            settle(engine)
        certificate = engine.erase("ann", now=True)
        assert certificate is not None and certificate.turns_removed == 18
        assert not {row.id for row in rows_of(tmp_path, "episode", "fact")}
        assert certificate.episodes_removed > 0 and certificate.facts_removed > 0
        settle(engine)
        assert not bytes_hold(tmp_path, "n17")
        engine.add_batch(topical("ann", 18))
        settle(engine)
        assert engine.policy("ann") == {"tenant": "ann", "policy": "recmem", "generation": 1, "change": None}
        assert ids and not ids & {m.id for m in engine.get_all("ann")}, "no id of an earlier life comes again"
    assert {row.id for row in rows_of(tmp_path, "episode", "fact")}


# ---- one change after another


@pytest.mark.parametrize("chunk", [1, 50])
def test_a_newer_change_takes_the_place_of_one_under_way(chunk: int, tmp_path: Path) -> None:
    llm = HeldLLM(REPLIES)
    with opened(tmp_path / "a", "recmem", llm) as engine:
        ingest(engine, topical("ann", 18), chunk)
        settle(engine)
        former = engine.get_all("ann")
        begin(engine, records=4)
        asked = len(llm.prompts["ann"])
        victim = turn_id("ann", 1, 1)
        engine.delete(victim)
        engine.set_policy("ann", "recmem")
        while engine.policy("ann")["change"]["decided"] < 2:
            llm.release()
            engine.step()
        assert {m.generation for m in engine.get_all("ann")} == {1}
        settle(engine)
        assert engine.policy("ann") == {"tenant": "ann", "policy": "recmem", "generation": 3, "change": None}
        late = [p.operation for p in llm.prompts["ann"][asked:]]
        assert late.count("extract") <= 1, "the change that is of no use any more goes no further"
        result = engine.get_all("ann")
        assert former and {m.generation for m in result} == {3}
        assert not any(1 in m.source_seqs for m in result)
    with reports(tmp_path / "a") as of:
        kinds: tuple[Any, ...] = ("episode", "fact")
        for kind in kinds:
            kept = of.memories("ann", kind, every=True)
            assert not any(1 in m["source_seqs"] for m in kept), "nor in the generation that was broken off"
    with opened(tmp_path / "a", "recmem") as engine:
        assert engine.get_all("ann") == result
    with opened(tmp_path / "b", "recmem") as engine:
        ingest(engine, topical("ann", 18), 50)
        engine.set_policy("ann", "eager")
        engine.delete(victim)
        engine.set_policy("ann", "recmem")
        assert engine.drain()
        assert engine.get_all("ann") == result, "to the ids, whenever the changes came"


# ---- out of a store and into another


def test_an_export_of_a_tenant_with_a_policy_of_its_own(tmp_path: Path) -> None:
    with opened(tmp_path / "from", "recmem") as engine:
        engine.set_policy("ann", "eager")
        engine.add_batch(turns_of("ann", 6))
        assert engine.drain()
    with reports(tmp_path / "from") as of:
        records = list(of.export("ann"))
    with opened(tmp_path / "to", "recmem") as engine:
        engine.import_("ann", records)
        assert engine.policy("ann")["policy"] == "eager"
