"""How many turns one step takes in: enough to share a commit, few enough that nobody waits for it long.

A commit costs the same for one turn as for a thousand, so large steps are cheap; but a search waits for the
end of the step, and an encoder on a CPU takes as long for twenty texts as one on a GPU for thousands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

MOST_TURNS = 2_048
LEAST_TURNS = 64
ADMISSION_S = 0.5


@dataclass(slots=True)
class Admitted:
    """Filled in by whoever admits: how many turns were new, so embedded and written."""

    fresh_turns: int = 0


class BatchSizer:
    """The turns of the next step, such that admitting them takes `ADMISSION_S`, learnt from earlier steps.

    It shrinks at once and at most doubles: turns that cost nothing, as they are there already, tell nothing
    about those behind them. What a step decides does not depend on it: batched equals streamed.
    """

    def __init__(self, turns: int | None = None, *, clock_s: Callable[[], float] = time.perf_counter) -> None:
        """`turns`: always so many."""
        self._fixed = turns is not None
        self._clock_s = clock_s
        self.turns = LEAST_TURNS if turns is None else turns

    @contextmanager
    def measured(self) -> Iterator[Admitted]:
        """Around an admission. One that fails counts for nothing."""
        admitted, began_s = Admitted(), self._clock_s()
        yield admitted
        if not self._fixed and 2 * admitted.fresh_turns >= self.turns:
            self._follow((self._clock_s() - began_s) / admitted.fresh_turns)

    def _follow(self, turn_s: float) -> None:
        in_time = int(ADMISSION_S / turn_s) if turn_s > 0 else MOST_TURNS
        self.turns = max(LEAST_TURNS, min(in_time, 2 * self.turns, MOST_TURNS))
