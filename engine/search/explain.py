"""Explains a search: the parts of each score, and what was left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from undertow.engine.base.results import MAX_LEFT_OUT, Explanation, Hit, HitKind, LeftOutReason
from undertow.engine.search.ranking import (
    ANY_TIME,
    Ranked,
    Ranker,
    Rows,
    Window,
    live_turns,
    rests_on,
    turn_hits,
)
from undertow.engine.search.where import Where
from undertow.engine.tenants.tenant import Tenant


def explained(
    ranker: Ranker,
    tenant: Tenant,
    vector: NDArray[np.float16],
    found: Ranked,
    *,
    words: str,
    terms: Sequence[int],
    telling: str | None,
    window: Window,
    where: Where,
    counts: Mapping[str, int],
) -> Ranked:
    """What `Ranker.rank` has found for a query, float16 [dim], and its words, with its explanation.

    `counts`: as `rank` was given them; of a kind that was not asked for nothing is listed. `telling`: see
    Explanation. A second ranking, without filters and for more hits, shows what was left out.
    """
    more: dict[str, Any] = {name: count and count + MAX_LEFT_OUT for name, count in counts.items()}
    every = ranker.rank(tenant, vector, **more, window=ANY_TIME, terms=terms)
    every = every.by_words() if found.words_only else every
    filters = _Filters(window, ranker.within(tenant, window), ranker.passing(tenant, where))
    left_out = _left_out(tenant, found, every, filters)
    rows = _rows_of(tenant, found, [hit for hit, _ in left_out])
    scores = ranker.parts_of_scores(tenant, vector, words)
    parts = {
        hit_id: part
        for kind, row_of in rows.items()
        for hit_id, part in zip(row_of, scores.of(kind, list(row_of.values())), strict=True)
    }
    how = Explanation(
        "hybrid" if words and ranker.by_words(tenant) else "dense",
        telling,
        live_turns(tenant),
        filters.passing(tenant),
        parts,
        tuple(left_out),
    )
    return replace(found, explanation=how)


@dataclass(frozen=True, slots=True)
class _Filters:
    """The filters of a search, and which turns pass each, bool [turns] by arena row; None: no filter."""

    window: Window
    in_time: Rows | None
    in_metadata: Rows | None

    def passing(self, tenant: Tenant) -> dict[str, int]:
        """How many turns pass each. Deleted turns, which keep their entry in the indexes, do not count."""
        counted = {"time": self.in_time, "filters": self.in_metadata}
        here = np.fromiter(map(tenant.exists, tenant.seq_by_row), bool)
        return {name: int((rows & here).sum()) for name, rows in counted.items() if rows is not None}

    def reason(self, tenant: Tenant, hit: Hit) -> LeftOutReason:
        """Why a hit was left out."""
        if not self.window.allows(hit.timestamp):
            return "time"
        return "count" if rests_on(tenant, hit, self.in_metadata) else "filters"


def _left_out(
    tenant: Tenant, found: Ranked, every: Ranked, filters: _Filters
) -> list[tuple[Hit, LeftOutReason]]:
    """The best of `every` that were not found."""
    known = {hit.id for hit in (*found.episodes, *found.facts)}
    seqs = {seq for _, seq in found.turns}
    turns = turn_hits(tenant, [turn for turn in every.turns if turn[1] not in seqs][:MAX_LEFT_OUT])
    others = [hit for hit in (*every.episodes, *every.facts) if hit.id not in known]
    best = sorted((*others, *turns), key=lambda hit: -hit.score)[:MAX_LEFT_OUT]
    return [(hit, filters.reason(tenant, hit)) for hit in best]


def _rows_of(tenant: Tenant, found: Ranked, left_out: list[Hit]) -> dict[HitKind, dict[str, int]]:
    """The arena row of each item, by kind and id."""
    hits = [*found.episodes, *found.facts, *turn_hits(tenant, found.turns), *left_out]
    rows: dict[HitKind, dict[str, int]] = {"turn": {}, "episode": {}, "fact": {}}
    for hit in hits:
        if hit.kind == "turn":
            rows["turn"][hit.id] = tenant.row_by_seq[hit.source_seqs[0]]
        else:
            rows[hit.kind][hit.id] = tenant.tiers[hit.kind].row_of[hit.id]
    return rows
