"""The payloads of journal rows by kind, and their conversion from and to engine/base/model.py."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import numpy as np
import orjson
import pyarrow as pa
from numpy.typing import NDArray

from undertow.engine.base.model import (
    INSTRUCTIONS,
    BadInput,
    InputError,
    Memory,
    MemoryKind,
    Message,
    PackedTurn,
    Turn,
    Usage,
    memory_id,
)
from undertow.engine.storage.journal_rows import Row

ControlKind = Literal["settings", "flush", "delete", "update", "replay", "policy", "reconsolidate", "used"]

TURNS = pa.schema(
    [
        pa.field("tenant", pa.string(), nullable=False),
        pa.field("key", pa.string(), nullable=False),
        pa.field("session", pa.string(), nullable=False),
        pa.field("timestamp", pa.string()),
        pa.field("text", pa.string(), nullable=False),
        pa.field("payload", pa.binary(), nullable=False),
        pa.field("vector", pa.binary()),
    ]
)
"""The columns of packed turns: the fields of PackedTurn."""


@dataclass(frozen=True, slots=True)
class Control:
    """A record of the log that is no turn, such as a deletion, an update, or feedback from an answer.

    `settings` and `policy` with seq -1 are the tenant's initial ones and have no place in the log.
    """

    kind: ControlKind
    seq: int
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LlmJob:
    """An LLM job as listed by `undertow jobs`. `cluster` holds the seqs of its turns."""

    id: str
    seq: int
    state: Literal["pending", "parked", "replayed"]
    operation: str
    cluster: tuple[int, ...] = ()
    reason: str | None = None


def turn_row(
    tenant: str, tenant_key: str, generation: int, seq: int, turn: Turn, timestamp: str | None
) -> Row:
    """The row of a turn, without its vector. `timestamp` is the effective one."""
    payload = turn_payload(turn, timestamp)
    return Row("turn", tenant, tenant_key, seq, payload, turn_id(tenant, generation, seq), timestamp)


def vector_row(tenant: str, tenant_key: str, seq: int, id: str, vector: NDArray[np.float16]) -> Row:
    """The row with the vector of a turn whose own row has none: no encoder could be used at the time."""
    return Row("vector", tenant, tenant_key, seq, b"{}", id, None, vector)


def check_turn(turn: Turn) -> None:
    """InputError for what JSON and the journal cannot store. The readers have checked the texts."""
    for name, value in (("tenant", turn.tenant), ("session", turn.session_id)):
        try:
            value.encode()
        except UnicodeEncodeError:
            _refuse(name, "holds half a surrogate pair", "Send valid Unicode.")
    if not turn.tenant or "\x00" in turn.tenant:
        _refuse("tenant", "is empty or holds a NUL", "Name the owner of the memory.")
    if turn.metadata:
        try:
            orjson.dumps({"metadata": dict(turn.metadata)})  # nested as deep as in the payload
        except TypeError as error:
            _refuse("metadata", f"is no JSON ({error})", "Give plain JSON values.")


def pack_turn(turn: Turn) -> PackedTurn:
    """The turn as it is stored. InputError names the field that cannot be stored."""
    check_turn(turn)
    try:
        turn.dedupe_key.encode()
    except UnicodeEncodeError:
        _refuse("idempotency_key", "holds half a surrogate pair", "Send valid Unicode.")
    try:
        payload = turn_payload(turn, turn.timestamp)
    except orjson.JSONEncodeError as error:
        _refuse("messages", f"cannot be written as JSON ({error})", "Send valid Unicode.")
    return PackedTurn(turn.tenant, turn.dedupe_key, turn.session_id, turn.timestamp, turn.text, payload)


def turns_table(turns: Iterable[PackedTurn]) -> pa.Table:
    """Packed turns as a table of schema TURNS, in their order."""
    columns = list(zip(*turns, strict=True)) or [()] * len(TURNS)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, TURNS, strict=True)], schema=TURNS)


def unpack(table: pa.Table) -> list[PackedTurn]:
    """The turns of a table of TURNS, in its order."""
    columns = [table.column(name).to_pylist() for name in TURNS.names]
    return list(map(PackedTurn._make, zip(*columns, strict=True)))


def unpack_turn(turn: PackedTurn) -> Turn:
    """The turn that `pack_turn` has packed."""
    body = orjson.loads(turn.payload)
    more = (body.get("metadata", {}), body.get("arrived", False))
    return Turn(turn.tenant, messages_of(body), *turn[1:4], *more)


def given_vectors(column: pa.Array | pa.ChunkedArray) -> NDArray[np.float16] | None:
    """The column `vector` of packed turns as float16 [n, dim], a row of zeros for null; None: all are null.

    ValueError: they are of several lengths.
    """
    given = column.drop_null()
    if not len(given):
        return None
    values = np.frombuffer(b"".join(given.to_pylist()), "<f2").reshape(len(given), -1)
    vectors = np.zeros((len(column), values.shape[1]), np.float16)
    vectors[column.is_valid().to_numpy(zero_copy_only=False)] = values
    return vectors


def _refuse(name: str, reason: str, cure: str) -> NoReturn:
    raise InputError(BadInput("add", None, name, reason, cure))


def turn_payload(turn: Turn, timestamp: str | None) -> bytes:
    """The JSON payload of a turn. JSONEncodeError (a TypeError) for values that JSON cannot represent."""
    messages = [_message_body(m) for m in turn.messages]
    body: dict[str, Any] = {"key": turn.dedupe_key, "session": turn.session_id, "messages": messages}
    if timestamp is not None:
        body["timestamp"] = timestamp
    if turn.arrived:
        body["arrived"] = True
    if turn.metadata:
        body["metadata"] = dict(turn.metadata)
    return payload_of(body)


def payload_of(body: Mapping[str, Any]) -> bytes:
    """The JSON of a turn, in a copy of exact size.

    orjson truncates its buffer in place, which would fragment the heap by about 4 KB for each payload.
    """
    return bytes(memoryview(orjson.dumps(body)))


def stamped(payload: bytes, timestamp: str | None) -> bytes:
    """The payload of an undated turn with its session's timestamp, fields in their usual order."""
    body = orjson.loads(payload)
    metadata = body.pop("metadata", None)
    body["timestamp"] = timestamp
    if metadata is not None:
        body["metadata"] = metadata
    return payload_of(body)


def _message_body(message: Message) -> dict[str, str]:
    body = {"role": message.role, "content": message.content}
    if message.name is not None:
        body["name"] = message.name
    if message.timestamp is not None:
        body["timestamp"] = message.timestamp
    return body


def turn_id(tenant: str, generation: int, seq: int) -> str:
    return memory_id(tenant, generation, seq, "turn", 0)


def messages_of(body: Mapping[str, Any]) -> tuple[Message, ...]:
    return tuple(Message(**m) for m in body["messages"])


def spoken_in(body: Mapping[str, Any]) -> str:
    """`spoken` of a payload's messages, without an object for each: searches read many payloads."""
    lines: list[str] = []
    instructions: list[str] = []
    for message in body["messages"]:
        said = instructions if (role := message["role"]) in INSTRUCTIONS else lines
        said.append(f"{message.get('name') or role}: {message['content']}")
    return "\n".join(lines or instructions)


def said_in(payload: bytes) -> tuple[str, str | None]:
    """The text and the timestamp of a turn, from its payload."""
    body = orjson.loads(payload)
    return spoken_in(body), body.get("timestamp")


def key_hash(dedupe_key: str) -> int:
    """The 64-bit hash of a dedupe key, the same in every process."""
    return int.from_bytes(hashlib.blake2b(dedupe_key.encode(errors="surrogatepass"), digest_size=8).digest())


def memory_row(memory: Memory, tenant_key: str, vector: NDArray[np.float16] | None) -> Row:
    """The row of one version of an episode or a fact. A deleted version has no vector."""
    body: dict[str, Any] = {
        "text": memory.text,
        "version": memory.version,
        "born_at_seq": memory.born_at_seq,
        "ordinal": memory.ordinal,
        "source_seqs": memory.source_seqs,
    }
    for name in ("episode_id", "fact_kind", "prompt_version", "model"):
        if (value := getattr(memory, name)) is not None:
            body[name] = value
    for name in ("source_messages", "shown_seqs", "supersedes", "links", "index_text", "deleted"):
        if value := getattr(memory, name):
            body[name] = value
    if memory.generation != 1:
        body["generation"] = memory.generation
    return Row(
        memory.kind,
        memory.tenant,
        tenant_key,
        memory.made_at_seq,
        orjson.dumps(body),
        memory.id,
        memory.timestamp,
        vector,
    )


def memory_of(row: Row) -> Memory:
    body = orjson.loads(row.payload)
    kind: MemoryKind = "episode" if row.kind == "episode" else "fact"
    assert row.id is not None, "a memory's row always has its id"
    return Memory(
        id=row.id,
        kind=kind,
        tenant=row.tenant,
        made_at_seq=row.seq,
        timestamp=row.timestamp,
        source_seqs=tuple(body.pop("source_seqs")),
        source_messages=tuple((seq, line) for seq, line in body.pop("source_messages", ())),
        shown_seqs=tuple(body.pop("shown_seqs", ())),
        supersedes=tuple(body.pop("supersedes", ())),
        links=tuple(body.pop("links", ())),
        **body,
    )


def control_row(tenant: str, tenant_key: str, control: Control) -> Row:
    payload = orjson.dumps({"kind": control.kind, "body": dict(control.body)})
    return Row("control", tenant, tenant_key, control.seq, payload)


def control_of(row: Row) -> Control:
    body = orjson.loads(row.payload)
    return Control(body["kind"], row.seq, body["body"])


def without_text(control: Control) -> Control:
    """The update without its text, which holds a deleted turn's words. Its place in the log stays."""
    return Control(control.kind, control.seq, {k: v for k, v in control.body.items() if k != "text"})


def outdated_updates(rows: Iterable[Row]) -> list[int]:
    """The lsns of the updates among `rows` (oldest first) that a later row, made `without_text`, replaces."""
    newest: dict[tuple[str, int, str], int] = {}
    outdated = []
    for row in rows:
        if row.kind != "control" or (control := control_of(row)).kind != "update":
            continue
        # The id tells the incarnations of the tenant apart.
        place = (row.tenant_key, row.seq, control.body["memory_id"])
        if place in newest:
            outdated.append(newest[place])
        newest[place] = row.lsn
    return outdated


def job_row(tenant: str, tenant_key: str, job: LlmJob) -> Row:
    body = {"state": job.state, "operation": job.operation, "cluster": job.cluster, "reason": job.reason}
    return Row("job", tenant, tenant_key, job.seq, orjson.dumps(body), job.id)


def job_of(row: Row) -> LlmJob:
    body = orjson.loads(row.payload)
    assert row.id is not None, "a job's row always has its id"
    return LlmJob(row.id, row.seq, body["state"], body["operation"], tuple(body["cluster"]), body["reason"])


def usage_to_json(usage: Mapping[str, Usage]) -> dict[str, list[int]]:
    return {
        op: [u.calls, u.prompt_tokens, u.cached_prompt_tokens, u.completion_tokens] for op, u in usage.items()
    }


def usage_from_json(body: Mapping[str, list[int]]) -> dict[str, Usage]:
    return {op: Usage(*counts) for op, counts in body.items()}
