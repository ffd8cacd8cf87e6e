"""What test_cluster.py and test_cluster_kills.py share."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from undertow.engine.api.engine import Engine, make_llm
from undertow.engine.base.model import Message, Turn
from undertow.engine.cluster.ray.actors import connect
from undertow.engine.cluster.shard_map import STORES, load
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.storage.location import Location

from ..cluster.in_process import settings
from ..faults.harness import (
    FILLER,
    TOPICS,
    State,
    end_state,
    stored_texts,
)
from .runs import MIB

ray = pytest.importorskip("ray")


@contextmanager
def ray_here(cpus: int) -> Iterator[str]:
    """A small Ray in this process; its address."""
    connect(
        "local",
        num_cpus=cpus,
        object_store_memory=200 * MIB,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=40,
    )
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def turn(tenant: str, n: int) -> Turn:
    """The n-th turn of a tenant, always the same: its topics recur."""
    rng = random.Random(f"{tenant}-{n}")
    topic = rng.choice(TOPICS).split()
    said = " ".join([*rng.sample(topic, 6), rng.choice(FILLER), f"n{n}"])
    answer = f"Tell me of the {topic[0]} and the {topic[1]}."
    when = f"2026-03-{1 + n // 24 % 28:02d}T{n % 24:02d}:00:00"
    return Turn(tenant, (Message("user", said), Message("assistant", answer)), f"{tenant}-{n}", "s", when)


def alone(folder: Path, sent: Counter[str], url: str) -> State:
    """What one engine makes of the first turns of each tenant."""
    of = settings(llm_url=url, batch_turns=512)
    with Engine(folder, of, HashingEncoder(384), llm=make_llm(of)) as engine:
        for tenant, count in sent.items():
            engine.add_batch([turn(tenant, n) for n in range(count)])
        assert engine.drain()
    return end_state(folder)


def assert_all_stored(root: Location, acked: Counter[str]) -> None:
    """Every acknowledged turn is stored, each once, in the order in which its tenant's were sent."""
    stored: dict[str, list[str]] = {}
    for shard in load(root).all_shards:
        texts = stored_texts(Path(str(root)) / STORES / shard, "turn")
        assert not stored.keys() & texts.keys(), "a tenant is at two shards"
        stored |= texts
    for tenant, count in acked.items():
        assert len(stored[tenant]) >= count, f"{tenant}: an acknowledged turn is lost"
        assert stored[tenant] == [turn(tenant, n).text for n in range(len(stored[tenant]))], tenant


TENANTS = tuple(f"tenant-{n}" for n in range(60))


@contextmanager
def beside(work: Callable[[float, threading.Event], object], seconds: float) -> Iterator[Future[object]]:
    """Work in a thread for so many seconds, or until the block ends; its error is raised then."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work, seconds, stop)
        try:
            yield working
        finally:
            stop.set()
    working.result()
