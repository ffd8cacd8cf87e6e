"""What one server refuses of a request, and whether it refuses every request: learned from its HTTP 400s.

OpenAI's reasoning models want `max_completion_tokens` and no `temperature`; other servers refuse lengths in a
schema, or any schema. What is refused is left out of that request, and of later ones once it was accepted so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from undertow.prompts.builders import Prompt

Part = Literal["max_tokens", "temperature", "seed", "frequency_penalty", "schema bounds", "response_format"]

_PARAMETERS: tuple[Part, ...] = ("max_tokens", "temperature", "seed", "frequency_penalty")
# After a reply that was cut off: small models may repeat a sentence without end (docs/decisions/0008).
_PENALTY = 0.3
_UNSUPPORTED = re.compile(r"support|permitted|allowed|accept|unrecogni|unknown|unexpected|forbidden", re.I)
_OF_SCHEMA = re.compile(r"response_format|schema|grammar|(min|max)(Length|Items)", re.I)
# a complaint about one prompt, which other prompts need not share; OpenAI's of schemas say "In context=..."
_OF_PROMPT = re.compile(
    r"context(?!=)|too (long|large|many)|\blength\b|content.(filter|management)|moderation|policy", re.I
)
_NUMBERED = re.compile(r"\S*\d\S*")
_SYSTEMATIC_PROMPTS = 3


def request_body(
    prompt: Prompt, messages: list[dict[str, str]], reply_tokens: int, longer: bool, refused: frozenset[Part]
) -> dict[str, Any]:
    """A chat completion request without its model and what is `refused`. `longer`: a reply was cut off."""
    limit = "max_completion_tokens" if "max_tokens" in refused else "max_tokens"
    body: dict[str, Any] = {"messages": messages, "temperature": 0, "seed": 0, limit: reply_tokens}
    if longer:
        body["frequency_penalty"] = _PENALTY
    if prompt.reply is not None:
        reply, bounded = prompt.reply, "schema bounds" not in refused
        schema = reply.wire_schema() if bounded else reply.unbounded_schema()
        form = {"name": prompt.operation, "schema": schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": form}
    return {name: value for name, value in body.items() if name not in refused}


def refused_part(
    body: Mapping[str, Any], message: str, param: str | None, refused: frozenset[Part]
) -> Part | None:
    """The part of `body` to leave out after this HTTP 400; None: none that a request can do without.

    `param`: what the server names as the cause. Without it, its message is searched.
    """
    for part in _PARAMETERS:
        if part in body and refuses(part, message, param):
            return part
    of_schema = _OF_SCHEMA.search(str(param or message)) and not _OF_PROMPT.search(message)
    if "response_format" not in body or not of_schema:
        return None
    return "response_format" if "schema bounds" in refused else "schema bounds"


def refuses(name: str, message: str, param: str | None) -> bool:
    """Whether this HTTP 400 says that the server does not support the parameter `name`, or its value."""
    named = re.search(rf"\b{re.escape(name)}\b", str(param or message))
    return bool(named and (param or _UNSUPPORTED.search(message)) and not _OF_PROMPT.search(message))


class Rejections:
    """The different prompts that a server has rejected in a row, in the same words."""

    def __init__(self) -> None:
        self._words = ""
        self._prompts: set[int] = set()

    def clear(self) -> None:
        """The server has accepted a prompt."""
        self._prompts.clear()

    def are_systematic(self, prompt: Prompt, message: str) -> bool:
        """Count a rejection. True: not this prompt is the cause, as several others were rejected like it."""
        words = _NUMBERED.sub("#", message)
        if words != self._words or _OF_PROMPT.search(words):
            self.clear()
        self._words = words
        self._prompts.add(hash(prompt.user))
        return len(self._prompts) >= _SYSTEMATIC_PROMPTS
