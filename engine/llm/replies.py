"""The outcomes of a request to an LLM, and the validation of a reply.

There are three outcomes (spec, "When the LLM fails"): a validated reply; `BadReply`, if this prompt gets no
usable reply; `ServerRefused`, if the settings are wrong. A transport failure is retried until it passes or
the caller cancels.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from pydantic import ValidationError

from undertow.engine.base.model import UndertowError, Usage
from undertow.prompts.builders import Prompt
from undertow.prompts.reply_schemas import Reply

SHOWN_ERROR_CHARS = 300
REASONING, REASONING_END = "<think>", "</think>"
_REASONING = re.compile(rf"(\s*{REASONING}.*?{REASONING_END})+\s*", re.DOTALL)
# A line that begins with "Answer:", in bold or not, and something behind it; the same of "Notes".
_ANSWER = re.compile(r"^[ \t>#*_]*answer[ \t*_]*:[*_]*+\s*+(?=\S)", re.IGNORECASE | re.MULTILINE)
_NOTES = re.compile(r"[\s>#*_]*notes[ \t*_]*(:|$)", re.IGNORECASE | re.MULTILINE)
NOTHING = Usage()

OnCall = Callable[[str, str, float, float, Usage, str], None]
"""(tenant, operation, started_s, ended_s, usage, outcome) of one HTTP request, from the client's
thread; times of `time.perf_counter`, the clock of `Trace`; outcome is ok, bad, retry, rejected,
refused, broken (a streamed reply ended early) or cancelled."""

OnText = Callable[[str], None]
"""(the next piece of a reply's text), from the client's thread. It must return at once."""


class BadReply(UndertowError):
    """No usable reply to this prompt, even after one repair. `usage` is the cost of all attempts."""

    def __init__(self, reason: str, usage: Usage) -> None:
        super().__init__(reason, usage)  # these arguments make it picklable, to be sent by a shard
        self.reason = reason
        self.usage = usage

    def __str__(self) -> str:
        return f"The LLM gave no usable reply: {self.reason}"


class ServerRefused(UndertowError):
    """The server refuses all requests: wrong key, URL or model. Jobs stay pending."""


class BrokenOff(UndertowError):
    """A streamed answer ended early; its pieces are no answer.

    `usage`: the known part of its cost. Servers report usage at the end of a reply.
    """

    def __init__(self, reason: str, usage: Usage = NOTHING) -> None:
        super().__init__(reason, usage)  # these arguments make it picklable, to be sent by a shard
        self.usage = usage


class CutOff(ValueError):
    """The reply reached the token limit. Its message is shown to the model for repair."""


class Trouble(Exception):
    """A transport failure. The request may be retried after `retry_after_s`."""

    def __init__(self, text: str, retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class Rejected(Exception):
    """The server rejects this prompt."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A usable reply. `latency_s` counts from submission, including waiting, retries and repair."""

    reply: Reply | str
    usage: Usage
    model: str
    latency_s: float


@dataclass(frozen=True, slots=True)
class ServerReply:
    """The result of one request. If `reply` is None, `problem` says why; `cut_off`: at the token limit."""

    content: str
    reply: Reply | str | None
    problem: str
    usage: Usage
    model: str
    cut_off: bool = False


class ServerHealth(NamedTuple):
    ok: bool
    text: str


def read_reply(prompt: Prompt, content: str, finish_reason: str | None = "stop") -> Reply | str:
    """The validated reply in `content`. The message of a ValueError is shown to the model for repair.

    CutOff, a ValueError: it has reached the token limit.
    """
    content = behind_reasoning(content)
    if finish_reason == "length" or content.startswith(REASONING):
        raise CutOff("it was cut off at the token limit; be shorter")
    if finish_reason == "content_filter":
        raise ValueError("a content filter withheld it")
    if not content.strip():
        raise ValueError("it was empty")
    if prompt.reply is None:
        return (behind_notes(content) if prompt.after_notes else content).strip()
    try:
        reply = prompt.reply.model_validate_json(content)
    except ValidationError as invalid:
        raise ValueError(in_words(invalid)) from invalid
    if reply.has_full_narrative():
        raise ValueError("a text was cut off at the longest allowed; be shorter")
    return reply


def behind_reasoning(content: str) -> str:
    """`content` without leading `<think>` blocks. One that is not closed stays: no reply follows it."""
    block = _REASONING.match(content)
    return content[block.end() :] if block else content.lstrip()


def behind_notes(content: str) -> str:
    """The answer behind its notes; all of a reply that has none. ValueError: there are only notes."""
    if is_only_notes(content):
        raise ValueError('after the notes, no line begins with "Answer:"')
    return content[len(notes_of(content)) :]


def is_only_notes(content: str) -> bool:
    return not notes_of(content) and _NOTES.match(content) is not None


def notes_of(content: str) -> str:
    """The beginning of a reply up to its answer; empty while that has not begun."""
    mark = _ANSWER.search(content)
    return "" if mark is None else content[: mark.end()]


def in_words(invalid: ValidationError) -> str:
    """The first three validation errors, short enough for a prompt or a log line."""
    problems = invalid.errors(include_url=False, include_context=False, include_input=False)
    lines = [f"{'.'.join(map(str, p['loc'])) or 'reply'}: {p['msg']}" for p in problems[:3]]
    return "; ".join(lines)[:SHOWN_ERROR_CHARS]
