"""What consolidation will cost, before any LLM call: calls and tokens by policy and operation.

RecMem's gate is run over the real vectors as `calibrate` runs it, NEMORI and HiMem are run themselves, and
the real prompts are built around stand-in memories, so what is left to assume is what an LLM would reply.
That is in `LOW`, `EXPECTED` and `HIGH`, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from undertow.engine.base.config import Settings
from undertow.engine.base.model import Turn, Usage
from undertow.engine.encoders.token_count import TokenCount
from undertow.engine.estimate.calibrate import Step, Vectors, walk
from undertow.engine.estimate.driven import driven_usage
from undertow.engine.estimate.eager import eager_usage
from undertow.engine.estimate.guessed_replies import GuessedReplies
from undertow.engine.estimate.recmem import recmem_usage
from undertow.engine.estimate.reply_guess import EXPECTED, HIGH, LOW, Evenly, Guesser, ReplyGuess
from undertow.engine.policies.base import Thresholds
from undertow.engine.policies.registry import policy_of

TOTAL = "total"
FIGURES = ("calls", "prompt_tokens", "completion_tokens")

UsageByOperation = Mapping[str, Usage]
# of each operation, each figure as {"low", "expected", "high"}
Ranges = dict[str, dict[str, dict[str, int]]]


@dataclass(frozen=True)
class TenantLog:
    """One tenant's turns in order, as `dated`, and their vectors: float32 [n, dim], normalised."""

    turns: Sequence[Turn]
    vectors: Vectors


def estimate(
    logs: Sequence[TenantLog], settings: Settings, tokens: TokenCount, expected: ReplyGuess = EXPECTED
) -> Ranges:
    """Calls and tokens by operation under the settings' policy, and their `total`.

    `expected` is the middle one of the guesses. A range runs over short and over long replies; RecMem's over
    each with few and with many merges granted: more of them mean fewer calls of one operation and more of
    another. ValueError: RecMem without a part of it, of which there is no estimate.
    """
    match settings.policy:
        case "recmem":
            outcomes = _recmem_outcomes(logs, settings, tokens, expected)
        case "eager":
            outcomes = {guess: _eager(logs, tokens, guess) for guess in (LOW, expected, HIGH)}
        case _:
            outcomes = {guess: _driven(logs, settings, tokens, guess) for guess in (LOW, expected, HIGH)}
    return _ranges(outcomes[expected], list(outcomes.values()))


def _recmem_outcomes(
    logs: Sequence[TenantLog], settings: Settings, tokens: TokenCount, expected: ReplyGuess
) -> dict[ReplyGuess, UsageByOperation]:
    if settings.ablation is not None:
        raise ValueError(f"the calls of RecMem's ablation {settings.ablation!r} are not estimated")
    corners = [replace(size, merge_share=other.merge_share) for size in (LOW, HIGH) for other in (LOW, HIGH)]
    guesses = (expected, *corners)
    thresholds = thresholds_of(settings)
    decided = {share: _decided(logs, thresholds, share) for share in {g.merge_share for g in guesses}}
    return {g: _recmem(logs, decided[g.merge_share], tokens, g) for g in guesses}


def thresholds_of(settings: Settings) -> Thresholds:
    return Thresholds(settings.similarity_threshold, settings.merge_threshold, settings.recurrence_count)


def dated(turns: Iterable[Turn]) -> list[Turn]:
    """One tenant's turns in order; those without a time get their session's previous one, as in ingestion."""
    latest: dict[str, str] = {}
    found = []
    for turn in turns:
        timestamp = turn.timestamp or latest.get(turn.session_id)
        if timestamp is not None:
            latest[turn.session_id] = timestamp
        found.append(replace(turn, timestamp=timestamp))
    return found


def expected_usage(logs: Sequence[TenantLog], thresholds: Thresholds, tokens: TokenCount) -> UsageByOperation:
    """What RecMem would spend with the expected replies, and its `total`: the middle of `estimate`."""
    return _recmem(logs, _decided(logs, thresholds, EXPECTED.merge_share), tokens, EXPECTED)


def _eager(logs: Sequence[TenantLog], tokens: TokenCount, guess: ReplyGuess) -> UsageByOperation:
    guesser = Guesser(guess)
    return _sum(eager_usage(log.turns, tokens, guesser) for log in logs)


def _driven(
    logs: Sequence[TenantLog], settings: Settings, tokens: TokenCount, guess: ReplyGuess
) -> UsageByOperation:
    policy, replies = policy_of(settings), GuessedReplies(guess)
    return _sum(driven_usage(policy, log.turns, tokens, replies, guess.evoked_facts) for log in logs)


def _decided(logs: Sequence[TenantLog], theta: Thresholds, merge_share: float) -> list[list[Step]]:
    granted = Evenly(merge_share)
    return [
        list(
            walk(
                log.vectors,
                theta.theta_sim,
                theta.theta_count,
                theta_merge=theta.theta_merge,
                grants=lambda: granted.take() > 0,
            )
        )
        for log in logs
    ]


def _recmem(
    logs: Sequence[TenantLog], decided: Sequence[Sequence[Step]], tokens: TokenCount, guess: ReplyGuess
) -> UsageByOperation:
    guesser = Guesser(guess)
    pairs = zip(logs, decided, strict=True)
    return _sum(recmem_usage(log.turns, steps, tokens, guesser) for log, steps in pairs)


def _sum(usages: Iterable[UsageByOperation]) -> UsageByOperation:
    total: dict[str, Usage] = {}
    for usage in usages:
        for operation, used in usage.items():
            total[operation] = total.get(operation, Usage()) + used
    total[TOTAL] = sum(total.values(), Usage())
    return total


def _ranges(expected: UsageByOperation, outcomes: Sequence[UsageByOperation]) -> Ranges:
    operations = dict.fromkeys(op for usage in (expected, *outcomes) for op in usage)
    ordered = [*(op for op in operations if op != TOTAL), TOTAL]
    return {op: {figure: _range(op, figure, expected, outcomes) for figure in FIGURES} for op in ordered}


def _range(
    operation: str, figure: str, expected: UsageByOperation, outcomes: Sequence[UsageByOperation]
) -> dict[str, int]:
    every = [getattr(usage.get(operation, Usage()), figure) for usage in outcomes]
    middle = getattr(expected.get(operation, Usage()), figure)
    return {"low": min(every), "expected": middle, "high": max(every)}


def price(ranges: Ranges, in_per_million: float, out_per_million: float) -> dict[str, float]:
    """What the total would cost at these prices a million tokens, without a discount for cached ones."""
    total = ranges[TOTAL]
    prompt, completion = total["prompt_tokens"], total["completion_tokens"]
    return {
        end: round((prompt[end] * in_per_million + completion[end] * out_per_million) / 1e6, 4)
        for end in ("low", "expected", "high")
    }


def assumptions() -> dict[str, dict[str, Any]]:
    """The three guesses as plain data."""
    return {"low": asdict(LOW), "expected": asdict(EXPECTED), "high": asdict(HIGH)}
