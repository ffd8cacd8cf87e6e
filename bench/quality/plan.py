"""What is to be measured, and which of it must not change while a run goes on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from undertow.bench.quality import Benchmark
from undertow.bench.quality.answers import Asked
from undertow.bench.quality.datasets import Question, Sample
from undertow.engine.config import Settings
from undertow.prompts import REPLIES, prompt_version

# what the memories and the prompts of a run hang on, of all settings
_SETTINGS = (
    "ablation",
    "himem_align_notes",
    "himem_align_episodes",
    "retain_consolidated",
    "profile",
    "encoder",
    "embed_timestamp",
    "search",
    "k_sub",
    "k_epi",
    "k_sem",
    "context_tokens",
    "reply_tokens",
    "llm_model",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured. `settings.llm_url` is set.

    `judge`: settings that name the judge's server, None for no judge; `own_prompt`: the user's template.
    `only`: the samples that were chosen by name. `questions`: how many a sample; None: all.
    """

    benchmark: Benchmark
    data: Path
    samples: tuple[Sample, ...]
    policy: str
    settings: Settings
    judge: Settings | None
    folder: Path
    own_prompt: Path | None = None
    only: tuple[str, ...] | None = None
    questions: int | None = None
    repeats: int = 1
    vectors: Path | None = None

    @property
    def asked(self) -> list[Asked]:
        return [(sample, question) for sample in self.samples for question in chosen(sample, self.questions)]

    def about(self) -> dict[str, Any]:
        """What must not change while a run goes on."""
        s = self.settings
        return {
            "benchmark": self.benchmark,
            "data": self.data.name,
            "data_digest": _digest(self.data),
            "only": self.only,
            "questions_per_sample": self.questions,
            "policy": self.policy,
            **{name: getattr(s, name) for name in _SETTINGS},
            "theta_sim": s.similarity_threshold,
            "theta_merge": s.merge_threshold,
            "theta_count": s.recurrence_count,
            "prompt_versions": {operation: prompt_version(operation) for operation in sorted(REPLIES)},
        }


def chosen(sample: Sample, count: int | None) -> list[Question]:
    """`count` of the questions that are answered, evenly spread: the middle ones of as many equal parts."""
    asked = [question for question in sample.questions if question.is_answered]
    if count is None or count >= len(asked):
        return asked
    return [asked[(2 * n + 1) * len(asked) // (2 * count)] for n in range(count)]


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()[:16]
