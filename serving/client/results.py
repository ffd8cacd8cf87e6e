"""The service's responses as frozen models. Unknown fields of a newer service are kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from undertow.engine.base.model import AnswerMode as AnswerMode
from undertow.engine.base.results import HitKind
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


class Results(Model, Generic[ItemT]):
    """Some results; `next`: the cursor of the next page, None at the end."""

    results: tuple[ItemT, ...]
    next: str | None = None


class Added(Model):
    """A turn's receipt: `ADD`, or `DUPLICATE` of an earlier one. `id`, `seq`: None if that one is gone."""

    id: str | None = None
    memory: str
    event: Literal["ADD", "DUPLICATE"]
    seq: int | None = None


class AddedItem(Model):
    """One item of many: stored (`status` 200, `results`), or refused (`detail` says why)."""

    status: int
    results: tuple[Added, ...] | None = None
    detail: str | None = None


class AddedItems(Model):
    items: tuple[AddedItem, ...]


class Hit(Model):
    """A search hit. `score`: the cosine to the query, raised towards 1 by the words they share."""

    id: str
    memory: str
    score: float
    kind: Kind
    timestamp: str | None = None
    source_seqs: tuple[int, ...] = ()


class Found(Model):
    """Hits, nearest first. `recall`: the measured recall of the index; 1.0 for an exact search."""

    results: tuple[Hit, ...]
    recall: float = 1.0


class Memory(Model):
    """One version of a memory. Further fields, such as `messages` of a turn, are in `model_extra`."""

    id: str
    memory: str | None = None
    kind: Kind
    timestamp: str | None = None


class Page(Results[Memory]):
    """A page of memories."""


class Changed(Model):
    """The result of an update or a deletion. An updated turn gets a new `id`."""

    id: str
    kind: Kind
    event: str


class Answer(Model):
    """An LLM's answer, the memories that the LLM was given, and the tokens that it used."""

    answer: str
    memories: tuple[Hit, ...] = ()
    usage: Mapping[str, int] = {}


class Decided(Model):
    decided: bool


class PolicyChange(Model):
    """A change under way: `decided` of the `records` in the tenant's log are processed again."""

    policy: str
    generation: int
    decided: int
    records: int


class Policy(Model):
    """The policy and the generation of the memories that are searched."""

    policy: str
    generation: int
    change: PolicyChange | None = None


class Certificate(Model):
    """What an erasure cannot reach; further fields say what it removed."""

    out_of_reach: tuple[str, ...] = ()


class Certificates(Model):
    certificates: tuple[Certificate, ...]


class Replayed(Model):
    replayed: int


class Records(Results[dict[str, Any]]):
    next_after_seq: int | None = None


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
