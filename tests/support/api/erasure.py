"""What the tests of erasure share."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lance
import pyarrow as pa
from lance.file import LanceFileReader

from undertow.bench.mock.llm import MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Message, PolicyName, Turn
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.llm.client import LLMClient

from ..faults.harness import THETA, TOPICS, WINDOWS

REPLIES = MockReplies(1, 0.3, 0.1, malformed_rate=0.1, malformed_sticky=True)


# to what one asks of it, in every prompt
OBLIGING = MockReplies(1)


OTHERS = ("bob", "cleo")


# of each tenant in a store of the policy
TURNS: dict[PolicyName, int] = {
    "recmem": 30,
    "eager": 9,
    "nemori": 12,
    "himem": 12,
    "a-mem": 6,
    "memory-os": 30,
}


SETTINGS: dict[str, Any] = {**THETA, **WINDOWS, "encoder": "hash:384"}


@dataclass(frozen=True)
class Marked:
    """A tenant whose every word, name and label holds `word`."""

    word: str

    @property
    def name(self) -> str:
        return f"{self.word} tenant"


def turns_of_topics(tenant: str, count: int, word: str = "", *, words: str = "") -> list[Turn]:
    turns = []
    for n in range(count):
        topic = TOPICS[n % 3].split()
        said = [*topic[n % 4 : n % 4 + 5], word, words, f"n{n}"]
        messages = (
            Message("user", " ".join(filter(None, said)), name=f"Ada {word}".strip()),
            Message("assistant", f"{topic[0]} {topic[1]} {word}"),
        )
        metadata = {"channel": word, word or "k": {"deep": [word]}}
        stamp = f"2026-04-{1 + n // 24:02d}T{n % 24:02d}:00:00"
        session = f"session {n // 4} {word}"
        turns.append(Turn(tenant, messages, f"{word} key {n}", session, stamp, metadata))
    return turns


def opened(store: Path, llm: LLMClient | None = None, policy: PolicyName = "recmem") -> Engine:
    settings = Settings(device="cpu", policy=policy, **SETTINGS)
    return Engine(store, settings, HashingEncoder(384), llm=llm)


def spellings(word: str) -> list[bytes]:
    escaped = json.dumps(word)[1:-1]
    plain = [word.encode(), word.encode("latin-1"), escaped.encode(), word[1:].encode()]
    wide = [text.encode(code) for text in (word, escaped) for code in ("utf-16-le", "utf-16-be", "utf-32-le")]
    return [*plain, *wide, word[1:].encode().hex().encode(), word[1:].upper().encode()]


def files_with(store: Path, needles: Sequence[bytes]) -> list[str]:
    """Files that hold any of the byte strings as they are, or in their own name."""
    found = []
    for path in sorted(p for p in store.rglob("*") if p.is_file()):
        data = path.read_bytes() + b"\x00" + str(path.relative_to(store)).encode()
        if any(needle in data for needle in needles):
            found.append(str(path.relative_to(store)))
    return found


def decoded(store: Path) -> dict[str, pa.Table]:
    """Every Lance file that lies in the store, referenced or not, whatever its compression."""
    files = [p for p in store.rglob("*.lance") if p.is_file()]
    return {str(p.relative_to(store)): LanceFileReader(str(p)).read_all().to_table() for p in files}


def values_with(store: Path, needles: Sequence[bytes]) -> set[tuple[str, str]]:
    """(file, column) of every decoded value that holds any of the byte strings."""
    found = set()
    for name, table in decoded(store).items():
        for column in table.column_names:
            for value in table[column].to_pylist():
                data = value if isinstance(value, bytes) else str(value).encode()
                if any(needle in data for needle in needles):
                    found.add((name, column))
    return found


def versions_with(store: Path, needles: Sequence[bytes]) -> list[int]:
    """Versions that can still be opened and whose rows hold any of the byte strings."""
    uri = str(store / "journal.lance")
    found = []
    for version in lance.dataset(uri).versions():
        rows = lance.dataset(uri, version=version["version"]).to_table().to_pylist()
        if any(needle in repr_bytes(rows) for needle in needles):
            found.append(version["version"])
    return found


def repr_bytes(rows: list[dict[str, Any]]) -> bytes:
    return b"\x00".join(v if isinstance(v, bytes) else str(v).encode() for row in rows for v in row.values())


def assert_no_trace(store: Path, marked: Marked, vectors: Sequence[bytes]) -> None:
    needles = spellings(marked.word)
    assert files_with(store, needles) == []
    assert values_with(store, needles) == set()
    assert versions_with(store, needles) == []
    base64s = [base64.b64encode(marked.word.encode()[i:])[2:-4] for i in range(3)]
    assert files_with(store, base64s) == []
    assert files_with(store, vectors) == [], "nor of its vectors, which tell what was said"
    assert values_with(store, vectors) == set()
