"""The service's responses as frozen models. The service describes and checks its responses by them too.

Further fields, such as the messages of a turn or what a newer service adds, are kept in `model_extra`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from undertow.engine.base.model import AnswerMode as AnswerMode
from undertow.engine.base.results import HitKind, LeftOutReason
from undertow.serving.client.errors import UnexpectedAnswer

Kind = HitKind
ItemT = TypeVar("ItemT")
ModelT = TypeVar("ModelT", bound="Model")


class Model(BaseModel):
    """One JSON object of the service."""

    model_config = ConfigDict(frozen=True, extra="allow")

    @classmethod
    def read(cls: type[ModelT], body: bytes | str) -> ModelT:
        """Parse a response body. UnexpectedAnswer: it is not of this model."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise UnexpectedAnswer(_flaws(error)) from error


class Listed(Model, Generic[ItemT]):
    """Some results in order."""

    results: tuple[ItemT, ...]


class Results(Listed[ItemT], Generic[ItemT]):
    """A page of results in order; `next`: the cursor of the next page, null at the end."""

    next: str | None


class Added(Model):
    """One turn. DUPLICATE: it was stored before, under the same Idempotency-Key; `id` and `seq` are null if
    it is gone."""

    id: str | None
    memory: str
    event: Literal["ADD", "DUPLICATE"]
    seq: int | None


class AddedItem(Model):
    """The result of one item: its turns, or why it was rejected."""

    status: int
    results: tuple[Added, ...] | None = None
    detail: str | None = None
    errors: tuple[dict[str, str], ...] | None = None


class AddedItems(Model):
    items: tuple[AddedItem, ...]


class Hit(Model):
    """`score`: the cosine of query and memory, raised towards 1 by shared words; `source_seqs`: its source
    turns."""

    id: str
    memory: str
    score: float
    kind: Kind
    timestamp: str | None
    source_seqs: tuple[int, ...]


class ScoreParts(Model):
    """What a score is made of. With c = cosine + 0.3 * max(neighbour_cosine - cosine, 0) and w = words +
    neighbour_words + stretch_words, it is 1 - (1 - c) * exp(-3 * w).

    `neighbour_cosine`: the higher one of the turns right before and after it. `words`: what its own words
    give; `neighbour_words`, `stretch_words`: what those turns, and the best one nearby in the session, add.
    `matched`: the words of the query that it has; "exercise ~ yoga": a related word in its place.
    """

    cosine: float
    neighbour_cosine: float | None
    words: float
    neighbour_words: float
    stretch_words: float
    matched: tuple[str, ...]


class LeftOut(Hit):
    """`reason`: its time or its metadata (filters); better ones of its kind (count) or of all kinds (top_k);
    too low a score (threshold)."""

    reason: LeftOutReason


class Explanation(Model):
    """How a search ranked: by cosine and words (hybrid), or by cosine alone (dense).

    `telling_words`: the words that weigh more in the query's vector. `turns`: how many the tenant has;
    `passing`: how many of them pass each filter. `scores`: by id, of the results and of what was left out.
    `left_out`: the best of what was not returned, best first.
    """

    search: Literal["hybrid", "dense"]
    telling_words: str | None
    turns: int
    passing: dict[str, int]
    scores: dict[str, ScoreParts]
    left_out: tuple[LeftOut, ...]


class Found(Model):
    """Nearest first. `recall`: measured, of the index that found the turns; 1.0 for an exact search.

    `words_only`: the embedding endpoint could not be used, so that only what shares words with the query was
    found. `explanation`: if it was asked for.
    """

    results: tuple[Hit, ...]
    recall: float
    words_only: bool = False
    explanation: Explanation | None = None


class Memory(Model):
    """A memory, or one version of it. A turn also has messages, session_id and metadata; an episode or a fact
    also has its version, and the seqs of its source turns."""

    id: str
    kind: Kind
    memory: str
    timestamp: str | None


class Page(Results[Memory]):
    """In creation order; `next`: the cursor of the next page, null at the end."""


class Changed(Model):
    """`id`: a turn has a new one after an update."""

    id: str
    kind: Kind
    event: Literal["UPDATE", "DELETE"]


class Answer(Model):
    """An LLM's answer, the memories that the LLM was given, and the tokens that it used.

    `words_only`: as of a search; the memories were found by words alone.
    """

    answer: str
    memories: tuple[Hit, ...] = ()
    usage: Mapping[str, int] = {}
    words_only: bool = False


class Decided(Model):
    """`decided` false: something is blocked, or the LLM server is lost. Everything stays stored."""

    decided: bool = Field(description="Whether every stored turn is decided.")


class PolicyChange(Model):
    """A change in progress: `decided` of the `records` in the tenant's log are done."""

    policy: str
    generation: int
    decided: int = Field(description="Records of the tenant's log that it has come to.")
    records: int


class Policy(Model):
    """The policy that made the memories now searched, and their generation."""

    policy: str
    generation: int
    change: PolicyChange | None


class Certificate(Model):
    """What an erasure cannot reach; further fields say what it removed."""

    out_of_reach: tuple[str, ...] = ()


class Certificates(Model):
    certificates: tuple[Certificate, ...]


class Replayed(Model):
    replayed: int


class Records(Listed[dict[str, Any]]):
    """Records in order; `next_after_seq`: where the next page starts, null at the end."""

    next_after_seq: int | None


class Job(Model):
    """A background operation of the service. Times are ISO 8601 in UTC."""

    id: str
    status: Literal["queued", "running", "done", "failed"]
    operation: str | None = None
    created_at: str | None = None
    finished_at: str | None = None
    result: Any = None
    error: Any = None

    @property
    def finished(self) -> bool:
        return self.status in ("done", "failed")


_DOCUMENT = TypeAdapter(dict[str, Any])


def document(body: bytes | str) -> dict[str, Any]:
    """A JSON object without a model of its own. UnexpectedAnswer."""
    try:
        return _DOCUMENT.validate_json(body)
    except ValidationError as error:
        raise UnexpectedAnswer(_flaws(error)) from error


def _flaws(error: ValidationError) -> str:
    """The invalid fields, without their values."""
    flaws = error.errors(include_url=False, include_input=False, include_context=False)
    return "; ".join(f"{'.'.join(map(str, flaw['loc'])) or 'the body'}: {flaw['msg']}" for flaw in flaws[:3])
