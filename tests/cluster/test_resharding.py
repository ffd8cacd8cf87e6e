"""Moving tenants between shards: cut off anywhere, nothing is lost, doubled or out of order."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.bench.mock.llm import MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.model import PolicyName, Turn, UndertowError
from undertow.engine.cluster.resharding import coordinator as resharding
from undertow.engine.cluster.resharding.coordinator import batches, reshard, resume
from undertow.engine.cluster.resharding.participant import DepartingTenant, ReshardingParticipant, StaleMap
from undertow.engine.cluster.resharding.transfer import TenantTransfer
from undertow.engine.cluster.shard_map import ShardMap, publish
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.storage import lance_log as log_table
from undertow.engine.storage.journal import Journal, Row
from undertow.engine.storage.lance_log import LanceLog
from undertow.engine.storage.location import Location, StoreError
from undertow.engine.tenants.migration_records import InTransit, Moved, MoveError, NotYet

from ..support.engine import DeafLLM, HeldLLM, bytes_hold, settings_of, turn_of
from ..support.faults.harness import CHANGES, KINDS, State, assert_same_state, reports, turns_of, write_log
from ..support.faults.moving import (
    HASH_KEY,
    REPLIES,
    Busy,
    Killed,
    Shards,
    Snapshots,
    Strike,
    Traffic,
    after_commits,
    alone,
    assert_stored,
    ids_of,
    state_of,
)

# of a, of b, and those that a third shard c takes from each
STAY = ("ada", "dan", "bob", "hal")
LEAVE_A, LEAVE_B = ("cleo", "lea", "pam"), ("eve", "gil", "zoe")
TENANTS = (*STAY, *LEAVE_A, *LEAVE_B)
# with the policies beside RecMem: of each kind some, and all that the tests look at
FEW = (STAY[0], STAY[2], *LEAVE_A, LEAVE_B[0])
TURNS = 10


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_log(tmp_path_factory.mktemp("log") / "log.jsonl", TENANTS, TURNS, session_turns=4)


@pytest.fixture
def policy() -> PolicyName:
    """Of most tests' shards; some are parametrised with it."""
    return "recmem"


@pytest.fixture
def turns(log: Path, policy: PolicyName) -> list[Turn]:
    return logged(log, policy)


def logged(log: Path, policy: PolicyName) -> list[Turn]:
    """The log's turns, the tenants by turns; of few of them for the policies beside RecMem."""
    every = [turn for of_tenant in zip(*turns_of(log).values(), strict=True) for turn in of_tenant]
    return [turn for turn in every if policy == "recmem" or turn.tenant in FEW]


@pytest.fixture(scope="module")
def stayed(log: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[PolicyName], State]:
    """What a policy makes of its turns where no one moves."""

    @cache
    def of(policy: PolicyName) -> State:
        state = alone(tmp_path_factory.mktemp("alone"), logged(log, policy), policy)
        assert KINDS[policy] | {"parked", "turn"} <= state.kinds()
        return state

    return of


@pytest.fixture
def expected(stayed: Callable[[PolicyName], State], policy: PolicyName) -> State:
    return stayed(policy)


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resharding, "TENANTS_PER_BATCH", 2)


def where(shards: Shards) -> dict[str, str]:
    return {name: shard for shard in shards.map.shards for name in shards(shard)._engine.tenants.names()}


def test_only_those_move_that_must_and_all_go_on_as_if_they_had_not(
    turns: list[Turn], expected: State, tmp_path: Path
) -> None:
    half = len(turns) // 2
    with Shards(tmp_path) as shards:
        assert shards.add(turns[:half]) == []
        before = where(shards)
        done = reshard(shards.root, ["a", "b", "c"], shards)
        after = where(shards)
        moved = {name for name in TENANTS if before[name] != after[name]}
        assert {after[name] for name in moved} == {"c"}
        assert 0 < len(moved) < len(TENANTS)
        assert after == {name: shards.map.owner(name) for name in TENANTS}
        assert (done.tenants, done.shard_map) == (len(moved), shards.map)
        assert shards.map.before is None and shards.map.version == 5
        assert shards.add(turns[half:]) == []
        shards.drain()
    assert_same_state(state_of(tmp_path), expected)


def test_cut_off_after_any_commit(turns: list[Turn], expected: State, tmp_path: Path) -> None:
    """Turns come in between all calls, some of new tenants, and others are in work when theirs move."""
    early, late = ([turn for turn in turns if turn.tenant == new] for new in (LEAVE_B[2], LEAVE_A[2]))
    known = [turn for turn in turns if turn not in [*early, *late]]
    with Shards(tmp_path / "root") as shards:
        traffic = Traffic(shards, known[:42] + early + late + known[42:])
        pulls: Counter[str | None] = Counter()

        def look(name: str) -> None:
            if not traffic.under_way:
                pulls[shards.map.phase] += name == "append_stream"
                snapshots.take(name)

        traffic.send(40)
        snapshots = Snapshots(tmp_path / "root", tmp_path / "snapshots", acked=traffic.acked)
        with after_commits(look):
            reshard(shards.root, ["a", "b", "c"], lambda shard: Busy(shards(shard), lambda: traffic.send(1)))
        assert traffic.line
    commits = Counter(name for name, _, _ in snapshots.taken)
    assert pulls["moving"] > 2 and pulls["closing"] > 0, "all that can happen has happened"
    assert commits["drop_history"] == 2 and commits["create"] >= 4
    for name, root, acked in snapshots.taken:
        with Shards(root) as shards:
            resume(shards.root, shards)
            assert shards.map.before is None and shards.map.shards in (("a", "b"), ("a", "b", "c")), name
            assert_stored(shards, turns, acked)
            assert shards.add(turns) == []
            shards.drain()
        assert_same_state(state_of(root), expected)


@pytest.mark.parametrize(
    ("policy", "seed"),
    [("recmem", 0), ("recmem", 1), ("recmem", 2), ("eager", 3), ("nemori", 4), ("himem", 5)],
)
def test_killed_again_and_again(
    policy: PolicyName, seed: int, turns: list[Turn], expected: State, tmp_path: Path
) -> None:
    """Also while it takes up what an earlier kill has left, there and back, with turns in between."""
    rng = random.Random(seed)
    line = list(turns)
    most_commits = 40 if policy == "recmem" else 20  # the others' worlds are smaller
    kills = 0
    for wanted in (["a", "b", "c"], ["b", "c"], ["a"]):
        ended = False
        while not ended:
            shards = Shards(tmp_path, policy=policy)
            try:
                with after_commits(Strike(rng.randrange(1, most_commits))):
                    line = shards.add(line[:20]) + line[20:]
                    resume(shards.root, shards)
                    reshard(shards.root, wanted, shards)
                shards.close()
                ended = True
            except Killed:
                kills += 1
                shards.crash()
    assert kills > 3
    with Shards(tmp_path, policy=policy) as shards:
        assert shards.map.everyone == ("a",)
        assert shards.add(turns) == []
        shards.drain()
    assert_same_state(state_of(tmp_path), expected)


def test_killed_by_the_system_at_random_moments(
    log: Path, turns: list[Turn], expected: State, tmp_path: Path
) -> None:
    rng = random.Random(5)
    acked: Counter[str] = Counter()
    root, out = tmp_path / "root", tmp_path / "acked.jsonl"
    with Shards(root) as shards:
        shards.add(turns[:30])
    statuses = []
    command = [sys.executable, "-B", "-m", "tests.support.faults.moving_driver"]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as driver:
        assert driver.stdin is not None and driver.stdout is not None
        for n in range(6):
            wanted = ["a", "b"] if n % 2 else ["a", "b", "c"]
            task = {"root": root, "log": log, "shards": wanted, "out": out}
            task["kill"] = (rng.randrange(1, 24), rng.uniform(0, 0.05)) if n < 5 else None
            driver.stdin.write(json.dumps(task, default=str) + "\n")
            driver.stdin.flush()
            statuses.append(json.loads(driver.stdout.readline())["exit"])
            if out.exists():
                for line in out.read_text().splitlines():
                    acked |= Counter(json.loads(line))
            out.unlink(missing_ok=True)
        driver.stdin.close()
    # one that finds most of it done may end before its moment
    assert set(statuses) == {0, -signal.SIGKILL} and statuses.count(-signal.SIGKILL) > 2
    assert statuses[-1] == 0
    with Shards(root) as shards:
        assert shards.map.before is None and shards.map.shards == ("a", "b")
        assert_stored(shards, turns, acked)
        assert shards.add(turns) == []
        shards.drain()
    assert_same_state(state_of(root), expected)


def test_on_an_object_store(turns: list[Turn], tmp_path: Path, s3: dict[str, str]) -> None:
    some = [turn for turn in turns if turn.tenant in (STAY[0], LEAVE_A[0], LEAVE_B[0])]
    half = len(some) // 2
    root = Location.of("s3://memories/cluster")
    with Shards(root) as shards:
        shards.add(some[:half])
        with after_commits(Strike(9)), pytest.raises(Killed):
            reshard(root, ["a", "b", "c"], shards)
        shards.crash()
    with Shards(root) as shards:
        assert resume(root, shards).tenants > 0
        assert shards.add(some[half:]) == []
        shards.drain()
    assert_same_state(state_of(root), alone(tmp_path, some))


# ---- what a shard answers meanwhile


@pytest.fixture
def shards(tmp_path: Path, turns: list[Turn]) -> Iterator[Shards]:
    """Two shards with some turns each, and the map that brings in a third."""
    with Shards(tmp_path / "root") as shards:
        shards.add(turns[:50])
        shards.drain()
        publish(shards.root, shards.map.toward(["a", "b", "c"]))
        for shard in "abc":
            shards(shard).adopt(shards.map)
        yield shards


def advance(shards: Shards) -> None:
    publish(shards.root, shards.map.after())
    for shard in shards.map.everyone:
        shards(shard).adopt(shards.map)


def keys_of(shards: Shards, names: Sequence[str]) -> list[str]:
    return [shards.map.tenant_key(name) for name in names]


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
    resume(shards.root, shards)
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
        publish(shards.root, shards.map.toward(["a", "b", "c"]))
        for shard in "abc":
            shards(shard).adopt(shards.map)
        extra = Turn(name, of_tenant[0].messages, "waits in the queue")
        shards.engines["a"].scheduler.inbox.put(extra)
        (ticket,) = shards("a").seal(2, keys_of(shards, LEAVE_A))
        assert ticket.turn is extra and ticket.receipt is None
        before = shards.engines["a"].journal.next_lsn
        held.release()
        for _ in range(3):
            shards.engines["a"].step(0.01)
        assert shards.engines["a"].journal.next_lsn == before, "a late reply is not even logged"
        assert shards.engines["a"].idle
        shards.crash()
    with Shards(root, policy=policy) as shards:
        resume(shards.root, shards)
        assert not shards.engines["c"].idle, "what was undecided is taken up"
        assert shards.add(turns) == []
        shards.drain()
    assert_same_state(state_of(root), expected)


def test_what_a_dropped_job_has_cost_is_metered(tmp_path: Path, turns: list[Turn]) -> None:
    held = HeldLLM(REPLIES)
    name = LEAVE_A[0]
    with Shards(tmp_path, llm=lambda: held) as shards:
        shards.add([turn for turn in turns if turn.tenant == name])
        engine = shards.engines["a"]
        running = None
        while running is None or not running.usage:  # until a job that has had a reply waits for the next
            held.release()
            engine.step(0.001)
            running = engine.scheduler.decisions.running(name)
        spent = {operation: usage.prompt_tokens for operation, usage in running.usage.items()}
        before = {operation: usage.prompt_tokens for operation, usage in running.tenant.meter.items()}
        publish(shards.root, shards.map.toward(["a", "b", "c"]))
        for shard in "abc":
            shards(shard).adopt(shards.map)
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
        publish(shards.root, shards.map.toward(["a", "b", "c"]))
        for shard in "abc":
            shards(shard).adopt(shards.map)
        shards("a").seal(2, keys_of(shards, [name]))
        shards("c").pull(2, "a", keys_of(shards, [name]))
        other = shards.engines["c"]
        assert (other.policy(name), other.get_all(name)) == (before, former)
        assert not other.idle, "the rest is taken up, though the log was decided to its end once"
        go_on(other, lambda: other.idle)
        assert other.policy(name) == {"tenant": name, "policy": after, "generation": 2, "change": None}
        assert former and not {m.id for m in former} & {m.id for m in other.get_all(name)}
        shards.crash()


def test_sealing_looks_at_its_batch_alone(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard may have millions of tenants, and a resharding thousands of batches."""

    class Unlisted(set[str]):
        def __iter__(self) -> Iterator[str]:
            raise AssertionError("all tenants are gone through")

    a, keys = shards("a"), keys_of(shards, LEAVE_A)
    engine = shards.engines["a"]
    engine.tenants._known = Unlisted(engine.tenants.names())
    read: list[str] = []
    scan = LanceLog.scanner

    def scanner(table: LanceLog, columns: Sequence[str], filter: str | None = None, **options: Any) -> Any:
        read.append(filter or "")
        return scan(table, columns, filter, **options)

    monkeypatch.setattr(LanceLog, "scanner", scanner)
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

    monkeypatch.setattr(log_table, "fsync_path", fsync)
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
    resume(shards.root, shards)
    assert events.count("cleared") == 2
    assert events[-1].startswith("b is on the disk"), "and so is that it was cleared"


# ---- erasing


def traces(shards: Shards, name: str) -> dict[str, bool]:
    """By shard, whether its files hold any vector of the tenant's, in whatever file or version."""
    return {shard: bytes_hold(Path(shards.store(shard).uri), name) for shard in "abc"}


def test_what_was_moved_leaves_no_byte_behind(shards: Shards) -> None:
    name = LEAVE_A[0]
    assert traces(shards, name) == {"a": True, "b": False, "c": False}
    resume(shards.root, shards)
    assert traces(shards, name) == {"a": False, "b": False, "c": True}


def test_a_name_erased_before_it_moves_begins_anew_as_another(shards: Shards, turns: list[Turn]) -> None:
    """One whose name lives again by then, one whose tombstone goes alone."""
    again, alone_ = LEAVE_A[:2]
    old = {name: ids_of(shards, name) for name in (again, alone_)}
    rows = shards.engines["a"].journal.count(keys_of(shards, [again]))
    for name in (again, alone_):
        assert shards.holder(name).erase(name) is None
    assert shards.holder(alone_) is shards.engines["a"], "its tombstone is still there"
    shards.add([turn for turn in turns if turn.tenant == again])
    done = resume(shards.root, shards)
    assert done.certificates == {}, "they are issued where the names live now"
    shards.close()
    for shard in "abc":
        shards(shard)
    assert "a" not in [shard for shard in "abc" if traces(shards, again)[shard]]
    assert shards.holder(alone_) is shards.engines["c"]
    shards.add([turn for turn in turns if turn.tenant == alone_])
    for name in (again, alone_):
        assert not old[name] & ids_of(shards, name)
    certificates = shards.engines["c"].purge()
    assert set(certificates) == set(keys_of(shards, [again, alone_]))
    assert certificates[shards.map.tenant_key(again)].rows_removed == rows
    assert len(ids_of(shards, again)) >= TURNS
    shards.drain()
    assert len(shards.engines["a"].tenants.erased) == 0


def test_two_lives_at_two_shards_are_on_one_certificate(shards: Shards, turns: list[Turn]) -> None:
    name = LEAVE_A[0]
    first = [turn for turn in turns[:50] if turn.tenant == name]
    rows = shards.engines["a"].journal.count(keys_of(shards, [name]))
    shards.holder(name).erase(name)
    shards.add(first[:3])
    resume(shards.root, shards)
    certificate = shards.holder(name).erase(name, now=True)
    assert certificate is not None
    assert certificate.turns_removed == len(first) + 3
    assert certificate.rows_removed > rows + 3
    assert traces(shards, name) == dict.fromkeys("abc", False)


def test_no_certificate_while_bytes_lie_at_the_shard_that_was_left(shards: Shards) -> None:
    name, keys = LEAVE_A[0], keys_of(shards, LEAVE_A)
    shards("a").seal(2, keys)
    shards("c").pull(2, "a", keys)
    shards("a").release(2, keys)
    assert shards.holder(name) is shards.engines["c"]
    assert shards.engines["c"].erase(name, now=True) is None
    assert traces(shards, name)["a"]
    shards.close()
    resume(shards.root, shards)
    assert shards.engines["c"].tenants.names() == sorted({*LEAVE_A, *LEAVE_B} - {name})
    (certificate,) = shards.engines["c"].purge().values()
    assert certificate.tenant_key == keys[0] and certificate.turns_removed > 0
    assert traces(shards, name) == dict.fromkeys("abc", False)


def test_an_erasure_at_a_shard_that_gives_is_certified_with_its_purge(shards: Shards) -> None:
    shards.holder(STAY[0]).erase(STAY[0])
    done = resume(shards.root, shards)
    assert set(done.certificates) == set(keys_of(shards, [STAY[0]]))
    assert shards.engines["a"].purge() == {}


# ---- who may ask for what


def test_calls_of_another_map_are_refused(shards: Shards) -> None:
    a, c, keys = shards("a"), shards("c"), keys_of(shards, LEAVE_A)
    steps: list[Callable[[int], object]] = [
        lambda version: a.seal(version, keys),
        lambda version: c.pull(version, "a", keys),
        lambda version: a.release(version, keys),
        lambda version: a.clear(version),
    ]
    for version in (1, 3):
        for step in steps:
            with pytest.raises(StaleMap):
                step(version)
    with pytest.raises(StaleMap, match=r"has map 2 \(moving\)"):
        a.clear(2)
    old = shards.map
    resume(shards.root, shards)
    for step in steps:
        with pytest.raises(StaleMap, match=r"has map 5 \(settled\)"):
            step(2)
    with pytest.raises(StaleMap):
        a.adopt(old)


def test_steps_out_of_order_are_refused(shards: Shards) -> None:
    a, b, c, keys = shards("a"), shards("b"), shards("c"), keys_of(shards, LEAVE_A)
    with pytest.raises(MoveError, match="has not sealed 3 tenants"):
        c.pull(2, "a", keys)
    with pytest.raises(ValueError, match="1 tenants need not leave"):
        a.seal(2, keys_of(shards, [STAY[0], LEAVE_A[0]]))
    a.seal(2, keys)
    with pytest.raises(MoveError, match="has not sealed 3 tenants"):
        b.pull(2, "a", keys)
    with pytest.raises(MoveError, match="3 tenants have not arrived"):
        a.release(2, keys)
    c.pull(2, "a", keys)
    a.release(2, keys)
    advance(shards)
    advance(shards)
    with pytest.raises(MoveError, match="3 tenants have yet to leave shard b"):
        b.clear(2)
    with pytest.raises(MoveError, match="has rows of 3 tenants that have left it"):
        advance(shards)


def test_one_change_at_a_time(shards: Shards) -> None:
    with pytest.raises(UndertowError, match=r"still moving tenants from a, b to a, b, c\. Resume that first"):
        reshard(shards.root, ["a"], shards)
    resume(shards.root, shards)
    done = reshard(shards.root, ["c", "b", "a"], shards)
    assert (done.shard_map.version, done.tenants) == (5, 0), "they are its shards already"


def test_a_shard_that_is_gone_is_asked_nothing_and_its_folder_named(shards: Shards) -> None:
    resume(shards.root, shards)
    settled: list[str] = []

    def calls(shard: str) -> Busy:
        def happen() -> None:
            if shards.map.phase is None:
                settled.append(shard)

        return Busy(shards(shard), happen)

    done = reshard(shards.root, ["a", "b"], calls)
    assert settled == ["a", "b"], "c may have ended by then"
    assert done.left_over == ["c"]
    assert resume(shards.root, calls).left_over == ["c"]
    assert shards.engines["c"].tenants.names() == []
    shards.close()
    assert reshard(shards.root, ["a", "b", "c"], shards).tenants > 0, "it may come back"


def test_two_that_resume_at_once_do_it_once(shards: Shards, turns: list[Turn], expected: State) -> None:
    """The second does all of it between two calls of the first, whichever these are."""
    for n in range(4):
        calls = 0

        def interrupt(at: int = 5 * n + 1) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                resume(shards.root, shards)

        if shards.map.before is None:
            publish(shards.root, shards.map.toward(["a", "b"] if n % 2 else ["a", "b", "c"]))
        try:
            resume(shards.root, lambda shard, happen=interrupt: Busy(shards(shard), happen))  # type: ignore[misc]
        except StaleMap:
            assert calls >= 5 * n + 1
        assert shards.map.before is None
    shards.add(turns)
    shards.drain()
    assert_same_state(state_of(shards.root), expected)


def test_who_comes_while_others_move_does_not_hold_the_move_up(shards: Shards) -> None:
    """New tenants begin at the shard that gives, at every look at who must leave it."""
    looks = 0
    keys = shards.map

    @dataclass
    class Growing(Busy):
        def leaving(self) -> Sequence[DepartingTenant]:
            nonlocal looks
            if shards.map.phase == "moving":
                looks += 1
                assert looks < 50, "it goes on as long as new tenants come"
                names = (f"new-{looks}-{n}" for n in range(999))
                new = next(n for n in names if keys.home(n) == "a" and keys.owner(n) == "c")
                shards("a")._engine.add_batch([turn_of(new, 0, "hello")])
            return self.shard.leaving()

    done = resume(shards.root, lambda shard: Growing(shards(shard), lambda: None))
    assert done.shard_map.phase is None
    assert 0 < looks < 10
    homes = where(shards)
    assert {homes[name] for name in homes if name.startswith("new")} == {"c"}
    assert len([name for name in homes if name.startswith("new")]) == looks


def test_a_journal_that_cannot_be_read_now_is_waited_for(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A purge takes away the files that a pull reads; a new writer takes over where a release looks."""
    a, keys = shards("a"), keys_of(shards, LEAVE_A)
    monkeypatch.setattr(resharding, "PAUSE_S", 0.01)
    read, failures = TenantTransfer._rows, 0

    def fail(transfer: TenantTransfer) -> Iterator[Row]:
        nonlocal failures
        failures += 1
        rows = read(transfer)
        yield next(rows)
        if failures < 3:
            raise OSError("the file is gone")
        yield from rows

    monkeypatch.setattr(TenantTransfer, "_rows", fail)
    a.seal(2, keys)
    rows = shards.engines["c"].journal.row_count
    with pytest.raises(NotYet, match="the file is gone"):
        shards("c").pull(2, "a", keys)
    assert shards.engines["c"].journal.row_count == rows
    resume(shards.root, shards)
    assert failures > 3
    assert set(shards.engines["c"].tenants.names()) == {*LEAVE_A, *LEAVE_B}


def test_what_a_former_writer_has_not_acknowledged_is_not_acted_upon(shards: Shards) -> None:
    a, keys = shards("a"), keys_of(shards, LEAVE_A)
    a.seal(2, keys)
    with after_commits(Strike(1)), pytest.raises(Killed):  # having claimed the journal
        Journal.open(shards.store("a"), writable=True, takeover=True)
    with pytest.raises(NotYet, match="taking over"):
        shards("c").pull(2, "a", keys)
    assert shards.engines["c"].tenants.names() == []


def test_a_store_of_another_cluster_or_encoder_takes_no_one(tmp_path: Path, turns: list[Turn]) -> None:
    with Shards(tmp_path / "root") as shards:
        shards.add(turns[:20])
        foreign = ShardMap.new(["a", "b"])
        with pytest.raises(StoreError, match="another hash key"):
            ReshardingParticipant(shards.engines["a"], "a", shards.root / "shards", foreign)
        publish(shards.root, shards.map.toward(["a", "b", "c"]))
        shards("a").adopt(shards.map)
        leavers = [leaver.key for leaver in shards("a").leaving()]
        shards("a").seal(2, leavers)
        other = HashingEncoder(32)
        Journal.create(shards.store("c"), other.dim, asdict(other.fingerprint), hash_key=HASH_KEY)
        with Engine(shards.store("c"), settings_of(), other) as engine:
            moving = ReshardingParticipant(engine, "c", shards.root / "shards", shards.map)
            with pytest.raises(MoveError, match="encoder"):
                moving.pull(2, "a", leavers)
            assert engine.journal.row_count == 0


# ---- batches


@given(
    st.lists(
        st.builds(DepartingTenant, st.uuids().map(str), st.sampled_from("xyz"), st.integers(0, 30_000)),
        max_size=40,
    )
)
def test_batches_are_bounded_and_lose_no_one(leavers: list[DepartingTenant]) -> None:
    rows = {leaver.key: leaver.rows for leaver in leavers}
    found = list(batches(leavers))
    assert sorted((key, to) for to, keys in found for key in keys) == sorted((x.key, x.to) for x in leavers)
    for _, keys in found:
        assert 0 < len(keys) <= 2
        assert len(keys) == 1 or sum(rows[key] for key in keys) <= resharding.ROWS_PER_BATCH
