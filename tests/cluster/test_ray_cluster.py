"""The cluster on a real Ray: actors that are killed, drivers that die, turns that kill, resources that lack.

Ray is started once for the file, small; the router's logic is tested without it in test_router.py.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ray = pytest.importorskip("ray")

from undertow.bench.mock.server import spawn_server
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.model import InputError, UndertowError
from undertow.engine.cluster.ray import actors
from undertow.engine.cluster.ray.actors import NAMESPACE, actor_name
from undertow.engine.cluster.ray.cluster import Cluster
from undertow.engine.cluster.ray.datasink import write_turns
from undertow.engine.cluster.resharding.coordinator import reshard
from undertow.engine.cluster.settings import ClusterSettings, ResourcesLacking
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.cluster.shard_map import Removed
from undertow.engine.encoders.base import Encoder, Float16
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.storage.location import Location

from ..support.cli import turn_line
from ..support.cluster.in_process import begin, cluster_state, of_one_engine, settings
from ..support.engine import turn_of
from ..support.faults.harness import PARKING, RATES, assert_same_state, end_state

pytestmark = pytest.mark.usefixtures("ray_address")

# that name no thresholds
PLAIN = Settings(device="cpu", encoder="hash:384")
SMALL = ClusterSettings(num_cpus=0.5, threads=1, patience_s=90, call_turns=16, lane_turns=64)


@pytest.fixture
def root(tmp_path: Path) -> Location:
    return Location.of(tmp_path / "root")


def kill_one(cluster: Cluster, rng: random.Random) -> None:
    """SIGKILL the process of a shard that runs."""
    if pids := pids_of(cluster):
        os.kill(rng.choice(pids), signal.SIGKILL)


def pids_of(cluster: Cluster) -> list[int]:
    return sorted(state["pid"] for state in cluster.status().values() if "pid" in state)


@pytest.mark.rarely
def test_shards_killed_at_random_moments_give_what_one_engine_gives(root: Location, tmp_path: Path) -> None:
    with spawn_server(latency_ms=2, jitter_ms=2, **RATES, **PARKING) as server:
        of_server = settings(llm_url=server)
        rng, (line, expected) = random.Random(4), of_one_engine(tmp_path, of_server)
        stored = 0
        with Cluster.open(root, of_server, shards=2, resources=SMALL) as cluster:
            began_with = pids_of(cluster)
            for start in range(0, len(line), 30):
                timer = threading.Timer(rng.uniform(0.0, 0.1), kill_one, (cluster, rng))
                if start in (30, 60):
                    timer.start()
                receipts = cluster.add_batch(line[start : start + 30])
                stored += len(receipts)
                if timer.is_alive():
                    timer.join()
                assert cluster.stats()["turns"] == stored
            assert cluster.drain()
            assert pids_of(cluster) != began_with
            cluster.stop()
    assert_same_state(cluster_state(root), expected)


FIRST_DRIVER = """
import sys, time
from undertow.engine.cluster.ray.actors import connect
from undertow.engine.cluster.ray.cluster import Cluster
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Message, Turn

address, root = sys.argv[1:]
connect(address, log_to_driver=False)
settings = Settings(device="cpu", encoder="hash:384")
cluster = Cluster.open(root, settings, shards=2, resources=ClusterSettings(num_cpus=0.5, threads=1))
cluster.add_batch([Turn(f"t{n % 5}", (Message("user", f"word{n}"),), f"k{n}") for n in range(50)])
cluster.drain()  # by then each has started
print(sorted(state["pid"] for state in cluster.status().values()), flush=True)
time.sleep(600)
"""


def test_shards_outlive_their_driver_and_the_next_one_finds_them(root: Location) -> None:
    address = ray.get_runtime_context().gcs_address
    driver = subprocess.Popen(
        [sys.executable, "-c", FIRST_DRIVER, address, str(root)], stdout=subprocess.PIPE, text=True
    )
    assert driver.stdout is not None
    pids = driver.stdout.readline().strip()
    driver.kill()
    driver.wait()
    assert pids.startswith("[")
    with pytest.raises(
        UndertowError, match=r"decided by .*theta_share 0\.02, and the settings say theta_sim"
    ):
        Cluster.open(root, settings(), resources=SMALL)
    with Cluster.open(root, PLAIN, resources=SMALL) as cluster:
        assert str(pids_of(cluster)) == pids
        assert cluster.stats()["turns"] == 50
        assert cluster.add_batch([turn_of("t0", 0, "after")])[0].seq == 10
        cluster.stop()
    with pytest.raises(UndertowError, match="has 2 shards"):
        Cluster.open(root, PLAIN, shards=3, resources=SMALL)


def test_the_shard_of_a_move_that_died_at_its_end_ends_and_is_not_started_again(root: Location) -> None:
    names = [f"tenant-{n}" for n in range(24)]  # some of each shard, whatever the hash key
    with (
        Cluster.open(root, PLAIN, shards=2, resources=SMALL) as cluster,
        Cluster.open(root, PLAIN, resources=SMALL) as stale,
    ):
        turns = [turn_of(name, n, f"word{n}") for n in range(3) for name in names]
        stale.add_batch(turns)
        moved = [name for name in names if stale.owners([name]) == ["s0002"]]
        assert moved
        reshard(root, ["s0001"], cluster.ask_shard)
        actor = ray.get_actor(actor_name(root, "s0002"), namespace=NAMESPACE)
        with pytest.raises(Removed):  # what it does by itself, some time
            ray.get(actor.call.remote("look"))
        with pytest.raises(ray.exceptions.RayActorError):
            while True:
                with suppress(UndertowError):  # closed, but not gone yet
                    ray.get(actor.call.remote("status"))
        # callers with the old map find the tenants, and start no shard
        assert [hit.memory for hit in stale.search(moved[0], "word1").turns]
        assert [r.seq for r in stale.add_batch([turn_of(name, 3, "word3") for name in moved])] == [3] * len(
            moved
        )
        assert stale.stats()["turns"] == len(turns) + len(moved)
        with pytest.raises(ValueError, match="Failed to look up"):
            ray.get_actor(actor_name(root, "s0002"), namespace=NAMESPACE)
        cluster.stop()


@pytest.mark.rarely
def test_a_shard_is_removed_and_comes_back_at_once(root: Location) -> None:
    names = [f"tenant-{n}" for n in range(24)]
    with Cluster.open(root, PLAIN, shards=2, resources=SMALL) as cluster:
        cluster.add_batch([turn_of(name, 0, f"harbour of {name}") for name in names])
        for shards in (["s0001"], ["s0001", "s0002"]):  # its former actor has not ended yet
            done = cluster.reshard(shards)
        assert done.tenants and done.shard_map.shards == ("s0001", "s0002")
        for name in names:
            assert [f"harbour of {name}\n" in hit.memory for hit in cluster.search(name, "boats").turns] == [
                True
            ]
        cluster.stop()


class DeadlyEncoder(HashingEncoder):
    """Ends its process at a word, as a fault in a native library would."""

    def encode(self, texts: Sequence[str]) -> Float16:
        if any("badger" in text for text in texts):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode(texts)


def deadly(of: Settings) -> Encoder:
    return DeadlyEncoder(384)


def no_llm(of: Settings) -> None:
    return None


def test_a_turn_that_kills_its_shard_is_found_and_parked(root: Location) -> None:
    # the workers cannot import this file
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    badger = turn_of("ann", 1, "a badger")
    with Cluster.open(
        root, settings(), shards=1, resources=SMALL, parts=EngineParts(deadly, no_llm)
    ) as cluster:
        cluster.add_batch([turn_of("ann", 0, "word0")])
        assert "process died" in (cluster.add_batch([badger])[0].parked or "")
        (state,) = cluster.status().values()
        assert len(state["parked"]) == 1
        # sent again it kills nobody
        pid = state["pid"]
        again = cluster.add_batch([badger, turn_of("ann", 9, "new")])
        assert [(r.parked is None, r.seq) for r in again] == [(False, None), (True, 1)]
        assert cluster.status()["s0001"]["pid"] == pid
        cluster.stop()


def test_more_shards_than_there_is_room_for_are_refused(root: Location) -> None:
    wants: dict[str, Any] = {"patience_s": 5}
    with pytest.raises(ResourcesLacking, match="no node has that"):
        Cluster.open(root, settings(), shards=1, resources=ClusterSettings(num_cpus=64, **wants))
    with pytest.raises(UndertowError, match="1 shards"):
        Cluster.open(root, settings(), shards=9, resources=ClusterSettings(num_cpus=2, **wants))


def test_a_dataset_is_stored_in_its_order_and_again_changes_nothing(root: Location, tmp_path: Path) -> None:
    of_store = settings(llm_url=None)
    lines = [
        turn_line(f"t{n % 5}", n, f"turn {n}", timestamp=f"2026-03-01T00:{n // 60:02d}:{n % 60:02d}")
        for n in range(600)
    ]
    rows = pa.Table.from_pylist(lines)
    for n in range(3):
        pq.write_table(rows.slice(n * 200, 200), tmp_path / f"{n}.parquet", row_group_size=50)
    dataset = ray.data.read_parquet(
        [str(tmp_path / f"{n}.parquet") for n in range(3)], override_num_blocks=12
    )
    keyed = dataset.map(lambda row: {**row, "idempotency_key": row["timestamp"]})
    plain = tmp_path / "plain"
    with Engine(plain, of_store, HashingEncoder(384)) as engine:
        engine.add_table(rows.append_column("idempotency_key", rows["timestamp"]))
        engine.drain()
    first, second = (
        write_turns(keyed, root, of_store, source="crm", shards=2, resources=SMALL) for _ in range(2)
    )
    assert (first.turns, first.new_turns, second.turns, second.new_turns) == (600, 600, 600, 0)
    none = write_turns(keyed.filter(lambda _: False), root, of_store, source="none")
    assert (none.turns, none.new_turns) == (0, 0)
    bad = ray.data.from_arrow(pa.table({"tenant": ["t1"], "messages": ["nonsense"]}))
    with pytest.raises(InputError, match="field 'messages'"):
        write_turns(bad, root, of_store, source="bad")
    with Cluster.open(root, of_store) as cluster:
        cluster.stop()
    assert_same_state(cluster_state(root), end_state(plain))


@pytest.mark.parametrize(
    ("given", "device", "gpus", "asked"),
    [({}, "cuda", 0, 1), ({}, "auto", 2, 1), ({}, "auto", 0, 0), ({}, "cpu", 2, 0)]
    + [({"num_gpus": some}, "cuda", 2, some) for some in (0.0, 0.5)],
)
def test_ray_is_asked_for_a_gpu_and_a_bound_is_of_its_node(
    given: dict[str, float], device: str, gpus: int, asked: float, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(actors, "ray", ray := MagicMock(cluster_resources=lambda: {"GPU": float(gpus)}))
    bound = {"arena_bytes": 1 << 30} if given else {}
    of = Settings.model_validate({"device": device, **bound})
    actors.Starter(begin(tmp_path / "root", 1), of, ClusterSettings.model_validate(given), None)("s0")
    shell = ray.remote.return_value.options
    told = shell.return_value.remote.call_args.args[2]
    assert (shell.call_args.kwargs["num_gpus"], told["device"]) == (asked, device)
    assert told.get("arena_bytes") == bound.get("arena_bytes")
