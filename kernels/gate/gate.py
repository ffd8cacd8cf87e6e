"""The recurrence gate's arithmetic (RecMem, section 3.2, equation 5) for a ragged batch of queries.

For each query, one call returns the nearest episode, the number of live earlier turns with a similarity of at
least theta, and the k nearest of those. Results are exact (see `kernels/error_bounds.py`), so they do not
depend on the batch, the device or the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from undertow.kernels.arena.arena import LIVE, PRESENT, Arena
from undertow.kernels.arena.vector_checks import Vectors, widened
from undertow.kernels.array_types import Float64s, Int64s, Uint8s

if TYPE_CHECKING:
    import torch

NO_SEGMENT = -1
_BLOCK_ROWS = 4096


@dataclass(frozen=True)
class GateReadings:
    """The result for q queries. Scores are exact dot products.

    nearest_row: int64 [q], row of the nearest PRESENT episode, -1 for none
    nearest_score: float64 [q], its score, -inf for none
    count: int64 [q], number of LIVE visible turns with score >= theta, including those beyond the k nearest
    offsets: int64 [q + 1]; rows, scores: int64, float64 [offsets[-1]]: of query i, in
        [offsets[i], offsets[i + 1]), the k nearest of the counted turns, by score descending,
        then row ascending
    """

    nearest_row: Int64s
    nearest_score: Float64s
    count: Int64s
    offsets: Int64s
    rows: Int64s
    scores: Float64s


class Places(NamedTuple):
    """Addresses of each query's rows and their flags, int64 [q] each: valid until the arena changes."""

    turns: Int64s
    turn_flags: Int64s
    episodes: Int64s
    episode_flags: Int64s
    episode_rows: Int64s  # their number, 0 for no segment


@dataclass(frozen=True)
class Probes:
    """Checked input of one call; see `Gate.read`. `visible` and `k` are capped at the segment's rows."""

    queries: Any  # [q, dim], as `Gate._admit` gives them
    turn_segments: Int64s
    episode_segments: Int64s
    visible: Int64s
    theta: Float64s
    k: Int64s
    places: Places
    turn_flag: int = LIVE  # only turn rows with this flag are read
    # uint8 [rows] in place of the only segment's flags
    turn_flags: Uint8s | torch.Tensor | None = None

    def __len__(self) -> int:
        """The number of queries."""
        return len(self.turn_segments)

    def part(self, start: int, stop: int) -> Probes:
        """The probes of queries [start, stop)."""
        some = slice(start, stop)
        return replace(
            self,
            queries=self.queries[some],
            turn_segments=self.turn_segments[some],
            episode_segments=self.episode_segments[some],
            visible=self.visible[some],
            theta=self.theta[some],
            k=self.k[some],
            places=Places(*(column[some] for column in self.places)),
        )


class Gate:
    """The reference, in NumPy: fp64 scores of every row. Subclasses make `_read` faster."""

    def __init__(self, arena: Arena) -> None:
        self.arena = arena

    def read(
        self,
        *,
        queries: Vectors,
        turn_segments: ArrayLike,
        episode_segments: ArrayLike,
        visible: ArrayLike,
        theta: ArrayLike,
        k: ArrayLike,
    ) -> GateReadings:
        """Read the gate for q queries.

        queries: float16 [q, dim]; a gate on a device also takes a tensor there, which is checked unless
        it comes from `Arena.take`;
        turn_segments, episode_segments: int64 [q] (episodes: -1 for none);
        visible: int64 [q], only turn rows below it are read (the causal mask); theta: float64 [q];
        k: int64 [q], the number of relevant turns to list. Raises ValueError for wrong shapes or dtypes,
        vectors that are not finite, unknown or released segments, negative visible or k, NaN theta.
        """
        return self._read(self._check(queries, turn_segments, episode_segments, visible, theta, k))

    def nearest(
        self,
        *,
        queries: Vectors,
        segments: ArrayLike,
        k: ArrayLike,
        wanted: NDArray[np.bool_] | torch.Tensor | None = None,
    ) -> tuple[Int64s, Int64s, Float64s]:
        """The k nearest PRESENT rows of each query's segment, live or not: the same scan without threshold.

        queries as in `read`; segments, k: int64 [q]; wanted: bool [rows], on a device also a tensor there;
        only these rows are read, and all segments must be the same. Returns offsets [q + 1], rows and scores
        as in GateReadings. Raises ValueError as `read` does.
        """
        count = len(queries)
        probes = self._check(
            queries,
            segments,
            np.full(count, NO_SEGMENT),
            np.full(count, np.iinfo(np.int64).max),
            np.full(count, -np.inf),
            k,
        )
        flags = None if wanted is None or count == 0 else self._flags(probes.turn_segments, wanted)
        found = self._read(replace(probes, turn_flag=PRESENT, turn_flags=flags))
        return found.offsets, found.rows, found.scores

    def _flags(self, segments: Int64s, wanted: NDArray[np.bool_] | torch.Tensor) -> Uint8s | torch.Tensor:
        """The flags of the wanted rows that are PRESENT: uint8 [rows] on the arena's device."""
        present = self.arena.held_flags(int(segments[0]))
        is_bool = str(wanted.dtype) in ("bool", "torch.bool")  # other dtypes would change the flags
        if (segments != segments[0]).any() or not is_bool or tuple(wanted.shape) != tuple(present.shape):
            raise ValueError(f"wanted must be bool [{len(present)}], one entry a row of the only segment")
        if isinstance(present, np.ndarray):
            flags: Uint8s = np.where(np.asarray(wanted), present & PRESENT, np.uint8(0))
            return flags
        from undertow.kernels.arena.tensors import to_tensor

        # Upload what the host knows. The rows' own flags are read on the device.
        held = to_tensor(wanted).to(present.device) if isinstance(wanted, np.ndarray) else wanted
        return (present & PRESENT) * held  # type: ignore[no-any-return]

    def _check(
        self,
        queries: Vectors,
        turn_segments: ArrayLike,
        episode_segments: ArrayLike,
        visible: ArrayLike,
        theta: ArrayLike,
        k: ArrayLike,
    ) -> Probes:
        admitted = self._admit(queries)
        count = len(queries)
        turns = _column("turn_segments", turn_segments, count)
        episodes = _column("episode_segments", episode_segments, count)
        limits, cuts = _column("visible", visible, count), _column("k", k, count)
        thetas = np.array(theta, np.float64)  # a copy: for other strides the plan would be compiled anew
        if thetas.shape != (count,) or np.isnan(thetas).any():
            raise ValueError(f"theta must be {count} numbers, none of them NaN")
        if (np.minimum(limits, cuts) < 0).any():
            raise ValueError("visible and k must not be negative")
        at, flags, rows = self.arena.locate(turns)
        none = episodes == NO_SEGMENT
        if none.all():
            here = (at, flags, np.zeros_like(rows))
        else:
            here = self.arena.locate(np.where(none, turns, episodes) if none.any() else episodes)
            here[2][none] = 0
        limits = np.minimum(limits, rows)
        places = Places(at, flags, *here)
        return Probes(admitted, turns, episodes, limits, thetas, np.minimum(cuts, limits), places)

    def _admit(self, queries: Vectors) -> Any:
        """The checked queries in the form that `_read` takes: here float32 [q, dim]."""
        return widened(queries, self.arena.dim)  # type: ignore[arg-type]

    def _read(self, probes: Probes) -> GateReadings:
        count = len(probes.queries)
        nearest_row, nearest_score = np.full(count, -1, np.int64), np.full(count, -np.inf)
        relevant, rows, scores = np.zeros(count, np.int64), [], []
        for i, query in enumerate(probes.queries.astype(np.float64)):
            if probes.episode_segments[i] != NO_SEGMENT:
                episodes, near = self._scores(probes.episode_segments[i], query, None, PRESENT)
                if len(episodes):
                    best = np.argmax(near)  # the first of equals
                    nearest_row[i], nearest_score[i] = episodes[best], near[best]
            limit = int(probes.visible[i])
            turns, near = self._scores(
                probes.turn_segments[i], query, limit, probes.turn_flag, probes.turn_flags
            )
            turns, near = turns[near >= probes.theta[i]], near[near >= probes.theta[i]]
            relevant[i] = len(turns)
            order = np.lexsort((turns, -near))[: probes.k[i]]
            rows.append(turns[order])
            scores.append(near[order])
        offsets = np.concatenate(([0], np.cumsum([len(r) for r in rows], dtype=np.int64)))
        return GateReadings(
            nearest_row,
            nearest_score,
            relevant,
            offsets,
            np.concatenate([np.zeros(0, np.int64), *rows]),
            np.concatenate([np.zeros(0, np.float64), *scores]),
        )

    def _scores(
        self, segment: int, query: Float64s, limit: int | None, flag: int, flags: Any = None
    ) -> tuple[Int64s, Float64s]:
        """Rows below `limit` with the flag, and their exact scores."""
        vectors = self.arena.vectors(segment)[:limit]
        held = self.arena.flags(segment) if flags is None else _on_host(flags)
        rows = np.flatnonzero(held[:limit] & flag)
        scores = np.empty(len(rows), np.float64)
        for start in range(0, len(rows), _BLOCK_ROWS):
            block = slice(start, start + _BLOCK_ROWS)
            some = vectors[rows[block]]
            scores[block] = _on_host(some).astype(np.float64) @ query
        return rows, scores


def _on_host(values: Any) -> NDArray[Any]:
    return values if isinstance(values, np.ndarray) else values.cpu().numpy()


def _column(name: str, values: ArrayLike, count: int) -> Int64s:
    column = np.asarray(values)
    if column.shape != (count,) or (count and column.dtype.kind not in "iu"):
        raise ValueError(f"{name} must be {count} integers, not {column.dtype} of shape {list(column.shape)}")
    return column.astype(np.int64)
