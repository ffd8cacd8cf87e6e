"""What holds for every export: its owner, damage of any kind, and size."""

from __future__ import annotations

import json
import re
import tracemalloc
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.engine.base.model import ExportFormat, InputError
from undertow.engine.readers import Format, detect_format
from undertow.engine.readers.exports import EXPORTS, WITHOUT_TENANT

from ....support.cli import run
from ....support.readers import GOOD
from .samples import (
    ANDROID,
    boat_chat,
    claude_chat,
    claude_message,
    read_export,
    slack_files,
    tea_chat,
    turns,
    write_json,
    write_zip,
)

ITEM = {"namespace": ["n"], "key": "k", "value": {"text": "t"}, "created_at": "2024-01-05T10:00:00Z"}
SAMPLES: dict[ExportFormat, Any] = {
    "chatgpt": boat_chat(),
    "claude": claude_chat("k", claude_message("m1", "human", "Hi", attachments=[{"file_name": "f"}])),
    "mem0": {"id": "1", "memory": "x", "user_id": "u", "metadata": {}, "created_at": "2024-01-05"},
    "zep": {"uuid": "1", "role": "user", "role_type": "user", "content": "x", "name": "n", "user_id": "u"},
    "langgraph": ITEM,
    "slack": slack_files()["general/2024-01-05.json"][4] | {"files": [{"name": "f"}], "user_profile": {}},
}
FORMATS = st.sampled_from(sorted(SAMPLES))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


def test_the_program_offers_every_format() -> None:
    refused = run("ingest", "log.jsonl", "--format", "none").err
    offered = {*re.findall(r"'([\w-]+)'", refused)} - {"none", "--format"}
    assert set(EXPORTS) == set(get_args(ExportFormat)) <= offered
    assert offered - set(EXPORTS) == {"auto", "messages", "parquet", "locomo", "longmemeval"}


@pytest.mark.parametrize("format", WITHOUT_TENANT)
def test_an_export_without_tenant_needs_an_owner(tmp_path: Path, format: Format) -> None:
    path = write_json(tmp_path / "c.json", [])
    (record,) = read_export(path, None, format)
    assert "names no tenant" in record.errors[0].reason and "--tenant" in record.errors[0].cure
    (record,) = read_export(path, " ", format)
    assert record.errors[0].field == "--tenant"


def test_a_log_that_names_its_tenants_takes_no_owner(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(GOOD))
    (record,) = read_export(path, "other")
    assert not record.turns and record.errors[0].cure == "Leave --tenant out for this file."
    assert turns(path, None)[0].tenant == "ada"


def replaced(raw: Any, data: st.DataObject) -> Any:
    """A value with one place within it, or all of it, replaced by another value or by nothing."""
    if not isinstance(raw, dict | list) or not raw or data.draw(st.integers(0, 5)) == 0:
        return data.draw(VALUES)
    copy = raw.copy()
    key = data.draw(st.sampled_from(sorted(raw) if isinstance(raw, dict) else range(len(raw))))
    if data.draw(st.booleans()):
        copy[key] = replaced(raw[key], data)
    else:
        del copy[key]
    return copy


@given(FORMATS, st.data())
def test_no_content_stops_a_reader(
    tmp_path_factory: pytest.TempPathFactory, format: ExportFormat, data: st.DataObject
) -> None:
    good, bad = SAMPLES[format], replaced(SAMPLES[format], data)
    folder = tmp_path_factory.mktemp("any")
    if format == "slack":
        path = write_zip(folder / "e.zip", {"general/2024-01-05.json": [good, bad, good]})
    else:
        path = write_json(folder / "e.json", [good, bad, good])
    known = {turn.dedupe_key for turn in turns(write_json(folder / "g.json", [good]), "me", format)}
    found = read_export(path, "me", format)
    if format != "slack":
        assert known <= {turn.dedupe_key for record in found for turn in record.turns}
    assert all(e.source == str(path) and e.reason and e.cure for r in found for e in r.errors)
    assert sum(len(record.turns) for record in found) >= 1


@pytest.mark.parametrize("format", EXPORTS)
@pytest.mark.parametrize("content", [b"", b"hello", b"[", b"{}", b"[1, null]", b"\xff\xfe", b"PK\x03\x04 no"])
@pytest.mark.parametrize("name", ["e.json", "e.zip", "e.txt"])
def test_no_file_stops_a_reader(tmp_path: Path, format: Format, content: bytes, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    found = read_export(path, format=format)
    assert not any(record.turns for record in found)
    if name == "e.zip":
        assert "cannot be read" in found[0].errors[0].reason
        with pytest.raises(InputError, match="known format"):
            detect_format(path)


def test_an_encrypted_archive_and_one_of_other_things_are_refused(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "e.zip", {"conversations.json": [tea_chat()]})
    packed = bytearray(path.read_bytes())
    packed[packed.index(b"PK\x01\x02") + 8] |= 1
    path.write_bytes(packed)
    with pytest.raises(InputError, match="encrypted"):
        detect_format(path)
    other = write_zip(tmp_path / "o.zip", {"photo.jpg": "x", "another.jpg": "y"})
    assert "no file of a known export" in read_export(other)[0].errors[0].reason
    assert "holds no text" in read_export(other, format="whatsapp")[0].errors[0].reason


def test_memory_is_bounded_by_a_conversation_not_by_the_export(tmp_path: Path) -> None:
    path = tmp_path / "conversations.json"
    chat = json.dumps(tea_chat() | {"padding": "x" * 100_000})
    path.write_text(f"[{', '.join([chat] * 300)}]")
    tracemalloc.start()
    assert len(turns(path)) == 300
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < path.stat().st_size / 3


def test_one_chat_is_read_for_two_owners(tmp_path: Path) -> None:
    path = tmp_path / "_chat.txt"
    path.write_text(ANDROID)
    ours, theirs = turns(path), turns(path, "other")
    assert {turn.tenant for turn in ours} == {"me"} and {turn.tenant for turn in theirs} == {"other"}
    assert [turn.text for turn in ours] == [turn.text for turn in theirs]
