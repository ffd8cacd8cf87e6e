"""Systems that construct nothing: the whole history in the prompt, and chunks found by their vectors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from undertow.bench.quality import Benchmark
from undertow.bench.quality.datasets import Question, Sample
from undertow.bench.quality.systems.base import Material, Means, OnProgress, System, each_once, shown
from undertow.engine.base.timestamps import in_words
from undertow.engine.encoders.base import Float16
from undertow.prompts.builders import UNDATED

# of the papers: how many chunks a question is given
TOP_CHUNKS: dict[Benchmark, int] = {"locomo": 3, "longmemeval": 5}
# UTF-8 bytes a token, to cut chunks by without any one model's tokenizer; Qwen2.5's has 4.3 on a conversation
# of LoCoMo and 4.7 on an item of LongMemEval
BYTES_PER_TOKEN = 4.3


class FullContext(System):
    """Every turn in order of time. Whether that fits the model is the caller's to check."""

    name = "full-context"

    def __init__(self, means: Means) -> None:
        """Nothing is built."""

    def material(self, sample: Sample, question: Question) -> Material:
        turns = shown([(turn.timestamp, turn.text) for turn in sample.turns])
        return Material(turns=turns, order="time", in_turns=each_once(sample.holds))


@dataclass(frozen=True, slots=True)
class Chunk:
    """Whole messages in a row, each on a line with its date; `date` is that of the first."""

    date: str | None
    text: str
    holds: tuple[str, ...]


class NaiveRAG(System):
    """Chunks of the history, of which the nearest to the question are shown."""

    def __init__(self, chunk_tokens: int, means: Means) -> None:
        self.name = f"naive-rag-{chunk_tokens}"
        self._chunk_tokens = chunk_tokens
        self._top = TOP_CHUNKS[means.benchmark]
        self._encoder = means.encoder()
        self._chunks: dict[str, tuple[list[Chunk], Float16]] = {}

    def build(self, samples: Sequence[Sample], on_progress: OnProgress) -> None:
        for n, sample in enumerate(samples):
            on_progress("chunks embedded", n, len(samples))
            chunks = list(chunked(sample, self._chunk_tokens))
            self._chunks[sample.tenant] = chunks, self._encoder.encode([chunk.text for chunk in chunks])
            self._encoder.encode_queries([question.text for question in sample.questions])

    def material(self, sample: Sample, question: Question) -> Material:
        """The nearest chunks; of equal ones the earlier first."""
        chunks, vectors = self._chunks[sample.tenant]
        asked = self._encoder.encode_queries([question.text])[0]
        # in fp64 such sums are exact, whatever order they are made in
        scores = vectors.astype(np.float64) @ asked.astype(np.float64)
        best = [chunks[i] for i in np.argsort(-scores, kind="stable")[: self._top]]
        turns = shown([(chunk.date, chunk.text) for chunk in best])
        return Material(turns=turns, in_turns=each_once([chunk.holds for chunk in best]))


def chunked(sample: Sample, chunk_tokens: int, *, repeat_dates: bool = True) -> Iterator[Chunk]:
    """Messages up to the budget. None is split: the one that overflows a chunk is still in it.

    Each line has its date; without `repeat_dates` only where it is not that of the line before.
    """
    lines: list[str] = []
    held: list[tuple[str, ...]] = []
    date, tokens, last = None, 0, None
    for turn, message, holds in sample.messages():
        said = message.timestamp or turn.timestamp
        if not lines:
            date = last = said
        dated = f"{in_words(said) if said else UNDATED} " if repeat_dates or said != last else ""
        lines.append(f"{dated}{message.speaker}: {message.content}")
        last = said
        held.append(holds)
        tokens += tokens_of(lines[-1])
        if tokens >= chunk_tokens:
            yield Chunk(date, "\n".join(lines), each_once(held))
            lines, held, tokens = [], [], 0
    if lines:
        yield Chunk(date, "\n".join(lines), each_once(held))


def tokens_of(text: str) -> int:
    return math.ceil(len(text.encode()) / BYTES_PER_TOKEN)
