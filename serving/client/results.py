"""What the service answers, as frozen models. Fields that a newer service adds are kept, not refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from undertow.serving.client.errors import UnexpectedAnswer

Kind = Literal["turn", "episode", "fact"]
AnswerMode = Literal["hybrid", "best_effort"]
AnswerT = TypeVar("AnswerT", bound="Model")


class Model(BaseModel):
    """One JSON object of the service."""

    model_config = ConfigDict(frozen=True, extra="allow")

    @classmethod
    def read(cls: type[AnswerT], body: bytes | str) -> AnswerT:
        """The object that a body holds. UnexpectedAnswer: another one, or none."""
        try:
            return cls.model_validate_json(body)
        except ValidationError as error:
            raise UnexpectedAnswer(_flaws(error)) from error


class Added(Model):
    """What became of one turn: `ADD`, or `DUPLICATE` of one that was added before.

    `id` and `seq` are None of a duplicate whose first is no more.
    """

    id: str | None = None
    memory: str
    event: Literal["ADD", "DUPLICATE"]
    seq: int | None = None


class AddedTurns(Model):
    results: tuple[Added, ...]


class AddedItem(Model):
    """What became of one item of many: stored (`status` 200, `results`), or refused, `detail` saying why."""

    status: int
    results: tuple[Added, ...] | None = None
    detail: str | None = None


class AddedItems(Model):
    items: tuple[AddedItem, ...]


class Hit(Model):
    """One memory found. `score` is its cosine to the query, raised towards 1 by the words they share."""

    id: str
    memory: str
    score: float
    kind: Kind
    timestamp: str | None = None
    source_seqs: tuple[int, ...] = ()


class Found(Model):
    """What a search found, nearest first. `recall`: measured, of the index used; 1.0 of an exact search."""

    results: tuple[Hit, ...]
    recall: float = 1.0


class Memory(Model):
    """One version of a memory. Further fields, such as `messages` of a turn, are in `model_extra`."""

    id: str
    memory: str | None = None
    kind: Kind
    timestamp: str | None = None


class Page(Model):
    """Some memories, and the cursor to ask for those behind them with; None: there are none."""

    results: tuple[Memory, ...]
    next: str | None = None


class History(Model):
    results: tuple[Memory, ...]


class Changed(Model):
    """What an update or a deletion did. A turn's update gives it a new `id`."""

    id: str
    kind: Kind
    event: str


class Answer(Model):
    """An LLM's answer, the memories that it was given, and the tokens it took."""

    answer: str
    memories: tuple[Hit, ...] = ()
    usage: Mapping[str, int] = {}


class Decided(Model):
    decided: bool


class PolicyChange(Model):
    """A change under way: of `records` in the tenant's log, so many are `decided` anew."""

    policy: str
    generation: int
    decided: int
    records: int


class Policy(Model):
    """What has made the memories that are searched, and as which generation of them."""

    policy: str
    generation: int
    change: PolicyChange | None = None


class Certificate(Model):
    """What an erasure removed, in further fields too, and what it cannot reach."""

    out_of_reach: tuple[str, ...] = ()


class Certificates(Model):
    certificates: tuple[Certificate, ...]


class Replayed(Model):
    replayed: int


class Names(Model):
    results: tuple[str, ...]
    next: str | None = None


class Records(Model):
    results: tuple[dict[str, Any], ...]
    next_after_seq: int | None = None


class Job(Model):
    """An operation that goes on at the service. Times are ISO 8601 in UTC."""

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


class Jobs(Model):
    results: tuple[Job, ...]


_DOCUMENT = TypeAdapter(dict[str, Any])


def document(body: bytes | str) -> dict[str, Any]:
    """A JSON object without a model of its own. UnexpectedAnswer."""
    try:
        return _DOCUMENT.validate_json(body)
    except ValidationError as error:
        raise UnexpectedAnswer(_flaws(error)) from error


def _flaws(error: ValidationError) -> str:
    """Which fields are wrong, without what they hold."""
    flaws = error.errors(include_url=False, include_input=False, include_context=False)
    return "; ".join(f"{'.'.join(map(str, flaw['loc'])) or 'the body'}: {flaw['msg']}" for flaw in flaws[:3])
