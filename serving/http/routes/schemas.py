"""Request bodies, and the response bodies that the client has no model of, as the OpenAPI page shows them.

The other responses are models of `serving/client/results.py`. Endpoints return the engine's results; a
response model reads its fields from their attributes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    StrictStr,
    TypeAdapter,
    WithJsonSchema,
    model_validator,
)

from undertow.engine.base.limits import MAX_FILTER_KEYS, MAX_FILTER_VALUES, MAX_MESSAGES, MAX_QUERY_CHARS
from undertow.engine.base.model import AnswerMode
from undertow.engine.base.queries import FilterOperator
from undertow.engine.base.timestamps import ACCEPTED, parse_timestamp
from undertow.engine.search.where import Where
from undertow.serving.client.results import Added, AddedItem, Hit, Kind, Model

MESSAGE_SCHEMA = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {
            "type": "string",
            "minLength": 1,
            "description": "Who speaks.",
            "examples": ["user", "assistant", "system", "tool"],
        },
        "content": {
            "description": "Text, or OpenAI content parts, of which the text is kept.",
            "anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "object"}}],
        },
        "name": {"type": "string", "description": "The speaker, if the role does not identify it."},
        "timestamp": {"anyOf": [{"type": "string"}, {"type": "number"}], "description": ACCEPTED},
    },
}


def _moment(value: str | float) -> str:
    return parse_timestamp(value)


def _filters(value: dict[str, Any]) -> dict[str, Any]:
    Where.of(value)
    return value


def _filters_text(text: str) -> str:
    filters = orjson.loads(text)
    if not isinstance(filters, dict):
        raise ValueError('is no JSON object. Give one such as {"topic": "work"}.')
    Where.of(filters)
    return text


Moment = Annotated[
    StrictStr | StrictInt | StrictFloat,  # true is no second
    AfterValidator(_moment),
    Field(description=ACCEPTED, examples=["2026-05-08T13:56:00Z"]),
]
MomentText = Annotated[str, AfterValidator(_moment), Field(description=ACCEPTED)]
Messages = Annotated[
    list[dict[str, Any]],
    WithJsonSchema(
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_MESSAGES,
            "items": MESSAGE_SCHEMA,
            "description": "Messages of one session, in order. A user message and its reply make one turn. "
            f"At most {MAX_MESSAGES:,}.",
        }
    ),
    Field(max_length=MAX_MESSAGES),
]
Scalar = str | int | float | bool
Wanted = Scalar | list[Scalar]
FILTERS_SCHEMA = TypeAdapter(dict[str, Wanted | dict[FilterOperator, Wanted]]).json_schema()
Filters = Annotated[
    dict[str, Any],
    AfterValidator(_filters),
    WithJsonSchema({**FILTERS_SCHEMA, "maxProperties": MAX_FILTER_KEYS}),
    Field(
        description="For each metadata key the value that a turn must have, a list of accepted values, or an "
        "object of operators that must all hold: $eq, $ne, $gt, $gte, $lt, $lte, $in (a list), $prefix. An "
        "episode or a fact passes if one of its source turns does. Values compare as in JSON: 1 equals 1.0, "
        'but neither true nor "1". Ranges compare numbers with numbers and text with text, by code points. A '
        "turn without the key passes $ne alone. "
        f"At most {MAX_FILTER_KEYS} keys, with {MAX_FILTER_VALUES} values each.",
        examples=[{"topic": ["sailing", "work"], "rating": {"$gte": 3, "$lt": 9}}],
    ),
]
FiltersText = Annotated[
    str,
    AfterValidator(_filters_text),
    Field(description="JSON, as `filters` of a search.", examples=['{"rating": {"$gte": 3}}']),
]
Words = Annotated[str, Field(min_length=1, pattern=r"\S")]
Query = Annotated[
    Words,
    Field(
        max_length=MAX_QUERY_CHARS,
        description=f"A question or some words, of at most {MAX_QUERY_CHARS:,} characters.",
    ),
]


class RequestModel(BaseModel):
    """A request body; unknown fields are errors."""

    model_config = ConfigDict(extra="forbid")


# ---- add


class Item(RequestModel):
    """Messages that are added together: one item of a batch."""

    messages: Messages
    session_id: str = Field(default="", max_length=1024)
    timestamp: Moment | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    idempotency_key: str | None = Field(default=None, min_length=1, max_length=255)


class AddRequest(RequestModel):
    """Either messages, or items with messages each."""

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
            description="Each with messages, session_id, timestamp and metadata as above, and its own "
            "idempotency_key. A rejected item does not affect the others."
        ),
    ] = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.messages is None) == (self.items is None):
            raise ValueError("give messages, or items with messages each")
        if self.items is not None and self.model_fields_set - {"items"}:
            raise ValueError("beside items there is nothing else: give each item its own fields")
        return self


class AddResponse(Model):
    """`results`: one per turn. For a request with items: `items`, in the same order."""

    results: tuple[Added, ...] | None = None
    items: tuple[AddedItem, ...] | None = None


# ---- search and answer


class SearchRequest(RequestModel):
    query: Query
    top_k: int | None = Field(default=None, ge=1, le=1000, description="Default: a count for each kind.")
    kinds: list[Kind] | None = Field(default=None, min_length=1, description="Default: all three.")
    filters: Filters = Field(default_factory=dict)
    since: Moment | None = Field(default=None, description="Nothing earlier; excludes undated memories.")
    until: Moment | None = Field(default=None, description="Nothing later; a date means its whole day.")
    threshold: float | None = Field(default=None, ge=-1, le=1, description="The lowest score to return.")
    explain: bool = Field(
        default=False,
        description="With the parts of each score, and what was left out and why. It takes longer.",
    )


class AnswerRequest(RequestModel):
    question: Query
    as_of: Moment | None = Field(default=None, description="When the question is asked.")
    mode: AnswerMode | None = Field(
        default=None,
        description="hybrid: from all tiers at once. best_effort, under HiMem: from its notes, and from its "
        "episodes only if the notes do not suffice. Default: the service's setting.",
    )
    stream: bool = Field(default=False, description="As text/event-stream; see the response.")


class Tokens(Model):
    calls: int
    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int


class AnswerResponse(Model):
    """The answer, the memories that the language model was given, and the cost.

    `words_only`: as of a search; the memories were found by words alone.
    """

    answer: str
    memories: tuple[Hit, ...]
    usage: Tokens
    words_only: bool = False


# ---- memories


class UpdateRequest(RequestModel):
    """Either new text for any memory, or the messages of one exchange for a turn."""

    text: Words | None = None
    messages: Messages | None = Field(default=None, description="For a turn: those of one exchange.")

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.text is None) == (self.messages is None):
            raise ValueError("give text, or messages")
        return self


class AllDeleted(Model):
    event: Literal["DELETE_ALL"] = "DELETE_ALL"


# ---- tenants and their jobs


class Imported(Model):
    """What was stored: turns that were not deleted, and every version of episodes and facts."""

    turns: int = Field(description="Turns that were not deleted.")
    episodes: int = Field(description="Versions of episodes.")
    facts: int = Field(description="Versions of facts.")
    decisions: int = Field(description="Decisions; what has none is decided here.")


class PolicyRequest(RequestModel):
    """`drop_edits`: change even if users have reworded or deleted memories; the history stays."""

    policy: Words
    drop_edits: bool = False


class CertificateView(Model):
    """What an erasure removed. It identifies the tenant by its keyed hash only."""

    tenant_key: str
    erased_at: str
    purged_at: str
    rows_removed: int
    turns_removed: int
    episodes_removed: int
    facts_removed: int
    out_of_reach: list[str]


class Accepted(Model):
    """An accepted job. It will be carried out even if the service is killed."""

    id: str
    status: Literal["queued"]


class JobView(Model):
    """`result`: the operation's response, once done; `error`: a problem, once failed."""

    id: str
    operation: Literal["flush", "import", "erase"]
    status: Literal["queued", "running", "done", "failed"]
    created_at: str
    finished_at: str | None


class WebhookRequest(RequestModel):
    """`tenants`: whose events; default: of all that the key names. `include_text`: with memories' texts."""

    url: str = Field(min_length=1, max_length=2_000, examples=["https://example.com/undertow"])
    tenants: list[Annotated[str, Field(min_length=1)]] | None = Field(
        default=None,
        max_length=100,
        description="Whose events, at most 100; default: of all that the key names. A key for a prefix must "
        "name some.",
    )
    include_text: bool = False


# ---- the store


class Purged(Model):
    """The certificates of all tenants whose bytes were removed."""

    certificates: list[CertificateView]


class Health(Model):
    status: Literal["ok", "unready", "draining"]
