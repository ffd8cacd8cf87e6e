"""The loop of `undertow consume`: read a batch, store it, set bad messages aside, then acknowledge it.

A message is acknowledged after its turns are durable, so none is lost. Its place in the stream and a digest
of its value are the key of its turns, so a message that comes again changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

import pyarrow as pa

from undertow.engine.base.model import BadInput, UndertowError, key_digests
from undertow.engine.base.results import TableReport
from undertow.engine.encoders.outage import EncoderDown
from undertow.engine.readers import MessageReader, TurnBlock
from undertow.engine.step.admission import QueueFull
from undertow.engine.tenants.registry import ArenaFull
from undertow.serving.streams.source import Delivery, Letter, Source, Unavailable

T = TypeVar("T")

# Bounds of a batch. One that is stored in STORE_S lets the consumer answer its group and signals in time.
LEAST_MESSAGES, MOST_MESSAGES, MOST_BYTES, STORE_S = 64, 8_192, 16 << 20, 1.0
# Messages of one read: the bytes of a batch are known only to so many messages.
READ_MESSAGES = 256
# How long a read waits for the first message, and for more of them; and how long a batch is collected.
WAIT_S, LINGER_S, COLLECT_S = 0.2, 0.02, 0.5
FIRST_PAUSE_S, LAST_PAUSE_S, HOLD_S = 0.1, 5.0, 0.1
STORE_IS_FULL = (ArenaFull, QueueFull, EncoderDown)
SET_ASIDE = "Correct the producer; with --dead-letter such messages are set aside."


class TurnStore(Protocol):
    """An Engine or a Cluster."""

    def add_turns(self, tables: Iterable[pa.Table]) -> TableReport: ...


class _Stopped(Exception):
    """The run was to stop while it waited."""


@dataclass
class ConsumeReport:
    """What a run has done. `read`: messages; `stored`, `already_there`, `parked`: turns.

    `stopped_by`: the message that ended the run, as there is no dead-letter stream.
    """

    read: int = 0
    stored: int = 0
    already_there: int = 0
    dead_lettered: int = 0
    parked: int = 0
    warnings: int = 0
    busy_s: float = 0.0
    stopped_by: BadInput | None = None

    @property
    def messages_per_s(self) -> float:
        """From the first message to the last acknowledgement."""
        return self.read / self.busy_s if self.busy_s else 0.0


class Consumer:
    """Feeds the messages of a source to a store until it is told to stop."""

    def __init__(
        self,
        source: Source,
        store: TurnStore,
        *,
        max_message_bytes: int,
        sets_aside: bool,
        until_end: bool = False,
        patience_s: float = 300.0,
        work: Callable[[], bool] = lambda: False,
        stop: Callable[[], bool] = lambda: False,
        on_error: Callable[[BadInput], None] = lambda _: None,
        on_warning: Callable[[str], None] = lambda _: None,
        on_batch: Callable[[ConsumeReport], None] = lambda _: None,
    ) -> None:
        """`sets_aside`: bad messages go to the dead-letter stream; else the first one ends the run.

        `patience_s`: how long a store that is full, or a server that is gone, is tried again. `work`: does
        some of the store's own work while no message waits; returns whether there is more.
        """
        self.report = ConsumeReport()
        self._source, self._store = source, store
        self._reader = MessageReader(source.name, max_message_bytes)
        self._sets_aside, self._until_end, self._patience_s = sets_aside, until_end, patience_s
        self._work, self._stop = work, stop
        self._on_error, self._on_warning, self._on_batch = on_error, on_warning, on_batch
        self._most = READ_MESSAGES
        self._began_s: float | None = None

    def run(self) -> None:
        """Consume. Unavailable, ArenaFull, EncoderDown: see `patience_s`; JournalError: reopen the store."""
        more = False
        try:
            while not self._stop() and self.report.stopped_by is None:
                batch = self._retried(lambda: self._collect(0.0 if more else WAIT_S), Unavailable)  # noqa: B023
                if batch:
                    self._take(batch)
                elif self._until_end and self._retried(self._source.is_caught_up, Unavailable):
                    return
                more = self._work()
        except _Stopped:
            return

    def _collect(self, wait_s: float) -> list[Delivery]:
        batch: list[Delivery] = []
        size_bytes, until_s = 0, time.monotonic() + COLLECT_S
        while len(batch) < self._most and size_bytes < MOST_BYTES:
            try:
                some = self._source.read(min(READ_MESSAGES, self._most - len(batch)), wait_s)
            except Unavailable:
                if batch:
                    break
                raise
            if self._began_s is None and some:
                self._began_s = time.monotonic()
            batch += some
            size_bytes += sum(len(delivery.value) for delivery in some)
            wait_s = LINGER_S
            if not some or time.monotonic() > until_s:
                break
        return batch

    def _take(self, batch: Sequence[Delivery]) -> None:
        """Store, set aside, acknowledge: in this order."""
        block, letters = self._read(batch)
        turns = block.turns
        if letters and not self._sets_aside:
            delivery, problem = letters[0]
            stop = next(n for n, other in enumerate(batch) if other is delivery)
            batch, letters = batch[:stop], []
            turns = turns.slice(0, block.before(stop - 1))
            self.report.stopped_by = replace(problem, cure=f"{problem.cure} {SET_ASIDE}")
        began_s = time.monotonic()
        if turns.num_rows:
            self._add(turns)
            speed = turns.num_rows / (time.monotonic() - began_s)
            self._most = min(max(int(speed * STORE_S), LEAST_MESSAGES), 2 * self._most, MOST_MESSAGES)
        if letters:
            self._retried(lambda: self._source.bury(letters), Unavailable)
        if batch:
            self._retried(lambda: self._source.commit(batch), Unavailable)
        self.report.read += len(batch)
        self.report.dead_lettered += len(letters)
        self.report.busy_s = time.monotonic() - (self._began_s or began_s)
        for letter in letters:
            self._on_error(letter.problem)
        self._on_batch(self.report)

    def _read(self, batch: Sequence[Delivery]) -> tuple[TurnBlock, list[Letter]]:
        """The turns, by places in the batch, and the messages that hold none, in order."""
        bad = {n: delivery.problem for n, delivery in enumerate(batch) if delivery.problem is not None}
        values = [b"" if n in bad else delivery.value for n, delivery in enumerate(batch)]
        digests = key_digests(values)
        keys = [f"{delivery.place}/{digest}" for delivery, digest in zip(batch, digests, strict=True)]
        block = self._reader.block(values, [delivery.tenant for delivery in batch], keys)
        for record in block.problems:
            self.report.warnings += len(record.warnings)
            for warning in record.warnings:
                self._on_warning(warning)
            for error in record.errors[:1]:
                place = batch[record.position].place
                bad.setdefault(record.position, replace(error, source=place, line=None))
        return block, [Letter(batch[n], problem) for n, problem in sorted(bad.items())]

    def _add(self, turns: pa.Table) -> None:
        """Store turns, in order. In halves, where they do not fit into the arena at the same time."""
        try:
            done = self._store.add_turns([turns])
        except STORE_IS_FULL as error:
            if isinstance(error, ArenaFull) and (half := turns.num_rows // 2):
                self._add(turns.slice(0, half))
                self._add(turns.slice(half))
                return
            done = self._retried(lambda: self._store.add_turns([turns]), *STORE_IS_FULL)
        self.report.stored += done.new_turns
        self.report.already_there += done.turns - done.new_turns
        self.report.parked += done.parked_turns

    def _retried(self, call: Callable[[], T], *errors: type[UndertowError]) -> T:
        """The call's result, tried again for as long as our patience. No message is taken meanwhile."""
        until_s, pause_s = None, FIRST_PAUSE_S
        while True:
            try:
                result = call()
            except errors as error:
                if until_s is None:
                    until_s = time.monotonic() + self._patience_s
                    self._on_warning(
                        f"{str(error).rstrip('.')}; it is tried again for up to {self._patience_s:g} s."
                    )
                if time.monotonic() >= until_s:
                    raise
                self._hold(pause_s)
                pause_s = min(2 * pause_s, LAST_PAUSE_S)
            else:
                if until_s is not None:
                    self._source.resume()
                return result

    def _hold(self, pause_s: float) -> None:
        """Wait, as a member of the group, while the store does its own work. _Stopped."""
        until_s = time.monotonic() + pause_s
        while time.monotonic() < until_s:
            if self._stop():
                raise _Stopped
            self._source.hold()
            if not self._work():
                time.sleep(min(HOLD_S, pause_s))


def summary(report: ConsumeReport) -> dict[str, Any]:
    """The figures of a run, as the command writes them."""
    return {
        "read": report.read,
        "stored": report.stored,
        "already_there": report.already_there,
        "dead_lettered": report.dead_lettered,
        "parked": report.parked,
        "busy_s": round(report.busy_s, 3),
        "messages_per_s": round(report.messages_per_s, 1),
        "warnings": report.warnings,
    }
