"""The systems that are measured side by side, and what each gives the one answering prompt."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undertow.bench.quality import Benchmark
from undertow.bench.quality.datasets import Question, Sample
from undertow.bench.quality.vectors import KeptVectors
from undertow.engine.base.config import Settings
from undertow.engine.base.model import AnswerStyle, Usage
from undertow.engine.base.timestamps import in_words
from undertow.engine.llm.client import LLMClient
from undertow.prompts.builders import Order, Prompt, ShownMemory, answer_prompt

OnProgress = Callable[[str, int, int], None]
"""(what is being done, how much of it is done, of how much)."""


@dataclass(frozen=True, slots=True)
class Material:
    """What a system gives the answering prompt; each tuple in the `order` that the prompt tells of.

    Ids of evidence, each once, () where it cannot be told: `in_turns` lies in the shown turns themselves,
    `behind_memories` in the turns that shown episodes and facts rest on, whether those tell of it or not,
    `in_memories` in those of them whose memory tells of it (`telling.py`).
    """

    episodes: tuple[ShownMemory, ...] = ()
    facts: tuple[ShownMemory, ...] = ()
    turns: tuple[ShownMemory, ...] = ()
    order: Order = "relevance"
    in_turns: tuple[str, ...] = ()
    behind_memories: tuple[str, ...] = ()
    in_memories: tuple[str, ...] = ()


# yields prompts, each of which is sent its reply or thrown the BadReply; returns the answer and its material
Steps = Generator[Prompt, Any, tuple[str, Material]]


class System:
    """A memory of conversations. Used from one thread."""

    name: str

    def build(self, samples: Sequence[Sample], on_progress: OnProgress) -> None:
        """Take every sample in. Resumable: what is built already is not built again."""

    def material(self, sample: Sample, question: Question) -> Material:
        """The most that any of its `steps` shows the answering prompt."""
        raise NotImplementedError

    def steps(self, sample: Sample, question: Question, material: Material, style: AnswerStyle) -> Steps:
        """How the question is answered: by default in one step from `material`, which is the system's."""
        reply = yield prompt_of(question, material, style)
        return str(reply), material

    def construction(self, tenant: str) -> dict[str, Usage]:
        """What building a tenant's memory has cost, by operation; {} if nothing is constructed."""
        return {}

    def counts(self) -> dict[str, int]:
        """Counts of what has been built; {} if nothing is constructed."""
        return {}

    def close(self) -> None:
        """Release what the system holds open."""


@dataclass(frozen=True, slots=True)
class Means:
    """What a system is made with.

    `settings`: those of the run; `llm_url` is set. `folder`: the system's own, kept between runs; it need not
    be there yet. `encoder`: the one that all systems share, loaded at the first call. `llm`: in place of the
    server's, for what is constructed.
    """

    benchmark: Benchmark
    settings: Settings
    folder: Path
    encoder: Callable[[], KeptVectors]
    llm: LLMClient | None = None


def shown(items: Sequence[tuple[str | None, str]]) -> tuple[ShownMemory, ...]:
    """(date, text) of each, numbered as they stand, dated as the engine dates what it answers from."""
    return tuple(ShownMemory(n, date and in_words(date), text) for n, (date, text) in enumerate(items, 1))


def each_once(held: Sequence[Sequence[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(piece for pieces in held for piece in pieces))


def prompt_of(question: Question, material: Material, style: AnswerStyle) -> Prompt:
    """The same prompt for every system."""
    shown = (material.episodes, material.facts, material.turns)
    asked_on = question.asked_on and in_words(question.asked_on)
    return answer_prompt(question.text, *shown, asked_on, order=material.order, style=style)
