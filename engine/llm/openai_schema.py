"""The fields of an OpenAI-compatible server's responses that we read, and streamed replies put together."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field

from undertow.engine.llm.replies import (
    REASONING,
    REASONING_END,
    OnText,
    behind_reasoning,
    is_only_notes,
    notes_of,
)


def _storable(content: object) -> object:
    """Text without lone surrogates, which JSON can carry but UTF-8, and so the journal, cannot."""
    return content.encode(errors="replace").decode() if isinstance(content, str) else content


class _Message(BaseModel):
    """A reply, or a piece of one."""

    content: Annotated[str | None, BeforeValidator(_storable)] = None


class _Choice(BaseModel):
    message: _Message
    finish_reason: str | None = None


class _CachedTokens(BaseModel):
    cached_tokens: int | None = None


class _TokenCounts(BaseModel):
    prompt_tokens: int
    completion_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None


class ChatCompletion(BaseModel):
    choices: list[_Choice] = Field(min_length=1)
    model: str | None = None
    usage: _TokenCounts | None = None


class _Part(BaseModel):
    delta: _Message
    finish_reason: str | None = None


class ChatChunk(BaseModel):
    """One event of a streamed reply; the last has the usage, and no choices."""

    choices: list[_Part] = []
    model: str | None = None
    usage: _TokenCounts | None = None


class _Model(BaseModel):
    id: str


class ModelList(BaseModel):
    data: list[_Model] = Field(min_length=1)


class ReplyStream:
    """The pieces of one reply. The streamed text equals the reply of `read_reply`.

    So neither leading reasoning nor notes are streamed, nor surrounding white space, which is held back until
    more text follows.
    """

    def __init__(self, on_text: OnText, *, after_notes: bool) -> None:
        """`after_notes`: see Prompt."""
        self._on_text = on_text
        self._after_notes = after_notes
        self._notes = ""
        self._told: list[str] = []
        self._space = ""
        self._undecided = ""
        self._last = ChatChunk()
        self.finish_reason: str | None = None

    def take(self, chunk: ChatChunk) -> None:
        """The next event of the stream."""
        self._last.model = chunk.model or self._last.model
        self._last.usage = chunk.usage or self._last.usage
        for part in chunk.choices:
            self.finish_reason = part.finish_reason or self.finish_reason
            self._tell(part.delta.content or "")

    def _beginning(self, content: str) -> str:
        """The answer's beginning, once it is known to be neither reasoning nor notes; else empty."""
        text, self._undecided = behind_reasoning(self._undecided + content), ""
        if text.startswith(REASONING):
            kept = len(REASONING)  # of the reasoning only what may be a part of its end
            self._undecided = text[:kept] + text[kept:][-len(REASONING_END) + 1 :]
            return ""
        if not self.finish_reason and REASONING.startswith(text):
            self._undecided = text
            return ""
        return self._behind_notes(text) if self._after_notes else text

    def _behind_notes(self, text: str) -> str:
        self._notes = notes_of(text)
        if self._notes or self._is_answer(text):
            return text[len(self._notes) :]
        self._undecided = text
        return ""

    def _is_answer(self, text: str) -> bool:
        """Whether a reply without the word "Answer" is one, now that it is complete."""
        return self.finish_reason == "stop" and not is_only_notes(text)

    def _tell(self, content: str) -> None:
        text = self._space + content if self._told else self._beginning(content)
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._told.append(said)
            self._on_text(said)

    @property
    def assembled(self) -> ChatCompletion:
        """The whole reply, in the form of a reply without streaming."""
        message = {"content": self._notes + "".join(self._told) or self._undecided}
        choices = [{"message": message, "finish_reason": self.finish_reason}]
        usage = self._last.usage and self._last.usage.model_dump()
        return ChatCompletion.model_validate({"choices": choices, "model": self._last.model, "usage": usage})
