"""What an LLM is asked for: the operations, as the meters count them, and the reply schema of each prompt."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from undertow.prompts import reply_schemas as replies
from undertow.prompts.reply_schemas import Reply

RecMemOperation = Literal["episode", "merge", "refine", "direct", "salient"]
EagerOperation = Literal["extract", "reconcile"]
NemoriOperation = Literal[
    "partition",
    "narrate",
    "select",
    "integrate",
    "predict",
    "distil",
    "distil_direct",
    "consolidate",
    "summarise",
]
HiMemOperation = Literal["segment", "notes", "traits", "align", "supplement", "revise", "sufficiency"]
AMemOperation = Literal["annotate", "connect"]
MemoryOSOperation = Literal["topic", "persona"]
Operation = Literal[
    RecMemOperation,
    EagerOperation,
    NemoriOperation,
    HiMemOperation,
    AMemOperation,
    MemoryOSOperation,
    "answer",
]
# prompts that ask at once for what the papers ask for in several calls
FusedName = Literal["episode_facts", "merge_facts", "consolidate_all", "notes_all"]
PromptName = Literal[Operation, FusedName]

# metered as the cost of queries, not of consolidation
QUERY_OPERATIONS: frozenset[str] = frozenset({"sufficiency", "answer"})

# the operations that fused prompts are metered as
FUSED: Mapping[PromptName, Operation] = {
    "episode_facts": "episode",
    "merge_facts": "merge",
    "consolidate_all": "consolidate",
    "notes_all": "notes",
}

REPLIES: dict[PromptName, type[Reply] | None] = {
    "episode": replies.EpisodesReply,
    "episode_facts": replies.EpisodeFactsReply,
    "merge": replies.MergeReply,
    "merge_facts": replies.MergeFactsReply,
    "refine": replies.FactsReply,
    "direct": replies.FactsReply,
    "salient": replies.SalientReply,
    "extract": replies.ExtractReply,
    "reconcile": replies.ReconcileReply,
    "partition": replies.PartitionReply,
    "narrate": replies.NarrativeReply,
    "select": replies.SelectReply,
    "integrate": replies.NarrativeReply,
    "predict": replies.PredictionReply,
    "distil": replies.StatementsReply,
    "distil_direct": replies.StatementsReply,
    "consolidate": replies.ConsolidateReply,
    "consolidate_all": replies.ConsolidateAllReply,
    "summarise": replies.SummaryReply,
    "segment": replies.SegmentReply,
    "notes": replies.NotesReply,
    "notes_all": replies.NotesAllReply,
    "traits": replies.TraitsReply,
    "align": replies.AlignReply,
    "supplement": replies.SupplementReply,
    "revise": replies.ReviseReply,
    "sufficiency": replies.SufficiencyReply,
    "annotate": replies.AnnotateReply,
    "connect": replies.ConnectReply,
    "topic": replies.TopicReply,
    "persona": replies.PersonaReply,
    "answer": None,
}
