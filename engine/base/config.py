"""All settings, validated once. Only this module reads the environment (prefix UNDERTOW_)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator
from pydantic_settings import SettingsConfigDict

from undertow.engine.base.environment import PREFIX, CheckedSettings
from undertow.engine.base.gpu_shares import GpuShares
from undertow.engine.base.model import AnswerMode, AnswerStyle, PolicyName, UndertowError
from undertow.engine.base.pair_cosines import prior_theta
from undertow.engine.base.process_tuning import usable_memory

Profile = Literal["companion", "assistant", "paper"]
# RecMem, section 4.3, and NEMORI, section 4.4: facts of the raw turns without episodes; episodes without
# facts; a window of messages as one episode, without partitioning.
Ablation = Literal["direct-extraction", "without-facts", "fixed-chunks"]
ABLATIONS: Mapping[str, tuple[PolicyName, ...]] = {
    "direct-extraction": ("recmem", "nemori"),
    "without-facts": ("recmem", "nemori"),
    "fixed-chunks": ("nemori",),
}
# How NEMORI manages facts (section 3.3.3 and appendix A).
ManagementName = Literal["native", "append", "summary", "a-mem", "memory-os"]
# NEMORI, table 6: an episode's narrative (N), or its raw messages (P).
EpisodeText = Literal["narrative", "messages"]
# Whether one LLM call asks for what the papers ask for in several.
CallForm = Literal["fused", "paper"]

ANSWER_TOKENS = 600

# theta (sim and merge), theta_count: RecMem, sections 3.6 and 4.1. The thetas belong to its encoder.
PROFILES: dict[str, tuple[float, int]] = {"companion": (0.7, 5), "assistant": (0.6, 4), "paper": (0.7, 5)}
# The share of a tenant's pairs of turns that takes the place of these thetas (docs/quality.md has figures).
THETA_SHARES: Mapping[str, float] = {"companion": 0.02, "assistant": 0.1, "paper": 0.0}
# The settings that apply to one policy alone, with their defaults, which they must have under the others.
_OF_POLICY: Mapping[PolicyName, Mapping[str, Any]] = {
    "himem": {
        "himem_align_notes": True,
        "himem_align_episodes": False,
        "himem_self_evolution": True,
        "himem_max_notes": None,
        "answer_mode": "hybrid",
    },
    "nemori": {"management": "native", "nemori_index": "narrative", "nemori_retrieve": "narrative"},
}


# The parameters of an LLM request that `llm_extra_body` may not replace.
_OWN_PARAMETERS = {"model", "messages", "response_format", "stream", "max_tokens", "max_completion_tokens"}


class Settings(CheckedSettings):
    """Settings of one engine. Thresholds that are not set come from the profile."""

    model_config = SettingsConfigDict(env_prefix=PREFIX)

    # The policy that makes memories (engine/policies). A store keeps the one that it was created with.
    policy: PolicyName = "recmem"
    # Leave out a part of the policy, to measure what it does (docs/policies.md).
    ablation: Ablation | None = None

    # What sort of log it is: the thresholds that are not set (docs/policies.md). "paper": those of the paper.
    profile: Profile = "companion"
    # The share of a tenant's pairs of turns that theta_sim and theta_merge link, found anew from its own
    # turns as its log grows (docs/policies.md). 0: both are fixed. None: the profile's. A theta that is set
    # is fixed.
    theta_share: float | None = Field(default=None, ge=0.0, lt=1.0)
    theta_sim: float | None = Field(default=None, ge=-1.0, le=1.0)
    theta_merge: float | None = Field(default=None, ge=-1.0, le=1.0)
    # Linked turns, the new one included, that make a topic recur. None: the profile's.
    theta_count: int | None = Field(default=None, ge=1, le=1000)

    # "fused": RecMem gets an episode or a merge and its facts in one reply; NEMORI compares all facts of a
    # distillation in one call, and shows episodes that may be continued by their cues; HiMem gets aligned
    # notes in one reply. "paper": the papers' calls. None: "paper" under the profile of that name, else
    # "fused".
    calls: CallForm | None = None

    # RecMem: of each so many turns in a row the LLM reads those that say most for their length, once
    # (engine/policies/salience.py); 0: none. A tenant's quota of tokens a day for it. Turns that say less
    # than this share of those before them neither fire nor count. The profile "paper" has none of the three.
    salience_turns: int = Field(default=16, ge=0, le=100)
    salience_day_tokens: int = Field(default=20_000, ge=0)
    quiet_share: float = Field(default=0.7, ge=0.0, lt=1.0)

    # NEMORI, section 4.1: w, the messages of a window, and tau: a prediction is made from facts with a cosine
    # above it.
    window_messages: int = Field(default=20, ge=1, le=200)
    theta_evoke: float = Field(default=0.70, ge=-1.0, le=1.0)
    # NEMORI: what is done with new facts (docs/policies.md).
    management: ManagementName = "native"
    # NEMORI, table 6: which text of an episode is embedded, and which one an answer is given. With
    # "narrative" an answer also gets the raw messages of the `raw_of_best` best episodes.
    nemori_index: EpisodeText = "narrative"
    nemori_retrieve: EpisodeText = "narrative"
    # With fused calls: a fact is compared with stored facts of at least this cosine, and is new without a
    # call if there is none. It belongs to the embedding model.
    theta_compare: float = Field(default=0.65, ge=-1.0, le=1.0)

    # MemoryOS, section 4.1: the pages of short-term memory, and tau, the
    # heat from which a segment is learned from.
    short_term_pages: int = Field(default=7, ge=1, le=100)
    heat_threshold: float = Field(default=5.0, ge=0.0)

    # HiMem, tables 3 and 4: knowledge alignment of its notes and (an ablation) of its episodes, and memory
    # self-evolution: whether a question that only the episodes covered revises the notes.
    himem_align_notes: bool = True
    himem_align_episodes: bool = False
    himem_self_evolution: bool = True
    # HiMem, adaptive forgetting: the number of most used notes that a tenant keeps; None: all.
    himem_max_notes: int | None = Field(default=None, ge=1)

    # the default answer mode (engine/search/answer_modes.py): `hybrid` reads all tiers at once; `best_effort`
    # (HiMem) reads notes first, and episodes only if the notes do not suffice. This `hybrid` is the paper's
    # term for notes and episodes; in `search` the word means dense and keyword scores
    answer_mode: AnswerMode = "hybrid"
    # The answering prompt (prompts/templates/shared). None: notes, and paper under the profile "paper".
    answer_style: AnswerStyle | None = None
    # What an answer is given: the best of all tiers in so many tokens (engine/search/packing.py). 0: the
    # counts below, whatever their length. None: 600, and 0 under the profile "paper".
    answer_tokens: int | None = Field(default=None, ge=0)
    # Answering: values that are not set come from the policy (its `tiers`; RecMem has 10, 5 and 10, section
    # 3.5), except that k_sem = 2 k_epi if only k_epi is set. 0 disables a tier: k_sub = 0 is "without
    # subconscious memory", k_epi = 0 with k_sem set "without episodic memory" (section 4.3).
    k_sub: int | None = Field(default=None, ge=0, le=1000)
    k_epi: int | None = Field(default=None, ge=0, le=1000)
    k_sem: int | None = Field(default=None, ge=0, le=2000)
    # For how many of the best episodes an answer also gets their turns.
    raw_of_best: int | None = Field(default=None, ge=0, le=100)
    # False: consolidated turns leave search, as in the paper's released code (an ablation).
    retain_consolidated: bool = True

    # The ranking of searches, also for answers. "dense": by cosine alone, as in the paper; "hybrid": also by
    # keywords (engine/search/keyword_index.py).
    search: Literal["hybrid", "dense"] = "hybrid"
    # The best candidates of an answer's search are ranked anew (engine/search/rerank.py): "off", or
    # cross-encoder:MODEL, a sentence-transformers cross-encoder's name or folder, on the CPU. After
    # `rerank_ms`, and after an error, the order of the search stays.
    rerank: str = Field(default="off", pattern=r"^(off|cross-encoder:.+)$")
    # How many candidates are ranked anew, and the milliseconds it may take.
    rerank_candidates: int = Field(default=20, ge=1, le=200)
    rerank_ms: int = Field(default=1_000, ge=1)

    # A sentence-transformers model's name or folder, openai:MODEL for an endpoint, or hash:DIM.
    encoder: str = "sentence-transformers/all-MiniLM-L6-v2"
    # What stands before a query, and before a text that is stored. None: what the model's configuration says.
    query_prompt: str | None = None
    document_prompt: str | None = None
    # For openai:MODEL: the endpoint, such as http://127.0.0.1:8000/v1, and its key. `llm_patience_s` applies.
    embedding_url: str | None = None
    embedding_api_key: str = "none"
    # The most texts of one request to it.
    embedding_batch_texts: int = Field(default=64, ge=1, le=2_048)
    # A longer text is embedded in parts. The model's maximum of tokens is safe: a token has at least a byte.
    embedding_window_bytes: int = Field(default=8_000, ge=64, le=1 << 18)
    # The device of encoder, arena and gate. "cuda" fails without a GPU, "auto" uses one if there is one.
    device: Literal["auto", "cpu", "cuda"] = "auto"
    # On a GPU, keep int8 codes of all vectors too, half as much memory again, which the gate reads before the
    # vectors that they leave open: fewer bytes a decision, and the same decisions.
    gate_int8: bool = False
    # The division of GPU memory; without a GPU it has no effect.
    card_shares: str = "llm=0.5,arena=0.35,encoder=0.1"
    # Whether a turn is embedded with its time, as in the RecMem paper's released code.
    embed_timestamp: bool = False
    # Texts whose vectors are kept in memory, so that they are not embedded again.
    encode_cache_texts: int = Field(default=4_096, ge=0)

    # What a commit outlives: "commit" a killed process; "fsync" also a machine that loses power.
    durability: Literal["commit", "fsync"] = "commit"
    # Turns of one step; None: as many as are admitted in half a second (engine/step/batch_size.py).
    batch_turns: int | None = Field(default=None, ge=1, le=65_536)
    # Turns that wait to be stored; a bulk load has as many again behind those that are being stored.
    queue_turns: int = Field(default=8_192, ge=1)
    # The most undecided turns of one tenant that a step asks the gate about.
    gate_lookahead_turns: int = Field(default=64, ge=1)
    # The longest message, in UTF-8.
    max_message_bytes: int = Field(default=1_000_000, ge=1)
    # The largest export to import: it is held in memory and committed at once.
    max_import_bytes: int = Field(default=256 << 20, ge=1)
    # Bound of an arena on the CPU (on a GPU its share is the bound): half of the memory that this process may
    # use, which the shards of `serve --workers` divide. A loaded turn also takes memory for its text, about
    # two thirds of its vector, and as much again once it was searched.
    arena_bytes: int = Field(default_factory=lambda: usable_memory() // 2, ge=1 << 20)

    # A tenant with more turns is searched through its own index.
    ivf_rows: int = Field(default=1_000_000, ge=1)
    # A tenant with more turns and memories is searched by cosine alone. Its keyword index is built at the
    # first search after it was loaded: about 35 us a turn, and 0.1 s at a time if other calls wait.
    words_rows: int = Field(default=100_000, ge=0)

    # Comma-separated URLs, or ray:NAME for a server run by a Ray actor (engine/llm/discovery.py).
    # `llm_in_flight` applies to each.
    llm_url: str | None = None
    # The model to ask for, by default the first that the server lists; and the key for it.
    llm_model: str | None = None
    llm_api_key: str = "none"
    # A JSON object with more parameters for each request, such as {"reasoning_effort": "low"}, or for vLLM
    # {"chat_template_kwargs": {"enable_thinking": false}}.
    llm_extra_body: str = "{}"
    # Requests under way at each server, and how long one may take.
    llm_in_flight: int = Field(default=64, ge=1)
    llm_timeout_s: float = Field(default=300.0, gt=0)
    # How long a server may be silent before a command ends and leaves the work pending.
    llm_patience_s: float = Field(default=60.0, gt=0)
    # What the model's context holds, prompt and reply.
    context_tokens: int = Field(default=8_192, ge=1_024)
    # The room that prompts leave for a reply. A reply that is cut off at it is asked for again, shorter, and
    # may then use what else the context has room for, up to the longest reply of its schema.
    reply_tokens: int = Field(default=1_024, ge=64)
    # The LLM tokens of a tenant, since it was made; when they are spent, no more are used. None: no bound.
    tenant_token_budget: int | None = Field(default=None, ge=0)

    @field_validator("card_shares")
    @classmethod
    def _shares_are_sound(cls, text: str) -> str:
        GpuShares.parse(text)
        return text

    @field_validator("llm_extra_body")
    @classmethod
    def _extra_body_is_sound(cls, text: str) -> str:
        try:
            extra = json.loads(text)
        except ValueError as invalid:
            raise ValueError(f"UNDERTOW_LLM_EXTRA_BODY is no JSON ({invalid})") from invalid
        if not isinstance(extra, dict) or not _OWN_PARAMETERS.isdisjoint(extra):
            own = ", ".join(sorted(_OWN_PARAMETERS))
            raise ValueError(f"UNDERTOW_LLM_EXTRA_BODY must be a JSON object without {own}")
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
        for policy, settings in _OF_POLICY.items():
            set_here = [name for name, usual in settings.items() if getattr(self, name) != usual]
            if set_here and self.policy != policy:
                raise ValueError(
                    f"{set_here[0]} is a setting of the policy {policy!r}, and the policy is "
                    f"{self.policy!r}. Set one of the two"
                )
        return self

    def under(self, policy: str) -> Self:
        """These settings for a tenant with its own policy, whose ablations and options are the defaults.

        UndertowError: no such policy.
        """
        if policy == self.policy:
            return self
        if policy not in get_args(PolicyName):
            raise UndertowError(f"a tenant or a store has the policy {policy!r}, which this Undertow lacks.")
        parts: dict[str, Any] = {"ablation": None}
        for usual in _OF_POLICY.values():
            parts |= usual
        return self.model_copy(update={"policy": policy, **parts})

    def shared_by(self, shards: int) -> Self:
        """These settings for each of so many shards in the memory of one machine."""
        if "arena_bytes" in self.model_fields_set:
            return self
        return self.model_copy(update={"arena_bytes": max(1 << 20, self.arena_bytes // shards)})

    def mode_of(self, asked: AnswerMode | None) -> AnswerMode:
        """The requested answer mode, by default the setting. ValueError: the policy has no such mode."""
        if asked is None:
            return self.answer_mode
        if asked not in get_args(AnswerMode):
            raise ValueError(f"{asked!r:.80} is none of {', '.join(get_args(AnswerMode))}")
        if asked != _OF_POLICY["himem"]["answer_mode"] and self.policy != "himem":
            raise ValueError(f"{asked!r} is of the policy 'himem', and the tenant's is {self.policy!r}")
        return asked

    @property
    def shares(self) -> GpuShares:
        return GpuShares.parse(self.card_shares)

    @property
    def answer_budget(self) -> int:
        """The tokens of memories that an answer is given; 0: as many memories as the counts say."""
        usual = 0 if self.profile == "paper" else ANSWER_TOKENS
        return usual if self.answer_tokens is None else self.answer_tokens

    @property
    def style_of_answers(self) -> AnswerStyle:
        usual: AnswerStyle = "paper" if self.profile == "paper" else "notes"
        return self.answer_style or usual

    @property
    def call_form(self) -> CallForm:
        return self.calls or ("paper" if self.profile == "paper" else "fused")

    @property
    def sim_share(self) -> float | None:
        """The share of pairs that theta_sim links; None: it is fixed."""
        share = THETA_SHARES[self.profile] if self.theta_share is None else self.theta_share
        return share if share and self.theta_sim is None else None

    @property
    def merge_share(self) -> float | None:
        """The share of pairs at or above theta_merge; None: it is fixed."""
        return self.sim_share if self.theta_merge is None else None

    @property
    def similarity_threshold(self) -> float:
        """theta_sim: where it is fixed, else until a tenant's own pairs of turns tell it."""
        if self.theta_sim is not None:
            return self.theta_sim
        share = self.sim_share
        return PROFILES[self.profile][0] if share is None else prior_theta(self.encoder, share)

    @property
    def merge_threshold(self) -> float:
        """As `similarity_threshold`, for theta_merge."""
        return self.similarity_threshold if self.theta_merge is None else self.theta_merge

    @property
    def recurrence_count(self) -> int:
        return PROFILES[self.profile][1] if self.theta_count is None else self.theta_count

    @property
    def llm_requests(self) -> int:
        """The most requests in flight at all the servers in `llm_url`."""
        return self.llm_in_flight * max(1, sum(bool(url.strip()) for url in (self.llm_url or "").split(",")))
