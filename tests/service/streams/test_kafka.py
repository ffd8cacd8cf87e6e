"""`undertow consume kafka` against librdkafka's mock cluster; docs/streams.md says what that cannot prove."""

from __future__ import annotations

import itertools
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from undertow.serving.streams.consumer import Consumer
from undertow.serving.streams.kafka import KafkaSource

from ...support.cli import Ran, run
from ...support.cluster.processes import Command
from ...support.llm_servers import wait_until
from ...support.service.streams import (
    TENANTS,
    MockKafka,
    Shared,
    ingested,
    kill_at_random,
    said,
    stored,
    stream_of,
    turns_in,
)

TOPICS = (f"chat-{n}" for n in itertools.count())
# short, but a busy machine must not drop members
PROPERTIES = {"session.timeout.ms": "4000", "heartbeat.interval.ms": "500"}


def arguments(brokers: MockKafka, topic: str, store: Path, *more: str) -> tuple[str | Path, ...]:
    config = store.parent / "kafka.conf"
    config.write_text(
        "# of the tests\n" + "\n".join(f"{name} = {value}" for name, value in PROPERTIES.items())
    )
    place = ("--brokers", brokers.brokers, "--topic", topic, "--group", "g", "--config", str(config))
    return ("consume", "kafka", *place, "--store", store, "--llm", "off", "--json", *more)


def consumed(brokers: MockKafka, topic: str, store: Path, *more: str) -> Ran:
    return run(*arguments(brokers, topic, store, "--until-end", *more))


def test_a_topic_is_stored_as_a_file_is_and_again_changes_nothing(brokers: MockKafka, tmp_path: Path) -> None:
    topic, lines = next(TOPICS), stream_of(40)
    expected = ingested(tmp_path, lines)
    brokers.add(topic, lines)
    for _ in range(3):
        brokers.refuse_a_commit()
    done = consumed(brokers, topic, tmp_path / "s")
    assert (done.code, done.doc["read"], done.doc["stored"], done.doc["already_there"]) == (0, 120, 120, 0)
    assert stored(tmp_path / "s") == expected
    assert sum(brokers.committed(topic, "g").values()) == 120
    again = consumed(brokers, topic, tmp_path / "s", "--group", "another").doc
    assert (again["read"], again["stored"], again["already_there"]) == (120, 0, 120)
    assert stored(tmp_path / "s") == expected


@pytest.mark.rarely
def test_kills_at_random_moments_lose_and_double_nothing(brokers: MockKafka, tmp_path: Path) -> None:
    topic, lines = next(TOPICS), stream_of(1_200)
    store = tmp_path / "s"
    command = arguments(brokers, topic, store)
    assert kill_at_random(partial(brokers.add, topic), command, store, lines, seed=2) >= 1
    assert consumed(brokers, topic, store).code == 0
    assert sum(brokers.committed(topic, "g").values()) == len(lines)
    assert stored(store) == ingested(tmp_path, lines)


def test_bad_messages_are_set_aside_with_place_field_and_cure(brokers: MockKafka, tmp_path: Path) -> None:
    topic, lines = next(TOPICS), stream_of(20)
    brokers.add(topic, lines[:30])
    message = b'{"tenant": "bo", "messages": [{"role": "user", "content": "x"}]}'
    bad: list[tuple[bytes | None, Any, str]] = [
        (b"{nope", "ada", ""),
        (None, "ada", ""),
        (message, "ada", "tenant"),
        (message.replace(b'"tenant": "bo", ', b""), None, "tenant"),
        (message, b"\xff", "key"),
    ]
    for value, key, _ in bad:
        brokers.send(topic, value, key, headers=[("trace", b"1")])
    brokers.add(topic, lines[30:])
    done = consumed(brokers, topic, tmp_path / "s", "--dead-letter", f"{topic}-dead")
    assert (done.code, done.doc["stored"], done.doc["dead_lettered"]) == (0, len(lines), len(bad))
    assert stored(tmp_path / "s") == ingested(tmp_path, lines)
    letters = brokers.all_of(f"{topic}-dead", len(bad))
    found = {(letter.value(), letter.key()): dict(letter.headers()) for letter in letters}
    for value, key, field in bad:
        headers = found.pop((value, key.encode() if isinstance(key, str) else key))
        assert (headers["trace"], headers["undertow.topic"]) == (b"1", topic.encode())
        place = f"{topic}/{headers['undertow.partition'].decode()}/{headers['undertow.offset'].decode()}"
        assert headers["undertow.place"].decode() == place
        assert headers["undertow.field"].decode() == field
        assert headers["undertow.reason"] and headers["undertow.cure"]
    assert not found
    assert sum(brokers.committed(topic, "g").values()) == len(lines) + len(bad)


def test_without_a_dead_letter_topic_a_bad_message_ends_the_run(brokers: MockKafka, tmp_path: Path) -> None:
    topic = next(TOPICS)
    brokers.add(topic, stream_of(5, ["ada"]))
    brokers.send(topic, b"{nope", "ada")
    brokers.add(topic, stream_of(5, ["ada"]))
    for read in (5, 0):
        done = consumed(brokers, topic, tmp_path / "s")
        assert (done.code, done.doc["stored"]) == (3, read)
        assert "/5: is not JSON" in done.err and "--dead-letter" in done.err
    assert list(brokers.committed(topic, "g").values()) == [5]


@pytest.mark.rarely
def test_hanging_brokers_are_waited_for_and_missing_ones_reported(brokers: MockKafka, tmp_path: Path) -> None:
    topic, lines, store = next(TOPICS), stream_of(60), tmp_path / "s"
    brokers.add(topic, lines[:90])
    with Command(tmp_path / "c", *arguments(brokers, topic, store)) as running:
        running.wait_until(lambda: turns_in(store) == 90)
        with brokers.frozen():
            time.sleep(3)
        brokers.add(topic, lines[90:])
        running.wait_until(lambda: turns_in(store) == len(lines))
        running.process.terminate()
        assert running.result()["dead_lettered"] == 0
    assert sum(brokers.committed(topic, "g").values()) == len(lines)
    assert stored(store) == ingested(tmp_path, lines)
    gone = run(*arguments(brokers, topic, store, "--brokers", "127.0.0.1:9", "--patience", "2"))
    assert gone.code == 1 and "Kafka does not answer" in gone.err


# ---- several members on one store, in this process


class Member:
    """A consumer in a thread of its own."""

    def __init__(self, brokers: MockKafka, topic: str, store: Shared) -> None:
        self.source = KafkaSource(brokers.brokers, [topic], "g", properties=PROPERTIES)
        self.stop, self.failure = threading.Event(), ""
        self.consumer = Consumer(
            self.source, store, max_message_bytes=10_000, sets_aside=False, stop=self.stop.is_set
        )
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.consumer.run()
        except BaseException as error:
            self.failure = repr(error)
            raise

    def end(self) -> None:
        self.stop.set()
        self._thread.join(30)
        self.source.close()
        assert not self.failure and not self._thread.is_alive()


def test_a_rebalance_loses_doubles_and_reorders_nothing(brokers: MockKafka, shared: Shared) -> None:
    topic, names = next(TOPICS), [f"t{n}" for n in range(12)]
    lines = stream_of(150, names)
    sending = threading.Event()

    def produce() -> None:
        for start in range(0, len(lines), 24):
            brokers.add(topic, lines[start : start + 24])
            sending.wait(0.15)

    producer = threading.Thread(target=produce)
    producer.start()
    first = Member(brokers, topic, shared)
    wait_until(lambda: first.consumer.report.read > 100)
    second = Member(brokers, topic, shared)
    wait_until(lambda: second.consumer.report.read > 50)
    assert first.source.partitions and second.source.partitions
    assert first.source.partitions.isdisjoint(second.source.partitions)
    first.end()
    producer.join()
    wait_until(lambda: sum(brokers.committed(topic, "g").values()) == len(lines))
    second.end()
    for name in names:
        assert shared.said(name) == said(lines, name)


@pytest.mark.rarely
def test_a_full_store_pauses_the_member_which_stays_in_its_group(brokers: MockKafka, shared: Shared) -> None:
    topic, lines = next(TOPICS), stream_of(40)
    brokers.add(topic, lines[:60])
    shared.full = 10**6
    member = Member(brokers, topic, shared)
    wait_until(lambda: shared.full < 10**6 - 10)
    assigned = member.source.partitions
    time.sleep(5)  # longer than a session
    brokers.add(topic, lines[60:])
    assert member.source.partitions == assigned and not brokers.committed(topic, "g")
    shared.full = 0
    wait_until(lambda: sum(brokers.committed(topic, "g").values()) == len(lines))
    member.end()
    report = member.consumer.report
    assert (report.read, report.stored, report.already_there) == (len(lines), len(lines), 0)
    for name in TENANTS:
        assert shared.said(name) == said(lines, name)
