"""Payloads in mapped files: what was written is read, what was freed is zero, and files go when empty."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.engine.tenants import payload_file
from undertow.engine.tenants.payload_file import PayloadFile, Payloads

TENANTS = 3
SIZES = st.lists(st.integers(0, 3_000), max_size=6)
# payloads of these sizes are appended; a payload is cleared; a tenant's are released
STEPS = st.lists(
    st.tuples(st.integers(0, TENANTS - 1), st.one_of(SIZES, st.integers(0, 40), st.none())), max_size=40
)


def segment_bytes(file: PayloadFile) -> bytes:
    return b"".join(segment.map[:] for segment in file.segments.values())


def full(*_: int) -> NoReturn:
    """As os.posix_fallocate on a full disk."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many small segments, whose pages are unmapped again and again."""
    monkeypatch.setattr(payload_file, "SEGMENT_BYTES", (1 << 14, 1 << 16))
    monkeypatch.setattr(payload_file, "LARGEST_BYTES", 1 << 13)
    monkeypatch.setattr(payload_file, "MAPPED_BYTES", 1 << 15)


@pytest.mark.usefixtures("small")
@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_payloads_are_those_of_a_plain_list_and_nothing_else_is_in_the_files(
    steps: list[tuple[int, list[int] | int | None]],
) -> None:
    file = PayloadFile()
    tenants, models = [Payloads(file) for _ in range(TENANTS)], [list[bytes]() for _ in range(TENANTS)]
    number = 0
    for at, step in steps:
        payloads, model = tenants[at], models[at]
        if step is None:
            payloads.release()
            model.clear()
        elif isinstance(step, int):
            if step < len(model):
                payloads.clear(step)
                model[step] = b""
        else:
            number += 1
            new = [bytes([number]) * size for size in step]
            payloads.extend(b"".join(new), step)
            model += new
        for held, expected in zip(tenants, models, strict=True):
            assert [held[seq] for seq in range(len(held))] == expected
            assert [held.exists(seq) for seq in range(len(held))] == [bool(one) for one in expected]
        left = sorted(byte for byte in segment_bytes(file) if byte)
        assert left == sorted(b"".join(one for model in models for one in model))
    for payloads in tenants:
        payloads.release()
    assert not file.segments, "files without payloads are gone"


def test_the_files_have_no_name_and_memory_stands_in_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = PayloadFile(tmp_path)
    payloads = Payloads(file)
    payloads.extend(b"words", [5])
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr(os, "posix_fallocate", full)
    payloads.extend(bytes(5 << 20), [5 << 20])
    assert payloads[0] == b"words" and payloads[1] == bytes(5 << 20)
    assert [segment.is_file for segment in file.segments.values()] == [True, False]
    file.close()
    assert not file.segments
