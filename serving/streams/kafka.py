"""Kafka topics as a source, over librdkafka."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from undertow.engine.base.model import BadInput
from undertow.serving.streams.source import (
    NO_VALUE,
    Delivery,
    Letter,
    Source,
    StreamError,
    Unavailable,
    envelope_text,
    letter_notes,
)

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message, TopicPartition

Partition = tuple[str, int]

# Properties that a file may change.
DEFAULTS = {
    "auto.offset.reset": "earliest",
    "partition.assignment.strategy": "cooperative-sticky",
    "queued.max.messages.kbytes": "32768",  # bounds the messages that are fetched ahead
    "log_level": "2",  # critical; we report errors ourselves
}
PROBE_S, DELIVERY_MS = 2.0, 30_000
# of a commit in a rebalance: it is made later for the partitions that stay ours
LATER = ("ILLEGAL_GENERATION", "UNKNOWN_MEMBER_ID", "REBALANCE_IN_PROGRESS", "_NO_OFFSET", "_ASSIGNMENT_LOST")
FINAL = (
    *("_AUTHENTICATION", "CLUSTER_AUTHORIZATION_FAILED", "FENCED_INSTANCE_ID"),
    *("GROUP_AUTHORIZATION_FAILED", "MSG_SIZE_TOO_LARGE", "SASL_AUTHENTICATION_FAILED"),
    "TOPIC_AUTHORIZATION_FAILED",
)


class KafkaSource(Source):
    """A member of a consumer group. A message's key names its tenant."""

    def __init__(
        self,
        brokers: str,
        topics: Sequence[str],
        group: str,
        *,
        dead_letters: str | None = None,
        properties: Mapping[str, str] | None = None,
    ) -> None:
        """`dead_letters`: a topic. `properties`: librdkafka's, but for those that delivery rests on.

        Connects in the background. ImportError names the extra; StreamError: a property is wrong.
        """
        self._kafka = import_module("confluent_kafka")
        self.name = ",".join(topics)
        self._topics, self._dead_letters = tuple(topics), dead_letters
        self._early: list[Delivery] = []
        # of our partitions: the next offsets of what is stored or set aside, until they are committed
        self._due: dict[Partition, int] = {}
        self._owned: set[Partition] | None = None
        self._ended: set[Partition] = set()
        self._held, self._trouble, self._probe_due_s = False, "", 0.0
        shared = {"bootstrap.servers": brokers, "error_cb": self._note}
        given = dict(properties or {})
        reading = {
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
        }
        writing = {"enable.idempotence": True, "message.timeout.ms": DELIVERY_MS, "message.max.bytes": 10**9}
        try:
            self._consumer = self._kafka.Consumer({**DEFAULTS, **given, **shared, **reading})
            given = {name: value for name, value in given.items() if name not in DEFAULTS}
            self._producer = self._kafka.Producer({**given, **shared, **writing}) if dead_letters else None
        except self._kafka.KafkaException as error:
            raise StreamError(f"Kafka's client refuses a property: {error.args[0].str()}") from None
        self._consumer.subscribe(
            list(topics), on_assign=self._assign, on_revoke=self._revoke, on_lost=self._revoke
        )

    # ---- reading

    def read(self, most: int, wait_s: float) -> list[Delivery]:
        if self._early:
            early, self._early = self._early[:most], self._early[most:]
            return early
        self._commit_due()
        taken = self._taken(self._consumer.consume(most, wait_s))
        if self._trouble and not taken:
            self._probe()
        return taken

    def _taken(self, messages: Sequence[Message]) -> list[Delivery]:
        taken = []
        for message in messages:
            error = message.error()
            if error is None:
                self._ended.discard(_partition(message))
                taken.append(_delivery(message))
            elif error.code() == self._kafka.KafkaError._PARTITION_EOF:
                self._ended.add(_partition(message))
            elif self._is_final(error):
                raise StreamError(f"{self.name} cannot be read: {error.str()}")
            else:
                self._note(error)
        if taken:
            self._trouble = ""
        return taken

    def _is_final(self, error: KafkaError) -> bool:
        return error.fatal() or error.name() in FINAL

    def _note(self, error: KafkaError) -> None:
        """Called by librdkafka, within our calls of it: it goes on by itself, and `_probe` asks whether."""
        self._trouble = error.str()

    def _probe(self) -> None:
        """Ask the brokers, after an error, whether the topics can be read. Unavailable."""
        if time.monotonic() < self._probe_due_s:
            raise Unavailable(f"Kafka cannot be used: {self._trouble}.")
        try:
            known = self._consumer.list_topics(timeout=PROBE_S).topics
        except self._kafka.KafkaException as error:
            self._probe_due_s = time.monotonic() + PROBE_S
            raise Unavailable(f"Kafka does not answer: {error.args[0].str()}.") from None
        if missing := [topic for topic in self._topics if topic not in known and not topic.startswith("^")]:
            raise Unavailable(f"Kafka has no topic {missing[0]}.")
        self._trouble = ""

    def is_caught_up(self) -> bool:
        return self._owned is not None and self._owned <= self._ended and not self._early and not self._due

    # ---- the group

    @property
    def partitions(self) -> frozenset[Partition]:
        """Those that this member has now."""
        return frozenset(self._owned or ())

    def _assign(self, _: Any, partitions: Sequence[TopicPartition]) -> None:
        added = {(p.topic, p.partition) for p in partitions}
        self._owned = (self._owned or set()) | added
        self._ended -= added
        self._held = False  # librdkafka assigns them after this call; `hold` comes again

    def _revoke(self, _: Any, partitions: Sequence[TopicPartition]) -> None:
        """What was read of these and is not stored is read again, by whoever has them now."""
        gone = {(p.topic, p.partition) for p in partitions}
        self._owned = (self._owned or set()) - gone
        self._ended -= gone
        self._due = {partition: offset for partition, offset in self._due.items() if partition not in gone}
        self._early = [delivery for delivery in self._early if _partition(delivery.raw) not in gone]

    def hold(self) -> None:
        if not self._held:
            self._consumer.pause(self._consumer.assignment())
            self._held = True
        self._early += self._taken(self._consumer.consume(1, 0))

    def resume(self) -> None:
        self._consumer.resume(self._consumer.assignment())
        self._held = False

    # ---- acknowledging

    def bury(self, letters: Sequence[Letter]) -> None:
        assert self._producer is not None and self._dead_letters is not None
        errors: list[KafkaError | None] = []
        for letter in letters:
            raw: Message = letter.delivery.raw
            more = {"headers": _headers(letter), "on_delivery": lambda error, _: errors.append(error)}
            self._producer.produce(self._dead_letters, raw.value(), raw.key(), **more)
        if self._producer.flush(DELIVERY_MS / 1_000):
            raise Unavailable(f"the dead letters to {self._dead_letters} are not acknowledged.")
        if (error := next((error for error in errors if error is not None), None)) is not None:
            kind = StreamError if self._is_final(error) else Unavailable
            raise kind(f"a dead letter to {self._dead_letters} was refused: {error.str()}.")

    def commit(self, batch: Sequence[Delivery]) -> None:
        ours = self.partitions
        self._due |= {p: d.raw.offset() + 1 for d in batch if (p := _partition(d.raw)) in ours}
        self._commit_due()

    def _commit_due(self) -> None:
        if not self._due:
            return
        offsets = [self._kafka.TopicPartition(*partition, offset) for partition, offset in self._due.items()]
        try:
            committed = self._consumer.commit(offsets=offsets, asynchronous=False)
            refusals = {(p.topic, p.partition): p.error for p in committed if p.error}
        except self._kafka.KafkaException as error:
            refusals = dict.fromkeys(self._due, error.args[0])
        self._due = {partition: self._due[partition] for partition in refusals}
        for refusal in refusals.values():
            if refusal.name() not in LATER:
                kind = StreamError if self._is_final(refusal) else Unavailable
                raise kind(f"the offsets of {self.name} cannot be committed: {refusal.str()}.")

    def close(self) -> None:
        with suppress(StreamError, Unavailable):
            self._commit_due()
        self._consumer.close()


def _partition(message: Message) -> Partition:
    return message.topic() or "", message.partition() or 0


def _delivery(message: Message) -> Delivery:
    place = f"{message.topic()}/{message.partition()}/{message.offset()}"
    tenant, problem = envelope_text(message.key(), place, "key")
    value = message.value()
    if value is None:
        problem = problem or BadInput(place, None, None, *NO_VALUE)
    return Delivery(place, tenant, value or b"", problem, message)


def _headers(letter: Letter) -> list[tuple[str, str | bytes | None]]:
    """The message's own headers, and ours."""
    raw: Message = letter.delivery.raw
    notes = {"topic": raw.topic() or "", "partition": str(raw.partition()), "offset": str(raw.offset())}
    notes |= letter_notes(letter)
    return [*(raw.headers() or []), *((f"undertow.{name}", value) for name, value in notes.items())]
