"""Resharding: erasures, refusals, interrupted and concurrent moves, batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.engine.api.engine import Engine
from undertow.engine.base.model import Turn, UndertowError
from undertow.engine.cluster.resharding import coordinator as resharding
from undertow.engine.cluster.resharding.coordinator import batches, reshard, resume
from undertow.engine.cluster.resharding.participant import DepartingTenant, ReshardingParticipant, StaleMap
from undertow.engine.cluster.resharding.transfer import TenantTransfer
from undertow.engine.cluster.shard_map import ShardMap, publish
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.storage.journal import Journal, Row
from undertow.engine.storage.location import StoreError
from undertow.engine.tenants.migration_records import MoveError, NotYet

from ...support.cluster.resharding import LEAVE_A, LEAVE_B, STAY, TURNS, advance, finished, keys_of, where
from ...support.engine import bytes_hold, settings_of, turn_of
from ...support.faults.harness import State, assert_same_state
from ...support.faults.moving import HASH_KEY, Killed, Shards, Strike, after_commits, ids_of

# ---- erasing


def traces(shards: Shards, name: str) -> dict[str, bool]:
    """By shard, whether its files hold any vector of the tenant's, in whatever file or version."""
    return {shard: bytes_hold(Path(shards.store(shard).uri), name) for shard in "abc"}


def test_a_name_erased_before_it_moves_begins_anew_as_another(shards: Shards, turns: list[Turn]) -> None:
    """One whose name lives again by then, one whose tombstone goes alone."""
    again, alone_ = LEAVE_A[:2]
    old = {name: ids_of(shards, name) for name in (again, alone_)}
    rows = shards.engines["a"].journal.count(keys_of(shards, [again]))
    for name in (again, alone_):
        assert shards.holder(name).erase(name) is None
    assert shards.holder(alone_) is shards.engines["a"], "its tombstone is still there"
    shards.add([turn for turn in turns if turn.tenant == again])
    assert resume(shards.root, shards.ask).certificates == {}, "they are issued where the names live now"
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
    resume(shards.root, shards.ask)
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
    resume(shards.root, shards.ask)
    assert shards.engines["c"].tenants.names() == sorted({*LEAVE_A, *LEAVE_B} - {name})
    (certificate,) = shards.engines["c"].purge().values()
    assert certificate.tenant_key == keys[0] and certificate.turns_removed > 0
    assert traces(shards, name) == dict.fromkeys("abc", False)


def test_an_erasure_at_a_shard_that_gives_is_certified_with_its_purge(shards: Shards) -> None:
    shards.holder(STAY[0]).erase(STAY[0])
    assert set(resume(shards.root, shards.ask).certificates) == set(keys_of(shards, [STAY[0]]))
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
    resume(shards.root, shards.ask)
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
        reshard(shards.root, ["a"], shards.ask)
    resume(shards.root, shards.ask)
    done = reshard(shards.root, ["c", "b", "a"], shards.ask)
    assert (done.shard_map.version, done.tenants) == (5, 0), "they are its shards already"


def test_a_shard_that_is_gone_is_asked_nothing_and_its_folder_named(shards: Shards) -> None:
    resume(shards.root, shards.ask)
    settled: list[str] = []

    def ask(shard: str, method: str, *args: Any) -> Any:
        if shards.map.phase is None:
            settled.append(shard)
        return shards.ask(shard, method, *args)

    done = reshard(shards.root, ["a", "b"], ask)
    assert settled == ["a", "b"], "c may have ended by then"
    assert done.left_over == ["c"]
    assert resume(shards.root, ask).left_over == ["c"]
    assert shards.engines["c"].tenants.names() == []
    shards.close()
    assert reshard(shards.root, ["a", "b", "c"], shards.ask).tenants > 0, "it may come back"


def test_two_that_resume_at_once_do_it_once(shards: Shards, turns: list[Turn], expected: State) -> None:
    """The second does all of it between two calls of the first, whichever these are."""
    for n in range(4):
        calls = 0

        def interrupt(at: int = 5 * n + 1) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                resume(shards.root, shards.ask)

        if shards.map.before is None:
            publish(shards.root, shards.map.toward(["a", "b"] if n % 2 else ["a", "b", "c"]))
        try:
            resume(shards.root, shards.busy(interrupt))
        except StaleMap:
            assert calls >= 5 * n + 1
        assert shards.map.before is None
    assert_same_state(finished(shards, turns), expected)


def test_who_comes_while_others_move_does_not_hold_the_move_up(shards: Shards) -> None:
    """New tenants begin at the shard that gives, at every look at who must leave it."""
    looks = 0
    keys = shards.map

    def growing(shard: str, method: str, *args: Any) -> Any:
        nonlocal looks
        if method == "leaving" and shards.map.phase == "moving":
            looks += 1
            assert looks < 50, "it goes on as long as new tenants come"
            names = (f"new-{looks}-{n}" for n in range(999))
            new = next(n for n in names if keys.home(n) == "a" and keys.owner(n) == "c")
            shards("a")._engine.add_batch([turn_of(new, 0, "hello")])
        return shards.ask(shard, method, *args)

    assert resume(shards.root, growing).shard_map.phase is None
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
    resume(shards.root, shards.ask)
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
