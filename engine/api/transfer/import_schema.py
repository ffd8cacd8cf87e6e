"""The records of an export as they must look to be taken in: fields and their types, one class a kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from undertow.engine.base.model import PolicyName
from undertow.engine.base.timestamps import parse_timestamp
from undertow.engine.readers.record import BadField

EDITED = "Import the export as it was written; an edited one is not taken."


def _normal(value: str) -> str:
    if parse_timestamp(value) != value:
        raise ValueError(f"{value!r:.80} is not written as the engine writes it")
    return value


def _storable(value: str) -> str:
    if "\x00" in value:
        raise ValueError("holds a NUL character")
    return value


Seq = Annotated[int, Field(ge=0)]
Words = Annotated[str, AfterValidator(_storable)]
Moment = Annotated[str, AfterValidator(_normal)]
Cosine = Annotated[float, Field(ge=-1.01, le=1.01, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0.0, lt=1.0)]
# calls, then prompt, cached and completion tokens
Spent = Annotated[list[Seq], Field(min_length=4, max_length=4)]


class Shape(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class RecordShape(Shape):
    tenant: Words = Field(min_length=1)


class TurnRecord(RecordShape):
    kind: Literal["turn"]
    id: Words
    seq: Seq
    made_at_seq: Seq
    superseded_at_seq: None
    session: Words
    timestamp: Moment | None
    timestamp_from: Literal["arrival"] | None = None
    text: str
    messages: list[dict[str, Any]]
    metadata: dict[str, Any]
    dedupe_key: Words
    vector: list[float] | None = None


class MemoryRecord(RecordShape):
    kind: Literal["episode", "fact"]
    id: Words
    text: Words
    version: int = Field(ge=1)
    born_at_seq: Seq
    made_at_seq: Seq
    ordinal: Seq
    source_seqs: list[Seq]
    source_messages: list[Annotated[list[Seq], Field(min_length=2, max_length=2)]] = []
    shown_seqs: list[Seq] = []
    timestamp: Moment | None
    episode_id: Words | None
    fact_kind: Words | None
    supersedes: list[Words]
    links: list[Words] = []
    index_text: Words = ""
    prompt_version: Words | None
    model: Words | None
    deleted: bool
    superseded_at_seq: Seq | None
    generation: int = Field(default=1, ge=1)
    vector: list[float] | None = None


class DecisionRecord(RecordShape):
    """`reread` with seq -1: here the log begins to be read again, up to that change of policy."""

    kind: Literal["decision"]
    seq: int = Field(ge=-1)
    reread: Seq | None = None
    decision: Literal["waits", "merged", "fired", "parked"]
    nearest_episode: Words | None = None
    score: Cosine | None = None
    count: Seq = 0
    relevant: list[Seq] = []
    relevant_scores: list[Cosine] = []
    merge_asked: bool = False
    cluster_seqs: list[Seq] = []
    settled: list[Seq] = []
    revived: list[Seq] = []
    reason: Words | None = None
    operation: Words | None = None
    repairs: Seq = 0
    salient_seqs: list[Seq] = []
    salient_day: str | None = Field(default=None, max_length=10)
    thetas: dict[Literal["theta_sim", "theta_merge"], Cosine] = {}
    episode_ids: list[Words] = []
    fact_ids: list[Words] = []
    usage: dict[str, Spent] = {}


class SettingsChange(Shape):
    theta_sim: Cosine
    theta_merge: Cosine
    theta_count: int = Field(ge=1, le=1000)
    sim_share: Share | None = None
    merge_share: Share | None = None


class TurnDeletion(Shape):
    turn_seq: Seq
    id: Words
    key: Words
    session: Words
    timestamp: Moment | None
    replaced_by: Words | None = None


class MemoryDeletion(Shape):
    memory_id: Words
    kind: Literal["episode", "fact"]


class Update(MemoryDeletion):
    text: Words | None = None


class Replay(Shape):
    job_id: Words


class PolicyChangeRecord(Shape):
    policy: PolicyName


class Reconsolidation(Shape):
    question: Words
    episode_ids: list[Words]


class Use(Shape):
    fact_ids: list[Words]


class ControlRecord(RecordShape):
    kind: Literal["control"]
    seq: int = Field(ge=-1)
    control: Literal["settings", "flush", "delete", "update", "replay", "policy", "reconsolidate", "used"]
    body: dict[str, Any]


class JobRecord(RecordShape):
    kind: Literal["job"]
    seq: Seq
    id: Words
    state: Literal["parked", "replayed"]
    operation: Words
    cluster_seqs: list[Seq]
    reason: Words | None


Content = TurnRecord | MemoryRecord | DecisionRecord | ControlRecord | JobRecord
_CONTENT: TypeAdapter[Content] = TypeAdapter(Annotated[Content, Field(discriminator="kind")])


def content_of(record: Mapping[str, Any]) -> Content:
    """One record between head and end. BadField."""
    try:
        return _CONTENT.validate_python(record)
    except ValidationError as error:
        raise _bad_field(error, skip=1) from None


def body_of(record: ControlRecord) -> Shape:
    """The body of a control record, checked. BadField."""
    shapes: dict[str, type[Shape]] = {
        "settings": SettingsChange,
        "flush": Shape,
        "delete": TurnDeletion if "turn_seq" in record.body else MemoryDeletion,
        "update": Update,
        "replay": Replay,
        "policy": PolicyChangeRecord,
        "reconsolidate": Reconsolidation,
        "used": Use,
    }
    try:
        return shapes[record.control].model_validate(record.body)
    except ValidationError as error:
        raise _bad_field(error).within("body") from None


def _bad_field(error: ValidationError, *, skip: int = 0) -> BadField:
    """The first problem; `skip`: names of kinds that pydantic puts before the field."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(map(str, first["loc"][skip:])) or ("kind" if skip else None)
    return BadField(field, first["msg"][:1].lower() + first["msg"][1:], EDITED)
