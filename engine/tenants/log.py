"""A tenant's log in memory: turns and control records in seq order, and the arena row of each turn."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence

import numpy as np
import orjson

from undertow.engine.base.model import lines_of
from undertow.engine.policies.base import Thresholds, TurnView
from undertow.engine.storage.row_codec import Control, messages_of, without_text

NO_ROW = -1


class RecordLog:
    """The records of one tenant, appended in seq order."""

    def __init__(self) -> None:
        # By seq: the payload of a turn (None once deleted), or the control record.
        self.records: list[bytes | Control | None] = []
        self.row_by_seq = array("q")
        self.seq_by_row = array("q")
        # By hash of a turn's dedupe key: its seq, also of a deleted turn. About 100 bytes a turn.
        self.keys: dict[int, int] = {}
        # By session: the last effective timestamp.
        self.last_timestamp: dict[str, str] = {}
        # (first seq, thresholds in force from there on), ascending.
        self.thresholds_from: list[tuple[int, Thresholds]] = []

    @property
    def next_seq(self) -> int:
        return len(self.records)

    def thresholds_at(self, seq: int) -> Thresholds:
        return next(t for since, t in reversed(self.thresholds_from) if since <= seq)

    def turn(self, seq: int) -> TurnView:
        """The turn of record `seq`, empty once deleted. ValueError: the record is no turn."""
        record = self.records[seq]
        if record is None:
            return TurnView(seq, "", None)
        if isinstance(record, Control):
            raise ValueError(f"record {seq} of the log is no turn")
        body = orjson.loads(record)
        lines = lines_of(messages_of(body))
        return TurnView(seq, "\n".join(lines), body.get("timestamp"), lines, body["session"])

    def exists(self, seq: int) -> bool:
        """Whether the record is a turn that was not deleted."""
        return isinstance(self.records[seq], bytes)

    def controls_after(self, seq: int) -> Iterator[Control]:
        """The control records after record `seq`."""
        return (record for record in self.records[seq + 1 :] if isinstance(record, Control))

    def rows_before(self, seq: int) -> int:
        """The number of turn rows before record `seq`: the causal mask of its gate."""
        return int(np.searchsorted(np.frombuffer(self.seq_by_row, dtype=np.int64), seq))

    def add_turn(self, payload: bytes | None, key: int, session: str, timestamp: str | None) -> int:
        """Append a turn (None: a deleted one). Returns its arena row.

        The caller appends the turn's vector to `turns_segment`, in the same order.
        """
        row = len(self.seq_by_row)
        self.keys[key] = len(self.records)
        self.row_by_seq.append(row)
        self.seq_by_row.append(len(self.records))
        self.records.append(payload)
        if timestamp is not None:
            self.last_timestamp[session] = timestamp
        return row

    def add_turns(
        self,
        payloads: Sequence[bytes],
        keys: Sequence[int],
        sessions: Sequence[str],
        timestamps: Sequence[str | None],
    ) -> None:
        """As `add_turn` for each of several new turns."""
        seq, row = len(self.records), len(self.seq_by_row)
        seqs = range(seq, seq + len(payloads))
        self.keys.update(zip(keys, seqs, strict=True))
        self.row_by_seq.extend(range(row, row + len(payloads)))
        self.seq_by_row.extend(seqs)
        self.records.extend(payloads)
        for session, timestamp in zip(sessions, timestamps, strict=True):
            if timestamp is not None:
                self.last_timestamp[session] = timestamp

    def redact_updates(self, before: int, memory_ids: Collection[str]) -> list[Control]:
        """Remove the text from these memories' updates before record `before`. Returns them redacted."""
        redacted = []
        for seq, record in enumerate(self.records[:before]):
            if not isinstance(record, Control) or record.kind != "update" or "text" not in record.body:
                continue
            if record.body["memory_id"] in memory_ids:
                redacted.append(without_text(record))
                self.records[seq] = redacted[-1]
        return redacted
