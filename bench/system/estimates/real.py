"""How far `undertow estimate` is off from what runs with an LLM have cost.

    python -m undertow.bench.system.estimates.real eval-locomo-recmem/summary.json --data locomo_dev.json \
        --tokenizer FOLDER --out docs/results

Each file is the summary of `undertow eval`, whose policy and thresholds are then estimated with, or what
`undertow stats --tenant NAME --json` says of the conversation that `--sample` names.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import orjson

from undertow.bench.quality.datasets import Sample, load
from undertow.bench.quality.vectors import KeptVectors
from undertow.bench.system.estimates.check import compare, logs_of, put
from undertow.engine.base.config import Settings
from undertow.engine.base.model import PolicyName, Usage
from undertow.engine.encoders.base import Encoder
from undertow.engine.encoders.factory import make_encoder
from undertow.engine.encoders.token_count import TokenCount, token_count
from undertow.engine.estimate.estimate import estimate

_MADE_WITH = ("policy", "theta_sim", "theta_merge", "theta_count", "encoder", "ablation")


def usage_in(found: object) -> dict[str, Usage]:
    """The usage by operation that `undertow stats --json` tells. ValueError: there is none."""
    usage = found.get("usage", found) if isinstance(found, dict) else None
    if not isinstance(usage, dict) or not all(isinstance(u, dict) and "calls" in u for u in usage.values()):
        raise ValueError(
            "no usage by operation. Give a summary of `undertow eval`, or what `undertow stats --json` says."
        )
    return {op: Usage(u["calls"], u["prompt_tokens"], 0, u["completion_tokens"]) for op, u in usage.items()}


@dataclass(frozen=True)
class RealRun:
    """What a run with a real LLM was made with, and what it spent, by conversation and operation."""

    made_with: Mapping[str, Any]
    spent: Mapping[str, Mapping[str, Usage]]


def real_run(found: object, policy: str, named: Sequence[str] | None) -> RealRun:
    """The run that a file tells of; `named`: only these conversations. ValueError: it lacks them."""
    if not isinstance(found, dict) or "construction" not in found:
        if named is None or len(named) != 1:
            raise ValueError("it does not say whose usage it is: name one conversation with --sample.")
        return RealRun({"policy": policy}, {named[0]: usage_in(found)})
    by_conversation = found["construction"]["by_conversation"]
    if unknown := set(named or ()) - set(by_conversation):
        raise ValueError(f"it has {', '.join(by_conversation)}, not {sorted(unknown)[0]}.")
    spent = {name: usage_in(used) for name, used in by_conversation.items() if not named or name in named}
    return RealRun({name: found[name] for name in _MADE_WITH}, spent)


def compare_real(
    run: RealRun, samples: Sequence[Sample], settings: Settings, encoder: Encoder, tokens: TokenCount
) -> dict[str, Any]:
    """Each conversation of a real run against its estimate, and all of them together; see `compare`."""
    own = [sample for sample in samples if sample.tenant in run.spent]
    if missing := set(run.spent) - {sample.tenant for sample in own}:
        raise ValueError(f"--data has no conversation {sorted(missing)[0]}.")
    logs = logs_of(own, encoder, settings)
    each = {
        sample.tenant: compare(estimate([log], settings, tokens), run.spent[sample.tenant])
        for sample, log in zip(own, logs, strict=True)
    }
    every = {op for used in run.spent.values() for op in used}
    summed = {op: sum((used.get(op, Usage()) for used in run.spent.values()), Usage()) for op in every}
    return {**each, "together": compare(estimate(logs, settings, tokens), summed)}


def main(argv: Sequence[str] | None = None) -> int:
    args = _options(argv)
    try:
        runs = [_compared(file, args) for file in args.files]
    except ValueError as wrong:
        print(wrong, file=sys.stderr)
        return 2
    put({"runs": runs}, args.out, "estimate-real.json")
    return 0


def _compared(file: Path, args: argparse.Namespace) -> dict[str, Any]:
    try:
        run = real_run(orjson.loads(file.read_bytes()), args.policy, args.sample)
    except ValueError as wrong:
        raise ValueError(f"{file}: {wrong}") from wrong
    settings = Settings(device="cpu", llm_url=None, **run.made_with)
    encoder = KeptVectors(make_encoder(settings), args.vectors)
    tokens = token_count(settings, args.tokenizer)
    samples = list(load(args.data, "locomo", settings.max_message_bytes))
    found = compare_real(run, samples, settings, encoder, tokens)
    encoder.save()
    return {**run.made_with, "tokens": tokens.name, **found}


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m undertow.bench.system.estimates.real")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="summaries, or a store's figures")
    parser.add_argument("--data", type=Path, required=True, help="LoCoMo's file")
    parser.add_argument("--sample", action="append", help="only this conversation; may be given again")
    parser.add_argument("--vectors", type=Path, help="keep the vectors here")
    parser.add_argument("--tokenizer", type=Path, help="folder of the model whose tokens are counted")
    parser.add_argument(
        "--policy",
        choices=get_args(PolicyName),
        default="recmem",
        help="of a store's figures; a summary says it",
    )
    parser.add_argument("--out", type=Path, help="folder for estimate-real.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
