"""Single memories, and lists of them."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import model_validator

from undertow.serving.http.schemas.base import Kind, Messages, RequestModel, ResponseModel, Words


class MemoryView(ResponseModel):
    """A memory as it stands, or as a version stood. Of a turn also its messages, session_id and metadata; of
    an episode or a fact its version, and the seqs of the turns that it rests on."""

    id: str
    kind: Kind
    memory: str
    timestamp: str | None


class MemoryList(ResponseModel):
    """In order of birth; `next` is the cursor of what follows, null at the end."""

    results: list[MemoryView]
    next: str | None


class History(ResponseModel):
    """Oldest first."""

    results: list[MemoryView]


class UpdateRequest(RequestModel):
    """New words for any memory, or the messages of one exchange for a turn: give one of both."""

    text: Words | None = None
    messages: Messages | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.text is None) == (self.messages is None):
            raise ValueError("give text, or messages")
        return self


class Changed(ResponseModel):
    """`id`: a turn has a new one after an update."""

    id: str
    kind: Kind
    event: Literal["UPDATE", "DELETE"]


class AllDeleted(ResponseModel):
    event: Literal["DELETE_ALL"] = "DELETE_ALL"
