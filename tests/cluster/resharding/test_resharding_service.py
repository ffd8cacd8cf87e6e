"""What a shard answers while tenants move, and what becomes of their work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args

import pytest

from undertow.bench.mock.llm import MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.model import PolicyName, Turn, UndertowError
from undertow.engine.cluster.resharding.coordinator import resume
from undertow.engine.storage import lance_log
from undertow.engine.storage.journal import Journal
from undertow.engine.storage.lance_log import LanceLog
from undertow.engine.tenants.migration_records import InTransit, Moved

from ...support.cluster.resharding import LEAVE_A, STAY, advance, begin_move, finished, keys_of
from ...support.engine import DeafLLM, HeldLLM
from ...support.faults.harness import CHANGES, State, assert_same_state, reports
from ...support.faults.moving import REPLIES, Killed, Shards, Strike, after_commits


def test_a_tenant_is_served_at_one_shard_at_every_moment(shards: Shards, turns: list[Turn]) -> None:
    a, c, keys = shards("a"), shards("c"), keys_of(shards, LEAVE_A)
    assert a.refusals([*STAY[:2], *LEAVE_A]) == {}, "it serves them until they are sealed"
    assert {leaver.key for leaver in a.leaving()} == set(keys)
    assert a.refusals(["wes"]) == {}, "a new tenant begins there too"
    for name, error in c.refusals(["wes", *LEAVE_A]).items():
        assert isinstance(error, Moved) and error.to == "a", f"{name} has not arrived"
    assert a.refusals(["bob"])["bob"].to == "b" and c.refusals(["bob"])["bob"].to == "b"
    a.seal(2, keys)
    for _ in range(2):
        refusals = shards("a").refusals([*STAY[:2], *LEAVE_A])
        assert {name: type(error) for name, error in refusals.items()} == dict.fromkeys(LEAVE_A, InTransit)
        shards.close()  # and after a restart
    assert shards("c").pull(2, "a", keys[:2]) > 0
    assert set(shards("c").refusals(LEAVE_A)) == {LEAVE_A[2]}
    assert shards("c").pull(2, "a", keys) > 0 == shards("c").pull(2, "a", keys)
    shards("a").release(2, keys)
    for _ in range(2):
        refusals = shards("a").refusals([*STAY[:2], *LEAVE_A])
        assert {name: type(error) for name, error in refusals.items()} == dict.fromkeys(LEAVE_A, Moved)
        assert {error.to for error in refusals.values()} == {"c"}
        shards.close()
    assert shards.add(turns) == []


def test_a_tenant_that_is_new_meanwhile(shards: Shards, turns: list[Turn]) -> None:
    """It begins where it would have before; in the end it waits, and begins where it belongs."""
    early, queued, late = (Turn(name, turns[0].messages, "first") for name in ("wes", "xia", "yan"))
    assert shards.add([early]) == []
    advance(shards)
    assert shards.map.phase == "closing"
    assert shards.add([early, late]) == [late]
    shards.engines["a"].scheduler.inbox.put(queued)
    assert set(keys_of(shards, ["wes", "xia", *LEAVE_A])) == {one.key for one in shards("a").leaving()}
    resume(shards.root, shards.ask)
    assert shards.engines["c"].search("wes", "boat").turns
    assert shards.add([queued, late]) == []
    assert {"wes", "xia", "yan", *LEAVE_A} <= set(shards.engines["c"].tenants.names())
    assert shards.engines["a"].tenants.names() == sorted(STAY[:2])


def test_calls_for_a_tenant_that_leaves_are_refused_whole(shards: Shards, turns: list[Turn]) -> None:
    engine, name = shards.engines["a"], LEAVE_A[0]
    memory = engine.search(name, "boat").turns[0].id
    shards("a").seal(2, keys_of(shards, [name]))
    staying = next(turn for turn in turns[50:] if turn.tenant == STAY[0])
    before = engine.journal.next_lsn
    calls: list[Callable[[], object]] = [
        lambda: engine.add_batch([staying, *(turn for turn in turns if turn.tenant == name)]),
        lambda: engine.search(name, "boat"),
        lambda: engine.get_all(name),
        lambda: engine.flush(name),
        lambda: engine.erase(name),
        lambda: engine.delete(memory),
        lambda: engine.update(memory, "other words"),
        lambda: engine.get(memory),
        lambda: engine.history(memory),
    ]
    for error in (InTransit, Moved):
        for call in calls:
            with pytest.raises(error):
                call()
        assert engine.tenants.names() == [STAY[0], STAY[1], LEAVE_A[1], LEAVE_A[2]]
        assert engine.journal.next_lsn == before
        shards("c").pull(2, "a", keys_of(shards, [name]))
        shards("a").release(2, keys_of(shards, [name]))
        before = engine.journal.next_lsn
    assert shards.engines["c"].search(name, "boat").turns[0].id == memory
    with reports(shards.store("a")) as of:
        assert name not in [size["tenant"] for size in of.tenant_sizes()]
        assert all(job["tenant"] != name for job in of.jobs())
        with pytest.raises(Moved):
            of.turns(name)
        with pytest.raises(UndertowError):
            of.history(memory)


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_work_under_way_is_dropped_and_done_again_elsewhere(
    policy: PolicyName, turns: list[Turn], expected: State, tmp_path: Path
) -> None:
    """Jobs that wait for a reply, a reply that comes too late, and turns that wait in the queue."""
    held = DeafLLM(REPLIES)
    name, root = LEAVE_A[0], tmp_path / "root"
    of_tenant = [turn for turn in turns if turn.tenant == name]
    with Shards(root, llm=lambda: held, policy=policy) as shards:
        shards.add([turn for turn in turns if turn.tenant in LEAVE_A])
        while not held.held:
            shards.engines["a"].step()
        begin_move(shards)
        extra = Turn(name, of_tenant[0].messages, "waits in the queue")
        ticket = shards.engines["a"].scheduler.inbox.put(extra)
        assert shards("a").seal(2, keys_of(shards, LEAVE_A)) == [name] and ticket.receipt is None
        before = shards.engines["a"].journal.next_lsn
        held.release()
        for _ in range(3):
            shards.engines["a"].step(0.01)
        assert shards.engines["a"].journal.next_lsn == before, "a late reply is not even logged"
        assert shards.engines["a"].idle
        shards.crash()
    with Shards(root, policy=policy) as shards:
        resume(shards.root, shards.ask)
        assert not shards.engines["c"].idle, "what was undecided is taken up"
        assert_same_state(finished(shards, turns), expected)


def test_what_a_dropped_job_has_cost_is_metered(tmp_path: Path, turns: list[Turn]) -> None:
    held = HeldLLM(REPLIES)
    name = LEAVE_A[0]
    with Shards(tmp_path, llm=lambda: held, calls="paper") as shards:  # jobs of several calls
        shards.add([turn for turn in turns if turn.tenant == name])
        engine = shards.engines["a"]
        running = None
        while running is None or not running.usage:  # until a job that has had a reply waits for the next
            held.release()
            engine.step(0.001)
            running = engine.scheduler.decisions.running(name)
        spent = {operation: usage.prompt_tokens for operation, usage in running.usage.items()}
        before = {operation: usage.prompt_tokens for operation, usage in running.tenant.meter.items()}
        begin_move(shards)
        shards("a").seal(2, keys_of(shards, [name]))
        shards("c").pull(2, "a", keys_of(shards, [name]))
        meter = shards.engines["c"].tenants.existing(name).meter
        after = {operation: usage.prompt_tokens for operation, usage in meter.items()}
        assert spent and after == dict(Counter(before) + Counter(spent))
        shards.crash()


@pytest.mark.parametrize(("policy", "after"), CHANGES)
def test_a_change_of_policy_goes_on_where_the_tenant_has_moved(
    policy: PolicyName, after: PolicyName, tmp_path: Path, turns: list[Turn]
) -> None:
    held, name = HeldLLM(MockReplies(1, 0.3, 0.15)), LEAVE_A[0]

    def go_on(engine: Engine, until: Callable[[], bool]) -> None:
        while not until():
            held.release()
            engine.step(0.001)

    with Shards(tmp_path, llm=lambda: held, policy=policy) as shards:
        shards.add([turn for turn in turns if turn.tenant == name])
        engine = shards.engines["a"]
        go_on(engine, lambda: engine.idle)
        former = engine.get_all(name)
        engine.set_policy(name, after)
        go_on(engine, lambda: engine.policy(name)["change"]["decided"] >= 4)
        before = engine.policy(name)
        begin_move(shards)
        shards("a").seal(2, keys_of(shards, [name]))
        shards("c").pull(2, "a", keys_of(shards, [name]))
        other = shards.engines["c"]
        assert (other.policy(name), other.get_all(name)) == (before, former)
        assert not other.idle, "the rest is taken up, though the log was decided to its end once"
        go_on(other, lambda: other.idle)
        assert other.policy(name) == {"tenant": name, "policy": after, "generation": 2, "change": None}
        assert former and not {m.id for m in former} & {m.id for m in other.get_all(name)}
        shards.crash()


def test_sealing_looks_at_its_batch_alone(shards: Shards, calls_of: Callable[..., list[str]]) -> None:
    """A shard may have millions of tenants, and a resharding thousands of batches."""

    class Unlisted(set[str]):
        def __iter__(self) -> Iterator[str]:
            raise AssertionError("all tenants are gone through")

    a, keys = shards("a"), keys_of(shards, LEAVE_A)
    engine = shards.engines["a"]
    engine.tenants._known = Unlisted(engine.tenants.names())
    read = calls_of(LanceLog, "scanner", lambda table, columns, filter=None, **options: filter or "")
    a.seal(2, keys[:2])
    assert read and all(f"tenant_key IN ('{keys[0]}', '{keys[1]}')" in filter for filter in read)
    assert set(a.refusals(LEAVE_A)) == set(LEAVE_A[:2])


def test_each_step_of_a_move_is_on_the_disk_before_the_next(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Appends need not be, by default; but the rows that are purged over here must not be lost over there."""
    synced: set[Path] = set()

    def fsync(path: Path) -> None:
        assert path.exists()
        synced.add(path)

    def lacking(shard: str) -> list[str]:
        """Files that the newest version of a journal rests on and that may be lost with the power."""
        folder = Path(shards.store(shard).uri) / shards.engines[shard].journal.info.journal
        manifest = min((folder / "_versions").glob("*.manifest"))  # they count down
        files = [*(folder / "data").iterdir(), *(folder / "_deletions").glob("*"), manifest]
        return sorted(path.name for path in {*files, manifest.parent, folder / "data"} - synced)

    monkeypatch.setattr(lance_log, "fsync_path", fsync)
    a, c, keys = shards("a"), shards("c"), keys_of(shards, LEAVE_A)
    assert shards.engines["a"].settings.durability == "commit" and lacking("a")
    a.seal(2, keys)
    assert lacking("a") == []
    with after_commits(Strike(1)), pytest.raises(Killed):  # between the commit and what comes after it
        c.pull(2, "a", keys)
    assert lacking("c")
    shards.close()
    shards("a"), shards("c")
    shards("c").pull(2, "a", keys)
    assert lacking("c") == [], "what an earlier attempt has stored"
    assert lacking("a"), "that one was opened again"
    shards("a").release(2, keys)
    assert lacking("a") == []


def test_a_shard_is_cleared_once_all_that_has_left_it_is_on_the_disk(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, delete = Journal.sync, LanceLog.delete

    def synced(journal: Journal) -> None:
        sync(journal)
        events.append(f"{journal.location.uri[-1]} is on the disk at {journal.next_lsn}")

    def deleted(table: LanceLog, filter: str) -> None:
        if "'turn'" in filter:
            ends = [f"{name} is on the disk at {shards.engines[name].journal.next_lsn}" for name in "abc"]
            assert set(ends) <= set(events)
            events.append("cleared")
        delete(table, filter)

    monkeypatch.setattr(Journal, "sync", synced)
    monkeypatch.setattr(LanceLog, "delete", deleted)
    resume(shards.root, shards.ask)
    assert events.count("cleared") == 2
    assert events[-1].startswith("b is on the disk"), "and so is that it was cleared"
