"""Reads logs in tasks on the Ray cluster: several side by side, their parts in the order of the logs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from undertow.engine.base.model import UndertowError
from undertow.engine.base.process_tuning import without_pandas
from undertow.engine.cluster.bulk.reading import PART_BYTES, Part, PartReader, Piece

try:
    import ray
    from ray.exceptions import RayError, RayTaskError
except ModuleNotFoundError as missing:
    raise UndertowError(
        f"bulk ingest needs Ray ({missing}). Install it: pip install 'undertow[cluster]'"
    ) from None

# of logs, about, that one task reads
TASK_BYTES = 32 << 20
# of Ray's object store, what is read ahead takes one of so many shares
STORE_SHARES = 4
# parts that a task reads ahead
LEAST_AHEAD, MOST_AHEAD = 2, 64
# how often a task is repeated that Ray has lost, unless it comes further
ATTEMPTS = 10
POLL_S = 0.25


@dataclass(slots=True)
class _Task:
    """A task and the pieces that it has still to read. `stream`: of references to its parts."""

    pieces: list[Piece]
    stream: Any


@dataclass
class ReadAhead:
    """The parts of some logs, in order.

    `stop` is polled; once it is true, there are no more parts.
    """

    reader: PartReader
    pieces: Sequence[Piece]
    stop: Callable[[], bool]
    _running: deque[_Task] = field(default_factory=deque, init=False)

    def parts(self) -> Generator[Part, None, None]:
        """The parts. Close the generator to end the tasks under way."""
        waiting = deque(tasks_of(self.pieces))
        readers = max(1, min(free_cpus(), len(waiting)))
        ahead = _parts_ahead(readers)
        try:
            while (waiting or self._running) and not self.stop():
                while waiting and len(self._running) < readers:
                    pieces = waiting.popleft()
                    self._running.append(_Task(pieces, self._begin(pieces, ahead)))
                yield from self._parts_of(self._running[0], ahead)
                self._running.popleft()
        finally:
            for task in self._running:
                ray.cancel(task.stream, force=True)

    def _begin(self, pieces: list[Piece], ahead: int) -> Any:
        def read(reader: PartReader, pieces: list[Piece]) -> Iterator[Part]:
            with without_pandas():
                pass
            yield from reader.parts(pieces)

        options = {"num_cpus": 1, "max_retries": 0, "_generator_backpressure_num_objects": ahead}
        return ray.remote(read).options(num_returns="streaming", **options).remote(self.reader, pieces)

    def _parts_of(self, task: _Task, ahead: int) -> Iterator[Part]:
        """The parts of one task. If Ray loses it, or a part, another one reads what is left."""
        attempts = 0
        while task.pieces:
            try:
                if not self._wait(task.stream):
                    return
                part: Part = ray.get(next(task.stream))
                task.pieces = _rest(task.pieces, part)
                attempts = 0
                yield part
            except RayTaskError as error:
                raise UndertowError(f"the logs cannot be read: {error}") from error
            except RayError as error:
                attempts += 1
                if attempts == ATTEMPTS:
                    raise UndertowError(f"the logs cannot be read on the Ray cluster: {error}") from error
                ray.cancel(task.stream, force=True)
                task.stream = self._begin(task.pieces, ahead)

    def _wait(self, stream: Any) -> bool:
        """Wait for a task's next part. False: the run is to stop."""
        while not ray.wait([stream], timeout=POLL_S)[0]:
            if self.stop():
                return False
        return True


def tasks_of(pieces: Sequence[Piece]) -> Iterator[list[Piece]]:
    """Consecutive pieces of about TASK_BYTES together; a larger one alone."""
    task: list[Piece] = []
    size_bytes = 0
    for piece in pieces:
        if task and size_bytes + piece.log.size_bytes > TASK_BYTES:
            yield task
            task, size_bytes = [], 0
        task.append(piece)
        size_bytes += piece.log.size_bytes
    if task:
        yield task


def _rest(pieces: list[Piece], part: Part) -> list[Piece]:
    """What is left of some pieces after a part."""
    last = part.reports[-1]
    left = [piece for piece in pieces if piece.file > last.file]
    if last.ended:
        return left
    return [*(replace(piece, after=last.position) for piece in pieces if piece.file == last.file), *left]


def free_cpus() -> int:
    """Processors of the Ray cluster that nothing has taken."""
    free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    return int(free.get("CPU", 0))


def _parts_ahead(readers: int) -> int:
    held: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    room = int(held.get("object_store_memory", 0)) // STORE_SHARES // readers
    return max(LEAST_AHEAD, min(room // PART_BYTES, MOST_AHEAD))
