"""The lines of an export, each parsed when it is read.

As objects, a record takes up to twenty times the memory of its line (`[[],[]]`): an import has one at a time.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import BinaryIO, Self, overload

import orjson

from undertow.engine.base.limits import MAX_IMPORT_RECORDS, MAX_RECORD_BYTES
from undertow.engine.base.model import InputError
from undertow.engine.base.results import Report
from undertow.engine.readers.record import BadField


class RecordLines(Sequence[Report]):
    """The records of a body of JSON lines; blank lines are none. Reading one that is no JSON: InputError."""

    def __init__(self, body: bytes) -> None:
        """InputError: there are too many lines, or one is too long."""
        self._body = body
        if body.count(b"\n") > MAX_IMPORT_RECORDS:
            reason = f"the export has more than {MAX_IMPORT_RECORDS:,} lines"
            raise _refused(1, reason, "Send what an export gave, one record a line.")
        self._places = array("q")
        start = 0
        while start < len(body):
            newline = body.find(b"\n", start)
            end = len(body) if newline < 0 else newline
            if end - start > MAX_RECORD_BYTES:
                reason = f"the line is longer than {MAX_RECORD_BYTES:,} bytes"
                raise _refused(len(self) + 1, reason, "Export it again, without vectors.")
            if body[start:end].strip():
                self._places.extend((start, end))
            start = end + 1

    @classmethod
    def read(cls, file: BinaryIO, max_bytes: int) -> Self:
        """The lines of a file. InputError: it is too large."""
        body = file.read(max_bytes + 1)
        if len(body) > max_bytes:
            raise InputError(too_large(max_bytes).at("import", 1))
        return cls(body)

    def __len__(self) -> int:
        return len(self._places) // 2

    @overload
    def __getitem__(self, at: int) -> Report: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Report]: ...
    def __getitem__(self, at: int | slice) -> Report | Sequence[Report]:
        if isinstance(at, slice):
            return [self[n] for n in range(*at.indices(len(self)))]
        number = range(len(self))[at]
        start, end = self._places[2 * number : 2 * number + 2]
        try:
            record: Report = orjson.loads(memoryview(self._body)[start:end])
        except orjson.JSONDecodeError as error:
            raise _refused(number + 1, f"is no JSON ({error.msg})", "Export it again.") from None
        return record


def too_large(max_bytes: int) -> BadField:
    cure = "Export it without vectors, or raise UNDERTOW_MAX_IMPORT_BYTES."
    return BadField(None, f"the export is larger than {max_bytes:,} bytes", cure)


def _refused(line: int, reason: str, cure: str) -> InputError:
    return InputError(BadField(None, reason, cure).at("import", line))
