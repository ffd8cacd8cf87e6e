"""Files of JSON lines that only grow: a run that was killed goes on behind its last line. JSON documents."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from undertow.engine.base.model import UndertowError

Key = tuple[int, str]
"""(run, question id)."""

Span = tuple[int, int]
"""Where a line stands in its file: (start, size), both in bytes, its end included."""

_BLOCK_BYTES = 1 << 16


def key_of(line: Mapping[str, Any]) -> Key:
    return line["run"], line["question_id"]


def write_json(file: Path, document: Mapping[str, Any]) -> None:
    """Write one indented document in the place of the file, in one step."""
    draft = file.with_name(file.name + ".draft")
    draft.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE))
    draft.replace(file)


class GrowingFile:
    """JSON lines, each written as a whole at once. One process has the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists():
            self._cut_torn_end()
        self._out = path.open("ab", buffering=0)

    def _cut_torn_end(self) -> None:
        """A last line without its end is what a kill has left of it."""
        with self.path.open("rb+") as file:
            file.truncate(_end_of_lines(file))

    def lines(self) -> Iterator[dict[str, Any]]:
        """UndertowError: a line that is no JSON object."""
        return (line for line, _ in self.placed())

    def placed(self) -> Iterator[tuple[dict[str, Any], Span]]:
        """Each line with where it stands. One at a time: together they may be more than memory holds."""
        start = 0
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                try:
                    line = orjson.loads(raw)
                except orjson.JSONDecodeError:
                    line = None
                if not isinstance(line, dict):
                    raise self.foreign(number)
                yield line, (start, len(raw))
                start += len(raw)

    def foreign(self, number: int) -> UndertowError:
        """What is to be said of a line that is none of ours."""
        return UndertowError(f"{self.path}:{number} is no line of this command's. Name another --out.")

    def write(self, line: Mapping[str, Any]) -> None:
        self._out.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    def replace(self, spans: Iterable[Span]) -> None:
        """Put these lines, in this order, in the place of all, in one step."""
        draft = self.path.with_name(self.path.name + ".draft")
        with self.path.open("rb") as file, draft.open("wb") as out:
            for start, size_bytes in spans:
                file.seek(start)
                out.write(file.read(size_bytes))
        self.close()
        draft.replace(self.path)
        self._out = self.path.open("ab", buffering=0)

    def close(self) -> None:
        self._out.close()


def _end_of_lines(file: BinaryIO) -> int:
    """Where the last line that has its end is over; 0 if there is none."""
    stop = file.seek(0, os.SEEK_END)
    while stop > 0:
        start = max(0, stop - _BLOCK_BYTES)
        file.seek(start)
        found = file.read(stop - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        stop = start
    return 0


class KeptLines(GrowingFile):
    """The lines of a file by key. Of two lines of one key the later counts.

    All have one value of each of the fields `alike`: figures of two models or prompts are not averaged.
    """

    def __init__(self, file: Path, *, alike: Sequence[str] = (), heavy: Sequence[str] = ()) -> None:
        """Reads what is there. UndertowError: a line that is none of ours.

        The fields `heavy` are not held in memory.
        """
        super().__init__(file)
        self._alike, self._heavy = alike, heavy
        self._lines: dict[Key, dict[str, Any]] = {}
        for number, line in enumerate(self.lines(), 1):
            if not {"run", "question_id"} <= line.keys():
                raise self.foreign(number)
            self._keep(line)

    def _keep(self, line: dict[str, Any]) -> None:
        for field in self._alike:
            if field in line:
                self.require(field, line[field])
        self._lines[key_of(line)] = {name: value for name, value in line.items() if name not in self._heavy}

    def require(self, field: str, value: Any) -> None:
        """UndertowError, with the cure, if the lines have another value of a field."""
        other = next((line[field] for line in self._lines.values() if line.get(field, value) != value), None)
        if other is not None:
            raise UndertowError(
                f"{self.path} has lines of {field.replace('_', ' ')} {other!r}, and now it is {value!r}. "
                f"Go on with {other!r}, name another --out, or delete the file to have all of it made anew."
            )

    def add(self, line: dict[str, Any]) -> None:
        """Write a line. UndertowError, and nothing is written, if it is not like the others."""
        self._keep(line)
        self.write(line)

    def of(self, keys: Sequence[Key]) -> list[Mapping[str, Any]]:
        """The lines of these keys, without their heavy fields."""
        return [self._lines[key] for key in keys]

    def get(self, key: Key) -> dict[str, Any] | None:
        return self._lines.get(key)

    def __contains__(self, key: Key) -> bool:
        return key in self._lines

    def __len__(self) -> int:
        return len(self._lines)

    def settle(self, order: Sequence[Key]) -> None:
        """Put the file's lines in this order, in one step; lines of other keys come last, as they stood.

        A line that a later one of its key has replaced goes.
        """
        place = {key: n for n, key in enumerate(order)}
        spans = [(key_of(line), span) for line, span in self.placed()]
        latest = dict(spans)
        settled = [latest[key] for key in sorted(latest, key=lambda key: place.get(key, len(place)))]
        if settled != [span for _, span in spans]:
            self.replace(settled)
