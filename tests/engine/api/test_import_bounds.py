"""An import takes the memory of its lines, not of their objects; too many or too long lines are refused."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import orjson
import pytest

from undertow.engine.api.transfer import record_lines
from undertow.engine.api.transfer.record_lines import RecordLines
from undertow.engine.base.model import InputError

from ...support.api.transfer import engine_at, exported, resealed, said


def test_an_import_holds_one_record_at_a_time_as_objects(tmp_path: Path) -> None:
    with engine_at(tmp_path / "a") as here:
        here.add_batch([said("ann", n) for n in range(40)])
        records = exported(here, "ann")
    for record in records:
        if record["kind"] == "turn":
            record["metadata"] = {"a": [[]] * 20_000}
    body = b"\n".join(map(orjson.dumps, resealed(records)))
    del records
    with engine_at(tmp_path / "b") as there:
        tracemalloc.start()
        assert there.import_("bob", RecordLines(body)).turns == 40
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    # as objects, the lists alone take 40 * 20,000 * 64 bytes: 51 MB; the rows, 3 MB, are held several times
    assert peak < 30e6


def test_lines_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_lines, "MAX_IMPORT_RECORDS", 3)
    monkeypatch.setattr(record_lines, "MAX_RECORD_BYTES", 10)
    assert list(RecordLines(b'{"a":1}\r\n\n{}\n {"b": 2}')) == [{"a": 1}, {}, {"b": 2}]
    with pytest.raises(InputError, match="more than 3 lines"):
        RecordLines(b"{}\n" * 4)
    with pytest.raises(InputError, match="import:2: the line is longer than 10 bytes"):
        RecordLines(b'{}\n{"a": 12345}\n')
    with pytest.raises(InputError, match="import:2: is no JSON"):
        list(RecordLines(b"{}\n{"))
