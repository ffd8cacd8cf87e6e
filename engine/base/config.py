"""Every setting, validated once. The environment (prefix UNDERTOW_) is read here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

import psutil
from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from undertow.engine.base.gpu_shares import GpuShares
from undertow.engine.base.model import AnswerMode, PolicyName

Profile = Literal["companion", "assistant"]
# RecMem, section 4.3, and NEMORI, section 4.4: no episodes, facts of the raw words; episodes alone; a window
# of messages as one episode, without partitioning
Ablation = Literal["direct-extraction", "without-facts", "fixed-chunks"]
ABLATIONS: Mapping[str, tuple[PolicyName, ...]] = {
    "direct-extraction": ("recmem", "nemori"),
    "without-facts": ("recmem", "nemori"),
    "fixed-chunks": ("nemori",),
}
# what keeps NEMORI's facts (its section 3.3.3 and appendix A)
ManagementName = Literal["native", "append", "summary"]

# theta (sim and merge), theta_count: paper, sections 3.6 and 4.1
PROFILES: dict[str, tuple[float, int]] = {"companion": (0.7, 5), "assistant": (0.6, 4)}
# of each setting that means something under HiMem alone, the default, which it must have under the others
_OF_HIMEM: Mapping[str, Any] = {
    "himem_align_notes": True,
    "himem_align_episodes": False,
    "himem_self_evolution": True,
    "himem_max_notes": None,
    "answer_mode": "hybrid",
}


class Settings(BaseSettings):
    """Settings of one engine. Thresholds left out come from the profile."""

    model_config = SettingsConfigDict(
        env_prefix="UNDERTOW_", env_ignore_empty=True, frozen=True, extra="forbid"
    )

    # what makes memories of turns (engine/policies); a store keeps to the one it was made with
    policy: PolicyName = "recmem"
    ablation: Ablation | None = None

    profile: Profile = "companion"
    theta_sim: float | None = Field(default=None, ge=-1.0, le=1.0)
    theta_merge: float | None = Field(default=None, ge=-1.0, le=1.0)
    theta_count: int | None = Field(default=None, ge=1, le=1000)

    # NEMORI, section 4.1: w, tau
    window_messages: int = Field(default=20, ge=1, le=200)
    theta_evoke: float = Field(default=0.70, ge=-1.0, le=1.0)
    management: ManagementName = "native"

    # of HiMem, tables 3 and 4: knowledge alignment of its notes and (an ablation) of its episodes, and memory
    # self-evolution: whether a question that the episodes covered and the notes did not changes the notes
    himem_align_notes: bool = True
    himem_align_episodes: bool = False
    himem_self_evolution: bool = True
    # adaptive forgetting: how many notes a tenant keeps, those that answers were given most often; None: all
    himem_max_notes: int | None = Field(default=None, ge=1)

    # the default answer mode (engine/search/answer_modes.py): `hybrid` reads all tiers at once; `best_effort`
    # (HiMem) reads notes first, and episodes only if the notes do not suffice. This `hybrid` is the paper's
    # term for notes and episodes; in `search` the word means dense and keyword scores
    answer_mode: AnswerMode = "hybrid"
    # answer time: what is not set is the policy's (its `tiers`; of RecMem 10, 5 and 10, section 3.5), but
    # k_sem = 2 k_epi where that alone is set. 0 leaves a tier out: without subconscious memory is k_sub = 0,
    # without episodic memory k_epi = 0 with k_sem set (section 4.3)
    k_sub: int | None = Field(default=None, ge=0, le=1000)
    k_epi: int | None = Field(default=None, ge=0, le=1000)
    k_sem: int | None = Field(default=None, ge=0, le=2000)
    # of how many of the best episodes the words are given to an answer too
    raw_of_best: int | None = Field(default=None, ge=0, le=100)
    # False: a turn that was consolidated leaves search, as in the paper's released code (an ablation)
    retain_consolidated: bool = True

    # how a search ranks, that of an answer included. "dense": by the cosine alone, as in the paper; "hybrid":
    # by the query's words too (engine/search/keyword_index.py)
    search: Literal["hybrid", "dense"] = "hybrid"

    encoder: str = "sentence-transformers/all-MiniLM-L6-v2"
    # of encoder, arena and gate; "cuda" fails where there is no card, "auto" takes what is there
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # how a card's memory is divided; without a card it means nothing
    card_shares: str = "llm=0.5,arena=0.35,encoder=0.1"
    embed_timestamp: bool = False
    encode_cache_texts: int = Field(default=4_096, ge=0)

    durability: Literal["commit", "fsync"] = "commit"
    # of one step; None: as many as are admitted in half a second (engine/step/batch_size.py)
    batch_turns: int | None = Field(default=None, ge=1, le=65_536)
    queue_turns: int = Field(default=8_192, ge=1)
    gate_lookahead_turns: int = Field(default=64, ge=1)
    max_message_bytes: int = Field(default=1_000_000, ge=1)
    # of an export that is taken in: it is held in memory, and committed at once
    max_import_bytes: int = Field(default=256 << 20, ge=1)
    # of an arena on the CPU (on a card its share bounds it): half of the machine's memory;
    # a loaded turn keeps its text too, about a third of its vector, and as much again once it was searched
    arena_bytes: int = Field(default_factory=lambda: psutil.virtual_memory().total // 2, ge=1 << 20)

    # a tenant with more turns is searched through an index of its own
    ivf_rows: int = Field(default=1_000_000, ge=1)
    # A tenant with more turns and memories is searched by meaning alone. Its index of words is made at the
    # first search after it was loaded: some 35 us of it a turn, and 0.1 s at a time where others wait.
    words_rows: int = Field(default=100_000, ge=0)

    # URLs with commas between them, or ray:NAME for a server that an actor keeps (engine/llm/discovery.py);
    # the limit in flight is that of each
    llm_url: str | None = None
    llm_model: str | None = None
    llm_api_key: str = "none"
    llm_in_flight: int = Field(default=64, ge=1)
    llm_timeout_s: float = Field(default=300.0, gt=0)
    llm_patience_s: float = Field(default=60.0, gt=0)
    context_tokens: int = Field(default=8_192, ge=1_024)
    reply_tokens: int = Field(default=1_024, ge=64)
    tenant_token_budget: int | None = Field(default=None, ge=0)

    @field_validator("card_shares")
    @classmethod
    def _shares_are_sound(cls, text: str) -> str:
        GpuShares.parse(text)
        return text

    @model_validator(mode="after")
    def _reply_fits(self) -> Self:
        if self.reply_tokens >= self.context_tokens:
            raise ValueError(
                f"reply_tokens ({self.reply_tokens}) must be smaller than "
                f"context_tokens ({self.context_tokens})"
            )
        return self

    @model_validator(mode="after")
    def _parts_are_of_the_policy(self) -> Self:
        if self.ablation is not None and self.policy not in (of := ABLATIONS[self.ablation]):
            raise ValueError(
                f"ablation {self.ablation!r} leaves out a part of the policy {' or '.join(map(repr, of))}, "
                f"and the policy is {self.policy!r}. Set one of the two"
            )
        if self.management != "native" and self.policy != "nemori":
            raise ValueError(
                f"management {self.management!r} keeps the facts of the policy 'nemori', and the policy is "
                f"{self.policy!r}. Set one of the two"
            )
        return self

    @model_validator(mode="after")
    def _himem_is_told_of_himem(self) -> Self:
        set_here = [name for name, usual in _OF_HIMEM.items() if getattr(self, name) != usual]
        if set_here and self.policy != "himem":
            raise ValueError(
                f"{set_here[0]} is a setting of the policy 'himem', and the policy is {self.policy!r}. "
                "Set one of the two"
            )
        return self

    def under(self, policy: PolicyName) -> Self:
        """These settings for a tenant with this policy of its own, whose parts are then as built in."""
        if policy == self.policy:
            return self
        parts: dict[str, Any] = {"ablation": None, "management": "native", **_OF_HIMEM}
        return self.model_copy(update={"policy": policy, **parts})

    def mode_of(self, asked: AnswerMode | None) -> AnswerMode:
        """How to answer: as asked, where nothing is asked as set. ValueError: the policy has no such mode."""
        if asked is None:
            return self.answer_mode
        if asked not in get_args(AnswerMode):
            raise ValueError(f"{asked!r:.80} is none of {', '.join(get_args(AnswerMode))}")
        if asked != _OF_HIMEM["answer_mode"] and self.policy != "himem":
            raise ValueError(f"{asked!r} is of the policy 'himem', and the tenant's is {self.policy!r}")
        return asked

    @property
    def shares(self) -> GpuShares:
        return GpuShares.parse(self.card_shares)

    @property
    def similarity_threshold(self) -> float:
        return PROFILES[self.profile][0] if self.theta_sim is None else self.theta_sim

    @property
    def merge_threshold(self) -> float:
        return self.similarity_threshold if self.theta_merge is None else self.theta_merge

    @property
    def recurrence_count(self) -> int:
        return PROFILES[self.profile][1] if self.theta_count is None else self.theta_count

    @property
    def llm_requests(self) -> int:
        """How many requests may be under way at all the servers that `llm_url` names."""
        return self.llm_in_flight * max(1, sum(bool(url.strip()) for url in (self.llm_url or "").split(",")))
