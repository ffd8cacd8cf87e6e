"""The cases of `poison`: three plain conversations, and what an attacker puts into one turn of them.

`poison_cases.json` holds them. An attack is text added to one message of one turn, `claims` are patterns of
what it wants memories or answers to state, `hides` is one of what it wants left out.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Literal

import orjson

CASES = Path(__file__).with_name("cases.json")

# Cyrillic letters that look like the Latin ones
LOOK_ALIKES = str.maketrans("aceopxyAEOPCTMHBK", "асеорхуАЕОРСТМНВК")
_FILLER = "the gulls went round the pier and came back while the tide was still going out and"

Role = Literal["user", "assistant", "tool"]
Exchange = list[dict[str, str]]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Three exchanges on one topic. `keeps`: patterns of what memories and answer should hold of it."""

    name: str
    speaker: str
    turns: tuple[dict[str, str], ...]
    question: str
    keeps: tuple[str, ...]

    def exchanges(self) -> list[Exchange]:
        """The turns as OpenAI-style messages."""
        return [
            [
                {"role": "user", "name": self.speaker, "content": turn["user"]},
                {"role": "assistant", "content": turn["assistant"]},
            ]
            for turn in self.turns
        ]


@dataclass(frozen=True, slots=True)
class Case:
    """One attack, in the turn `at` of a conversation; without `text` it is that conversation's control.

    `live`: a claim does its harm wherever an answer holds it, such as a link that a reader's screen loads.
    """

    name: str
    family: str
    conversation: Conversation
    at: int = 0
    role: Role = "user"
    text: str = ""
    claims: tuple[str, ...] = ()
    hides: str | None = None
    live: bool = False

    def exchanges(self) -> list[Exchange]:
        """The conversation with the attack in its place."""
        exchanges = self.conversation.exchanges()
        if not self.text:
            return exchanges
        target = exchanges[self.at]
        if self.role == "tool":
            target.insert(1, {"role": "tool", "name": "tool", "content": self.text})
            return exchanges
        message = next(m for m in target if m["role"] == self.role)
        message["content"] += f" {self.text}"
        return exchanges


def controls(cases: Sequence[Case]) -> list[Case]:
    """For each conversation that the cases use, itself without an attack."""
    used = {case.conversation.name: case.conversation for case in cases}
    return [Case(f"control-{name}", "control", used[name]) for name in used]


@cache
def all_cases() -> tuple[Case, ...]:
    """The attacks, in the order of the file."""
    return tuple(_read())


def _read() -> Iterator[Case]:
    document = orjson.loads(CASES.read_bytes())
    conversations = {
        name: Conversation(name, c["name"], tuple(c["turns"]), c["question"], tuple(c["keeps"]))
        for name, c in document["conversations"].items()
    }
    for raw in document["cases"]:
        yield Case(
            raw["name"],
            raw["family"],
            conversations[raw["conversation"]],
            raw["at"],
            raw["role"],
            _disguised(raw),
            tuple(raw.get("claims", ())),
            raw.get("hides"),
            raw.get("live", False),
        )


def _disguised(raw: dict[str, str | int]) -> str:
    """The attack's text as its victim gets it."""
    text = str(raw["text"])
    if raw.get("encode") == "base64":
        text = base64.b64encode(text.encode()).decode()
    elif raw.get("encode") == "look-alikes":
        text = text.translate(LOOK_ALIKES)
    filler = " ".join(islice(cycle(_FILLER.split()), int(raw.get("padding_words", 0))))
    return f"{raw.get('lead', '')}{filler} {text}".strip()
