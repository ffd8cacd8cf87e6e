"""Reads turns from conversation logs: JSON lines, Parquet, LoCoMo and LongMemEval, streamed, also from S3.

A bad line never stops the stream: it becomes a `BadInput` that names file, line, field and cure, and the
other lines are read. One bad message rejects its whole line (its whole session in the two benchmark formats):
half a turn would be worse than none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from undertow.engine.base.model import BadInput, Format, InputError, LogFormat
from undertow.engine.readers.blocks import block_of_error, blocks_of
from undertow.engine.readers.datasets import locomo, longmemeval, read_samples
from undertow.engine.readers.exports import EXPORTS, WITHOUT_TENANT, export_records
from undertow.engine.readers.files import JSON_LINES, detect_format, find_logs
from undertow.engine.readers.jsonl import MessageReader, jsonl_blocks
from undertow.engine.readers.messages import name_of, parse_messages
from undertow.engine.readers.pairing import own_time, pair_chat, pair_dialogue
from undertow.engine.readers.parquet import parquet_blocks, turns_of_rows
from undertow.engine.readers.record import BadField, PackedRecord, Record, TurnBlock
from undertow.engine.readers.source import Log
from undertow.engine.readers.vectors import StoreEncoder

__all__ = [
    "JSON_LINES",
    "Format",
    "Log",
    "LogFormat",
    "MessageReader",
    "PackedRecord",
    "Record",
    "StoreEncoder",
    "TurnBlock",
    "block_of_error",
    "detect_format",
    "find_logs",
    "own_time",
    "pair_chat",
    "pair_dialogue",
    "parse_messages",
    "read",
    "read_blocks",
    "turns_of_rows",
]

_SAMPLES = {"locomo": locomo, "longmemeval": longmemeval}


def read(
    path: Log | Path, format: Format = "auto", *, after: int = 0, max_message_bytes: int
) -> Iterator[Record]:
    """The records of one file, in file order, at positions greater than `after`.

    `max_message_bytes` bounds the UTF-8 length of one message. Memory is bounded by a megabyte of lines, one
    record batch or sample. A file that cannot be opened or recognised yields one record with the error and no
    turns. Warnings issued once per file (unknown fields, order of timestamps) cover only what was read after
    `after`.
    """
    for block in read_blocks(path, format, after=after, max_message_bytes=max_message_bytes):
        yield from block.records()


def read_blocks(
    path: Log | Path,
    format: Format = "auto",
    *,
    after: int = 0,
    max_message_bytes: int,
    encoder: StoreEncoder | None = None,
) -> Iterator[TurnBlock]:
    """As `read`, in blocks: the turns as columns, in the form in which they are stored.

    `encoder`: that of the store, which given vectors must be of. None: they are not read.
    """
    log = Log.of(path)
    try:
        found: LogFormat = detect_format(log) if format == "auto" else format
        _check_tenant(log, found)
    except InputError as refusal:
        yield block_of_error(after, refusal.problem)
        return
    if found == "messages":
        yield from jsonl_blocks(log, after=after, max_message_bytes=max_message_bytes)
    elif found == "parquet":
        yield from parquet_blocks(log, after=after, max_message_bytes=max_message_bytes, encoder=encoder)
    elif found in EXPORTS:
        yield from blocks_of(export_records(log, found, after=after, max_message_bytes=max_message_bytes))
    else:
        samples = read_samples(_SAMPLES[found], log, after=after, max_message_bytes=max_message_bytes)
        yield from blocks_of(samples)


def _check_tenant(log: Log, format: LogFormat) -> None:
    """InputError: the owner of the turns is neither named nor in the file, or it is both."""
    if log.tenant is None and format in WITHOUT_TENANT:
        reason = f"a {format} export names no tenant"
        raise InputError(BadInput(str(log), None, None, reason, "Name the owner of its turns with --tenant."))
    if log.tenant is not None and format not in EXPORTS:
        reason = f"each record of a {format} file names its tenant"
        raise InputError(BadInput(str(log), None, None, reason, "Leave --tenant out for this file."))
    if log.tenant is not None:
        try:
            name_of({"--tenant": log.tenant}, "--tenant")
        except BadField as bad:
            raise InputError(bad.at(str(log), None)) from None
