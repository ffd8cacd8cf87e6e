"""Who owns a tenant, and how a new map comes into force."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import compress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.engine.cluster.shard_map import MapConflict, ShardMap, exists, load, publish
from undertow.engine.storage.location import Location, StoreError
from undertow.engine.storage.store_info import StoreInfo

KEY = "5e" * 32
SHARDS = ("a", "b", "c", "d")
NAMES = [f"tenant {n}" for n in range(20_000)]

shard_ids = st.from_regex(r"[a-z0-9][a-z0-9_-]{0,5}", fullmatch=True)
shard_sets = st.lists(shard_ids, min_size=1, max_size=7, unique=True)


def mixed(point: int) -> int:
    """The end of splitmix64, in plain integers."""
    point = (point ^ point >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    point = (point ^ point >> 27) * 0x94D049BB133111EB % 2**64
    return point ^ point >> 31


def owner_by_the_book(shards: list[str], hash_key: str, tenant: str) -> str:
    data = tenant.encode(errors="surrogatepass")
    digest = hashlib.blake2b(data, key=bytes.fromhex(hash_key), digest_size=16).digest()
    point = int.from_bytes(digest[:8], "big")

    def weight(shard: str) -> int:
        return mixed(point ^ int.from_bytes(hashlib.blake2b(shard.encode(), digest_size=8).digest(), "big"))

    return max(sorted(shards), key=weight)


@given(shards=shard_sets, tenant=st.text(max_size=20), hash_key=st.sampled_from(["", KEY]))
def test_the_owner_is_the_shard_of_the_highest_weight(shards: list[str], tenant: str, hash_key: str) -> None:
    expected = owner_by_the_book(shards, hash_key, tenant)
    assert ShardMap(1, tuple(shards), hash_key=hash_key).owner(tenant) == expected
    assert ShardMap(1, tuple(reversed(shards)), hash_key=hash_key).owner(tenant) == expected


def test_owners_do_not_change_from_release_to_release() -> None:
    """A cluster's journals lie where these say: they may never change."""
    owners = ShardMap(1, SHARDS, hash_key=KEY).owners([f"tenant {n}" for n in range(12)])
    assert "".join(owners) == "bdddbcabbdbd"


def test_many_at_once_as_one_by_one_and_in_blocks() -> None:
    many = ShardMap(1, tuple(f"shard-{n}" for n in range(300)), hash_key=KEY)
    names = NAMES[:5_000]  # more pairs than a block holds
    owners = many.owners(names)
    assert owners[::500] == [many.owner(name) for name in names[::500]]
    assert [many.shards[i] for i in many.owner_ids(names)] == owners
    assert many.owners([]) == []


def test_the_load_is_even() -> None:
    counts = Counter(ShardMap(1, SHARDS, hash_key=KEY).owners(NAMES))
    # binomial: five standard deviations
    assert all(abs(counts[shard] - 5_000) < 5 * np.sqrt(20_000 * 0.25 * 0.75) for shard in SHARDS)


@given(shards=shard_sets, extra=shard_ids)
def test_a_new_shard_takes_and_gives_to_no_one_else(shards: list[str], extra: str) -> None:
    """And one that goes, read the other way round, leaves all others' tenants where they are."""
    with_it = ShardMap(1, tuple({*shards, extra}), hash_key=KEY)
    without = ShardMap(1, tuple({*shards, extra} - {extra}) or ("other",), hash_key=KEY)
    for old, new in zip(without.owners(NAMES[:200]), with_it.owners(NAMES[:200]), strict=True):
        assert new in (old, extra)


def test_while_tenants_move_the_former_owner_is_their_home() -> None:
    old = ShardMap(1, SHARDS, hash_key=KEY)
    new = old.toward(["a", "b", "e"])
    assert (new.version, new.before, new.shards) == (2, SHARDS, ("a", "b", "e"))
    assert new.all_shards == ("a", "b", "c", "d", "e")
    names = NAMES[:1_000]
    assert new.homes(names) == old.owners(names) != new.owners(names)
    assert old.homes(names) == old.owners(names)
    by_key = {new.tenant_key(name): name for name in names}
    leaving = {shard: new.leaving(shard, list(by_key)) for shard in new.all_shards}
    assert leaving["e"] == {}
    for name, home, owner in zip(names, new.homes(names), new.owners(names), strict=True):
        to = leaving[home].get(new.tenant_key(name))
        assert to == (None if home == owner else owner)
    with pytest.raises(ValueError, match="still moving"):
        new.toward(["a"])


def test_the_phases_of_a_resharding() -> None:
    old = ShardMap(1, SHARDS, hash_key=KEY)
    moving = old.toward(["a", "b", "e"])
    closing, clearing = moving.after(), moving.after().after()
    settled = clearing.after()
    maps = (old, moving, closing, clearing, settled)
    assert [m.version for m in maps] == [1, 2, 3, 4, 5]
    assert [m.phase for m in maps] == [None, "moving", "closing", "clearing", None]
    assert [m.began for m in maps] == [None, 2, 2, 2, None]
    assert [m.before for m in maps] == [None, SHARDS, SHARDS, SHARDS, None]
    names = NAMES[:500]
    assert closing.homes(names) == moving.homes(names) == old.owners(names)
    assert clearing.homes(names) == settled.homes(names) == moving.owners(names)
    assert clearing.all_shards == moving.all_shards and settled.all_shards == ("a", "b", "e")
    assert settled.leaving("a", [settled.tenant_key(name) for name in names]) == {}
    with pytest.raises(ValueError, match="no one moves"):
        settled.after()
    for before, phase in ((None, "moving"), (SHARDS, None), (SHARDS, "resting")):
        with pytest.raises(ValueError, match="no phase"):
            ShardMap(2, SHARDS, before, phase=phase)  # type: ignore[arg-type]


def test_keys_are_those_of_the_journals() -> None:
    info = StoreInfo.new(8, {}, KEY)
    for name in ("ann", "Ågot", "\ud800", ""):
        assert ShardMap(1, SHARDS, hash_key=KEY).tenant_key(name) == info.tenant_key(name)


@pytest.mark.parametrize("shards", [(), ("a", "a"), ("A",), ("",), ("-a",), ("a/b",), ("x" * 64,)])
def test_unsound_shard_ids_are_refused(shards: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="shard"):
        ShardMap(1, shards)


# ---- maps in a root


def test_a_map_is_read_back_and_the_newest_counts(tmp_path: Path) -> None:
    root = Location.of(tmp_path)
    assert not exists(root)
    with pytest.raises(StoreError, match="no cluster's root"):
        load(root)
    first = ShardMap.new(SHARDS)
    assert len(bytes.fromhex(first.hash_key)) == 32 and first.hash_key != ShardMap.new(SHARDS).hash_key
    publish(root, first)
    assert exists(root) and load(root) == first
    second = first.toward(["a"])
    for version in (second, second.after(), second.after().after(), second.after().after().after()):
        publish(root, version)
        publish(root, version)  # again changes nothing
        assert load(root) == version


def test_of_two_maps_of_one_version_the_first_stays(tmp_path: Path) -> None:
    root = Location.of(tmp_path)
    first = ShardMap.new(SHARDS)
    publish(root, first)
    maps = [first.toward([f"shard-{n}"]) for n in range(8)]
    start = threading.Barrier(len(maps))

    def publishes(wanted: ShardMap) -> bool:
        start.wait()
        try:
            publish(root, wanted)
        except MapConflict:
            return False
        return True

    with ThreadPoolExecutor(len(maps)) as pool:
        published = list(compress(maps, pool.map(publishes, maps)))
    assert published == [load(root)]


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"version": 1, "shards": []}', b'{"version": 0}'])
def test_a_damaged_map_is_told(data: bytes, tmp_path: Path) -> None:
    Location.of(tmp_path).write("map/00000001.json", data)
    with pytest.raises(StoreError, match="is no shard map"):
        load(Location.of(tmp_path))
