"""What requests and responses hold, as the OpenAPI page shows it: shapes alone."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

from undertow.engine.metadata import Where
from undertow.engine.timestamps import ACCEPTED, parse_timestamp

Kind = Literal["turn", "episode", "fact"]

MESSAGE_SCHEMA = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"type": "string", "minLength": 1, "examples": ["user", "assistant", "system", "tool"]},
        "content": {
            "description": "Text, or content parts as OpenAI has them, of which the text is kept.",
            "anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "object"}}],
        },
        "name": {"type": "string", "description": "Who speaks, where the role does not tell."},
        "timestamp": {"anyOf": [{"type": "string"}, {"type": "number"}], "description": ACCEPTED},
    },
}


def _moment(value: str | float) -> str:
    return parse_timestamp(value)


def _filters(value: dict[str, Any]) -> dict[str, Any]:
    Where.of(value)
    return value


Moment = Annotated[
    str | int | float, AfterValidator(_moment), Field(description=ACCEPTED, examples=["2026-05-08T13:56:00Z"])
]
MomentText = Annotated[str, AfterValidator(_moment), Field(description=ACCEPTED)]
Messages = Annotated[
    list[dict[str, Any]],
    WithJsonSchema({"type": "array", "minItems": 1, "items": MESSAGE_SCHEMA}),
    Field(description="Of one session, in their order. A user's message and the reply to it make one turn."),
]
Filters = Annotated[
    dict[str, Any],
    AfterValidator(_filters),
    Field(
        description="For each metadata key the value that a turn must have, or a list of which it must have "
        "one. An episode or a fact passes if a turn that it rests on does. Equal as in JSON: 1 is 1.0, and "
        'neither true nor "1".',
        examples=[{"topic": ["sailing", "work"], "rating": 5}],
    ),
]
Words = Annotated[str, Field(min_length=1, pattern=r"\S")]


class Given(BaseModel):
    """What a request's body holds: a field that is not known is an error."""

    model_config = ConfigDict(extra="forbid")


class Answered(BaseModel):
    """What a response's body holds."""

    model_config = ConfigDict(extra="allow")


# ---- adding


class Lot(Given):
    """Messages that are added together."""

    messages: Messages
    session_id: str = Field(default="", max_length=1024, description="Messages of one session are in order.")
    timestamp: Moment | None = Field(default=None, description="Of messages without one of their own.")
    metadata: dict[str, Any] = Field(default_factory=dict, description="Kept with each turn; see filters.")


class Item(Lot):
    """One of many."""

    idempotency_key: str | None = Field(default=None, min_length=1, max_length=255)


class AddRequest(Given):
    """Messages, or many lots of messages as items: give one of both."""

    messages: Messages | None = None
    session_id: str | None = Field(default=None, max_length=1024)
    timestamp: Moment | None = None
    metadata: dict[str, Any] | None = None
    items: Annotated[
        list[Any] | None,
        WithJsonSchema(
            {"type": "array", "minItems": 1, "items": {"type": "object", "additionalProperties": True}}
        ),
        Field(
            description="Each with messages, session_id, timestamp, metadata as above, and an "
            "idempotency_key of its own. An item that cannot be taken does not hold up the others."
        ),
    ] = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.messages is None) == (self.items is None):
            raise ValueError("give messages, or items with messages each")
        if self.items is not None and self.model_fields_set - {"items"}:
            raise ValueError("beside items there is nothing else: give each item its own fields")
        return self


class Added(Answered):
    """One turn. DUPLICATE: it was stored before, under the same Idempotency-Key."""

    id: str | None
    memory: str
    event: Literal["ADD", "DUPLICATE"]
    seq: int | None


class AddedItem(Answered):
    """What became of an item: its turns, or why it was not taken."""

    status: int
    results: list[Added] | None = None
    detail: str | None = None
    errors: list[dict[str, str]] | None = None


class AddResponse(Answered):
    """`results`, one a turn; of a request with items, `items` in their order."""

    results: list[Added] | None = None
    items: list[AddedItem] | None = None


# ---- searching


class SearchRequest(Given):
    query: Words
    top_k: int | None = Field(default=None, ge=1, le=1000, description="Left out: each tier's own count.")
    kinds: list[Kind] | None = Field(default=None, min_length=1, description="Left out: all three.")
    filters: Filters = Field(default_factory=dict)
    since: Moment | None = Field(default=None, description="Nothing earlier; undated ones are left out then.")
    until: Moment | None = Field(default=None, description="Nothing later; a date means its whole day.")
    threshold: float | None = Field(default=None, ge=-1, le=1, description="The lowest score to be shown.")


class FoundMemory(Answered):
    """`score` is the cosine of query and memory, raised towards 1 where it has the query's words;
    `source_seqs` the turns that it rests on."""

    id: str
    memory: str
    score: float
    kind: Kind
    timestamp: str | None
    source_seqs: list[int]


class SearchResponse(Answered):
    """Nearest first. `recall` of the index that found the turns, as measured; 1.0: the search was exact."""

    results: list[FoundMemory]
    recall: float


class AnswerRequest(Given):
    question: Words
    as_of: Moment | None = Field(default=None, description="The moment at which the question is asked.")
    stream: bool = Field(default=False, description="As text/event-stream; see the response.")


class Tokens(Answered):
    calls: int
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int


class AnswerResponse(Answered):
    """The answer, the memories that it was given, and what it cost."""

    answer: str
    memories: list[FoundMemory]
    usage: Tokens


# ---- single memories


class MemoryView(Answered):
    """A memory as it stands, or as a version stood. Of a turn also its messages, session and metadata; of an
    episode or a fact its version, and the seqs of the turns that it rests on."""

    id: str
    kind: Kind
    memory: str
    timestamp: str | None


class MemoryList(Answered):
    """In order of birth; `next` is the cursor of what follows, null at the end."""

    results: list[MemoryView]
    next: str | None


class History(Answered):
    """Oldest first."""

    results: list[MemoryView]


class UpdateRequest(Given):
    """New words for any memory, or the messages of one exchange for a turn: give one of both."""

    text: Words | None = None
    messages: Messages | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.text is None) == (self.messages is None):
            raise ValueError("give text, or messages")
        return self


class Changed(Answered):
    """`id`: a turn has a new one after an update."""

    id: str
    kind: Kind
    event: Literal["UPDATE", "DELETE"]


class AllDeleted(Answered):
    event: Literal["DELETE_ALL"] = "DELETE_ALL"


# ---- tenants and the store


class Flushed(Answered):
    """`decided` false: something is blocked, or the LLM server is lost; what is stored stays stored."""

    decided: bool


class Imported(Answered):
    """What was stored: turns that were not deleted, and every version of episodes and facts."""

    turns: int
    episodes: int
    facts: int
    decisions: int


class CertificateView(Answered):
    """What an erasure removed. It names the tenant by its keyed hash alone."""

    tenant_key: str
    erased_at: str
    purged_at: str
    rows_removed: int
    turns_removed: int
    episodes_removed: int
    facts_removed: int
    out_of_reach: list[str]


class Accepted(Answered):
    """A job that was accepted: it is done whatever becomes of this process."""

    id: str
    status: Literal["queued"]


class JobView(Answered):
    """`result`: of a job that is done, what the operation answers; `error`: of one that failed, a problem."""

    id: str
    operation: Literal["flush", "import", "erase"]
    status: Literal["queued", "running", "done", "failed"]
    created_at: str
    finished_at: str | None


class JobList(Answered):
    """Newest first."""

    results: list[JobView]


class Records(Answered):
    """Records in their order; `next_after_seq` goes on where they end, null at the end."""

    results: list[dict[str, Any]]
    next_after_seq: int | None


class TenantList(Answered):
    """By name; `next` is the cursor of what follows, null at the end."""

    results: list[str]
    next: str | None


class Purged(Answered):
    """The certificates of all tenants whose bytes went."""

    certificates: list[CertificateView]


class Replayed(Answered):
    replayed: int


class Health(Answered):
    status: Literal["ok", "unready", "draining"]


class ProblemView(Answered):
    """Problem details for HTTP APIs (RFC 9457). `detail` says what to do; `errors` names fields."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[dict[str, str]] | None = None
