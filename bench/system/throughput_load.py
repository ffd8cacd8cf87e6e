"""What `undertow bench ingest` feeds: a log's conversations under the names of many tenants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from typing import Literal

from undertow.engine.base.model import InputError, Turn, UndertowError
from undertow.engine.readers import read

Texts = Literal["salted", "plain copies"]


def conversations(data: Path, max_message_bytes: int = 1_000_000) -> list[list[Turn]]:
    """Those of a log in any format that can be ingested, by tenant. InputError; UndertowError: no turns."""
    found: dict[str, list[Turn]] = {}
    for record in read(data, max_message_bytes=max_message_bytes):
        if record.errors:
            raise InputError(record.errors[0])
        for turn in record.turns:
            found.setdefault(turn.tenant, []).append(turn)
    if not found:
        raise UndertowError(f"{data} holds no turns. Name a log that does.")
    return list(found.values())


def copies(data: Path, tenants: int, turns_per_tenant: int | None = None) -> Iterator[Turn]:
    """Plain copies of the log's conversations under `tenants` names, interleaved as traffic is.

    `turns_per_tenant`: a shorter conversation begins anew; left out: each conversation once.
    """
    logs = conversations(data)
    lines = [
        list(islice(cycle(log), turns_per_tenant or len(log)))
        for log, _ in zip(cycle(logs), range(tenants), strict=False)
    ]
    for i in range(max(map(len, lines))):
        for n, line in enumerate(lines):
            if i < len(line):
                yield replace(line[i], tenant=f"tenant-{n}", dedupe_key=f"{n}-{i}")


def salted(turns: Iterable[Turn]) -> Iterator[Turn]:
    """Each message ends in its tenant's name, so that no text is another tenant's too.

    Copies share texts that a cache would serve; people who talk of the same things share none.
    """
    for turn in turns:
        messages = tuple(replace(m, content=f"{m.content} ({turn.tenant})") for m in turn.messages)
        yield replace(turn, messages=messages)
