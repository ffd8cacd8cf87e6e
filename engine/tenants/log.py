"""A tenant's log in memory: turns and control records in seq order, and the arena row of each turn."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from hashlib import blake2b
from itertools import takewhile
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from undertow.engine.base.model import lines_of
from undertow.engine.policies.base import Thresholds, TurnView
from undertow.engine.storage.row_codec import Control, messages_of, said_in, without_text
from undertow.engine.tenants.payload_file import PayloadFile, Payloads
from undertow.kernels.key_table import KeyTable, add_keys

NO_ROW = -1
NO_TURN, NOT_MEASURED = -1, -2
# The least turns between two times at which thresholds are found from the tenant's own turns.
THETA_TURNS = 64


class RecordLog:
    """The records of one tenant, appended in seq order."""

    # The 64-bit hash of a dedupe key, in this process only.
    key_hash = staticmethod(hash)

    def __init__(self, name: str, incarnation: int, texts: PayloadFile) -> None:
        self.name = name
        self.incarnation = incarnation
        # of the part that the ids of all turns share, as a search makes many ids
        self._id_hash = blake2b(f"{name}\x1f{incarnation}\x1f".encode(), digest_size=16)
        self._payloads = Payloads(texts)
        # By seq, ascending.
        self._controls: dict[int, Control] = {}
        # By seq of a turn: the body of the control record that deletes it.
        self._deletions: dict[int, Mapping[str, Any]] = {}
        self.row_by_seq = array("i")
        self.seq_by_row = array("i")
        # By row: what `measured` was told of a turn, or that it was not asked yet, or that there is none.
        self._measures = array("i")
        # The rows of the dedupe keys and, by session, the last effective timestamp, also of deleted turns. Of
        # turns that were loaded, `index_keys` reads both from the payloads.
        self._keys = KeyTable()
        self._last_timestamp: dict[str, str] = {}
        # The turns without a vector, in order: no encoder could be used when they came. None is decided yet.
        self.awaiting: dict[int, None] = {}
        # (first seq, thresholds in force from there on) as stated by `settings` records, ascending; and those
        # that the turns have told to decisions since the log was begun, or begun again.
        self.thresholds_from: list[tuple[int, Thresholds]] = []
        self.told_from: list[tuple[int, Thresholds]] = []

    @property
    def next_seq(self) -> int:
        return len(self.row_by_seq)

    @property
    def decidable_end(self) -> int:
        """The first record that cannot be decided now, as a turn's vector is missing, or `next_seq`."""
        return next(iter(self.awaiting), self.next_seq)

    # ---- thresholds

    def thresholds_at(self, seq: int) -> Thresholds:
        """The thresholds in force at a record: as last stated, or as the turns since then have told them."""
        return self._in_force(seq)[0]

    def thetas_are_due(self, seq: int) -> bool:
        """Whether thresholds that state a share are to be found anew once this turn is decided.

        From the 64th turn on: where none were found since they were stated, then after every 64 turns, and
        from the 1,024th on less often, as few more turns then change little.
        """
        kept, are_told = self._in_force(seq)
        count = self.rows_before(seq + 1)
        if count < THETA_TURNS or not kept.shares:
            return False
        return not are_told or count % max(THETA_TURNS, (1 << count.bit_length()) // 16) == 0

    def _in_force(self, seq: int) -> tuple[Thresholds, bool]:
        """The thresholds in force at a record, and whether turns have told them."""
        since, stated = self.thresholds_from[-1]
        if since > seq:
            since, stated = next(entry for entry in reversed(self.thresholds_from) if entry[0] <= seq)
        for at, told in reversed(self.told_from):
            if since <= at <= seq:
                return told, True
        return stated, False

    # ---- records

    def turn_id(self, seq: int) -> str:
        """As `row_codec.turn_id`, in half the time."""
        hashed = self._id_hash.copy()
        hashed.update(b"%d\x1fturn\x1f0" % seq)
        return hashed.hexdigest()

    def payload(self, seq: int) -> bytes:
        """The payload of a turn; empty for a deleted one, and for a control record."""
        return self._payloads[seq]

    def exists(self, seq: int) -> bool:
        """Whether the record is a turn that was not deleted."""
        return self._payloads.exists(seq)

    def control(self, seq: int) -> Control | None:
        """The control record `seq`; None if that is a turn."""
        return self._controls.get(seq)

    def controls_from(self, seq: int) -> list[Control]:
        """The control records from `seq` on, oldest first."""
        return list(takewhile(lambda control: control.seq >= seq, reversed(self._controls.values())))[::-1]

    def turn(self, seq: int) -> TurnView:
        """The turn of record `seq`, empty once deleted. ValueError: the record is no turn."""
        if seq in self._controls:
            raise ValueError(f"record {seq} of the log is no turn")
        if not self.exists(seq):
            return TurnView(seq, "", None)
        body = orjson.loads(self.payload(seq))
        lines = lines_of(messages_of(body))
        return TurnView(seq, "\n".join(lines), body.get("timestamp"), lines, body["session"])

    def said(self, seq: int) -> tuple[str, str | None]:
        """The text and timestamp of a turn that exists, as of `turn`."""
        return said_in(self._payloads[seq])

    def measured(self, rows: NDArray[np.int64], measure: Callable[[TurnView], int]) -> NDArray[np.int32]:
        """What a measure makes of the turns in these rows; -1: there is none, or it was deleted.

        A result is kept for good, so there is one measure.
        """
        self._measures.extend([NOT_MEASURED] * (len(self.seq_by_row) - len(self._measures)))
        kept, places = np.frombuffer(self._measures, np.int32), np.maximum(rows, 0)
        for row in np.unique(places[kept[places] == NOT_MEASURED]).tolist():
            seq = self.seq_by_row[row]
            self._measures[row] = measure(self.turn(seq)) if self.exists(seq) else NO_TURN
        return np.where(rows < 0, NO_TURN, kept[places])

    def rows_before(self, seq: int) -> int:
        """The number of turn rows before record `seq`: the causal mask of its gate."""
        return bisect_left(self.seq_by_row, seq)

    # ---- keys and sessions

    @property
    def keys(self) -> KeyTable:
        """The `key_hash` of the dedupe key of each row, also of deleted turns."""
        self.index_keys()
        return self._keys

    @property
    def last_timestamp(self) -> Mapping[str, str]:
        """By session: the last effective timestamp, also of deleted turns."""
        self.index_keys()
        return self._last_timestamp

    def seq_of(self, key: str) -> int | None:
        """The seq of the turn that came under a dedupe key, also of a deleted one.

        Different keys may have one hash, so the stored key decides.
        """
        matches = (self.seq_by_row[row] for row in self.keys.matches(self.key_hash(key)))
        return next((seq for seq in matches if self._kept_of(seq)["key"] == key), None)

    def _kept_of(self, seq: int) -> Mapping[str, Any]:
        """The key, session and timestamp of a turn: from its payload, or from its deletion."""
        return orjson.loads(self.payload(seq)) if self.exists(seq) else self._deletions[seq]

    @property
    def keys_missing(self) -> int:
        """Of how many turns, which were loaded, the keys and timestamps are not read yet."""
        return len(self.seq_by_row) - len(self._keys)

    def index_keys(self, most: int | None = None) -> None:
        """Read the keys and timestamps of turns that were loaded, or of so many: searches need neither."""
        if not self.keys_missing:
            return
        hashes, begin = array("q"), len(self._keys)
        for seq in self.seq_by_row[begin : begin + (most or self.keys_missing)]:
            kept = self._kept_of(seq)
            hashes.append(self.key_hash(kept["key"]))
            if (timestamp := kept.get("timestamp")) is not None:
                self._last_timestamp[kept["session"]] = timestamp
        add_keys([self._keys], np.zeros(len(hashes), np.int64), np.frombuffer(hashes, np.int64))

    # ---- changes

    def add_turns(
        self,
        payloads: Sequence[bytes],
        sessions: Sequence[str],
        timestamps: Sequence[str | None],
    ) -> None:
        """Append new turns to a log whose `keys` have been read.

        The caller appends their vectors to `turns_segment`, and their hashes to `keys`, in the same order.
        """
        for session, timestamp in zip(sessions, timestamps, strict=True):
            if timestamp is not None:
                self._last_timestamp[session] = timestamp
        self.load_turns(b"".join(payloads), list(map(len, payloads)))

    def load_turns(self, joined: bytes | memoryview, lengths: Sequence[int]) -> None:
        """Append turns whose payloads lie one after the other in `joined`; a length of 0: a deleted turn."""
        seq, row, count = self.next_seq, len(self.seq_by_row), len(lengths)
        self._payloads.extend(joined, lengths)
        self.row_by_seq.extend(range(row, row + count))
        self.seq_by_row.extend(range(seq, seq + count))

    def append_control(self, control: Control) -> None:
        self._payloads.extend(b"", [0])
        self.row_by_seq.append(NO_ROW)
        self._controls[control.seq] = control
        if "turn_seq" in control.body:
            self._deletions[control.body["turn_seq"]] = control.body

    def clear_turn(self, seq: int) -> None:
        """Remove the payload of a deleted turn. Its deletion is in the log."""
        self._payloads.clear(seq)
        self.awaiting.pop(seq, None)
        if (row := self.row_by_seq[seq]) < len(self._measures):
            self._measures[row] = NO_TURN

    def release_payloads(self) -> None:
        """Zero and free the memory of the payloads. The log cannot be used any more."""
        self._payloads.release()

    def redact_updates(self, before: int, memory_ids: Collection[str]) -> list[Control]:
        """Remove the text from these memories' updates before record `before`. Returns them redacted."""
        redacted = []
        for seq, control in self._controls.items():
            if seq >= before or control.kind != "update" or "text" not in control.body:
                continue
            if control.body["memory_id"] in memory_ids:
                redacted.append(without_text(control))
        self._controls.update((control.seq, control) for control in redacted)
        return redacted
