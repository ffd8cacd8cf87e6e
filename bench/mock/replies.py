"""What the mock LLM replies: a pure function of (seed, messages, schema).

A reply satisfies the schema it is given and echoes words of the material shown, so that later
turns come near the episodes it writes. It understands nothing and says nothing about quality.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from undertow.engine.base.model import Usage

Messages = Sequence[Mapping[str, str]]

_EPISODE_WORDS = 80
_MERGED_OLD_WORDS = 60  # the episode's words first, so that many merges do not wash them out
FACT_WORDS = 14
_CACHE_BLOCK_TOKENS = 16
_JUDGING = "yes or no"
_NOTING = "\nNotes:"
# fields with the number of a stored fact
_FACT_NUMBERS = (".replaces", ".fact")
# fields with the number of a note, stored or new
_NOTE_NUMBERS = (".note", ".same_as")
_MALFORMED = ('{"episodes": [{"te', "I am sorry, I cannot do that.", '{"unexpected": true}', "", "[1, 2, 3]")


@dataclass(frozen=True, slots=True)
class MockReplies:
    """The reply function. Rates are shares of prompts, decided by hash and not by a counter.

    `refusal_rate`: booleans come out false (a merge is refused). `empty_rate`: arrays that may be
    empty are. `malformed_rate`: the reply breaks its schema; its repair does not, unless
    `malformed_sticky`. A judge (it is told to reply yes or no) says no where a boolean comes out false;
    `undecided_rate`: neither.
    """

    seed: int = 0
    refusal_rate: float = 0.0
    empty_rate: float = 0.0
    malformed_rate: float = 0.0
    malformed_sticky: bool = False
    undecided_rate: float = 0.0

    def reply(self, messages: Messages, schema: Mapping[str, Any] | None) -> str:
        """The content of the assistant's message."""
        first = [dict(m) for m in itertools.takewhile(lambda m: m["role"] != "assistant", messages)]
        repairing = len(first) < len(messages)
        key = orjson.dumps([self.seed, first, schema], option=orjson.OPT_SORT_KEYS)
        if share(key, "malformed") < self.malformed_rate and (self.malformed_sticky or not repairing):
            return _MALFORMED[_number(key, "how malformed", len(_MALFORMED))] if schema is not None else ""
        echo = _Echo(key, first[-1]["content"])
        if schema is None and _JUDGING in first[0]["content"]:
            return self._verdict(key)
        if schema is None:
            answer = "From memory: " + (echo.words(_EPISODE_WORDS) or "nothing.")
            return f"Notes: what is shown\nAnswer: {answer}" if _NOTING in first[0]["content"] else answer
        writer = _Writer(
            echo,
            schema,
            refuses=share(key, "refusal") < self.refusal_rate,
            empties=share(key, "empty") < self.empty_rate,
        )
        return json.dumps(writer.write(schema, ""), ensure_ascii=False)

    def _verdict(self, key: bytes) -> str:
        if share(key, "undecided") < self.undecided_rate:
            return "That is hard to say."
        return "No." if share(key, "refusal") < self.refusal_rate else "Yes."


def usage_of(messages: Messages, content: str) -> Usage:
    """Token counts of a call, as of a warm prefix cache: the system message's full blocks hit it."""
    prompt_tokens = sum(_tokens(m["content"]) for m in messages)
    fixed_tokens = _tokens(messages[0]["content"]) if messages[0]["role"] == "system" else 0
    return Usage(
        1, prompt_tokens, fixed_tokens // _CACHE_BLOCK_TOKENS * _CACHE_BLOCK_TOKENS, _tokens(content)
    )


def words_of(text: str) -> list[str]:
    """The pieces in which a reply is streamed: each word with the space before it."""
    words: list[str] = re.findall(r"\s*\S+|\s+", text)
    return words


def _tokens(text: str) -> int:
    return math.ceil(len(text.split()) * 4 / 3)


def _number(key: bytes, purpose: str, below: int) -> int:
    digest = hashlib.blake2b(purpose.encode() + b"\x1f" + key, digest_size=8).digest()
    return int.from_bytes(digest, "big") % below


def share(key: bytes, purpose: str) -> float:
    """A number in [0, 1) that depends on nothing but `key` and `purpose`."""
    return _number(key, purpose, 1 << 32) / (1 << 32)


class _Echo:
    """The material shown in a user message: lines `[number, date, text]` under headings."""

    def __init__(self, key: bytes, user: str) -> None:
        self.key = key
        self.sections: dict[str, list[tuple[int, str]]] = {}
        heading = ""
        for line in user.split("\n"):
            shown = _shown(line)
            if shown is None:
                heading = line.removesuffix(":").strip().lower()
            else:
                self.sections.setdefault(heading, []).append(shown)
        if not self.sections:
            self.sections[""] = [(1, user)]

    def pick(self, purpose: str, below: int) -> int:
        return _number(self.key, purpose, below)

    @property
    def turns(self) -> list[tuple[int, str]]:
        return (
            self.sections.get("turns") or self.sections.get("new turn") or next(iter(self.sections.values()))
        )

    @property
    def facts(self) -> list[tuple[int, str]]:
        return self.sections.get("stored facts", [])

    @property
    def notes(self) -> list[tuple[int, str]]:
        return self.sections.get("stored notes") or self.sections.get("notes", [])

    def words(self, limit: int) -> str:
        """Words of all material; of an episode under a new turn `_MERGED_OLD_WORDS` at most."""
        if "stored episode" in self.sections:
            old = self.sections["stored episode"][0][1].split()[:_MERGED_OLD_WORDS]
            return " ".join(old + self.sections["new turn"][0][1].split()[: limit - len(old)])
        return " ".join(_even(self.turns, limit))


def _shown(line: str) -> tuple[int, str] | None:
    if not line.startswith("["):
        return None
    try:
        number, _, text, *_ = json.loads(line)
    except ValueError:
        return None
    return number, text


def _even(shown: Sequence[tuple[int, str]], limit: int) -> list[str]:
    """At most `limit` words, each text giving its first ones and an equal part."""
    each = max(1, limit // len(shown))
    return [word for _, text in shown for word in text.split()[:each]][:limit]


@dataclass(slots=True)
class _Writer:
    """Walks a JSON schema and writes a value for it; `path` tells strings and numbers apart."""

    echo: _Echo
    root: Mapping[str, Any]
    refuses: bool
    empties: bool

    def write(self, schema: Mapping[str, Any], path: str) -> Any:
        if "$ref" in schema:
            target: Any = self.root
            for part in schema["$ref"].removeprefix("#/").split("/"):
                target = target[part]
            return self.write(target, path)
        if "const" in schema:
            return schema["const"]
        if "enum" in schema:
            return schema["enum"][self.echo.pick(path, len(schema["enum"]))]
        for union in ("anyOf", "oneOf"):
            if union in schema:
                choices = schema[union]
                if path.endswith(_FACT_NUMBERS) and not self.echo.facts:  # nothing there to replace
                    choices = [c for c in choices if c.get("type") == "null"] or choices
                return self.write(choices[self.echo.pick(path, len(choices))], path)
        kind = schema.get("type", "object")
        if isinstance(kind, list):
            kind = kind[self.echo.pick(path, len(kind))]
        return getattr(self, f"_{kind}")(schema, path)

    def _null(self, schema: Mapping[str, Any], path: str) -> None:
        return None

    def _boolean(self, schema: Mapping[str, Any], path: str) -> bool:
        return not self.refuses

    def _object(self, schema: Mapping[str, Any], path: str) -> dict[str, Any]:
        properties = schema.get("properties", {})
        return {name: self.write(sub, f"{path}.{name}") for name, sub in properties.items()}

    def _array(self, schema: Mapping[str, Any], path: str) -> list[Any]:
        least, most = schema.get("minItems", 0), schema.get("maxItems", 5)
        if path.endswith((".turns", ".messages")):
            numbers = [number for number, _ in self._part(path)]
            if path.endswith(".messages") and self.refuses:  # one missing, one twice, one that was not shown
                numbers = [*numbers[1:], *numbers[-1:], len(self.echo.turns) + 1]
            return numbers[: max(most, least)]
        if self.empties and least == 0:
            return []
        count = min(max(least, 1 + self.echo.pick(path, 2)), most)
        return [self.write(schema["items"], f"{path}.{i}of{count}") for i in range(count)]

    def _part(self, path: str) -> list[tuple[int, str]]:
        """The turns of the i-th of n episodes: every n-th one, so that episodes differ."""
        i, n = _ordinal(path)
        return self.echo.turns[i::n] or self.echo.turns

    def _string(self, schema: Mapping[str, Any], path: str) -> str:
        least = schema.get("minLength", 0)
        if self.refuses and least == 0:
            return ""
        if path == ".cue":
            words = self.echo.words(FACT_WORDS)
        elif listed := [name for name in (".facts", ".notes", ".changes") if name in path]:
            i, _ = _ordinal(path.partition(listed[0])[2])
            _, text = self.echo.turns[(self.echo.pick("fact", 97) + i) % len(self.echo.turns)]
            words = " ".join(text.split()[:FACT_WORDS])
        elif path.startswith(".episodes"):
            words = " ".join(_even(self._part(path), _EPISODE_WORDS))
        else:
            words = self.echo.words(_EPISODE_WORDS)
        words = words or "(silence)"  # of material without a word
        return words[: schema.get("maxLength")].rstrip().ljust(least, "x")

    def _integer(self, schema: Mapping[str, Any], path: str) -> int:
        shown = self.echo.turns
        if path.endswith(_FACT_NUMBERS) or ".targets" in path:
            shown = self.echo.facts
        elif path.endswith(_NOTE_NUMBERS) or path.startswith(".links"):
            shown = self.echo.notes
        number = shown[self.echo.pick(path, len(shown))][0] if shown else 1
        return int(min(max(number, schema.get("minimum", number)), schema.get("maximum", number)))

    def _number(self, schema: Mapping[str, Any], path: str) -> float:
        least, most = schema.get("minimum", 0.0), schema.get("maximum", 1.0)
        return float(least + (most - least) * self.echo.pick(path, 1001) / 1000)


def _ordinal(path: str) -> tuple[int, int]:
    """(i, n) of the array item that `path` lies in; (0, 1) outside of arrays."""
    for part in path.split("."):
        i, of, n = part.partition("of")
        if of and i.isdigit() and n.isdigit():
            return int(i), int(n)
    return 0, 1
