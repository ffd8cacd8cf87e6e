"""What an answer is given besides what its search ranked: quotes, linked facts, and what is always shown."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

from undertow.engine.base.model import Memory
from undertow.engine.base.results import Hit, SearchResult
from undertow.engine.policies.base import Tiers
from undertow.engine.search.ranking import ANY_TIME, shows, turn_hits
from undertow.engine.tenants.tenant import Tenant


def with_companions(tenant: Tenant, found: SearchResult, tiers: Tiers) -> SearchResult:
    """The result with all that the tiers add to it."""
    found = with_links(tenant, found) if tiers.linked else found
    found = with_standing(tenant, found, tiers)
    return with_words(tenant, found, tiers.raw_of_best) if tiers.narratives else as_words(tenant, found)


def as_words(tenant: Tenant, found: SearchResult) -> SearchResult:
    """The result with the raw messages of its episodes in place of their text (NEMORI, table 6)."""
    return replace(with_words(tenant, found, len(found.episodes)), episodes=(), quoted=frozenset())


def with_words(tenant: Tenant, found: SearchResult, best: int) -> SearchResult:
    """The result, with the raw messages of its first `best` episodes added to its turns.

    Adds a hit for each of their source turns, in order, with the source messages and the episode's score,
    except for turns that were found themselves.
    """
    whole = {seq for hit in found.turns for seq in hit.source_seqs}
    raw = [hit for episode in found.episodes[:best] for hit in _words_of(tenant, episode, whole)]
    turns = tuple(sorted((*raw, *found.turns), key=lambda hit: -hit.score))
    return replace(found, turns=turns, quoted=frozenset(seq for hit in raw for seq in hit.source_seqs))


def with_links(tenant: Tenant, found: SearchResult) -> SearchResult:
    """The result, with the facts that its facts link to, each with the score of the best that does."""
    tier = tenant.tiers["fact"]
    facts = {fact.id: fact for fact in found.facts}
    for fact in found.facts:
        links = () if (memory := tier.find(fact.id)) is None else memory.links
        linked = [m for i in links if i not in facts and (m := tier.find(i)) is not None and not m.deleted]
        for m in linked:
            if shows(tenant, m, ANY_TIME):
                facts[m.id] = _hit(m, fact.score)
    return replace(found, facts=tuple(sorted(facts.values(), key=lambda hit: -hit.score)))


def _words_of(tenant: Tenant, episode: Hit, left_out: Set[int]) -> list[Hit]:
    tier = tenant.tiers["episode"]
    memory = tier.rows[tier.row_of[episode.id]]
    assert memory is not None, "it was found"
    hits = []
    for seq in memory.source_seqs:
        if seq in left_out:
            continue
        turn = tenant.turn(seq)
        lines = [line for its_seq, line in memory.source_messages if its_seq == seq]
        said = [turn.messages[n] for n in sorted(lines) if n < len(turn.messages)] or turn.messages
        identity = tenant.turn_id(seq)
        hits.append(Hit(identity, "turn", "\n".join(said), episode.score, turn.timestamp, (seq,)))
    return hits


def with_standing(tenant: Tenant, found: SearchResult, tiers: Tiers) -> SearchResult:
    """The result with the newest turns and the facts that are always shown, at the best score found."""
    newest = tenant.seq_by_row[max(0, len(tenant.seq_by_row) - tiers.recent) :] if tiers.recent else []
    told = {hit.source_seqs for hit in found.turns}
    best = max((hit.score for hit in found.turns), default=0.0)
    turns = turn_hits(tenant, [(best, seq) for seq in newest if (seq,) not in told])
    facts = [] if tiers.always is None else tenant.current("fact")
    known = {hit.id for hit in found.facts}
    best = max((hit.score for hit in found.facts), default=0.0)
    standing = [m for m in facts if m.fact_kind == tiers.always and m.id not in known]
    lines = [_hit(m, best) for m in standing if shows(tenant, m, ANY_TIME)]
    return replace(found, facts=_ranked(found.facts, lines), turns=_ranked(found.turns, turns))


def _ranked(hits: Sequence[Hit], more: Sequence[Hit]) -> tuple[Hit, ...]:
    return tuple(sorted((*hits, *more), key=lambda hit: -hit.score))


def _hit(fact: Memory, score: float) -> Hit:
    return Hit(fact.id, "fact", fact.text, score, fact.timestamp, fact.source_seqs)
