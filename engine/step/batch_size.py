"""How many turns a step admits, and how much of the time decisions take while turns are being read.

A commit costs the same for one turn as for a thousand, so large steps are cheap. But a search waits for the
end of the step, and an encoder on a CPU takes as long for twenty texts as one on a GPU for thousands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MOST_TURNS = 2_048
# A step of a bulk load takes so many times the turns: nobody waits for it, and it does less a turn.
BULK_FACTOR = 4
MOST_BULK_TURNS = BULK_FACTOR * MOST_TURNS
LEAST_TURNS = 64
ADMISSION_S = 0.5
# Of the time, for decisions, where more turns are about to be stored. These are searchable, so that storing
# comes first; but with an encoder that takes hours for a log, the LLM must not idle for as long.
DECIDING_SHARE = 0.1
# A step admits for so long, and decides for so long, where searches wait for its end; at least so many turns
# and records, as other threads may slow it down, and at most so many turns.
BRIEF_S = 0.001
LEAST_BRIEF = 4
QUICK_TURNS = 32
# It decides so many records where none wait: enough to fill the gate's kernel.
MOST_RECORDS = 8_192


@dataclass(slots=True)
class AdmissionSize:
    """Filled in by the caller: how many turns were new, so that they were embedded and written."""

    fresh_turns: int = 0


class BatchSizer:
    """The number of turns whose admission takes about `ADMISSION_S`, measured on earlier steps.

    What was embedded ahead counts as far as the step has waited for it. It shrinks at once and at most
    doubles: duplicate turns cost nothing, and say nothing about later turns.
    Decisions do not depend on it: batched equals streamed.
    """

    def __init__(self, turns: int | None = None, *, clock_s: Callable[[], float] = time.perf_counter) -> None:
        """`turns`: a fixed number, instead of a measured one."""
        self._fixed = turns is not None
        self._clock_s = clock_s
        self.turns = LEAST_TURNS if turns is None else turns

    def step_turns(self, *, bulk: bool) -> int:
        """The number of turns of a step, of a bulk load or not."""
        return BULK_FACTOR * self.turns if bulk and not self._fixed else self.turns

    @contextmanager
    def measured(self) -> Iterator[AdmissionSize]:
        """Measure an admission. A failed one is ignored."""
        admitted, began_s = AdmissionSize(), self._clock_s()
        yield admitted
        if not self._fixed and 2 * admitted.fresh_turns >= self.turns:
            self._follow((self._clock_s() - began_s) / admitted.fresh_turns)

    def _follow(self, turn_s: float) -> None:
        in_time = int(ADMISSION_S / turn_s) if turn_s > 0 else MOST_TURNS
        self.turns = max(LEAST_TURNS, min(in_time, 2 * self.turns, MOST_TURNS))


class BriefWork:
    """How much of some work takes about `BRIEF_S`, measured on earlier steps."""

    def __init__(self, most: int, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self._most = most
        self._clock_s = clock_s
        self.count = min(LEAST_TURNS, most)

    @contextmanager
    def measured(self, done: Callable[[], int]) -> Iterator[None]:
        """Measure the work of a step; `done`: how much it was, asked at its end."""
        began_s = self._clock_s()
        yield
        if 2 * done() >= self.count:
            in_time = int(BRIEF_S * done() / max(self._clock_s() - began_s, 1e-9))
            self.count = max(LEAST_BRIEF, min(in_time, 2 * self.count, self._most))
