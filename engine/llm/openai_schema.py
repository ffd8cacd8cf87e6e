"""The fields of an OpenAI-compatible server's responses that we read, and streamed replies put together."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, Field

from undertow.engine.llm.replies import REASONING, REASONING_END, OnText, behind_reasoning


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

    So neither leading reasoning is streamed nor surrounding white space, which is held back until more text
    follows.
    """

    def __init__(self, on_text: OnText) -> None:
        self._on_text = on_text
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

    def _behind_reasoning(self, content: str) -> str:
        """The reply's beginning, once it is known to be none of a block of reasoning; else empty."""
        text, self._undecided = behind_reasoning(self._undecided + content), ""
        begun = text.startswith(REASONING)
        if not begun and (self.finish_reason or not REASONING.startswith(text)):
            return text
        kept = len(REASONING)  # of the reasoning only what may be a part of its end
        self._undecided = text[:kept] + text[kept:][-len(REASONING_END) + 1 :]
        return ""

    def _tell(self, content: str) -> None:
        text = self._space + content if self._told else self._behind_reasoning(content)
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._told.append(said)
            self._on_text(said)

    @property
    def assembled(self) -> ChatCompletion:
        """The whole reply, in the form of a reply without streaming."""
        message = {"content": "".join(self._told) or self._undecided}
        choices = [{"message": message, "finish_reason": self.finish_reason}]
        usage = self._last.usage and self._last.usage.model_dump()
        return ChatCompletion.model_validate({"choices": choices, "model": self._last.model, "usage": usage})
