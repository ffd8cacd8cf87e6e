"""The data model of the engine: messages, turns, memories, decisions, errors, and ids.

Vocabulary: spec of RecMem, section 3. A *turn* is one interaction unit u_i = (user message,
assistant message, timestamp) of equation 3; an *episode* and a *fact* are what the LLM writes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, Literal, NamedTuple, Self

LINKED_PAIRS = 0.025
"""The default share of turn pairs at or above theta_sim: that of MiniLM at 0.7 on LoCoMo (docs/cost.md)."""

MemoryKind = Literal["episode", "fact"]
PolicyName = Literal["recmem", "eager", "nemori", "himem", "a-mem", "memory-os"]
# Which tiers an answer reads, and when (engine/search/answer_modes.py). Unrelated to the ranking of searches.
AnswerMode = Literal["hybrid", "best_effort"]
# How an answer is asked for: with notes before it, the same in a few words, or in one go as in the papers.
AnswerStyle = Literal["notes", "short", "paper"]
# Exports of other programs, and all that a log may be.
ExportFormat = Literal["chatgpt", "claude", "whatsapp", "slack", "mem0", "zep", "langgraph"]
LogFormat = Literal["messages", "parquet", "locomo", "longmemeval", ExportFormat]
Format = Literal["auto", LogFormat]


class Decision(StrEnum):
    """The decision on a turn. The last two are states of the cursor and never stored."""

    WAITS = "waits"
    MERGED = "merged"
    FIRED = "fired"
    PARKED = "parked"
    PENDING = "pending"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Message:
    """One utterance of one speaker. `timestamp` is ISO 8601, as normalised by `parse_timestamp`."""

    role: str
    content: str
    name: str | None = None
    timestamp: str | None = None

    @property
    def speaker(self) -> str:
        return self.name or self.role


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange, the unit of ingestion. The engine assigns its seq on arrival.

    `dedupe_key`: the client's idempotency key, or a key from (source, session, position) and the content, so
    that reading the same log twice changes nothing. `arrived`: its timestamp is that of its arrival.
    """

    tenant: str
    messages: tuple[Message, ...]
    dedupe_key: str
    session_id: str = ""
    timestamp: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    arrived: bool = False

    @property
    def text(self) -> str:
        """The text to embed: speakers and words, without timestamp."""
        return spoken(self.messages)


class PackedTurn(NamedTuple):
    """A checked turn with its journal `payload` and the `text` to embed.

    `vector`: the text's embedding, little-endian fp16 [dim]; None: it is yet to be made. A tuple, because a
    shard creates one for each turn that it receives.
    """

    tenant: str
    dedupe_key: str
    session_id: str
    timestamp: str | None
    text: str
    payload: bytes
    vector: bytes | None = None


INSTRUCTIONS = frozenset({"system", "developer"})


def spoken(messages: Sequence[Message]) -> str:
    """The text of a turn, one line per message with its speaker's name.

    Instructions to the agent are left out: repeated in every turn they would make all turns similar
    (measured: a 40-word system prompt raises the median cosine of unrelated turns from 0.24 to 0.70). They
    are stored, and used only if a turn has nothing else.
    """
    return "\n".join(lines_of(messages))


def lines_of(messages: Sequence[Message]) -> tuple[str, ...]:
    """The lines of `spoken`, one per message, each with its speaker's name."""
    said = [m for m in messages if m.role not in INSTRUCTIONS] or messages
    return tuple(f"{m.speaker}: {m.content}" for m in said)


def as_embedded(text: str, timestamp: str | None, embed_timestamp: bool) -> str:
    """The text of a turn for the encoder. `timestamp`: its own, or the inherited one."""
    return f"{timestamp}\n{text}" if embed_timestamp and timestamp is not None else text


@dataclass(frozen=True, slots=True)
class Memory:
    """One version of an episode or a fact, as stored.

    `made_at_seq` is the log record whose decision made this version, `born_at_seq` that of the first version.
    `superseded_at_seq` is known only once a later version (or a deletion) exists. `source_messages`, if its
    sources are parts of turns: (seq of the turn, index of the line) of each message; () means all messages of
    `source_seqs`. `shown_seqs`: other turns in its prompt, whose words it may contain. `generation`: 1, plus
    the number of changes of the tenant's policy before it. `links`: ids of related memories of its kind; some
    may be gone. `index_text`: what it is found by, where that is not its text.
    """

    id: str
    kind: MemoryKind
    tenant: str
    text: str
    version: int
    born_at_seq: int
    made_at_seq: int
    ordinal: int
    source_seqs: tuple[int, ...]
    timestamp: str | None = None
    episode_id: str | None = None
    fact_kind: str | None = None
    supersedes: tuple[str, ...] = ()
    prompt_version: str | None = None
    model: str | None = None
    deleted: bool = False
    superseded_at_seq: int | None = None
    source_messages: tuple[tuple[int, int], ...] = ()
    generation: int = 1
    shown_seqs: tuple[int, ...] = ()
    links: tuple[str, ...] = ()
    index_text: str = ""

    @property
    def indexed(self) -> str:
        """The text that its vector and its keywords are of."""
        return self.index_text or self.text

    @property
    def reach(self) -> frozenset[int]:
        """The turns whose words it may contain."""
        return frozenset((*self.source_seqs, *self.shown_seqs))


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens and calls of one or more LLM requests. Supports addition."""

    calls: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.calls + other.calls,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_prompt_tokens + other.cached_prompt_tokens,
            self.completion_tokens + other.completion_tokens,
        )


@dataclass(frozen=True, slots=True)
class BadInput:
    """Why an input was rejected: its place, the problem, and the cure.

    `line`: the line of a text file, or the row of a Parquet file or table, counted from 1. `row_group`: that
    of the row in a Parquet file, counted from 0.
    """

    source: str
    line: int | None
    field: str | None
    reason: str
    cure: str
    row_group: int | None = None

    def __str__(self) -> str:
        where = self.source if self.line is None else f"{self.source}:{self.line}"
        if self.row_group is not None:
            where = f"{where} (row group {self.row_group})"
        what = f"field '{self.field}': {self.reason}" if self.field else self.reason
        return f"{where}: {what}. {self.cure}"


class UndertowError(Exception):
    """Base of all errors that users may see. The message says what to do."""

    # the known cost of the LLM calls of what failed
    usage = Usage()

    def __str__(self) -> str:
        """The first argument; others are there for unpickling."""
        return str(self.args[0]) if self.args else ""


class UnknownMemory(UndertowError):
    """There is no memory with this id, or it was deleted."""


def unknown_memory(memory_id: str, tenant: str | None = None) -> UnknownMemory:
    """The error for an unknown id, optionally of a tenant."""
    whose = "" if tenant is None else f" of {tenant!r}"
    cure = "`undertow list --json` shows the whole ids"
    return UnknownMemory(f"no memory{whose} has the id {memory_id}: {cure}.")


class NoLLM(UndertowError):
    """The call needs an LLM server, and none is set."""


class InputError(UndertowError, ValueError):
    """Invalid input."""

    def __init__(self, problem: BadInput) -> None:
        super().__init__(str(problem))
        self.problem = problem

    @classmethod
    def of(cls, call: str, field: str | None, reason: str, cure: str) -> Self:
        """The error for an argument of a call."""
        return cls(BadInput(call, None, field, reason, cure))


def memory_id(tenant: str, generation: int, seq: int, operation: str, ordinal: int) -> str:
    """The id of the `ordinal`-th result of `operation` at log record `seq`.

    A hash of its arguments, so that a step repeated after a crash writes the same ids.
    """
    parts = f"{tenant}\x1f{generation}\x1f{seq}\x1f{operation}\x1f{ordinal}"
    return hashlib.blake2b(parts.encode(), digest_size=16).hexdigest()


def dedupe_key(source: str, session_id: str, position: str, messages: Sequence[Message]) -> str:
    """The dedupe key of a turn without an idempotency key."""
    parts = [
        source,
        session_id,
        position,
        *(f"{m.speaker}\x1e{m.content}\x1e{m.timestamp}" for m in messages),
    ]
    return key_digest("\x1f".join(parts))


def key_digest(text: str) -> str:
    return key_digests([text.encode(errors="surrogatepass")])[0]


def key_digests(texts: Iterable[bytes]) -> list[str]:
    return [hashlib.blake2b(text, digest_size=12).hexdigest() for text in texts]


def time_key(timestamp: str | None) -> datetime:
    """Sort key of a stored timestamp: zoned times in UTC, zoneless ones unchanged, undated first."""
    if timestamp is None:
        return datetime.min
    moment = datetime.fromisoformat(timestamp)
    return moment.astimezone(UTC).replace(tzinfo=None) if moment.tzinfo else moment
