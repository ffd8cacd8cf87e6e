"""The schemas of the LLM's replies: one class per operation, from which the JSON schema is generated.

The bounds keep a constrained server from generating forever, and oversized texts from being stored. Line
numbers are bounded in the schema only: policies handle a number that names no shown line (spec: "none or
invalid numbers: the whole cluster").
"""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator

FactKind = Literal["user_event", "preference_or_constraint", "dated_update", "entity_relation"]

# the longest stored text of an episode, merged or not, and of a fact
EPISODE_CHARS = 4000
FACT_CHARS = 600
# episodes of a cluster, facts of an episode
EPISODES, REFINED_FACTS = 5, 9
# facts extracted from one turn, or from one part of an episode's messages
CANDIDATES = 10
# an episode is its cue, a line end and its narrative
CUE_CHARS = 200
NARRATIVE_CHARS = EPISODE_CHARS - CUE_CHARS - 1
# the summary that may replace facts
FACTS_SUMMARY_CHARS = 3500

_BOUNDS = ("minLength", "maxLength", "minItems", "maxItems", "minimum", "maximum")
_LITERAL_CHARS = 5  # "false"; a line number or null is shorter
# a text that may be this long or longer is a narrative
_NARRATIVE_CHARS = 3000

_LINE_NUMBER = {"type": "integer", "minimum": 1, "maximum": 9999}
LineNumber = Annotated[int, WithJsonSchema(_LINE_NUMBER)]
LineNumberOrNull = Annotated[int | None, WithJsonSchema({"anyOf": [_LINE_NUMBER, {"type": "null"}]})]


class Reply(BaseModel):
    """Base of all replies: no coercion, no unknown fields, strings stripped."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, str_strip_whitespace=True)

    @classmethod
    @cache
    def wire_schema(cls) -> dict[str, Any]:
        """The class as one flat JSON schema (no `$ref`, no titles), which small servers understand."""
        schema = cls.model_json_schema()
        flat: dict[str, Any] = _flat(schema, schema.get("$defs", {}))
        return flat

    @classmethod
    @cache
    def unbounded_schema(cls) -> dict[str, Any]:
        """`wire_schema` without lengths and bounds, for servers that refuse such keywords."""
        text = json.dumps(cls.wire_schema())
        unbounded: dict[str, Any] = json.loads(text, object_hook=_without_bounds)
        return unbounded

    @classmethod
    @cache
    def most_tokens(cls) -> int:
        """The tokens of the longest JSON that the schema allows, at four characters a token."""
        return math.ceil(_longest_chars(cls.wire_schema()) / 4)

    def has_full_narrative(self) -> bool:
        """Whether a long text has the longest length: a server that keeps to the schema has cut it off.

        Short texts, such as topics, may fill their length.
        """
        return _fills(self.wire_schema(), self.model_dump())


def _flat(node: Any, definitions: dict[str, Any]) -> Any:
    if isinstance(node, list):
        return [_flat(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _flat(definitions[node["$ref"].removeprefix("#/$defs/")], definitions)
    kept = {k: v for k, v in node.items() if k not in ("$defs", "title", "description")}
    if "properties" in kept:  # its keys are field names, so a field called "title" must stay
        kept["properties"] = {name: _flat(sub, definitions) for name, sub in kept["properties"].items()}
    return {k: v if k == "properties" else _flat(v, definitions) for k, v in kept.items()}


def _without_bounds(node: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in node.items() if name not in _BOUNDS}


def _longest_chars(node: dict[str, Any]) -> int:
    match node.get("type"):
        case "object":
            return 2 + sum(len(name) + 6 + _longest_chars(of) for name, of in node["properties"].items())
        case "array":
            return 2 + int(node["maxItems"]) * (2 + _longest_chars(node["items"]))
        case "string":
            return 2 + int(node.get("maxLength", 0) or max(map(len, node["enum"])))
    return _LITERAL_CHARS


def _fills(node: dict[str, Any], value: Any) -> bool:
    if isinstance(value, dict):
        return any(_fills(node["properties"][name], of) for name, of in value.items())
    if isinstance(value, list):
        return any(_fills(node["items"], of) for of in value)
    most = node.get("maxLength", 0)
    # a space at the end was stripped
    return isinstance(value, str) and most >= _NARRATIVE_CHARS and len(value) >= most - 1


class FactDraft(Reply):
    """`turns`: the numbers of the turns that say it, which date it."""

    text: str = Field(min_length=1, max_length=FACT_CHARS)
    kind: FactKind
    turns: list[LineNumber] = Field(max_length=100)
    replaces: LineNumberOrNull


class FactsReply(Reply):
    """Reply to `refine`: equations 8 and 9 of RecMem, at most nine new facts."""

    facts: list[FactDraft] = Field(max_length=REFINED_FACTS)


class EpisodeDraft(Reply):
    text: str = Field(min_length=1, max_length=3000)
    turns: list[LineNumber] = Field(max_length=100)


class EpisodesReply(Reply):
    """Reply to `episode`: equation 7 of RecMem. 0 to 5 episodes with their source turns."""

    episodes: list[EpisodeDraft] = Field(max_length=EPISODES)


class EpisodeFactsDraft(EpisodeDraft):
    facts: list[FactDraft] = Field(max_length=REFINED_FACTS)


class EpisodeFactsReply(Reply):
    """Reply to `episode_facts`: equations 7 to 9 of RecMem at once."""

    episodes: list[EpisodeFactsDraft] = Field(max_length=EPISODES)


class MergeReply(Reply):
    """Reply to `merge`: equation 6 of RecMem. `narrative` counts only if `same_story`."""

    same_story: bool
    narrative: str = Field(max_length=EPISODE_CHARS)

    @model_validator(mode="after")
    def _merged_needs_text(self) -> Self:
        if self.same_story and not self.narrative:
            raise ValueError("same_story is true but the narrative is empty")
        return self


class MergeFactsReply(MergeReply):
    """Reply to `merge_facts`: equations 6, 8 and 9 of RecMem at once. Without `same_story` no facts count."""

    facts: list[FactDraft] = Field(max_length=REFINED_FACTS)


class SalientReply(Reply):
    """Reply to `salient`: facts of turns that do not share a topic, about two for each."""

    facts: list[FactDraft] = Field(max_length=16)


class ExtractDraft(Reply):
    text: str = Field(min_length=1, max_length=FACT_CHARS)


class ExtractReply(Reply):
    """Reply to `extract`: what Mem0 calls candidate memories."""

    facts: list[ExtractDraft] = Field(max_length=CANDIDATES)


class StatementDraft(Reply):
    """`messages`: the numbers of the source messages."""

    messages: list[LineNumber] = Field(max_length=100)
    text: str = Field(min_length=1, max_length=FACT_CHARS)


class StatementsReply(Reply):
    """Reply to `distil` and `distil_direct`: K_new of NEMORI, section 3.3.2."""

    facts: list[StatementDraft] = Field(max_length=CANDIDATES)


class FactDecision(Reply):
    """How one candidate changes the stored facts. `text` is used only for an update."""

    candidate: LineNumber
    action: Literal["add", "update", "delete", "none"]
    fact: LineNumberOrNull
    text: str = Field(max_length=FACT_CHARS)


class ReconcileReply(Reply):
    """Reply to `reconcile`: Mem0's ADD, UPDATE, DELETE or NOOP, one per candidate."""

    decisions: list[FactDecision] = Field(max_length=CANDIDATES)


class MessageGroup(Reply):
    messages: list[LineNumber] = Field(max_length=200)


class PartitionReply(Reply):
    """Reply to `partition`: O of NEMORI, section 3.2.1; the policy repairs anything else."""

    groups: list[MessageGroup] = Field(max_length=100)


class NarrativeReply(Reply):
    """Reply to `narrate` and `integrate`: c and N of NEMORI, section 3.2.

    The cue comes last. Where it came first, a small model told all in it, and then repeated it without end.
    """

    narrative: str = Field(min_length=1, max_length=NARRATIVE_CHARS)
    cue: str = Field(min_length=1, max_length=CUE_CHARS)


class SelectReply(Reply):
    """Reply to `select`: idx of NEMORI, section 3.2.3; null is its -1."""

    continues: LineNumberOrNull


class PredictionReply(Reply):
    """Reply to `predict`: the anticipatory schema of NEMORI, section 3.3.1."""

    prediction: str = Field(min_length=1, max_length=3000)


class ConsolidateReply(Reply):
    """Reply to `consolidate`: delta, idxs and k of NEMORI, section 3.3.3; `text` is used only for a merge."""

    action: Literal["new", "merge", "conflict"]
    targets: list[LineNumber] = Field(max_length=10)
    text: str = Field(max_length=FACT_CHARS)


class CandidateDecision(Reply):
    """How one new fact changes the stored ones. Facts without a decision are new."""

    candidate: LineNumber
    action: Literal["merge", "conflict"]
    targets: list[LineNumber] = Field(max_length=10)
    text: str = Field(max_length=FACT_CHARS)


class ConsolidateAllReply(Reply):
    """Reply to `consolidate_all`: `consolidate` for all facts of one distillation."""

    decisions: list[CandidateDecision] = Field(max_length=CANDIDATES)


class SummaryReply(Reply):
    """Reply to `summarise`: S_sum of NEMORI, appendix A.1."""

    summary: str = Field(min_length=1, max_length=FACTS_SUMMARY_CHARS)


# ---- the policy HiMem

NoteKind = Literal["fact", "preference", "profile"]

TOPIC_CHARS = 120
TOPIC_SUMMARY_CHARS = 500
# the most notes per part of a conversation, in stages 1 and 2
STATED_NOTES = 20
IMPLIED_NOTES = 10


class SegmentDraft(Reply):
    """An episode. It ends where the next one begins, so no reply can duplicate or lose a turn."""

    first: LineNumber
    topic: str = Field(min_length=1, max_length=TOPIC_CHARS)
    summary: str = Field(min_length=1, max_length=TOPIC_SUMMARY_CHARS)


class SegmentReply(Reply):
    """Reply to `segment`: HiMem, section 2.2.1."""

    episodes: list[SegmentDraft] = Field(min_length=1, max_length=12)


class NoteDraft(Reply):
    text: str = Field(min_length=1, max_length=FACT_CHARS)
    kind: NoteKind
    turns: list[LineNumber] = Field(max_length=100)


class NotesReply(Reply):
    """Reply to `notes`, the first stage of HiMem's section 2.2.2."""

    notes: list[NoteDraft] = Field(max_length=STATED_NOTES)


class NotesAllReply(Reply):
    """Reply to `notes_all`: the three stages of HiMem's section 2.2.2 at once."""

    notes: list[NoteDraft] = Field(max_length=STATED_NOTES + IMPLIED_NOTES)


class TraitDraft(Reply):
    text: str = Field(min_length=1, max_length=FACT_CHARS)
    kind: Literal["preference", "profile"]
    turns: list[LineNumber] = Field(max_length=100)


class TraitsReply(Reply):
    """Reply to `traits`, the second stage: implied traits, no facts."""

    notes: list[TraitDraft] = Field(max_length=IMPLIED_NOTES)


class NoteChange(Reply):
    """How stage 3 changes one note. Notes without a change stay as they are."""

    note: LineNumber
    same_as: LineNumberOrNull
    text: str = Field(max_length=FACT_CHARS)


class AlignReply(Reply):
    """Reply to `align`, the third stage."""

    changes: list[NoteChange] = Field(max_length=STATED_NOTES + IMPLIED_NOTES)


class SufficiencyReply(Reply):
    """Reply to `sufficiency`: the binary judgement of HiMem, section 2.4, with the lines that support it."""

    lines: list[LineNumber] = Field(max_length=50)
    sufficient: bool


class SupplementDraft(Reply):
    """`episodes`: the numbers of the source episodes."""

    episodes: list[LineNumber] = Field(max_length=20)
    text: str = Field(min_length=1, max_length=FACT_CHARS)
    kind: NoteKind


class SupplementReply(Reply):
    """Reply to `supplement`: notes that a question needed and did not find."""

    notes: list[SupplementDraft] = Field(max_length=CANDIDATES)


class Revision(Reply):
    """How one candidate relates to the stored notes. `text` is used only when it extends one."""

    candidate: LineNumber
    relation: Literal["independent", "extendable", "contradictory"]
    note: LineNumberOrNull
    text: str = Field(max_length=FACT_CHARS)


class ReviseReply(Reply):
    """Reply to `revise`: ADD, UPDATE or DELETE of HiMem's section 2.4, one per candidate."""

    decisions: list[Revision] = Field(max_length=CANDIDATES)


# ---- the policy A-Mem

CONTEXT_CHARS = 240
Word = Annotated[str, Field(min_length=1, max_length=30)]


class AnnotateReply(Reply):
    """Reply to `annotate`: K, G and X of a note (A-Mem, equation 2)."""

    keywords: list[Word] = Field(max_length=6)
    tags: list[Word] = Field(max_length=4)
    context: str = Field(min_length=1, max_length=CONTEXT_CHARS)


class Evolution(AnnotateReply):
    """What a stored note becomes (equation 7)."""

    note: LineNumber


class ConnectReply(Reply):
    """Reply to `connect`: L of a note (equation 6), and the neighbours that it changes."""

    links: list[LineNumber] = Field(max_length=10)
    evolved: list[Evolution] = Field(max_length=5)


# ---- the policy MemoryOS

SUMMARY_CHARS, TOPIC_KEYWORDS = 800, 8
# a segment is its summary, and a line of keywords
TOPIC_TEXT_CHARS = SUMMARY_CHARS + TOPIC_KEYWORDS * 32 + 12
PERSONA_LINES = 10


class TopicReply(Reply):
    """Reply to `topic`: summary and K of a segment, or of a page (MemoryOS, section 3.1)."""

    summary: str = Field(min_length=1, max_length=SUMMARY_CHARS)
    keywords: list[Word] = Field(max_length=TOPIC_KEYWORDS)


class PersonaLine(Reply):
    text: str = Field(min_length=1, max_length=300)
    kind: Literal["profile", "knowledge", "agent"]
    turns: list[LineNumber] = Field(max_length=20)
    replaces: LineNumberOrNull


class PersonaReply(Reply):
    """Reply to `persona`: long-term memory (MemoryOS, section 3.1). One line at least marks turns as read."""

    lines: list[PersonaLine] = Field(min_length=1, max_length=PERSONA_LINES)
