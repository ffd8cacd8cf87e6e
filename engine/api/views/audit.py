"""What is doubtful about a tenant's episodes and facts, from the journal alone: no LLM, no encoder."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from undertow.engine.api.views.reports import Reports
from undertow.engine.base.model import MemoryKind
from undertow.engine.base.results import Report
from undertow.kernels.array_types import Float32s

KINDS: tuple[MemoryKind, ...] = ("episode", "fact")
# Cosines: the same statement again; statements about the same thing.
REPEATED, RELATED = 0.95, 0.8
# And the part of their words that both have.
REPEATED_WORDS, RELATED_WORDS = 0.8, 0.5
AT_ONCE = 1_024

_SHORT_NOT = re.compile(r"n['’]t\b")
_WORD = re.compile(r"\w+")
_NEGATIONS = frozenset(("no", "not", "never", "none", "nobody", "nothing", "without", "cannot"))
# "may" is left out: it is more often a verb than a month
_DATES = frozenset(
    (
        *("monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday", "january"),
        *("february", "march", "april", "june", "july", "august", "september", "october", "november"),
        "december",
    )
)
_COUNTS = (
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven"),
    "twelve",
)
_DIGITS = {word: str(n) for n, word in enumerate(_COUNTS)} | {"once": "1", "twice": "2"}


@dataclass(frozen=True, slots=True)
class _Claims:
    """The words of a text: those that it is about, its numbers and dates, and its negations."""

    words: frozenset[str]
    numbers: frozenset[str]
    negations: int

    @classmethod
    def of(cls, text: str) -> _Claims:
        words = _WORD.findall(_SHORT_NOT.sub(" not", text.lower()))
        words = [_DIGITS.get(word, word) for word in words]
        numbers = frozenset(word for word in words if word in _DATES or word[0].isdigit())
        negations = [word for word in words if word in _NEGATIONS]
        return cls(frozenset(words) - numbers - set(negations), numbers, len(negations))

    def shared(self, other: _Claims) -> float:
        """The part of the words of both that both have."""
        return len(self.words & other.words) / (len(self.words | other.words) or 1)

    def may_contradict(self, other: _Claims) -> bool:
        """Much the same words, but other numbers or dates in both, or a negation more in one."""
        if self.shared(other) < RELATED_WORDS:
            return False
        return bool(self.numbers - other.numbers and other.numbers - self.numbers) or (
            self.negations % 2 != other.negations % 2
        )


def audit(reports: Reports, tenant: str, k: int) -> Report:
    """A tenant's doubtful memories: lists of `repeats`, `contradictions`, `never_shown` and `single_source`.

    A repeat has the nearest earlier memory of its kind with a cosine of at least REPEATED and much the same
    words. Two facts may contradict each other if their cosine is at least RELATED and they have many of the
    same words, but other numbers or dates, or one has a negation more: a person has to judge. What differs in
    a name alone is not seen. A memory is never shown if no vector of its source turns has it among the `k`
    nearest of its kind. UnknownTenant.
    """
    reports.catalog.require(tenant)
    turns = dict(reports.turns_with_vectors(tenant))
    found: Report = {"tenant": tenant, "turns": len(turns), "episodes": 0, "facts": 0}
    lists: dict[str, list[Report]] = {
        name: [] for name in ("repeats", "contradictions", "never_shown", "single_source")
    }
    for kind in KINDS:
        pairs = list(reports.memory_vectors(tenant, kind))
        memories, vectors = [memory for memory, _ in pairs], _stacked([vector for _, vector in pairs])
        found[f"{kind}s"] = len(memories)
        for name, item in _pairs(memories, vectors):
            lists[name].append(item)
        lists["never_shown"] += _never_shown(memories, vectors, turns, k)
        lists["single_source"] += [_brief(m) for m in memories if len(m["source_seqs"]) == 1]
    return found | lists


def _pairs(memories: Sequence[Report], vectors: Float32s) -> Iterator[tuple[str, Report]]:
    """Each memory with earlier ones of its kind: repeats and contradictions."""
    claims = [_Claims.of(memory["text"]) for memory in memories]
    for start in range(0, len(memories), AT_ONCE):
        cosines = vectors[start : start + AT_ONCE] @ vectors.T
        for at, row in enumerate(cosines, start):
            related = np.flatnonzero(row[:at] >= RELATED)
            nearest_first = related[np.argsort(-row[related], kind="stable")].tolist()
            doubtful = next((n for n in nearest_first if claims[at].may_contradict(claims[n])), None)
            same = next((n for n in nearest_first if _is_repeat(row[n], claims[at], claims[n])), None)
            if doubtful is not None and memories[at]["kind"] == "fact":
                yield "contradictions", _pair(memories[at], memories[doubtful], row[doubtful])
            if same is not None:
                yield "repeats", _pair(memories[at], memories[same], row[same])


def _is_repeat(cosine: np.float32, one: _Claims, other: _Claims) -> bool:
    if cosine < REPEATED or one.may_contradict(other):
        return False
    return one.shared(other) >= REPEATED_WORDS


def _never_shown(
    memories: Sequence[Report], vectors: Float32s, turns: dict[int, NDArray[np.float16]], k: int
) -> list[Report]:
    hidden = []
    for at, memory in enumerate(memories):
        sources = [turns[seq] for seq in memory["source_seqs"] if seq in turns]
        if not sources:
            continue
        cosines = _stacked(sources) @ vectors.T
        rank = int((cosines > cosines[:, at : at + 1]).sum(1).min()) + 1
        if rank > k:
            hidden.append(_brief(memory) | {"rank": rank})
    return hidden


def _stacked(vectors: Sequence[NDArray[np.float16]]) -> Float32s:
    return np.array(vectors, np.float32) if vectors else np.empty((0, 0), np.float32)


def _brief(memory: Report) -> Report:
    return {name: memory[name] for name in ("id", "kind", "text", "timestamp", "source_seqs")}


def _pair(memory: Report, earlier: Report, cosine: np.float32) -> Report:
    return _brief(memory) | {"earlier": _brief(earlier), "cosine": float(cosine)}
