"""Adding to memory."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, WithJsonSchema, model_validator

from undertow.serving.http.schemas.base import Messages, Moment, RequestModel, ResponseModel


class Lot(RequestModel):
    """Messages that are added together."""

    messages: Messages
    session_id: str = Field(default="", max_length=1024, description="Messages of one session are in order.")
    timestamp: Moment | None = Field(default=None, description="Of messages without one of their own.")
    metadata: dict[str, Any] = Field(default_factory=dict, description="Kept with each turn; see filters.")


class Item(Lot):
    """One of many."""

    idempotency_key: str | None = Field(default=None, min_length=1, max_length=255)


class AddRequest(RequestModel):
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


class Added(ResponseModel):
    """One turn. DUPLICATE: it was stored before, under the same Idempotency-Key."""

    id: str | None
    memory: str
    event: Literal["ADD", "DUPLICATE"]
    seq: int | None


class AddedItem(ResponseModel):
    """What became of an item: its turns, or why it was not taken."""

    status: int
    results: list[Added] | None = None
    detail: str | None = None
    errors: list[dict[str, str]] | None = None


class AddResponse(ResponseModel):
    """`results`, one a turn; of a request with items, `items` in their order."""

    results: list[Added] | None = None
    items: list[AddedItem] | None = None
