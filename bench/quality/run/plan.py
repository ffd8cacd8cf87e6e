"""What an evaluation measures, and which settings must stay the same when it is resumed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from undertow.bench.quality import Benchmark
from undertow.bench.quality.datasets import Question, Sample
from undertow.bench.quality.run.answers import Asked
from undertow.engine.base.config import Settings
from undertow.engine.policies.base import Tiers
from undertow.engine.policies.registry import tiers_of
from undertow.prompts.builders import prompt_versions
from undertow.prompts.operations import QUERY_OPERATIONS

# Every setting is in exactly one of SETTINGS, OTHERWISE and RUNNING. SETTINGS: those that shape memories and
# prompts; the first ones shape the answers only
_ANSWERING = (
    *("retain_consolidated", "search", "answer_mode", "answer_style", "answer_tokens", "ivf_rows"),
    *("words_rows", "query_prompt", "rerank", "rerank_candidates", "rerank_ms"),
)
_TIERS = tuple(field.name for field in fields(Tiers))
SETTINGS = (
    *_ANSWERING,
    *("ablation", "management", "nemori_index", "himem_align_notes", "himem_align_episodes"),
    *("himem_self_evolution", "himem_max_notes", "salience_turns", "salience_day_tokens", "quiet_share"),
    *("profile", "theta_evoke", "theta_compare", "window_messages", "short_term_pages", "heat_threshold"),
    "tenant_token_budget",
    *("encoder", "embed_timestamp", "llm_model", "llm_extra_body", "context_tokens", "reply_tokens"),
    *("document_prompt", "embedding_window_bytes"),
)
# recorded in another form: as the policy's name, what is in force of thresholds and calls, the tiers of an
# answer
OTHERWISE = (
    *("policy", "theta_share", "theta_sim", "theta_merge", "theta_count", "calls"),
    *("k_sub", "k_epi", "k_sem", "raw_of_best", "nemori_retrieve"),
)
# what affects speed, place and success of a run, but none of its lines
RUNNING = (
    *("device", "card_shares", "gate_int8", "encode_cache_texts", "durability", "arena_bytes"),
    *("batch_turns", "queue_turns", "gate_lookahead_turns", "max_message_bytes", "max_import_bytes"),
    *("embedding_url", "embedding_api_key", "embedding_batch_texts"),
    *("llm_url", "llm_api_key", "llm_in_flight", "llm_timeout_s", "llm_patience_s"),
)
# names of the inputs, for readers. Files and folders may be renamed: `data_digest` and `memories_id` identify
# them
NAMES = ("data", "memories_of")
# values of settings that did not exist when a run began
AS_BUILT_IN = {name: Settings.model_fields[name].default for name in SETTINGS}
AS_BUILT_IN |= {"sim_share": None, "merge_share": None, "narratives": True, "is_taught": False}
# the run from taught notes, within the folder of the run from the notes as they were
TAUGHT, VECTORS = "taught", "vectors.npz"


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be measured. `settings.llm_url` is set.

    `judge`: settings that name the judge's server, None for no judge; `own_prompt`: the user's template.
    `only`: the samples that were chosen by name. `questions`: how many a sample; None: all.
    `memories_of`: the folder of the run whose memories are answered from; None: this one's. `memories_id`:
    that run's identity, known once its folder is ours. `teach`: another run follows, in a folder within
    this one's, from a copy of the memories that the questions have taught; that one `is_taught`.
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
    teach: bool = False
    is_taught: bool = False

    @property
    def built_in(self) -> Path:
        """The folder that has the memories, or will have them."""
        return self.memories_of or self.folder

    @property
    def kept_vectors(self) -> Path:
        return self.vectors or self.built_in / VECTORS

    def taught(self) -> Plan:
        """The run that follows from taught memories, of its own folder."""
        own = replace(self, folder=self.folder / TAUGHT, vectors=self.kept_vectors, is_taught=True)
        return replace(own, memories_of=None, memories_id=None, teach=False)

    @property
    def asked(self) -> list[Asked]:
        return [(sample, question) for sample in self.samples for question in chosen(sample, self.questions)]

    def about(self) -> dict[str, Any]:
        """What must stay the same when a run is resumed."""
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
            "is_taught": self.is_taught,
            **{name: getattr(s, name) for name in SETTINGS},
            **asdict(tiers_of(s)),
            "theta_sim": s.similarity_threshold,
            "theta_merge": s.merge_threshold,
            "theta_count": s.recurrence_count,
            "sim_share": s.sim_share,
            "merge_share": s.merge_share,
            "calls": s.call_form,
            "prompt_versions": prompt_versions(s.style_of_answers),
        }


def construction(about: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `about` that the memories depend on; runs that differ elsewhere can share memories."""
    # a profile is thetas; who answers from taught memories has named them
    left_out = {"questions_per_sample", "memories_id", "is_taught", "profile", *NAMES, *_ANSWERING, *_TIERS}
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
