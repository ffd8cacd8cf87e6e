"""Assembles a streamed reply."""

from __future__ import annotations

from undertow.engine.llm.openai_schema import ChatChunk, ChatCompletion
from undertow.engine.llm.replies import OnText


class ReplyStream:
    """The pieces of one reply. The streamed text equals the reply of `read_reply`.

    So surrounding white space is not streamed: it is held back until more text follows.
    """

    def __init__(self, on_text: OnText) -> None:
        self._on_text = on_text
        self._told: list[str] = []
        self._space = ""
        self._last = ChatChunk()
        self.finish_reason: str | None = None

    def take(self, chunk: ChatChunk) -> None:
        """The next event of the stream."""
        self._last.model = chunk.model or self._last.model
        self._last.usage = chunk.usage or self._last.usage
        for part in chunk.choices:
            self.finish_reason = part.finish_reason or self.finish_reason
            self._tell(part.delta.content or "")

    def _tell(self, content: str) -> None:
        text = self._space + content if self._told else content.lstrip()
        said = text.rstrip()
        self._space = text[len(said) :]
        if said:
            self._told.append(said)
            self._on_text(said)

    @property
    def together(self) -> ChatCompletion:
        """The whole reply, in the form of a reply without streaming."""
        message = {"content": "".join(self._told)}
        choices = [{"message": message, "finish_reason": self.finish_reason}]
        usage = self._last.usage and self._last.usage.model_dump()
        return ChatCompletion.model_validate({"choices": choices, "model": self._last.model, "usage": usage})
