"""What calls on memories return. Plain data: it loads no torch, no Lance and no numba."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any, Literal

from undertow.engine.base.model import BadInput, Usage

Report = dict[str, Any]
"""A record shown to users: made of str, int, float, list, dict and None, ready to be written as JSON."""

UsageReport = dict[str, dict[str, int]]
"""LLM calls and tokens by operation."""

Wording = str | Sequence[Mapping[str, Any]]
"""New words for a memory; for a turn also the messages of one exchange."""

HitKind = Literal["turn", "episode", "fact"]

# Items that an explanation names beside those that were found.
MAX_LEFT_OUT = 10

OUT_OF_REACH = (
    "caches and logs of the LLM server that has seen the prompts",
    "backups, exports and trace files made before the erasure",
    "blocks that the file system or the disk keeps of deleted files",
)


@dataclass(frozen=True, slots=True)
class Receipt:
    """Confirms that a turn is stored under `id`; `duplicate` if it was stored before.

    `parked`: why a shard quarantined the turn instead (the turn alone made the engine fail).
    """

    tenant: str
    id: str | None
    seq: int | None
    duplicate: bool
    parked: str | None = None


@dataclass(frozen=True, slots=True)
class Hit:
    """A search hit and its sources.

    `score`: the cosine to the query, raised towards 1 by shared words and neighbours (kernels/topk). Words of
    the query that tell turns apart weigh more in it, so that a text scores 1 against itself only if all of
    its words do, or under UNDERTOW_SEARCH=dense.
    """

    id: str
    kind: HitKind
    memory: str
    score: float
    timestamp: str | None
    source_seqs: tuple[int, ...]


LeftOutReason = Literal["time", "filters", "count", "top_k", "threshold"]
"""Why a search left an item out: its time, its metadata, or better ones of its kind (`count`) or of all kinds
(`top_k`), or too low a score."""


@dataclass(frozen=True, slots=True)
class ScoreParts:
    """What a score is made of (kernels/topk/combined_score.py).

    With c = cosine + 0.3 * max(neighbour_cosine - cosine, 0) and w = words + neighbour_words + stretch_words,
    the score is 1 - (1 - c) * exp(-3 * w).
    `cosine`: of the vectors of item and query. `neighbour_cosine`: the higher one of the turns right before
    and after it in its session; None for an episode or a fact, and in a dense search. `words`: its BM25 score
    as a share of the query's maximum. `neighbour_words`, `stretch_words`: what those two turns, and the best
    turn of the same stretch of the session, add to it. `matched`: the words of the query that it has;
    "exercise ~ yoga": a related word in its place.
    """

    cosine: float
    neighbour_cosine: float | None = None
    words: float = 0.0
    neighbour_words: float = 0.0
    stretch_words: float = 0.0
    matched: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Explanation:
    """How a search ranked.

    `search`: hybrid, by cosine and words, or dense, by cosine alone. `telling_words`: the words that weigh
    more in the query's vector; None: all alike. `turns`: how many the tenant has; `passing`: how many of them
    pass each filter that was set. `scores`: by id, of what was found and left out. `left_out`: the best of
    what was not found, best first, each with the reason. It has nothing that no search may find, and may lack
    turns that an index missed (`turn_recall`).
    """

    search: Literal["hybrid", "dense"]
    telling_words: str | None
    turns: int
    passing: Mapping[str, int]
    scores: Mapping[str, ScoreParts]
    left_out: tuple[tuple[Hit, LeftOutReason], ...]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """The hits of each tier, nearest first (ties: the older first).

    `turn_recall`: the measured recall of the index that found the turns; 1.0 for an exact search.
    `quoted`: seqs of turns that were not found themselves, but are quoted by episodes that were. `order`: of
    each tier as an answer is given it. `words_only`: the encoder could not be used, so that only what shares
    words with the query was found. `explanation`: if it was asked for.
    """

    episodes: tuple[Hit, ...]
    facts: tuple[Hit, ...]
    turns: tuple[Hit, ...]
    turn_recall: float = 1.0
    quoted: frozenset[int] = frozenset()
    order: Literal["relevance", "time"] = "relevance"
    words_only: bool = False
    explanation: Explanation | None = None

    def ranked(self, k: int | None = None) -> list[Hit]:
        """All tiers as one list, nearest first."""
        hits = sorted((*self.episodes, *self.facts, *self.turns), key=attrgetter("score"), reverse=True)
        return hits if k is None else hits[:k]

    def explained(self, returned: Sequence[Hit], threshold: float | None = None) -> Report | None:
        """The explanation as a report, where only some of the hits are returned; None: none was asked for."""
        if (how := self.explanation) is None:
            return None
        kept = {hit.id for hit in returned}
        left_out: list[tuple[Hit, LeftOutReason]] = [*how.left_out]
        left_out += [(hit, "top_k") for hit in self.ranked() if hit.id not in kept]
        if threshold is not None:
            left_out = [
                (hit, "threshold" if hit.score < threshold and reason in ("count", "top_k") else reason)
                for hit, reason in left_out
            ]
        left_out = sorted(left_out, key=lambda item: -item[0].score)[:MAX_LEFT_OUT]
        shown = kept | {hit.id for hit, _ in left_out}
        return {
            "search": how.search,
            "telling_words": how.telling_words,
            "turns": how.turns,
            "passing": dict(how.passing),
            "scores": {id_: asdict(parts) for id_, parts in how.scores.items() if id_ in shown},
            "left_out": [{**asdict(hit), "reason": reason} for hit, reason in left_out],
        }


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, the memories it was given, and what the call cost."""

    text: str
    found: SearchResult
    usage: Usage


@dataclass(frozen=True, slots=True)
class Page:
    """Some records, and the cursor of the next ones; None: there are no more."""

    items: tuple[Report, ...]
    after: str | None


@dataclass(frozen=True, slots=True)
class Updated:
    """The memory after an update. An episode or a fact keeps its `id`; a turn gets a new one."""

    id: str
    kind: str


@dataclass(frozen=True, slots=True)
class TableReport:
    """What `add_table` has stored: the turns of the table, and those of them that were not stored before.

    `parked_turns`: those that a shard cannot store and has put aside; an Engine never does.
    """

    turns: int
    new_turns: int
    parked_turns: int = 0


@dataclass(frozen=True, slots=True)
class ImportReport:
    """What an import has stored: turns that were not deleted, and every version of episodes and facts."""

    turns: int
    episodes: int
    facts: int
    decisions: int


@dataclass(frozen=True, slots=True)
class Certificate:
    """What an erasure removed. It names the tenant by its keyed hash alone."""

    tenant_key: str
    erased_at: str
    purged_at: str
    rows_removed: int
    turns_removed: int
    episodes_removed: int
    facts_removed: int
    out_of_reach: tuple[str, ...] = OUT_OF_REACH


@dataclass(slots=True)
class IngestReport:
    """What one run took in. `admit_s` runs from the first read to the last turn's commit.

    `resumed_turns`, `resumed_errors`: of the parts of files that earlier runs have read and this one skipped.
    """

    read_turns: int = 0
    new_turns: int = 0
    errors: int = 0
    warnings: int = 0
    resumed_turns: int = 0
    resumed_errors: int = 0
    admit_s: float = 0.0
    interrupted: bool = False
    stopped_by: BadInput | None = None

    @property
    def turns_per_s(self) -> float:
        return self.new_turns / self.admit_s if self.admit_s > 0 else 0.0

    @property
    def ended(self) -> bool:
        """Whether the run is over, with logs left."""
        return self.interrupted or self.stopped_by is not None

    def interrupt_if(self, stop: Callable[[], bool]) -> bool:
        """Whether the run is interrupted; `stop` is not asked again once it has said so."""
        self.interrupted = self.interrupted or stop()
        return self.interrupted
