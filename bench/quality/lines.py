"""A file of JSON lines that only grows, so that a run that was killed goes on behind its last line."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from undertow.engine.model import UndertowError

Key = tuple[int, str]
"""(run, question id)."""


def key_of(line: Mapping[str, Any]) -> Key:
    return line["run"], line["question_id"]


class KeptLines:
    """The lines of a file by key, each written as a whole at once. One process has the file.

    Of two lines of one key the later counts.

    All have one value of each of the fields `alike`: figures of two models or prompts are not averaged.
    """

    def __init__(self, file: Path, *, alike: Sequence[str] = (), heavy: Sequence[str] = ()) -> None:
        """Reads what is there. UndertowError: a line that is none of ours.

        A last line without its end is what a kill has left of it, and is dropped. The fields `heavy` are not
        held in memory.
        """
        self.file = file
        self._alike, self._heavy = alike, heavy
        self._lines: dict[Key, dict[str, Any]] = {}
        if file.exists():
            self._cut_torn_end()
            for number, raw in enumerate(file.read_bytes().splitlines(), 1):
                self._keep(self._parsed(raw, number))
        self._out = file.open("ab", buffering=0)

    def _cut_torn_end(self) -> None:
        with self.file.open("rb+") as file:
            file.truncate(file.read().rfind(b"\n") + 1)

    def _parsed(self, raw: bytes, number: int) -> dict[str, Any]:
        try:
            line: dict[str, Any] = orjson.loads(raw)
            key_of(line)
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise UndertowError(
                f"{self.file}:{number} is no line of this command's ({error!r}). Name another --out."
            ) from None
        return line

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
                f"{self.file} has lines of {field.replace('_', ' ')} {other!r}, and now it is {value!r}. "
                f"Go on with {other!r}, name another --out, or delete the file to have all of it made anew."
            )

    def add(self, line: dict[str, Any]) -> None:
        """Write a line. UndertowError, and nothing is written, if it is not like the others."""
        self._keep(line)
        self._out.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

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
        raw = self.file.read_bytes().splitlines(keepends=True)
        latest = {key_of(orjson.loads(line)): line for line in raw}
        settled = [latest[key] for key in sorted(latest, key=lambda key: place.get(key, len(place)))]
        if settled == raw:
            return
        draft = self.file.with_name(self.file.name + ".draft")
        draft.write_bytes(b"".join(settled))
        self._out.close()
        draft.replace(self.file)
        self._out = self.file.open("ab", buffering=0)

    def close(self) -> None:
        self._out.close()
