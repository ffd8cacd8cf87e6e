"""A tenant's own policy, and changes of it: the log is read again into a new generation of memories."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.mock.llm import MockReplies
from undertow.bench.mock.replies import Messages
from undertow.bench.mock.server import MockServer
from undertow.engine.api.engine import Engine
from undertow.engine.base.model import InputError, Memory, PolicyName
from undertow.engine.storage.row_codec import turn_id

from ...support.engine import MARKER, NEVER, HeldLLM, RecordingLLM, ingest, open_engine, settle, turn_of
from ...support.faults.harness import (
    CHANGES,
    THETA,
    WINDOWS,
    assert_same_state,
    end_state,
    reports,
    shared_driver,
    write_log,
)
from ...support.faults.moving import Snapshots, after_commits
from ...support.faults.spoilt_llm import served
from ...support.policies.change import REPLIES, begin, opened, topical
from ...support.soak.rare import COMPARED


def content(memories: Iterable[Memory]) -> list[tuple[object, ...]]:
    """What memories say and rest on, in order of birth, with names that do not depend on the generation."""
    memories = list(memories)
    name = {m.id: (m.kind, m.born_at_seq, m.ordinal) for m in memories}
    fields = "version made_at_seq text source_seqs source_messages shown_seqs timestamp fact_kind"
    plain = attrgetter(*fields.split())
    return [(*name[m.id], *plain(m), name.get(m.episode_id or ""), len(m.supersedes)) for m in memories]


def found_of(engine: Engine) -> list[tuple[str, str, float]]:
    hits = engine.search("ann", "harbour violin", k_sub=0).ranked()
    return [(hit.kind, hit.memory, hit.score) for hit in hits]


def forget_some(engine: Engine) -> None:
    """Delete turns; what is left of their memories is remade, some of it out of several turns in one job."""
    for seq in (3, 9, 20):
        engine.delete(turn_id("ann", 1, seq))
    assert engine.drain()


# ---- a tenant's own policy


def test_a_tenant_begins_under_a_policy_of_its_own(tmp_path: Path) -> None:
    with opened(tmp_path / "eager", "eager") as engine:
        ingest(engine, topical("ann", 20), 7)
        assert engine.drain()
        expected = engine.get_all("ann")
    with opened(tmp_path / "own", "recmem") as engine:
        told = {"tenant": "ann", "policy": "eager", "generation": 1, "change": None}
        assert engine.set_policy("ann", "eager") == told
        ingest(engine, topical("ann", 20), 7)
        ingest(engine, topical("bob", 20), 7)
        assert engine.drain()
        assert engine.get_all("ann") == expected and len(expected) > 3
        assert any(m.kind == "episode" for m in engine.get_all("bob")), (
            "the store's policy is everyone else's"
        )
        assert engine.policy("bob")["policy"] == "recmem"
    with opened(tmp_path / "own", "recmem") as engine:
        assert engine.policy("ann")["policy"] == "eager"
        assert engine.get_all("ann") == expected


def test_an_answer_is_given_what_the_tenants_own_policy_says(tmp_path: Path) -> None:
    with opened(tmp_path, "recmem") as engine:
        engine.set_policy("ann", "nemori")
        for name in ("ann", "bob"):
            ingest(engine, topical(name, 20), 20)
            engine.flush(name)
        given = engine.recall("ann", "harbour boat")
        best = {seq for hit in given.episodes[:2] for seq in hit.source_seqs}
        assert {seq for hit in given.turns for seq in hit.source_seqs} == best != set(), "the words of these"
        assert given.episodes == engine.search("ann", "harbour boat").episodes
        assert engine.recall("bob", "harbour boat") == engine.search("bob", "harbour boat")
        assert len(engine.search("bob", "harbour boat").turns) == 10
        engine.set_policy("ann", "recmem")
        assert engine.recall("ann", "harbour boat") == given, "until the change is done"
        assert engine.drain()
        assert engine.recall("ann", "harbour boat") == engine.search("ann", "harbour boat")


def test_what_is_no_change_leaves_no_record(tmp_path: Path) -> None:
    with opened(tmp_path, "recmem") as engine:
        engine.add_batch(topical("ann", 2))
        with pytest.raises(InputError, match=r"'lazy' is none.*recmem, eager"):
            engine.set_policy("ann", "lazy")
        with pytest.raises(InputError, match="empty"):
            engine.set_policy("", "eager")
        before = engine.journal.row_count
        assert engine.set_policy("ann", "recmem")["change"] is None
        assert engine.journal.row_count == before
        engine.set_policy("ann", "eager")
        before = engine.journal.row_count
        assert engine.set_policy("ann", "eager")["change"]["policy"] == "eager"
        assert engine.journal.row_count == before, "repeated, it is the same change"


# ---- a change


@pytest.mark.rarely(before=COMPARED, after=COMPARED)
@pytest.mark.parametrize(("before", "after"), CHANGES)
@pytest.mark.parametrize("chunk", [1, 50])
def test_after_a_change_all_is_as_if_the_policy_had_been_there_from_the_start(
    before: PolicyName, after: PolicyName, chunk: int, tmp_path: Path
) -> None:
    """Whatever the batches, with other tenants at work, and with turns that come meanwhile.

    A flush in the log ends a window when it is read again, too.
    """
    with opened(tmp_path / "from the start", after) as engine:
        ingest(engine, topical("ann", 24), 50)
        engine.log_flush("ann")
        engine._log("ann", "replay", [{"job_id": "none"}])  # does nothing, in the log's place of the change
        ingest(engine, topical("ann", 12, 24), 50)
        assert engine.drain()
        expected, stats = content(engine.get_all("ann")), engine.tenant_stats("ann")
        found = found_of(engine)
        forget_some(engine)
        less = content(engine.get_all("ann"))
    assert len(expected) > 5 and found and less != expected
    llm = RecordingLLM(REPLIES, latency_s=0.001, jitter_s=0.002)
    with opened(tmp_path / "changed", before, llm) as engine:
        ingest(engine, topical("ann", 24), chunk)
        ingest(engine, topical("bob", 24), chunk)
        engine.log_flush("ann")
        engine.set_policy("ann", after)
        ingest(engine, topical("ann", 12, 24), chunk)
        assert engine.drain()
        assert content(engine.get_all("ann")) == expected
        assert {m.generation for m in engine.get_all("ann")} == {2}
        told = engine.tenant_stats("ann")
        for name in ("turns", "episodes", "facts", "merges", "consolidations", "waiting_turns"):
            assert told[name] == stats[name], name
        assert told["llm_calls"] > stats["llm_calls"], "what the first generation cost stays metered"
        assert found_of(engine) == found
        assert engine.policy("bob")["generation"] == 1
        forget_some(engine)
        live = engine.get_all("ann")
        assert content(live) == less and {m.generation for m in live} == {2}
    with reports(tmp_path / "changed") as of:
        kinds: tuple[Any, ...] = ("episode", "fact")
        listed = [m["id"] for kind in kinds for m in of.memories("ann", kind)]
        assert sorted(listed) == sorted(m.id for m in live)
        every = [m["generation"] for kind in kinds for m in of.memories("ann", kind, every=True)]
        assert set(every) == {1, 2}, "the first generation stays in the history"
        assert [r["decision"] for r in of.explain("ann")].count("undecided") == 0
    with opened(tmp_path / "changed", before) as engine:
        assert engine.get_all("ann") == live


class OneFact(MockReplies):
    """Whatever is read says the same."""

    def reply(self, messages: Messages, schema: Mapping[str, Any] | None) -> str:
        return '{"facts": [{"text": "Ann sails."}]}'


def test_what_one_job_makes_and_changes_is_of_its_generation(tmp_path: Path) -> None:
    with open_engine(tmp_path, RecordingLLM(OneFact()), **NEVER) as engine:
        engine.add_batch(topical("ann", 6))
        assert engine.drain()
        engine.set_policy("ann", "eager")
        assert engine.drain()
        assert [m.source_seqs for m in engine.get_all("ann")] == [(0, 1, 2, 3, 4, 5)]
        engine.delete(turn_id("ann", 1, 2))
        assert engine.drain()
        (fact,) = engine.get_all("ann")
        assert (fact.generation, fact.version, fact.source_seqs) == (2, 5, (0, 1, 3, 4, 5))
    with open_engine(tmp_path, **NEVER) as engine:
        assert engine.get_all("ann") == [fact]


def test_meanwhile_searches_see_the_former_generation(tmp_path: Path) -> None:
    with opened(tmp_path, "recmem", HeldLLM(REPLIES)) as engine:
        engine.add_batch(topical("ann", 20))
        settle(engine)
        former = engine.get_all("ann")
        found = engine.search("ann", "harbour boat")
        assert former and (found.episodes or found.facts)
        page = engine.list("ann", kinds=["episode", "fact"])
        begin(engine)
        assert engine.get_all("ann") == former
        assert engine.search("ann", "harbour boat") == found
        assert engine.list("ann", kinds=["episode", "fact"]) == page
        assert engine.history(former[0].id)[-1]["text"] == former[0].text
        (receipt,) = engine.add_batch([turn_of("ann", 99, f"the {MARKER} in the harbour")])
        turns = engine.search("ann", MARKER).turns
        assert receipt.id in [hit.id for hit in turns], "a turn that comes is found at once"
        change = engine.policy("ann")["change"]
        assert change == {"policy": "eager", "generation": 2, "decided": change["decided"], "records": 21}
        assert 3 <= change["decided"] < 21
        settle(engine)
        assert engine.policy("ann") == {"tenant": "ann", "policy": "eager", "generation": 2, "change": None}
        current = engine.get_all("ann")
        assert current and not {m.id for m in current} & {m.id for m in former}
        hits = engine.search("ann", "harbour boat", k_sub=0, k_epi=50, k_sem=50).ranked()
        assert {hit.id for hit in hits} == {m.id for m in current}, "the former is no longer retrieved"
        assert any(99 not in m.source_seqs and 21 in m.source_seqs for m in current), (
            "the late turn's, after all"
        )
        assert engine.history(former[0].id)[-1]["generation"] == 1
        assert engine.search("ann", MARKER).turns[0].id == receipt.id
        assert turn_id("ann", 1, 0) in {hit.id for hit in engine.search("ann", "n0", k_sub=100).turns}


def test_consolidated_turns_stay_out_of_search_during_a_change(tmp_path: Path) -> None:
    def found(engine: Engine) -> set[int]:
        return {hit.source_seqs[0] for hit in engine.search("ann", "harbour", k_sub=100).turns}

    with opened(tmp_path, "recmem", HeldLLM(REPLIES), retain_consolidated=False) as engine:
        engine.add_batch(topical("ann", 20))
        settle(engine)
        before = found(engine)
        assert 0 < len(before) < 20
        begin(engine)
        assert found(engine) == before
        engine.add_batch(topical("ann", 1, 50))
        assert found(engine) == before | {21}


# ---- crashes and faults


@pytest.mark.rarely(before=COMPARED, after=COMPARED)
@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_a_change_goes_on_from_wherever_it_was_cut_off(
    before: PolicyName, after: PolicyName, tmp_path: Path
) -> None:
    """The store as it is on the disk after some of the commits, taken up by another engine."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with opened(whole, before) as engine:
        engine.add_batch(topical("ann", 16))
        assert engine.drain()
        shutil.copytree(whole, cut)
        engine.set_policy("ann", after)
        assert engine.drain()
        assert engine.get_all("ann")
    expected = end_state(whole)
    snapshots = Snapshots(cut, tmp_path / "cuts")
    with opened(cut, before) as engine, after_commits(snapshots.take):
        engine.set_policy("ann", after)
        assert engine.drain()
    stores = [store for commit, store, _ in snapshots.taken if commit == "append"]
    came_to: list[Any] = []
    # the last two stand before and behind the switch
    for store in [*stores[: -2 : -(-len(stores) // 4)], *stores[-2:]]:
        (store / "writer.lock").unlink()
        with opened(store, before) as other:
            told = other.policy("ann")
            came_to.append(told["change"]["decided"] if told["change"] else None)
            assert told["generation"] == (1 if told["change"] else 2)
            assert other.drain()
        assert_same_state(end_state(store), expected)
    assert came_to[0] == 0 and 0 < came_to[-2] <= 16 and came_to[-1] is None
    assert_same_state(end_state(cut), expected)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(MockServer(REPLIES)) as url:
        yield url


@pytest.mark.rarely(before=COMPARED, after=COMPARED)
@pytest.mark.parametrize(("before", "after"), CHANGES)
def test_a_process_killed_during_a_change(
    before: PolicyName, after: PolicyName, url: str, tmp_path: Path
) -> None:
    """SIGKILL before and after commits, one run after the other; each goes on with the rest."""
    driver = shared_driver()
    settings = {
        **THETA,
        "encoder": "hash:64",
        "llm_url": url,
        "policy": before,
        **WINDOWS,
        "window_messages": 4,
    }
    log = write_log(tmp_path / "log.jsonl", ["ann", "bob"], 14, session_turns=2)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    ingested = driver.run(task="ingest", log=log, store=whole, settings=settings)
    assert ingested.last("settled")
    shutil.copytree(whole, cut)
    task = {"task": "set_policy", "tenant": "ann", "policy": after, "settings": settings}
    outcome = driver.run(store=whole, **task)
    assert outcome.status == 0 and outcome.last("policy")["generation"] == 2
    begun_at = []
    for n, late in ((1, False), (1, True), (5, True), (4, False)):
        kill = {"method": "_commit", "n": n, "after": late}  # of commits that hold rows
        outcome = driver.run(store=cut, kill=kill, **task)
        assert outcome.status == -signal.SIGKILL, outcome.lines
        begun_at.append(outcome.last("begun_at"))
    outcome = driver.run(store=cut, **task)
    assert outcome.status == 0 and outcome.last("settled")
    assert 0 < outcome.last("begun_at") < 14, begun_at
    assert sorted(n for n in begun_at if n is not None) == [n for n in begun_at if n is not None]
    assert_same_state(end_state(cut), end_state(whole))


def test_unusable_replies_park_and_are_replayed_in_the_new_generation(tmp_path: Path) -> None:
    broken = MockReplies(1, malformed_rate=1.0, malformed_sticky=True)
    with opened(tmp_path, "recmem", RecordingLLM(broken)) as engine:
        engine.add_batch(topical("ann", 14))
        assert engine.drain()
        assert (parked := engine.tenant_stats("ann")["dead_letters"]) > 0
        engine.set_policy("ann", "eager")
        assert engine.drain()
        assert engine.tenant_stats("ann")["dead_letters"] == 14 != parked
        assert engine.policy("ann")["generation"] == 2, "parked jobs do not hold the switch"
    with reports(tmp_path) as of:
        assert [job["operation"] for job in of.jobs()] == ["extract"] * 14, "the former jobs are of no use"
    with opened(tmp_path, "recmem", RecordingLLM(REPLIES)) as engine:
        assert engine.replay_jobs() == 14
        assert engine.drain()
        assert engine.get_all("ann") and engine.tenant_stats("ann")["dead_letters"] == 0


def test_without_a_server_a_change_waits_and_the_former_memories_serve(tmp_path: Path) -> None:
    with opened(tmp_path, "recmem") as engine:
        engine.add_batch(topical("ann", 14))
        assert engine.drain()
        former = engine.get_all("ann")
    with open_engine(tmp_path, None, **THETA) as engine:
        engine.set_policy("ann", "eager")
        assert not engine.drain()
        assert engine.get_all("ann") == former
        assert engine.policy("ann")["change"]["decided"] == 0
    with reports(tmp_path) as of:
        assert [(job["state"], job["operation"]) for job in of.jobs()] == [("pending", "extract")]
    with opened(tmp_path, "recmem") as engine:
        assert engine.drain()
        assert engine.policy("ann")["generation"] == 2
