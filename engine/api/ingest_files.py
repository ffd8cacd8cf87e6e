"""Files into an engine: read, offer, step, and remember how far each file was taken."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from undertow.engine.api.engine import WAIT_FOR_REPLY_S, Engine
from undertow.engine.base.model import BadInput
from undertow.engine.base.results import IngestReport
from undertow.engine.readers import Format, Log, TurnBlock, read_blocks
from undertow.engine.step.admission import Block
from undertow.engine.step.batch_size import MOST_BULK_TURNS
from undertow.engine.step.scheduler import StepReport
from undertow.engine.storage.journal import Row
from undertow.engine.storage.row_codec import TURNS
from undertow.engine.tenants.turn_columns import TurnColumns

# Blocks that are read while a step stores those before: about as many as one step takes.
BLOCKS_AHEAD = 4


class Ingest:
    """Feeds files to an engine in steps of at most `batch_turns` turns.

    A file's position is committed in the very step that stores the last turn before it, so a kill at
    any moment loses no turn and `resume` reads none twice but those of one batch, which dedupe drops.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        format: Format = "auto",
        resume: bool = False,
        strict: bool = False,
        on_error: Callable[[BadInput], None] = lambda _: None,
        on_warning: Callable[[str], None] = lambda _: None,
        on_step: Callable[[StepReport], None] = lambda _: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """`stop` is asked between steps: once it says so, the run ends after a whole commit.

        `strict`: the first refused input ends the run; nothing of the batch it stood in is stored.
        """
        self.report = IngestReport()
        self._engine = engine
        self._format: Format = format
        self._strict = strict
        self._on_error, self._on_warning, self._on_step, self._stop = on_error, on_warning, on_step, stop
        self._batch_turns = min(engine.settings.batch_turns or MOST_BULK_TURNS, engine.settings.queue_turns)
        self._batch: list[pa.Table] = []
        self._count = 0
        self._reached: dict[str, dict[str, Any]] = {}
        self._stored = self._stored_offsets() if resume else {}

    def feed(self, paths: Sequence[Log | Path]) -> None:
        """Store every turn of the files; decisions go on alongside. JournalError: reopen the engine."""
        began_s = time.perf_counter()
        for path in paths:
            if not self.report.ended:
                self._feed_file(Log.of(path))
        if not self.report.ended:
            self._flush()
        if not self.report.interrupted:
            self._step_until(lambda: self._engine.scheduler.inbox.is_empty)
        self._batch.clear()
        self._count = 0
        self._reached.clear()
        self.report.admit_s += time.perf_counter() - began_s

    def settle(self) -> bool:
        """Step until all is decided. False: something waits (see `obstacles`), or `stop` said so."""
        while not self._engine.idle:
            if self._stopping():
                return False
            self._on_step(self._engine.step(WAIT_FOR_REPLY_S))
            if self._engine.is_stalled:
                return False
        return not self._engine.scheduler.blocked

    def _stopping(self) -> bool:
        return self.report.interrupt_if(self._stop)

    def _feed_file(self, log: Log) -> None:
        source = self._engine.journal.info.tenant_key(log.identity)
        begun = self._begun(log, source)
        self.report.resumed_turns += begun["turns"]
        self.report.resumed_errors += begun["errors"]
        head = {"source": source, **log.head()}
        blocks = read_blocks(
            log,
            self._format,
            after=begun["position"],
            max_message_bytes=self._engine.settings.max_message_bytes,
            encoder=self._engine.store_encoder,
        )
        for block in _read_ahead(blocks):
            refused, stop = self._note_problems(block)
            self._feed_block(block, stop, {**head, **begun})
            if self.report.ended:
                return
            if refused is not None:
                self.report.stopped_by = refused
                return
            if self._stopping():
                return
            begun = _reached_in(block, block.position, begun)
            self._reached[source] = {**head, **begun}

    def _note_problems(self, block: TurnBlock) -> tuple[BadInput | None, int]:
        """Tell the problems of a block. Returns the one that ends the run, and how many turns to feed."""
        for record in block.problems:
            self.report.warnings += len(record.warnings)
            for warning in record.warnings:
                self._on_warning(warning)
            for error in record.errors:
                self.report.errors += 1
                self._on_error(error)
                if self._strict:
                    return error, int(np.searchsorted(block.positions, record.position))
        return None, len(block.positions)

    def _feed_block(self, block: TurnBlock, stop: int, reached: dict[str, Any]) -> None:
        """Add the first `stop` turns to the batch; store a full batch before the next turn.

        `reached`: how far the file was taken before the block.
        """
        start = 0
        while start < stop:
            if self._count == self._batch_turns:
                if start:  # the records before that of the next turn are complete
                    upto = _reached_in(block, int(block.positions[start]) - 1, reached)
                    self._reached[reached["source"]] = {**reached, **upto}
                self._flush()
                if self.report.ended:
                    return
            end = min(stop, start + self._batch_turns - self._count)
            self._batch.append(block.turns.slice(start, end - start))
            self._count += end - start
            start = end

    def _flush(self) -> None:
        """Queue the batch, and the positions that it completes for the commit of its last turn."""
        batch, self._batch = self._batch, []
        count, self._count = self._count, 0
        reached, self._reached = self._reached, {}
        if not batch and not reached:
            return
        inbox = self._engine.scheduler.inbox
        # one batch waits behind that which is stored, so that it is embedded meanwhile
        self._step_until(lambda: inbox.has_room_for_block(count))
        if not self.report.ended:
            rows = [Row("source_offset", "", "", -1, orjson.dumps(body)) for body in reached.values()]
            turns = pa.concat_tables(batch) if batch else TURNS.empty_table()
            inbox.put_block(Block(TurnColumns.of_table(turns), rows))

    def _step_until(self, done: Callable[[], bool]) -> None:
        """Store; where the arena is full, the turns wait for decisions. Ends early if `stop` says so."""
        while not (done() or self._stopping()):
            step = self._engine.step(WAIT_FOR_REPLY_S, storing=True)
            self.report.new_turns += step.admitted
            self.report.read_turns += step.stored
            self._on_step(step)

    def _begun(self, log: Log, source: str) -> dict[str, int]:
        """How far earlier runs have taken a file (`_reached_in`); zeros if it is another file by now."""
        stored = self._stored.get(source, {"position": 0})
        begun = {name: int(stored.get(name, 0)) for name in ("position", "turns", "errors")}
        if not begun["position"]:
            return begun
        if log.head(stored["head_bytes"]) == {k: stored[k] for k in ("head", "head_bytes")}:
            return begun
        self.report.warnings += 1
        self._on_warning(f"{log}: has changed since it was last read; reading it from the start")
        return dict.fromkeys(begun, 0)

    def _stored_offsets(self) -> dict[str, dict[str, Any]]:
        rows = sorted(
            self._engine.journal.read(kinds=["source_offset"], vectors=False), key=lambda row: row.lsn
        )
        return {body["source"]: body for body in (orjson.loads(row.payload) for row in rows)}


def _reached_in(block: TurnBlock, position: int, before: Mapping[str, Any]) -> dict[str, int]:
    """A position in a block, and the turns and errors of its file up to there. `before`: those before it."""
    errors = sum(len(record.errors) for record in block.problems if record.position <= position)
    return {
        "position": position,
        "turns": before["turns"] + block.before(position),
        "errors": before["errors"] + errors,
    }


def _read_ahead(blocks: Iterator[TurnBlock]) -> Iterator[TurnBlock]:
    """The blocks, read by a thread of its own while those before them are stored."""
    with ThreadPoolExecutor(1, "reading") as reading:
        coming = deque(reading.submit(next, blocks, None) for _ in range(BLOCKS_AHEAD))
        while (block := coming.popleft().result()) is not None:
            coming.append(reading.submit(next, blocks, None))
            yield block


def obstacles(engine: Engine) -> list[str]:
    """Why work is pending, in words: one line for each reason."""
    blocked = Counter(engine.scheduler.blocked.values())
    lines = [f"{count} tenant{'s' * (count > 1)}: {why}" for why, count in blocked.most_common()]
    if engine.server_lost:
        lines.insert(0, f"the LLM server does not answer: {engine.llm_error}")
    if (down := engine.scheduler.encoder_down) is not None:
        lines.insert(0, f"the encoder cannot be used: {down}")
    return lines
