"""How the default search was found: evidence recall of one change after the other, over the same vectors.

    python -m undertow.bench.quality.search_steps \
        --data locomo_dev.json --vectors minilm.npz --out docs/results

Offline rankings of all turns of a conversation, where the engine ranks its candidates. Held back: the two
conversations that were not looked at while tuning. No LLM; deterministic.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from undertow.bench.quality.datasets import Question, Sample, load
from undertow.bench.quality.scoring import Score, means, score
from undertow.bench.quality.vectors import KeptVectors
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Turn, spoken
from undertow.engine.base.timestamps import day_in_words
from undertow.engine.encoders.factory import make_encoder
from undertow.engine.search.analyzer import Analyzer, stem
from undertow.engine.search.irregular_forms import BASE_FORMS
from undertow.engine.search.keyword_index import NEIGHBOUR_SHARE, STRETCH_SHARE, in_context, places
from undertow.engine.search.ranking import WORDS_WEIGHT
from undertow.kernels.bm25 import Bm25, Float64s

HELD_BACK = ("conv-42", "conv-43")
_WORDS = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Words:
    """How texts become terms, and which texts a turn has."""

    stems: bool = True
    base_forms: bool = True
    function_words: bool = False
    day: bool = True
    speakers: bool = True
    by_message: bool = False
    neighbours: float = NEIGHBOUR_SHARE
    stretch: float = STRETCH_SHARE
    sessions: bool = True


Fusion = Callable[[Float64s, Float64s], Float64s]
"""(cosines, shares of the words) of all turns, as one score each."""


@dataclass(frozen=True, slots=True)
class Step:
    name: str
    words: Words
    fusion: Fusion


def raised(weight: float = WORDS_WEIGHT) -> Fusion:
    return lambda cosines, shares: 1 - (1 - cosines) * np.exp(-weight * shares)


def reciprocal_ranks(k: int) -> Fusion:
    return lambda cosines, shares: 1 / (k + _ranks(cosines)) + 1 / (k + _ranks(shares))


def _ranks(scores: Float64s) -> Float64s:
    ranks = np.empty(len(scores))
    ranks[np.argsort(-scores, kind="stable")] = np.arange(1, len(scores) + 1)
    return ranks


DEFAULT = Words()
ALONE = Words(base_forms=False, day=False, neighbours=0.0, stretch=0.0)
WITH_NEIGHBOURS = replace(ALONE, neighbours=NEIGHBOUR_SHARE)
WITH_DAY = replace(WITH_NEIGHBOURS, day=True)
BY_WORDS: Fusion = lambda cosines, shares: shares  # noqa: E731
STEPS = (
    Step("cosine alone", ALONE, lambda cosines, shares: cosines),
    Step("BM25 alone, no stemming", replace(ALONE, stems=False, function_words=True), BY_WORDS),
    Step("BM25 alone, light stemming", replace(ALONE, function_words=True), BY_WORDS),
    Step("the same without function words", ALONE, BY_WORDS),
    Step("both, reciprocal ranks (k = 60)", ALONE, reciprocal_ranks(60)),
    Step("both, reciprocal ranks (k = 10)", ALONE, reciprocal_ranks(10)),
    Step("both, cosine + 1.5 x share", ALONE, lambda cosines, shares: cosines + 1.5 * shares),
    Step("both, cosine raised by the share (weight 3)", ALONE, raised()),
    Step("and neighbours, 0.3", WITH_NEIGHBOURS, raised()),
    Step("and the day in words", WITH_DAY, raised()),
    Step("and irregular forms", replace(WITH_DAY, base_forms=True), raised()),
    Step("and the best of the stretch, 0.3", DEFAULT, raised()),
    Step("last one, but weight 2", DEFAULT, raised(2.0)),
    Step("last one, but weight 5", DEFAULT, raised(5.0)),
    Step("last one, but neighbours 0.2", replace(DEFAULT, neighbours=0.2), raised()),
    Step("last one, but neighbours 0.5", replace(DEFAULT, neighbours=0.5), raised()),
    Step("last one, but the best of the stretch, 0.1", replace(DEFAULT, stretch=0.1), raised()),
    Step("last one, but the best of the stretch, 0.2", replace(DEFAULT, stretch=0.2), raised()),
    Step("last one, but the best of the stretch, 0.5", replace(DEFAULT, stretch=0.5), raised()),
    Step("last one, but all in one session without end", replace(DEFAULT, sessions=False), raised()),
    Step("last one, but speakers left out of the words", replace(DEFAULT, speakers=False), raised()),
    Step("last one, but BM25 by message, best of a turn", replace(DEFAULT, by_message=True), raised()),
    Step("last one, but function words kept", replace(DEFAULT, function_words=True), raised()),
)


class Conversation:
    """A sample with the vectors of its turns and scored questions."""

    def __init__(self, sample: Sample, encoder: KeptVectors) -> None:
        self.sample = sample
        self.questions = [question for question in sample.questions if question.is_scored]
        asked = encoder.encode([question.text for question in self.questions]).astype(np.float64)
        turns = encoder.encode([turn.text for turn in sample.turns]).astype(np.float64)
        self._cosines = asked @ turns.T
        numbers = {name: n for n, name in enumerate(dict.fromkeys(t.session_id for t in sample.turns))}
        sessions = np.array([numbers[turn.session_id] for turn in sample.turns], np.int32)
        self._places = {True: places(sessions), False: places(np.zeros_like(sessions))}
        self._shares = cache(self._made)  # several steps share their words

    def scores(self, step: Step) -> Iterable[Score]:
        words = step.words
        alone = self._shares(replace(words, neighbours=0.0, stretch=0.0))
        for question, cosines, own in zip(self.questions, self._cosines, alone, strict=True):
            shares = in_context(
                own,
                self._places[words.sessions],
                neighbour_share=words.neighbours,
                stretch_share=words.stretch,
            )
            best = np.argsort(-step.fusion(cosines, shares), kind="stable")
            yield score(question.category, question.evidence, [self.sample.holds[i] for i in best])

    def _made(self, words: Words) -> list[Float64s]:
        """Of each question: the share that each turn itself has of its words."""
        index = Bm25()
        owners: list[int] = []
        for n, turn in enumerate(self.sample.turns):
            for text in texts_of(turn, words):
                index.put(len(owners), terms_of(text, words))
                owners.append(n)
        return [self._by_turn(index, owners, question, words) for question in self.questions]

    def _by_turn(self, index: Bm25, owners: Sequence[int], question: Question, words: Words) -> Float64s:
        shares = np.zeros(len(self.sample.turns))
        np.maximum.at(shares, owners, index.scores(terms_of(question.text, words), len(owners)))
        return shares


def texts_of(turn: Turn, words: Words) -> list[str]:
    """The turn as one text, or one for each message."""
    groups = [(message,) for message in turn.messages] if words.by_message else [turn.messages]
    texts = [spoken(group) if words.speakers else "\n".join(m.content for m in group) for group in groups]
    if not words.day or turn.timestamp is None:
        return texts
    return [f"{text}\n{day_in_words(turn.timestamp)}" for text in texts]


_TERMS, _NUMBERS = Analyzer(), dict[str, int]()


def terms_of(text: str, words: Words) -> list[int]:
    """As `Analyzer`, but for what is changed; for languages with spaces between words."""
    found = [word for word in _WORDS.findall(text.lower()) if words.function_words or _TERMS.of(word)]
    if words.base_forms:
        found = [BASE_FORMS.get(word, word) for word in found]
    return [_NUMBERS.setdefault(stem(w) if words.stems else w, len(_NUMBERS)) for w in found]


def table(talks: Sequence[Conversation], steps: Sequence[Step] = STEPS) -> list[dict[str, Any]]:
    """Each step's means over the tuned half, the one held back, and all."""
    halves = {
        "tuned": [talk for talk in talks if talk.sample.tenant not in HELD_BACK],
        "held_back": [talk for talk in talks if talk.sample.tenant in HELD_BACK],
        "all": talks,
    }
    return [
        {
            "step": step.name,
            **{half: means([s for talk in some for s in talk.scores(step)]) for half, some in halves.items()},
        }
        for step in steps
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m undertow.bench.quality.search_steps")
    parser.add_argument("--data", type=Path, required=True, help="LoCoMo's file")
    parser.add_argument("--vectors", type=Path, help="keep the vectors here")
    parser.add_argument("--out", type=Path, help="folder for search-steps.json")
    args = parser.parse_args(argv)
    settings = Settings(device="cpu", llm_url=None)
    encoder = KeptVectors(make_encoder(settings), args.vectors)
    talks = [Conversation(s, encoder) for s in load(args.data, "locomo", settings.max_message_bytes)]
    encoder.save()
    found = {"data": args.data.name, "encoder": settings.encoder, "steps": table(talks)}
    line = orjson.dumps(found, option=orjson.OPT_APPEND_NEWLINE)
    sys.stdout.buffer.write(line)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "search-steps.json").write_bytes(line)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
