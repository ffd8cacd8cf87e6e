"""What is to be measured, and which of it must not change while a run goes on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from undertow.bench.quality import Benchmark
from undertow.bench.quality.datasets import Question, Sample
from undertow.bench.quality.run.answers import Asked
from undertow.engine.base.config import Settings
from undertow.engine.policies.base import Tiers
from undertow.engine.policies.registry import tiers_of
from undertow.prompts.builders import QUERY_OPERATIONS, REPLIES, prompt_version

# Each setting stands in one of these three. What the memories and the prompts of a run hang on; the first are
# those of answering alone
_ANSWERING = ("retain_consolidated", "search", "answer_mode", "ivf_rows", "words_rows")
_TIERS = tuple(field.name for field in fields(Tiers))
SETTINGS = (
    *_ANSWERING,
    "ablation",
    "himem_align_notes",
    "himem_align_episodes",
    "himem_self_evolution",
    "himem_max_notes",
    "profile",
    "encoder",
    "embed_timestamp",
    "window_messages",
    "theta_evoke",
    "management",
    "context_tokens",
    "reply_tokens",
    "llm_model",
    "tenant_token_budget",
)
# what a run is about in another form: by its policy, as the thresholds in force, as the tiers of its answers
OTHERWISE = ("policy", "theta_sim", "theta_merge", "theta_count", "k_sub", "k_epi", "k_sem", "raw_of_best")
# what changes how long a run takes, where, and whether it goes through, but none of its lines
RUNNING = (
    "device",
    "card_shares",
    "encode_cache_texts",
    "durability",
    "batch_turns",
    "queue_turns",
    "gate_lookahead_turns",
    "max_message_bytes",
    "max_import_bytes",
    "arena_bytes",
    "llm_url",
    "llm_api_key",
    "llm_in_flight",
    "llm_timeout_s",
    "llm_patience_s",
)
# what tells a reader where a run's input lay. Files and folders may be renamed: `data_digest` and
# `memories_id` say whether they are the same
NAMES = ("data", "memories_of")
# what a run was begun with that says nothing of a setting, as there was none then
AS_BUILT_IN = {name: Settings.model_fields[name].default for name in SETTINGS}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured. `settings.llm_url` is set.

    `judge`: settings that name the judge's server, None for no judge; `own_prompt`: the user's template.
    `only`: the samples that were chosen by name. `questions`: how many a sample; None: all.
    `memories_of`: the folder of the run whose memories are answered from; None: this one's. `memories_id`:
    that run's identity, known once its folder is ours.
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
    memories_of: Path | None = None
    memories_id: str | None = None

    @property
    def built_in(self) -> Path:
        """The folder that has the memories, or will have them."""
        return self.memories_of or self.folder

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
            "memories_of": None if self.memories_of is None else self.memories_of.name,
            "memories_id": self.memories_id,
            **{name: getattr(s, name) for name in SETTINGS},
            **asdict(tiers_of(s)),
            "theta_sim": s.similarity_threshold,
            "theta_merge": s.merge_threshold,
            "theta_count": s.recurrence_count,
            "prompt_versions": {operation: prompt_version(operation) for operation in sorted(REPLIES)},
        }


def construction(about: Mapping[str, Any]) -> dict[str, Any]:
    """Of what a run is `about`, that which its memories hang on: other answers can come of the same ones."""
    # a profile is thetas
    left_out = {"questions_per_sample", "memories_id", "profile", *NAMES, *_ANSWERING, *_TIERS}
    versions = about.get("prompt_versions") or {}
    return {
        **{name: value for name, value in about.items() if name not in left_out},
        "prompt_versions": {
            operation: of for operation, of in versions.items() if operation not in QUERY_OPERATIONS
        },
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
