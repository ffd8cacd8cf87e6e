"""Moving tenants between shards: cut off anywhere, nothing is lost, doubled or out of order."""

from __future__ import annotations

import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from undertow.engine.base.model import PolicyName, Turn
from undertow.engine.cluster.resharding.coordinator import reshard, resume
from undertow.engine.cluster.shard import call_queue
from undertow.engine.storage.location import Location
from undertow.engine.tenants import log

from ...support.cluster.resharding import LEAVE_A, LEAVE_B, STAY, TENANTS, finished, where
from ...support.faults import moving
from ...support.faults.harness import State, assert_same_state, shared_driver
from ...support.faults.moving import (
    Killed,
    Shards,
    Snapshots,
    Strike,
    Traffic,
    after_commits,
    alone,
    assert_stored,
)


def test_only_those_move_that_must_and_all_go_on_as_if_they_had_not(
    turns: list[Turn], expected: State, tmp_path: Path
) -> None:
    half = len(turns) // 2
    with Shards(tmp_path) as shards:
        assert shards.add(turns[:half]) == []
        before = where(shards)
        done = reshard(shards.root, ["a", "b", "c"], shards.ask)
        after = where(shards)
        moved = {name for name in TENANTS if before[name] != after[name]}
        assert {after[name] for name in moved} == {"c"}
        assert 0 < len(moved) < len(TENANTS)
        assert after == {name: shards.map.owner(name) for name in TENANTS}
        assert (done.tenants, done.shard_map) == (len(moved), shards.map)
        assert shards.map.before is None and shards.map.version == 5
        assert_same_state(finished(shards, turns[half:]), expected)


def test_thresholds_that_turns_told_move_with_them(
    turns: list[Turn], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log, "THETA_TURNS", 4)
    monkeypatch.setattr(moving, "THETA", {"theta_share": 0.2, "theta_count": 3})
    expected = alone(tmp_path / "alone", turns)
    assert sum('"thetas"' in line for lines in expected.exports.values() for line in lines) == 2 * len(
        TENANTS
    )
    with Shards(tmp_path / "root") as shards:
        half = len(turns) // 2
        assert shards.add(turns[:half]) == []
        reshard(shards.root, ["a", "b", "c"], shards.ask)
        assert_same_state(finished(shards, turns[half:]), expected)


@pytest.mark.rarely(part=(1, 2, 3, 4, 5))
@pytest.mark.parametrize("part", range(6))
def test_cut_off_after_any_commit(part: int, turns: list[Turn], expected: State, tmp_path: Path) -> None:
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
            reshard(shards.root, ["a", "b", "c"], shards.busy(lambda: traffic.send(1)))
        assert traffic.line
    commits = Counter(name for name, _, _ in snapshots.taken)
    assert pulls["moving"] > 2 and pulls["closing"] > 0, "all that can happen has happened"
    assert commits["drop_history"] == 2 and commits["create"] >= 4
    for name, root, acked in snapshots.taken[part::6]:
        with Shards(root) as shards:
            resume(shards.root, shards.ask)
            assert shards.map.before is None and shards.map.shards in (("a", "b"), ("a", "b", "c")), name
            assert_stored(shards, turns, acked)
            assert_same_state(finished(shards, turns), expected)


@pytest.mark.rarely(seed=(1, 2, 3, 4, 5))
@pytest.mark.parametrize(
    ("policy", "seed"),
    [("recmem", 0), ("recmem", 1), ("recmem", 2), ("eager", 3), ("nemori", 4), ("himem", 5)],
)
def test_killed_again_and_again(
    policy: PolicyName,
    seed: int,
    turns: list[Turn],
    expected: State,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also while it takes up what an earlier kill has left, there and back, with turns in between."""
    rng = random.Random(seed)
    monkeypatch.setattr(call_queue, "BLOCK_TURNS", 1 + 9 * (seed % 2))  # of calls of up to 20 turns
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
                    resume(shards.root, shards.ask)
                    reshard(shards.root, wanted, shards.ask)
                shards.close()
                ended = True
            except Killed:
                kills += 1
                shards.crash()
    assert kills > 3
    with Shards(tmp_path, policy=policy) as shards:
        assert shards.map.all_shards == ("a",)
        assert_same_state(finished(shards, turns), expected)


def test_killed_by_the_system_at_random_moments(
    log: Path, turns: list[Turn], expected: State, tmp_path: Path
) -> None:
    rng = random.Random(5)
    acked: Counter[str] = Counter()
    root = tmp_path / "root"
    with Shards(root) as shards:
        shards.add(turns[:30])
    statuses = []
    for n in range(6):
        wanted = ["a", "b"] if n % 2 else ["a", "b", "c"]
        kill_at = (rng.randrange(1, 24), rng.uniform(0, 0.05)) if n < 5 else None
        outcome = shared_driver().run(task="reshard", root=root, log=log, shards=wanted, kill_at=kill_at)
        statuses.append(outcome.status)
        acked |= Counter(outcome.last("acked"))
    # one that finds most of it done may end before its moment
    assert set(statuses) == {0, -signal.SIGKILL} and statuses.count(-signal.SIGKILL) > 2
    assert statuses[-1] == 0
    with Shards(root) as shards:
        assert shards.map.before is None and shards.map.shards == ("a", "b")
        assert_stored(shards, turns, acked)
        assert_same_state(finished(shards, turns), expected)


def test_on_an_object_store(turns: list[Turn], tmp_path: Path, s3: dict[str, str]) -> None:
    some = [turn for turn in turns if turn.tenant in (STAY[0], LEAVE_A[0], LEAVE_B[0])]
    half = len(some) // 2
    root = Location.of("s3://memories/cluster")
    with Shards(root) as shards:
        shards.add(some[:half])
        with after_commits(Strike(9)), pytest.raises(Killed):
            reshard(root, ["a", "b", "c"], shards.ask)
        shards.crash()
    with Shards(root) as shards:
        assert resume(root, shards.ask).tenants > 0
        assert_same_state(finished(shards, some[half:]), alone(tmp_path, some))
