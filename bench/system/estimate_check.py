"""How far `undertow estimate` is off: estimated against metered, by operation.

    python -m undertow.bench.system.estimate_check --data locomo_dev.json --tokenizer FOLDER [FILE ...]

With files, against the runs with an LLM that they report: summaries of `undertow eval`, or files in
docs/results that hold several. Otherwise against runs of the engine with a mock LLM, under RecMem at several
rates of refused merges. The same tokenizer counts the mock's prompts and replies.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, get_args

import numpy as np
import orjson

from undertow.bench.mock.llm import MockLLM
from undertow.bench.mock.replies import Messages, MockReplies
from undertow.bench.quality.datasets import Sample, load
from undertow.bench.quality.vectors import KeptVectors
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.model import PolicyName, Usage, as_embedded
from undertow.engine.encoders.base import Encoder
from undertow.engine.encoders.factory import make_encoder
from undertow.engine.encoders.token_count import TokenCount, token_count
from undertow.engine.estimate.assumptions import EXPECTED, Assumptions
from undertow.engine.estimate.estimate import FIGURES, TOTAL, Ranges, estimate
from undertow.engine.estimate.guessed_replies import MESSAGES_PER_TURN, shown_in
from undertow.engine.estimate.stand_ins import TenantLog
from undertow.prompts.builders import operation_of, system_message
from undertow.prompts.operations import QUERY_OPERATIONS, REPLIES

RATES = (0.0, 0.5, 1.0)
SAMPLES = ("conv-30", "conv-26")
# the heading of the material that an operation makes memories of
SHOWN = {
    **dict.fromkeys(("partition", "distil", "distil_direct"), "Messages"),
    **dict.fromkeys(("segment", "notes"), "Turns"),
    "align": "Notes",
}
# the settings of a run that its summary reports and an estimate depends on
MADE_WITH = (
    *("policy", "ablation", "theta_sim", "theta_merge", "theta_count", "encoder", "embed_timestamp"),
    *("context_tokens", "reply_tokens", "window_messages", "management", "calls"),
)

Spent = Mapping[str, Usage]


@dataclass(frozen=True, slots=True)
class Counted(MockReplies):
    """The mock's replies, with prompts and replies counted by a tokenizer and by operation.

    `shown`: the number of lines of `SHOWN` in the prompts. `listed`: the number of items in the replies.
    """

    tokens: TokenCount = field(kw_only=True)
    spent: dict[str, Usage] = field(default_factory=dict)
    shown: Counter[str] = field(default_factory=Counter)
    listed: Counter[str] = field(default_factory=Counter)

    def reply(self, messages: Messages, schema: Mapping[str, Any] | None) -> str:
        content = MockReplies.reply(self, messages, schema)
        asked = self.tokens.template_tokens + sum(self.tokens.of_text(m["content"]) for m in messages)
        operation = operation_of(next(of for of in REPLIES if system_message(of) == messages[0]["content"]))
        used = Usage(1, asked, 0, self.tokens.of_text(content))
        self.spent[operation] = self.spent.get(operation, Usage()) + used
        heading = SHOWN.get(operation, "")
        self.shown[operation] += len(shown_in(messages[-1]["content"]).get(heading, ()))
        self.listed[operation] += sum(len(v) for v in orjson.loads(content).values() if isinstance(v, list))
        return content

    def guess(self) -> Assumptions:
        """The guess with the mock's own counts; lengths are guessed as before."""
        cut = "partition" if "partition" in self.spent else "segment"
        each = 1 if cut == "partition" else MESSAGES_PER_TURN
        distil = "distil" if "distil" in self.spent else "distil_direct"
        calls = {operation: used.calls for operation, used in self.spent.items()}
        return replace(
            EXPECTED,
            merge_share=1 - self.refusal_rate,
            facts=_mean(self.listed["extract"], calls.get("extract", 0), EXPECTED.facts),
            topic_messages=_mean(each * self.shown[cut], self.listed[cut], EXPECTED.topic_messages),
            continued_share=_mean(calls.get("integrate", 0), calls.get("select", 0), 0),
            facts_per_message=_mean(self.listed[distil], self.shown[distil], 0),
            notes_per_turn=_mean(self.listed["notes"], self.shown["notes"], 0),
            traits=_mean(self.listed["traits"], calls.get("traits", 0), 0),
            aligned_share=_mean(self.listed["align"], self.shown["align"], 0),
        )


def _mean(total: int, count: int, otherwise: float) -> float:
    return total / count if count else otherwise


def metered(
    samples: Sequence[Sample], settings: Settings, encoder: Encoder, tokens: TokenCount, refusal_rate: float
) -> Counted:
    """Consolidate all turns of the samples in a temporary store, with the mock LLM."""
    replies = Counted(refusal_rate=refusal_rate, tokens=tokens)
    with (
        TemporaryDirectory(prefix="undertow-metered-") as folder,
        MockLLM(replies) as llm,
        Engine(Path(folder), settings, encoder, llm=llm) as engine,
    ):
        for sample in samples:
            engine.add_batch(sample.turns)
            engine.log_flush(sample.tenant)
        engine.drain()
    return replies


def compare(estimated: Ranges, spent: Spent) -> dict[str, dict[str, Any]]:
    """By operation and for the total: each figure estimated (low, expected, high), metered, and `off`.

    `off` is the error of the expected figure as a share of the metered one; None if nothing was metered.
    """
    every = {op: used for op, used in spent.items() if op not in QUERY_OPERATIONS}
    every[TOTAL] = sum(every.values(), Usage())
    shared = [op for op in every if op in estimated]
    return {op: {f: _row(estimated[op][f], getattr(every[op], f)) for f in FIGURES} for op in shared}


def _row(estimated: Mapping[str, int], measured: int) -> dict[str, Any]:
    off = round(estimated["expected"] / measured - 1, 3) if measured else None
    within = estimated["low"] <= measured <= estimated["high"]
    return {**estimated, "metered": measured, "off": off, "within": within}


def log_of(sample: Sample, encoder: Encoder, settings: Settings) -> TenantLog:
    """The sample with the vectors that the engine would store."""
    dated = settings.embed_timestamp
    vectors = encoder.encode([as_embedded(turn.text, turn.timestamp, dated) for turn in sample.turns])
    return TenantLog(sample.turns, vectors.astype(np.float32))


def check_mock(
    sample: Sample, settings: Settings, encoder: Encoder, tokens: TokenCount
) -> list[dict[str, Any]]:
    """Runs with the mock against the estimate as it is, and against one with the mock's own counts."""
    log = log_of(sample, encoder, settings)
    blind = estimate([log], settings, tokens)
    rows = []
    for rate in RATES if settings.policy == "recmem" else RATES[:1]:
        run = metered([sample], settings, encoder, tokens, rate)
        told = compare(estimate([log], settings, tokens, run.guess()), run.spent)
        rows.append({"refusal_rate": rate, "as_it_is": compare(blind, run.spent), "told": told})
    return rows


def real_runs(found: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Spent]]]:
    """The runs with an LLM that a file reports: their settings, and their usage by conversation.

    Runs and conversations that were stopped before their last turns are left out. A run without settings and
    conversations of its own has those of the file's first run.
    """
    for run in found.get("runs", ()):
        whole = {name: c for name, c in run["conversations"].items() if not c["undecided_turns"]}
        thetas = {"theta_sim": run["theta_sim"], "theta_count": found["theta_count"]}
        yield {"policy": "recmem", **thetas}, {name: _usage(c["usage"]) for name, c in whole.items()}
    first: Mapping[str, Any] = {}
    for name, run in ({"": found} if "construction" in found else found).items():
        policy = run.get("policy", name) if isinstance(run, dict) else None
        if policy not in get_args(PolicyName) or "construction" not in run or "exchanges_decided" in run:
            continue
        first = first or run
        made_with = {field: {**first, **run}[field] for field in MADE_WITH if field in first}
        each = run["construction"].get("by_conversation")
        if each is None:
            names = first["construction"]["by_conversation"]
            each = dict.fromkeys(names, run["construction"]["by_operation"])
        if (share := {**first, **run}.get("sim_share")) is not None:
            fixed = {"theta_sim", *(["theta_merge"] if run.get("merge_share") else [])}
            made_with = {k: v for k, v in made_with.items() if k not in fixed} | {"theta_share": share}
        yield {**made_with, "policy": policy}, {name: _usage(used) for name, used in each.items()}


def _usage(found: Mapping[str, Mapping[str, int]]) -> Spent:
    return {op: Usage(u["calls"], u["prompt_tokens"], 0, u["completion_tokens"]) for op, u in found.items()}


def check_real(file: Path, samples: Mapping[str, Sample], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Each run in the file against its estimate, by conversation. ValueError: the file reports no run."""
    rows = []
    for made_with, by_conversation in real_runs(orjson.loads(file.read_bytes())):
        # a run that does not say is older than any other form of calls
        settings = Settings(device="cpu", llm_url=None, **{"calls": "paper", **made_with})
        encoder = KeptVectors(make_encoder(settings), args.vectors)
        tokens = token_count(settings, args.tokenizer)
        each = {
            name: compare(estimate([log_of(samples[name], encoder, settings)], settings, tokens), spent)
            for name, spent in by_conversation.items()
            if name in (args.sample or samples)
        }
        encoder.save()
        rows.append({"file": file.name, **made_with, "tokens": tokens.name, **each})
    if not rows:
        raise ValueError(f"{file} reports no usage by conversation. Name a summary of `undertow eval`.")
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    parser, args = _options(argv)
    settings = Settings(device="cpu", llm_url=None, policy=args.policy, ablation=None)
    samples = {sample.tenant: sample for sample in load(args.data, "locomo", settings.max_message_bytes)}
    if unknown := set(args.sample or ()) - set(samples):
        parser.error(f"--sample {sorted(unknown)[0]!r}: {args.data} has {', '.join(samples)}.")
    if args.files:
        try:
            rows = [row for file in args.files for row in check_real(file, samples, args)]
        except ValueError as wrong:
            parser.error(str(wrong))
        put({"runs": rows}, args.out, "estimate-real.json")
        return 0
    encoder = KeptVectors(make_encoder(settings), args.vectors)
    tokens = token_count(settings, args.tokenizer)
    names = args.sample or SAMPLES
    found = {name: check_mock(samples[name], settings, encoder, tokens) for name in names}
    encoder.save()
    thetas = {
        **{"theta_sim": settings.similarity_threshold, "theta_count": settings.recurrence_count},
        "theta_share": settings.sim_share,
    }
    about = {"policy": settings.policy, "encoder": settings.encoder, **thetas, "tokens": tokens.name}
    put({**about, **found}, args.out, f"estimate-{settings.policy}.json")
    return 0


def put(document: Mapping[str, Any], out: Path | None, name: str) -> None:
    """Write a line to standard output, and the file of that name in `out`."""
    line = orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)
    sys.stdout.buffer.write(line)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(line)


def _options(argv: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="python -m undertow.bench.system.estimate_check")
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE", help="reports of runs with an LLM")
    parser.add_argument("--data", type=Path, required=True, help="LoCoMo's file")
    parser.add_argument("--sample", action="append", help="only this conversation; may be repeated")
    parser.add_argument("--vectors", type=Path, help="keep the vectors here")
    parser.add_argument("--tokenizer", type=Path, help="folder of the model whose tokens are counted")
    parser.add_argument("--policy", choices=get_args(PolicyName), default="recmem", help="of the mock's runs")
    parser.add_argument("--out", type=Path, help="folder for estimate-POLICY.json or estimate-real.json")
    return parser, parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
