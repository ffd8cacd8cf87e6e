"""How many turns a step admits, and how much of the time decisions take while turns are being read.

A commit costs the same for one turn as for a thousand, so large steps are cheap. But a search waits for the
end of the step, and an encoder on a CPU takes as long for twenty texts as one on a GPU for thousands.
"""

from __future__ import annotations

MOST_TURNS = 2_048
# A step of a bulk load takes so many times the turns: nobody waits for it, and it does less a turn.
BULK_FACTOR = 4
MOST_BULK_TURNS = BULK_FACTOR * MOST_TURNS
LEAST_TURNS = 64
ADMISSION_S = 0.5
# Of the time, for decisions, where more turns are about to be stored. These are searchable, so that storing
# comes first; but with an encoder that takes hours for a log, the LLM must not idle for as long.
DECIDING_SHARE = 0.1
# What a step takes where searches wait for its end: seconds (turns: of CPU; the others: of the clock), and at
# most how many. Half of a short step does not depend on its turns, so turns get more time; but beside a
# large call, its tenant would use that. Where no search waits, a step decides up to the number of records.
BRIEF = {"turns": (0.002, 32), "turns beside a large call": (0.001, 32), "records": (0.001, 8_192)}
LEAST_BRIEF = 4  # as other threads may slow a step down


class BatchSizer:
    """The number of turns whose admission takes about `ADMISSION_S`, measured on earlier steps.

    What was embedded ahead counts as far as the step has waited for it. It shrinks at once and at most
    doubles: duplicate turns cost nothing, and say nothing about later turns.
    Decisions do not depend on it: batched equals streamed.
    """

    def __init__(self, turns: int | None = None) -> None:
        """`turns`: a fixed number, instead of a measured one."""
        self._fixed = turns is not None
        self.turns = LEAST_TURNS if turns is None else turns

    def step_turns(self, *, bulk: bool) -> int:
        """The number of turns of a step, of a bulk load or not."""
        return BULK_FACTOR * self.turns if bulk and not self._fixed else self.turns

    def note(self, fresh_turns: int, took_s: float) -> None:
        """An admission has taken so long, and has not failed.

        `fresh_turns`: the new ones, which were embedded and written.
        """
        if not self._fixed and 2 * fresh_turns >= self.turns:
            in_time = int(ADMISSION_S * fresh_turns / took_s) if took_s > 0 else MOST_TURNS
            self.turns = max(LEAST_TURNS, min(in_time, 2 * self.turns, MOST_TURNS))


class BriefWork:
    """How much of a kind of work takes as long as it may, measured on earlier steps; see BRIEF."""

    def __init__(self, kind: str) -> None:
        self._seconds, self.most = BRIEF[kind]
        self.count = min(LEAST_TURNS, self.most)

    def note(self, done: int, took_s: float) -> None:
        """A step has done so much, and has taken so long for it."""
        if 2 * done >= self.count:
            in_time = int(self._seconds * done / max(took_s, 1e-9))
            self.count = max(LEAST_BRIEF, min(in_time, 2 * self.count, self.most))
