"""Packs what an answer is given into a budget of tokens: the best of all tiers, and nothing told twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from undertow.engine.base.model import Memory
from undertow.engine.base.results import Hit, SearchResult
from undertow.engine.base.timestamps import day_in_words, in_words
from undertow.engine.encoders.token_count import by_bytes
from undertow.engine.search.ranking import ANY_TIME, shows
from undertow.engine.tenants.tenant import Tenant
from undertow.prompts.builders import ShownMemory, anchored, fenced

# How much of a fact's score reaches the turns it rests on.
KEY_SHARE = 0.2


def packed(found: SearchResult, budget_tokens: int, *, is_whole: bool = False) -> SearchResult:
    """The hits that fit into the budget, chosen by score over all tiers; one that is too long is skipped.

    A turn's score is raised by the best fact that rests on it. An episode or fact is left out if all the
    turns that it rests on are there already. `is_whole`: whether all turns of the tenant were found; if they
    fit, they are the result, in order of time.
    """
    if is_whole and sum(map(line_tokens, found.turns)) <= budget_tokens:
        in_time = tuple(sorted(found.turns, key=lambda hit: hit.source_seqs))
        return replace(found, episodes=(), facts=(), turns=in_time, order="time")
    kept: list[Hit] = []
    told: set[int] = set()
    for hit in raised_by_facts(found).ranked():
        tokens = line_tokens(hit)
        if tokens > budget_tokens or (hit.kind != "turn" and told.issuperset(hit.source_seqs)):
            continue
        budget_tokens -= tokens
        kept.append(hit)
        if hit.kind == "turn":
            told.update(hit.source_seqs)
    tiers = (tuple(hit for hit in kept if hit.kind == kind) for kind in ("episode", "fact", "turn"))
    episodes, facts, turns = tiers
    return replace(found, episodes=episodes, facts=facts, turns=turns)


def raised_by_facts(found: SearchResult) -> SearchResult:
    """The result with its turns' scores raised by the facts that rest on them, best first."""
    best: dict[int, float] = {}
    for fact in reversed(found.facts):  # the nearest last, so that it counts
        best |= dict.fromkeys(fact.source_seqs, fact.score)
    raised = [
        replace(turn, score=1 - (1 - turn.score) * (1 - KEY_SHARE * best.get(turn.source_seqs[0], 0.0)))
        for turn in found.turns
    ]
    return replace(found, turns=tuple(sorted(raised, key=lambda turn: -turn.score)))


def as_told(tenant: Tenant, found: SearchResult) -> SearchResult:
    """The result as an answer is given it.

    An episode says from when to when it lasted, without its turns' own words: those are shown as turns.
    A replaced fact stands behind the one that replaces it, and is not shown by itself.
    """
    episodes = tuple(_with_span(tenant, episode) for episode in found.episodes)
    return replace(found, episodes=episodes, facts=_replaced(tenant, found.facts))


def _with_span(tenant: Tenant, episode: Hit) -> Hit:
    said = [tenant.said(seq) for seq in episode.source_seqs]
    quotes = {line for text, _ in said for line in text.split("\n")}
    text = "\n".join(line for line in episode.memory.split("\n") if line not in quotes) or episode.memory
    dates = sorted(date for _, date in said if date is not None)
    ends = [day_in_words(date) for date in dates[:1] + dates[-1:]]
    span = f"({ends[0]} to {ends[1]}) " if ends and ends[0] != ends[1] else ""
    return replace(episode, memory=span + text)


def _replaced(tenant: Tenant, facts: Sequence[Hit]) -> tuple[Hit, ...]:
    """The facts without replaced ones. What replaces them, found or not, has the best score of all.

    It mentions each that was found: what replaces a fact may be the work of an attacker.
    """
    place = {fact.id: n for n, fact in enumerate(tenant.current("fact"))}
    newer = {
        old: fact
        for fact in tenant.current("fact")
        for old in fact.supersedes
        if place.get(old, -1) < place[fact.id]  # an import may have any links, and no chain may be a circle
    }
    told = {hit.id: hit for hit in facts}
    for hit in facts:
        latest = newer.get(hit.id)
        while latest is not None and latest.id in newer:
            latest = newer[latest.id]
        if latest is not None and shows(tenant, latest, ANY_TIME):
            del told[hit.id]
            told[latest.id] = _standing_for(hit, latest, told.get(latest.id))
    return tuple(sorted(told.values(), key=lambda hit: -hit.score))


def _standing_for(old: Hit, latest: Memory, found: Hit | None) -> Hit:
    """The newest fact, as it was `found` or made so far, which also mentions the `old` one."""
    so_far = found or Hit(latest.id, "fact", latest.text, old.score, latest.timestamp, latest.source_seqs)
    since = "" if latest.timestamp is None else f" on {day_in_words(latest.timestamp)}"
    return replace(
        so_far,
        memory=f"{so_far.memory} (Replaced{since}: {old.memory})",
        score=max(so_far.score, old.score),
        source_seqs=tuple(sorted({*so_far.source_seqs, *old.source_seqs})),
    )


def line_tokens(hit: Hit) -> int:
    """What a hit's line in the answering prompt takes, as bytes / 4."""
    line = fenced if hit.kind == "episode" else anchored
    return by_bytes(line(ShownMemory(1, hit.timestamp and in_words(hit.timestamp), hit.memory)) + "\n")
