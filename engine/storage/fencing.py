"""Fencing: which rows of a journal count when a former writer keeps writing after it was replaced.

Lance rebases a late append onto whatever was committed meanwhile, so storage alone stops no former writer.
Every row therefore carries its writer's epoch, and a writer opens in three steps:

1. *claim*: commit a mark with an epoch above all claims. Two writers may claim the same epoch. A writer that
   finds, in the very version that it committed, another claim at least as high claims again.
2. Read the newest version. If it lacks the claim, or holds another one of its epoch, go back to 1: a writer
   that was paused within its commit may have made a version that a purge of another had removed. If it holds
   a higher claim, give up.
3. *begin*: commit a mark with the writer's first lsn (one after the last row that counts) and the epoch that
   it takes over from, its *former*. If another commit came between 2 and 3, look for higher claims again.

A writer acknowledges a commit if its version follows the last known one. Otherwise it first looks for higher
claims, and stops at one. The begin of the highest epoch is in force. Following the formers from there gives a
chain; a row counts if its epoch is in the chain and its lsn is below the first lsn of the next link.

Nothing acknowledged is lost: it was committed before the next writer's claim (else its writer would have seen
the claim), so it was visible in step 2 and is below the begin. Nothing late counts: the lsns of a writer only
grow, and in step 2 the last row that counts is the former's own last row (if it has any, they are above all
that it took over). So whatever the former commits later is at or above the new first lsn. A begin that lands
late (its writer was overtaken between 2 and 3) is nobody's former, or is in force only until the higher claim
begins; its writer has acknowledged nothing. None of this depends on the order of rows in the dataset.

Small commits go to the write-ahead log first, and a flush moves them to Lance. There a writer opens so: after
its claim is committed it writes the claim to the log's folder, then reads the log to its end, then does
step 2. It commits what the log has beyond Lance together with its begin, under its own epoch, and the first
lsn of the begin is that of the first such row. A writer acknowledges an entry if, after writing it, it finds
its own claim in the folder; otherwise it flushes, which asks Lance. Either it finds the claim of the next
writer, or that one finds the entry. Only the entries of the epoch in force count, and of these the ones
beyond Lance: what a former writer adds after it was replaced is never read, and what it flushes then has lsns
at or above the new first lsn. A claim may be overwritten by a writer that was overtaken before it wrote its
own; the writer in force then writes its claim again, and asks Lance once more before it trusts it.

A writer that restarts by itself may have an *owner*: one shard of one cluster, through all its restarts. An
owner that was displaced by another owner never takes the log back; otherwise the two would displace each
other for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import orjson
from numpy.typing import NDArray

from undertow.engine.storage.location import StoreError

UNBOUNDED = np.iinfo(np.int64).max
# The lsn of every mark. Marks are no part of the log.
MARK_LSN = -1


@dataclass(frozen=True, slots=True)
class FenceMark:
    """A claim, or with `first_lsn` a begin. `former`: the epoch taken over from, 0 for none.

    `writer` identifies one opening, as OWNER.TOKEN or TOKEN.
    """

    epoch: int
    writer: str
    first_lsn: int | None = None
    former: int = 0

    @property
    def payload(self) -> bytes:
        return orjson.dumps({"writer": self.writer, "first_lsn": self.first_lsn, "former": self.former})

    @property
    def owner(self) -> str:
        """Empty for a writer without an owner."""
        return self.writer.rpartition(".")[0]

    @classmethod
    def of(cls, epoch: int, payload: bytes) -> FenceMark:
        return cls(epoch, **orjson.loads(payload))


class Fences:
    """The chain of writers that the marks in one version of a journal define."""

    def __init__(self, marks: Iterable[FenceMark]) -> None:
        self.marks: Sequence[FenceMark] = list(marks)
        begun = {mark.epoch: mark for mark in self.marks if mark.first_lsn is not None}
        chain: list[FenceMark] = []
        epoch = max(begun, default=0)
        while epoch:
            chain.insert(0, begun[epoch])
            if begun[epoch].former >= epoch:
                raise StoreError(f"two writers have begun epoch {epoch} of the journal. Restore a backup.")
            epoch = begun[epoch].former
        self._owners = [mark.owner for mark in chain if mark.owner]
        firsts = [mark.first_lsn or 0 for mark in chain]
        self.first_lsn = (firsts or [0])[-1]
        self._epochs = np.array([mark.epoch for mark in chain], np.int64)
        self._ends = np.array([*firsts, UNBOUNDED][1:] if chain else [], np.int64)

    @property
    def claimed(self) -> int:
        """The highest claimed epoch; 0 for none."""
        return max((mark.epoch for mark in self.marks), default=0)

    @property
    def in_force(self) -> int:
        """The epoch of the last begin; 0 for none."""
        return int(self._epochs[-1]) if len(self._epochs) else 0

    @property
    def former(self) -> int:
        """The epoch that the one in force took over from; 0 for none."""
        return int(self._epochs[-2]) if len(self._epochs) > 1 else 0

    def contested(self, epoch: int, writer: str) -> bool:
        """Whether another writer has claimed this epoch or a higher one."""
        return any(mark.epoch >= epoch and mark.writer != writer for mark in self.marks)

    def is_claimed_by(self, writer: str, epoch: int) -> bool:
        """Whether this writer, and no other, has claimed the epoch."""
        return {mark.writer for mark in self.marks if mark.epoch == epoch} == {writer}

    def has_displaced(self, owner: str) -> bool:
        """Whether another owner has taken the log over from this one."""
        return owner in self._owners and self._owners[-1] != owner

    def ends(self, epochs: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each epoch, the lsn from which its rows are stale: int64 of the same shape."""
        if not len(self._epochs):
            return np.zeros_like(epochs)
        link = np.searchsorted(self._epochs, epochs).clip(max=len(self._epochs) - 1)
        return np.where(self._epochs[link] == epochs, self._ends[link], 0)

    def stale(self, epochs: NDArray[np.int64], lsns: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which rows do not count; epochs and lsns are int64 [rows]."""
        return lsns >= self.ends(epochs)

    def end_of(self, stale_epochs: Iterable[int]) -> Mapping[int, int]:
        """`ends` of some epochs, by epoch."""
        epochs = np.array(sorted(stale_epochs), np.int64)
        return dict(zip(epochs.tolist(), self.ends(epochs).tolist(), strict=True))
