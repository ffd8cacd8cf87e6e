"""What the gates with a compiled scan have in common: plans of batches, and hits turned into readings."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import fields, replace

import numpy as np

from undertow.kernels.arena.arena import PRESENT
from undertow.kernels.array_types import Int64s
from undertow.kernels.gate.gate import Gate, GateReadings, Probes
from undertow.kernels.gate.plan import MAX_SPACE_BYTES, GateHits, Plan, ProbeBatch, TaskLimits, lay_out


class PlannedGate(Gate, ABC):
    """Base of gates with a compiled scan: plans a batch, and converts the hits to readings.

    The nearest episode is the same scan with k = 1 and no threshold. Subclasses set the limits of tasks on
    their device, and run a plan.
    """

    @abstractmethod
    def _cut(self) -> TaskLimits:
        """The limits of tasks on this device."""

    @abstractmethod
    def _run(self, probes: Probes, plan: Plan) -> GateReadings:
        """Run the plan."""

    def _read(self, probes: Probes) -> GateReadings:
        count, cut = len(probes), self._cut()
        # A single query cannot be split further: then less space matters more than speed.
        plan = self._plan(probes, cut if count > 1 else cut._replace(enough=1))
        if plan.space_bytes <= MAX_SPACE_BYTES or count == 1:
            return self._run(probes, plan)
        half = count // 2
        return _joined(self._read(probes.part(0, half)), self._read(probes.part(half, count)))

    def _plan(self, probes: Probes, cut: TaskLimits) -> Plan:
        count, asks, places = len(probes), _asks(probes), probes.places
        lengths, turn_flags = places.episode_rows[asks], places.turn_flags
        if probes.turn_flags is not None:
            own = probes.turn_flags
            at = own.ctypes.data if isinstance(own, np.ndarray) else own.data_ptr()
            turn_flags = np.full_like(turn_flags, at)
        turns = ProbeBatch(
            query=np.arange(count),
            segment=probes.turn_segments,
            vectors=places.turns,
            flags=turn_flags,
            limit=probes.visible,
            flag=np.full(count, probes.turn_flag),
            theta=probes.theta,
            k=probes.k,
        )
        episodes = (
            *(asks, probes.episode_segments[asks], places.episodes[asks], places.episode_flags[asks]),
            *(lengths, np.full_like(asks, PRESENT), np.full(len(asks), -np.inf), np.ones_like(asks)),
        )
        # without episodes nothing is copied
        asked = ProbeBatch(*map(np.concatenate, zip(turns, episodes, strict=True))) if len(asks) else turns
        return lay_out(asked, cut, self._table, MAX_SPACE_BYTES)

    def _table(self, size: int) -> Int64s:
        """Memory for a plan: int64 [size]."""
        return np.empty(size, np.int64)

    @staticmethod
    def _readings(probes: Probes, found: GateHits) -> GateReadings:
        count, asks = len(probes), _asks(probes)
        turns = found.starts[count]
        nearest_row, nearest_score = np.full(count, -1, np.int64), np.full(count, -np.inf)
        some = asks[np.diff(found.starts[count:]) > 0]
        nearest_row[some], nearest_score[some] = found.rows[turns:], found.scores[turns:]
        return GateReadings(
            nearest_row,
            nearest_score,
            found.counts[:count],
            found.starts[: count + 1],
            found.rows[:turns],
            found.scores[:turns],
        )


def _asks(probes: Probes) -> Int64s:
    """The queries with episodes to compare with."""
    return np.flatnonzero(probes.places.episode_rows)


def _joined(one: GateReadings, two: GateReadings) -> GateReadings:
    """Concatenate the readings of two parts of a batch."""
    later = replace(two, offsets=two.offsets[1:] + one.offsets[-1])
    names = [field.name for field in fields(GateReadings)]
    return GateReadings(*(np.concatenate((getattr(one, name), getattr(later, name))) for name in names))
