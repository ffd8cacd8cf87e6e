"""Files of JSON lines that only grow: a run that was killed goes on behind its last line. JSON documents."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import orjson

from undertow.engine.base.model import UndertowError

Key = tuple[int, str]
"""(run, question id)."""


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
        if path.exists() and path.stat().st_size:  # what is empty cannot be mapped
            self._cut_torn_end()
        self._out = path.open("ab", buffering=0)

    def _cut_torn_end(self) -> None:
        """A last line without its end is what a kill has left of it."""
        with self.path.open("rb+") as file:
            with mmap(file.fileno(), 0, access=ACCESS_READ) as held:
                end = held.rfind(b"\n") + 1
            file.truncate(end)

    def lines(self) -> Iterator[dict[str, Any]]:
        """One at a time: together they may be more than memory holds.

        UndertowError: a line that is no JSON object.
        """
        with self.path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                try:
                    line = orjson.loads(raw)
                except orjson.JSONDecodeError:
                    line = None
                if not isinstance(line, dict):
                    raise self.foreign(number)
                yield line

    def foreign(self, number: int) -> UndertowError:
        """What is to be said of a line that is none of ours."""
        return UndertowError(f"{self.path}:{number} is no line of this command's. Name another --out.")

    def write(self, line: Mapping[str, Any]) -> None:
        self._out.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    def close(self) -> None:
        self._out.close()


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
