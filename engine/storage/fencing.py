"""Which of the rows in a journal count, when a writer that was replaced goes on writing.

Lance rebases a late append onto whatever was committed meanwhile, so storage alone stops no former
writer. Every row therefore carries its writer's epoch, and a writer opens in three commits' steps:

1. *claim*: a row with an epoch above all claims. Two may claim the same; whoever finds, in the very
   version that it committed, another claim as high as its own claims again.
2. it reads the newest version; if that holds a higher claim, it gives up.
3. *begin*: a row that names its first lsn (one after the last row that counts) and the epoch that it takes
   over from, its *former*. If another commit came between 2 and 3, it looks for higher claims once more.

A writer acknowledges a commit whose version follows its last known one; otherwise it looks for higher
claims first, and stops at one. The begin of the highest epoch is in force. Following its formers gives the
chain; a row counts if its epoch is in the chain and its lsn is below the first one of the next link.

Why nothing acknowledged is lost: it was committed before the claim of whoever came next (else its writer
would have seen the claim), so it was there at step 2, below the begin. Why nothing late counts: lsns of a
writer only grow, and at step 2 the last row that counts is the former's own last one (if it has any, they are
above all that it took over); so what the former commits later is at or above the new first lsn. A begin that
lands late (its writer was overtaken between 2 and 3) is no one's former, or in force only until the higher
claim begins; its writer has acknowledged nothing. None of this depends on where rows stand in the dataset.

A writer that starts again by itself may belong to a *life*: one shard of one cluster, through all its
restarts. A life that another has taken the log from never takes it back, or the two would do so for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import orjson
from numpy.typing import NDArray

UNBOUNDED = np.iinfo(np.int64).max
# of every mark: it is no part of the log
MARK_LSN = -1


@dataclass(frozen=True, slots=True)
class FenceMark:
    """A claim, or with `first_lsn` a begin. `former`: the epoch taken over from, 0 for none.

    `writer` is of one opening; what stands before a dot in it is the life that it belongs to.
    """

    epoch: int
    writer: str
    first_lsn: int | None = None
    former: int = 0

    @property
    def payload(self) -> bytes:
        return orjson.dumps({"writer": self.writer, "first_lsn": self.first_lsn, "former": self.former})

    @property
    def life(self) -> str:
        """Empty for a writer that belongs to none."""
        return self.writer.rpartition(".")[0]

    @classmethod
    def of(cls, epoch: int, payload: bytes) -> FenceMark:
        return cls(epoch, **orjson.loads(payload))


class Fences:
    """What the marks of one version of a journal say."""

    def __init__(self, marks: Iterable[FenceMark]) -> None:
        self.marks: Sequence[FenceMark] = list(marks)
        begun = {mark.epoch: mark for mark in self.marks if mark.first_lsn is not None}
        chain: list[FenceMark] = []
        epoch = max(begun, default=0)
        while epoch:
            chain.insert(0, begun[epoch])
            epoch = begun[epoch].former
        self._lives = [mark.life for mark in chain if mark.life]
        firsts = [mark.first_lsn or 0 for mark in chain]
        self.first_lsn = (firsts or [0])[-1]
        self._epochs = np.array([mark.epoch for mark in chain], np.int64)
        self._ends = np.array([*firsts, UNBOUNDED][1:] if chain else [], np.int64)

    @property
    def claimed(self) -> int:
        """The highest epoch that anyone has claimed; 0 for none."""
        return max((mark.epoch for mark in self.marks), default=0)

    @property
    def in_force(self) -> int:
        """The epoch of the last writer that has begun; 0 for none."""
        return int(self._epochs[-1]) if len(self._epochs) else 0

    @property
    def former(self) -> int:
        """The epoch that the one in force took over from; 0 for none."""
        return int(self._epochs[-2]) if len(self._epochs) > 1 else 0

    def contested(self, epoch: int, writer: str) -> bool:
        """Whether another writer has claimed this epoch or a higher one."""
        return any(mark.epoch >= epoch and mark.writer != writer for mark in self.marks)

    def is_over(self, life: str) -> bool:
        """Whether another life has taken the log over from this one."""
        return life in self._lives and self._lives[-1] != life

    def ends(self, epochs: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each epoch the lsn from which on its rows are stale: int64 of the same shape."""
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
