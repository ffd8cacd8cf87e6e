"""Loads LoCoMo and LongMemEval files: conversations, questions, and the evidence that each turn holds.

The engine's own readers make the turns; the questions and the evidence ids are added here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from undertow.bench.quality import Benchmark
from undertow.engine.base.model import BadInput, InputError, Message, Turn, lines_of
from undertow.engine.base.timestamps import parse_timestamp
from undertow.engine.readers import detect_format, read
from undertow.engine.readers.datasets import raw_samples
from undertow.engine.readers.source import Log

# LoCoMo's categories by number, as the paper (Maharana et al., 2024) names them
CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}
# what asks about things that were never said has no evidence to find. LoCoMo's such questions are left out
# of every score; to LongMemEval's, which it marks in their ids, the right answer is that one cannot know.
ADVERSARIAL = "adversarial"
ABSTENTION = "abstention"
_ABSTENTION_MARK = "_abs"

_SEPARATOR = re.compile(r"[;,]")
_SCHEMA = "Compare with the published schema of the data set."


@dataclass(frozen=True, slots=True)
class Question:
    """`evidence`: ids of the messages (LoCoMo) or sessions (LongMemEval) that hold the answer, each once.

    `answer`: the gold one, "" only where the category has none. `asked_on`: ISO 8601, where the file says.
    """

    id: str
    text: str
    category: str
    evidence: tuple[str, ...]
    answer: str
    asked_on: str | None

    @property
    def is_scored(self) -> bool:
        """Whether its evidence is looked for."""
        return bool(self.evidence) and not self.has_no_answer

    @property
    def has_no_answer(self) -> bool:
        """Whether the conversation does not tell the answer."""
        return self.category in (ADVERSARIAL, ABSTENTION)

    @property
    def is_searched(self) -> bool:
        """Whether a measurement of evidence searches for it."""
        return self.is_scored or self.has_no_answer

    @property
    def is_answered(self) -> bool:
        """Whether it is asked, and its answer judged."""
        return self.category != ADVERSARIAL


@dataclass(frozen=True, slots=True)
class Sample:
    """One conversation or haystack. `holds[i]`: the ids of the evidence that turn i would be.

    `observations`: by the id of a message, what LoCoMo's own LLM has noted of it (else none).
    """

    tenant: str
    turns: tuple[Turn, ...]
    holds: tuple[tuple[str, ...], ...]
    questions: tuple[Question, ...]
    observations: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def messages(self) -> Iterator[tuple[Turn, Message, tuple[str, ...]]]:
        """Every message in order, with its turn and the evidence that it would be."""
        for turn, held in zip(self.turns, self.holds, strict=True):
            by_message = len(held) == len(turn.messages)  # else the evidence is the whole session
            for n, message in enumerate(turn.messages):
                yield turn, message, held[n : n + 1] if by_message else held

    def observed(self) -> dict[str, tuple[str, ...]]:
        """The observations by the line of their message in a turn's text."""
        return {
            line: found
            for _, message, held in self.messages()
            for line in lines_of((message,))
            if (found := tuple(text for piece in held for text in self.observations.get(piece, ())))
        }


def load(path: Path, benchmark: Benchmark, max_message_bytes: int) -> Iterator[Sample]:
    """The samples of a file, one at a time. InputError names file, sample, field and cure.

    A sample with any session that cannot be read is an error: a score over what is left would pass for one
    of the benchmark.
    """
    log = Log.of(path)
    found = detect_format(log)
    if found != benchmark:
        cure = f"Run `undertow eval {found}`." if found in ("locomo", "longmemeval") else _SCHEMA
        raise InputError(BadInput(str(log), None, None, f"is of the format {found}, not {benchmark}", cure))
    every = raw_samples(log)
    first_at: dict[str, int] = {}
    for record in read(log, benchmark, max_message_bytes=max_message_bytes):
        if record.errors:
            raise InputError(record.errors[0])
        raw = next(every)
        try:
            sample = (_locomo if benchmark == "locomo" else _longmemeval)(raw, record.turns)
            _check_new(sample, benchmark, first_at, record.position)
        except _Unfit as unfit:
            problem = BadInput(str(log), record.position, unfit.field, unfit.reason, unfit.cure)
            raise InputError(problem) from None
        yield sample


def _check_new(sample: Sample, benchmark: Benchmark, first_at: dict[str, int], position: int) -> None:
    """A tenant's name is its sample's id, and its questions' ids hang on it: none may stand twice."""
    first = first_at.setdefault(sample.tenant, position)
    if first != position:
        field = "sample_id" if benchmark == "locomo" else "question_id"
        reason = f"{sample.tenant!r:.80} stands twice, the first time in sample {first}"
        raise _Unfit(field, reason, "Give each an id of its own, or leave one out.")


class _Unfit(ValueError):
    def __init__(self, field: str, reason: str, cure: str = _SCHEMA) -> None:
        super().__init__(field, reason)
        self.field, self.reason, self.cure = field, reason, cure


def _locomo(raw: Mapping[str, Any], turns: tuple[Turn, ...]) -> Sample:
    """A turn holds the messages of its session that follow those of the turn before it."""
    conversation = raw["conversation"]
    taken: dict[str, int] = {}
    holds = []
    for turn in turns:
        start = taken.get(turn.session_id, 0)
        taken[turn.session_id] = stop = start + len(turn.messages)
        holds.append(tuple(str(m.get("dia_id")) for m in conversation[turn.session_id][start:stop]))
    asked = _list(raw, "qa")
    tenant = str(raw["sample_id"])
    questions = tuple(_locomo_question(item, n, tenant) for n, item in enumerate(asked))
    return Sample(tenant, turns, tuple(holds), questions, _observations(raw))


def _observations(raw: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """By message id; a file may lack them. An observation of several messages belongs to each."""
    found: dict[str, tuple[str, ...]] = {}
    for by_speaker in (raw.get("observation") or {}).values():
        for text, source in (entry for entries in by_speaker.values() for entry in entries):
            for piece in _parts([source] if isinstance(source, str) else source):
                found[piece] = (*found.get(piece, ()), text)
    return found


def _parts(entries: Iterable[str]) -> list[str]:
    """The ids in these texts, each once: some hold several."""
    ids = (part.strip() for entry in entries for part in _SEPARATOR.split(entry))
    return list(dict.fromkeys(part for part in ids if part))


def _locomo_question(raw: Any, number: int, tenant: str) -> Question:
    where = f"qa[{number}]"
    category = raw.get("category") if isinstance(raw, dict) else None
    if category not in CATEGORIES:
        known = ", ".join(map(str, CATEGORIES))
        raise _Unfit(f"{where}.category", f"is {category!r:.40}, not one of {known}")
    evidence = tuple(_parts(_texts(raw, "evidence", where)))
    name = CATEGORIES[category]
    text = _text(raw, "question", where)
    answer = "" if name == ADVERSARIAL else _answer(raw, where)
    return Question(f"{tenant}:{number}", text, name, evidence, answer, None)


def _longmemeval(raw: Mapping[str, Any], turns: tuple[Turn, ...]) -> Sample:
    tenant = str(raw["question_id"])
    evidence = tuple(dict.fromkeys(_texts(raw, "answer_session_ids", "")))
    category = ABSTENTION if tenant.endswith(_ABSTENTION_MARK) else _text(raw, "question_type", "")
    text, asked_on = _text(raw, "question", ""), _date(raw, "question_date")
    question = Question(tenant, text, category, evidence, _answer(raw, ""), asked_on)
    return Sample(tenant, turns, tuple((turn.session_id,) for turn in turns), (question,))


def _list(raw: Mapping[str, Any], field: str, within: str = "") -> list[Any]:
    found = raw.get(field, [] if within else None)
    if not isinstance(found, list):
        raise _Unfit(f"{within}.{field}".lstrip("."), "is missing or not a list")
    return found


def _texts(raw: Mapping[str, Any], field: str, within: str) -> list[str]:
    found = _list(raw, field, within)
    if not all(isinstance(item, str) for item in found):
        raise _Unfit(f"{within}.{field}".lstrip("."), "must hold ids as text")
    return found


def _text(raw: Mapping[str, Any], field: str, within: str) -> str:
    found = raw.get(field)
    if not isinstance(found, str) or not found.strip():
        raise _Unfit(f"{within}.{field}".lstrip("."), "is missing or not text")
    return found


def _answer(raw: Mapping[str, Any], within: str) -> str:
    found = raw.get("answer")
    if isinstance(found, int | float) and not isinstance(found, bool):
        return str(found)
    return _text(raw, "answer", within)


def _date(raw: Mapping[str, Any], field: str) -> str | None:
    """A date that is there must be one: what "last week" means hangs on it."""
    if raw.get(field) is None:
        return None
    try:
        return parse_timestamp(raw[field])
    except ValueError as error:
        raise _Unfit(field, str(error)) from None
