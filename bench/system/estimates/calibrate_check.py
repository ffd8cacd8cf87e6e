"""Which share of linked pairs costs what the paper's RecMem does, for an encoder and conversations.

    python -m undertow.bench.system.estimates.calibrate_check --data locomo_dev.json \
        --tokenizer FOLDER --out docs/results

takes the theta_sim that `calibrate` gives for each share, runs the engine with it and a mock LLM that refuses
half the merges, and counts prompts and replies with the tokenizer. The mock writes less than an LLM, so the
estimate with its expected replies stands beside. Both are scaled to the paper's conversation by messages.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from undertow.bench.quality.datasets import Sample, load
from undertow.bench.quality.vectors import KeptVectors
from undertow.bench.system.estimates.check import logs_of, metered, put
from undertow.engine.base.config import Settings
from undertow.engine.encoders.base import Encoder
from undertow.engine.encoders.factory import make_encoder
from undertow.engine.encoders.token_count import TokenCount, token_count
from undertow.engine.estimate.calibrate import PairCosines, simulate
from undertow.engine.estimate.estimate import TOTAL, TenantLog, expected_usage
from undertow.engine.policies.base import Thresholds

SHARES = (0.005, 0.01, 0.02, 0.05, 0.1)
REFUSAL_RATE = 0.5
# spec, section Cost: tokens a conversation of 588 messages, with GPT-4.1-mini and GPT-4o-mini
PAPER_TOKENS = (193_200, 202_000)
PAPER_MESSAGES = 588
# the paper's own threshold, whatever share it links here
PAPER_THETA = 0.7


def check(
    samples: Sequence[Sample],
    settings: Settings,
    encoder: Encoder,
    tokens: TokenCount,
    shares: Sequence[float] = SHARES,
) -> dict[str, Any]:
    """By share of linked pairs, the paper's theta among them: what fires, merges and is spent."""
    logs = logs_of(samples, encoder, settings)
    pairs = PairCosines()
    for log in logs:
        pairs.add(log.vectors)
    thetas = [(share, pairs.quantile(1 - share)) for share in shares]
    thetas.append((round(pairs.share_above(PAPER_THETA), 4), PAPER_THETA))
    messages = sum(len(turn.messages) for sample in samples for turn in sample.turns)
    rows = []
    for share, theta in sorted(thetas):
        row = _row(samples, logs, theta, settings, encoder, tokens, messages)
        rows.append({"share": share, "theta_sim": theta, **row})
    return {
        "conversations": len(samples),
        "turns": sum(len(log.turns) for log in logs),
        "messages": messages,
        "paper_tokens": PAPER_TOKENS,
        "shares": rows,
    }


def _row(
    samples: Sequence[Sample],
    logs: Sequence[TenantLog],
    theta: float,
    settings: Settings,
    encoder: Encoder,
    tokens: TokenCount,
    messages: int,
) -> dict[str, Any]:
    count = settings.recurrence_count
    run = metered(samples, settings.model_copy(update={"theta_sim": theta}), encoder, tokens, REFUSAL_RATE)
    expected = expected_usage(logs, Thresholds(theta, theta, count), tokens)[TOTAL]
    spent = sum(used.prompt_tokens + used.completion_tokens for used in run.spent.values())
    alone = [simulate(log.vectors, theta, count) for log in logs]
    return {
        "triggers_without_merges": sum(t.fires for t in alone),
        "consolidations": run.stats["consolidations"],
        "merges": run.stats["merges"],
        "merge_refusals": run.stats["merge_refusals"],
        "calls": run.stats["llm_calls"],
        "waiting_turns": run.stats["waiting_turns"],
        "tokens_per_588_messages": {
            "mock": _scaled(spent, messages),
            "estimated": _scaled(expected.prompt_tokens + expected.completion_tokens, messages),
        },
    }


def _scaled(tokens: int, messages: int) -> int:
    return round(tokens * PAPER_MESSAGES / messages)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m undertow.bench.system.estimates.calibrate_check")
    parser.add_argument("--data", type=Path, required=True, help="LoCoMo's file")
    parser.add_argument("--vectors", type=Path, help="keep the vectors here")
    parser.add_argument("--tokenizer", type=Path, help="folder of the model whose tokens are counted")
    parser.add_argument("--out", type=Path, help="folder for calibrate.json")
    args = parser.parse_args(argv)
    settings = Settings(device="cpu", llm_url=None, policy="recmem", ablation=None)
    encoder = KeptVectors(make_encoder(settings), args.vectors)
    tokens = token_count(settings, args.tokenizer)
    found = check(list(load(args.data, "locomo", settings.max_message_bytes)), settings, encoder, tokens)
    encoder.save()
    about = {"encoder": settings.encoder, "theta_count": settings.recurrence_count, "tokens": tokens.name}
    put({**about, **found}, args.out, "calibrate.json")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
