"""What consolidation will cost, before any LLM call: calls and tokens by policy and operation.

The engine itself runs over the logs, in a temporary store, with given vectors and guessed replies. Windows,
splits, settings and ablations are the engine's own. The assumptions are the replies (`LOW`, `EXPECTED` and
`HIGH`) and the vectors of what an LLM would write (`StandInEncoder`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Turn, Usage
from undertow.engine.base.queries import UsageQuery
from undertow.engine.encoders.token_count import TokenCount
from undertow.engine.estimate.assumptions import EXPECTED, HIGH, LOW, Assumptions
from undertow.engine.estimate.guessed_replies import GuessedReplies
from undertow.engine.estimate.stand_ins import GuessingLLM, StandInEncoder, TenantLog
from undertow.prompts.operations import REPLIES

TOTAL = "total"
FIGURES = ("calls", "prompt_tokens", "completion_tokens")
# The engine chooses the size of a batch by time, on which the order of replies would depend.
_SETTINGS: Mapping[str, Any] = {
    "device": "cpu",
    "durability": "commit",
    "batch_turns": 1_024,
    "llm_url": None,
    "tenant_token_budget": None,
}

# for each operation, each figure as {"low", "expected", "high"}
Ranges = dict[str, dict[str, dict[str, int]]]


def estimate(
    logs: Sequence[TenantLog], settings: Settings, tokens: TokenCount, expected: Assumptions = EXPECTED
) -> Ranges:
    """Calls and tokens by operation under the settings' policy, and their `total`. One log a tenant.

    The range covers short and long replies. For RecMem it covers each with few and with many granted merges:
    more merges mean fewer calls of one operation and more of another.
    """
    extremes = [LOW, HIGH]
    if settings.policy == "recmem":
        extremes = [replace(size, merge_share=end.merge_share) for size in extremes for end in extremes]
    return _ranges([usage(logs, settings, tokens, assumed) for assumed in (expected, *extremes)])


def usage(
    logs: Sequence[TenantLog], settings: Settings, tokens: TokenCount, assumed: Assumptions
) -> dict[str, Usage]:
    """Calls and tokens by operation of an engine that gets these replies, and their `total`."""
    encoder = StandInEncoder(logs, assumed.likeness, embed_timestamp=settings.embed_timestamp)
    llm = GuessingLLM(GuessedReplies(assumed, encoder.add), tokens)
    with (
        TemporaryDirectory(prefix="undertow-estimate-") as folder,
        Engine(Path(folder), settings.model_copy(update=_SETTINGS), encoder, llm=llm) as engine,
    ):
        engine.add_batch([turn for log in logs for turn in log.turns])
        for tenant in dict.fromkeys(turn.tenant for log in logs for turn in log.turns):
            engine.log_flush(tenant)
        engine.drain()
        found = {operation: Usage(**used) for operation, used in engine.call(UsageQuery()).items()}
    return {**found, TOTAL: sum(found.values(), Usage())}


def dated(turns: Iterable[Turn]) -> list[Turn]:
    """One tenant's turns in order, as ingestion dates them: without a time, by the session's previous one."""
    latest: dict[str, str] = {}
    found = []
    for turn in turns:
        timestamp = turn.timestamp or latest.get(turn.session_id)
        if timestamp is not None:
            latest[turn.session_id] = timestamp
        found.append(replace(turn, timestamp=timestamp))
    return found


def _ranges(runs: Sequence[Mapping[str, Usage]]) -> Ranges:
    """The ranges over several runs; the first one is the expected one."""
    operations = [op for op in (*REPLIES, TOTAL) if any(op in run for run in runs)]
    return {op: {figure: _range(op, figure, runs) for figure in FIGURES} for op in operations}


def _range(operation: str, figure: str, runs: Sequence[Mapping[str, Usage]]) -> dict[str, int]:
    every: list[int] = [getattr(run.get(operation, Usage()), figure) for run in runs]
    return {"low": min(every), "expected": every[0], "high": max(every)}


def price(ranges: Ranges, in_per_million: float, out_per_million: float) -> dict[str, float]:
    """The price of the total at these prices for a million tokens, without a discount for cached ones."""
    prompt, completion = ranges[TOTAL]["prompt_tokens"], ranges[TOTAL]["completion_tokens"]
    return {
        end: round((prompt[end] * in_per_million + completion[end] * out_per_million) / 1e6, 4)
        for end in ("low", "expected", "high")
    }


def assumptions() -> dict[str, dict[str, Any]]:
    """The three sets of assumptions as plain data."""
    return {"low": asdict(LOW), "expected": asdict(EXPECTED), "high": asdict(HIGH)}
