"""How far `undertow estimate` is off: estimated against metered, by operation.

    python -m undertow.bench.system.estimates.check --data locomo_dev.json \
        --tokenizer FOLDER --out docs/results

runs the engine over some conversations with a mock LLM, under RecMem one that refuses various shares of
merges, counts what it is asked and replies by the same tokenizer, and compares. `estimate_real` does the same
with what runs with an LLM have cost.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
from undertow.engine.estimate.estimate import FIGURES, TOTAL, Ranges, TenantLog, estimate
from undertow.engine.estimate.guessed_replies import MESSAGES_PER_TURN, shown_in
from undertow.engine.estimate.reply_guess import EXPECTED, ReplyGuess
from undertow.prompts.builders import QUERY_OPERATIONS, REPLIES, system_message

RATES = (0.0, 0.25, 0.5, 0.75, 1.0)
# what each operation makes memories of, by its heading in the prompt
SHOWN = {
    "partition": "Messages",
    "distil": "Messages",
    "distil_direct": "Messages",
    "segment": "Turns",
    "notes": "Turns",
    "align": "Notes",
}
SAMPLES = ("conv-30", "conv-26")


@dataclass(frozen=True, slots=True)
class Counted(MockReplies):
    """The mock's replies, with what is asked and replied counted by a tokenizer and by operation.

    `shown`: how many lines those of `SHOWN` were shown of it. `listed`: how many things were replied.
    """

    tokens: TokenCount | None = None
    spent: dict[str, Usage] = field(default_factory=dict)
    shown: Counter[str] = field(default_factory=Counter)
    listed: Counter[str] = field(default_factory=Counter)

    def reply(self, messages: Messages, schema: Mapping[str, Any] | None) -> str:
        content = MockReplies.reply(self, messages, schema)
        assert self.tokens is not None, "made by `metered`"
        asked = self.tokens.template_tokens + sum(self.tokens.of_text(m["content"]) for m in messages)
        operation = next(op for op in REPLIES if system_message(op) == messages[0]["content"])
        used = Usage(1, asked, 0, self.tokens.of_text(content))
        self.spent[operation] = self.spent.get(operation, Usage()) + used
        if (heading := SHOWN.get(operation)) is not None:
            self.shown[operation] += len(shown_in(messages[-1]["content"]).get(heading, ()))
        self.listed[operation] += sum(len(v) for v in orjson.loads(content).values() if isinstance(v, list))
        return content


@dataclass(frozen=True)
class Run:
    """A real run of the engine with a mock LLM: what it spent and replied, and what became of the turns."""

    replies: Counted
    stats: Mapping[str, int]

    @property
    def spent(self) -> Mapping[str, Usage]:
        return self.replies.spent

    def told(self, policy: PolicyName) -> ReplyGuess:
        """The guess that knows how much the mock has made of what; lengths are guessed as before."""
        shown, listed = self.replies.shown, self.replies.listed
        match policy:
            case "recmem":
                return replace(EXPECTED, merge_share=1 - self.replies.refusal_rate)
            case "eager":
                return replace(EXPECTED, facts=_mean(listed["extract"], self._calls("extract"), 0))
            case "nemori":
                distilled = "distil" if shown["distil"] else "distil_direct"  # NEMORI-s
                return replace(
                    EXPECTED,
                    topic_messages=_mean(shown["partition"], listed["partition"], EXPECTED.topic_messages),
                    continued_share=_mean(self._calls("integrate"), self._calls("select"), 0),
                    facts_per_message=_mean(listed[distilled], shown[distilled], 0),
                )
            case "himem":
                each = MESSAGES_PER_TURN * shown["segment"]
                return replace(
                    EXPECTED,
                    topic_messages=_mean(each, listed["segment"], EXPECTED.topic_messages),
                    notes_per_turn=_mean(listed["notes"], shown["notes"], 0),
                    traits=_mean(listed["traits"], self._calls("traits"), 0),
                    aligned_share=_mean(listed["align"], shown["align"], 0),
                )

    def _calls(self, operation: str) -> int:
        return self.spent.get(operation, Usage()).calls


def _mean(total: int, count: int, otherwise: float) -> float:
    return total / count if count else otherwise


def metered(
    samples: Sequence[Sample], settings: Settings, encoder: Encoder, tokens: TokenCount, refusal_rate: float
) -> Run:
    """Consolidate the samples, each to its end, in a store that is thrown away."""
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
        return Run(replies, engine.stats())


def compare(estimated: Ranges, spent: Mapping[str, Usage]) -> dict[str, dict[str, Any]]:
    """By operation and for the total: each figure estimated (low, expected, high), metered, and `off`.

    `off` is the expected one's distance as a share of the metered one; None where nothing was metered.
    """
    every = {op: used for op, used in spent.items() if op not in QUERY_OPERATIONS}
    every[TOTAL] = sum(every.values(), Usage())
    return {
        op: {figure: _row(estimated[op][figure], getattr(every[op], figure)) for figure in FIGURES}
        for op in every
        if op in estimated
    }


def _row(estimated: Mapping[str, int], measured: int) -> dict[str, Any]:
    off = round(estimated["expected"] / measured - 1, 3) if measured else None
    within = estimated["low"] <= measured <= estimated["high"]
    return {**estimated, "metered": measured, "off": off, "within": within}


def logs_of(samples: Sequence[Sample], encoder: Encoder, settings: Settings) -> list[TenantLog]:
    """The samples with the vectors that the engine would have of them."""
    dated = settings.embed_timestamp
    texts = [[as_embedded(turn.text, turn.timestamp, dated) for turn in sample.turns] for sample in samples]
    vectors = [encoder.encode(some).astype(np.float32) for some in texts]
    return [TenantLog(sample.turns, some) for sample, some in zip(samples, vectors, strict=True)]


def check(
    samples: Sequence[Sample], settings: Settings, encoder: Encoder, tokens: TokenCount
) -> list[dict[str, Any]]:
    """Each run of the mock against the estimate as it is, and against one that is told what the mock does.

    Under RecMem a run for each refusal rate, else one.
    """
    logs = logs_of(samples, encoder, settings)
    blind = estimate(logs, settings, tokens)
    results = []
    for rate in RATES if settings.policy == "recmem" else RATES[:1]:
        run = metered(samples, settings, encoder, tokens, rate)
        told = run.told(settings.policy)
        counts = {name: run.stats[name] for name in ("consolidations", "merges", "merge_refusals")}
        knows = {name: value for name, value in asdict(told).items() if value != asdict(EXPECTED)[name]}
        as_it_is = compare(blind, run.spent)
        knowing = compare(estimate(logs, settings, tokens, told), run.spent)
        results.append(
            {"refusal_rate": rate, **counts, "as_it_is": as_it_is, "knows": knows, "told": knowing}
        )
    return results


def main(argv: Sequence[str] | None = None) -> int:
    parser, args = _options(argv)
    settings = Settings(device="cpu", llm_url=None, policy=args.policy, ablation=None)
    every = {sample.tenant: sample for sample in load(args.data, "locomo", settings.max_message_bytes)}
    if unknown := set(args.sample) - set(every):
        parser.error(f"--sample {sorted(unknown)[0]!r}: {args.data} has {', '.join(every)}.")
    encoder = KeptVectors(make_encoder(settings), args.vectors)
    tokens = token_count(settings, args.tokenizer)
    document = {name: check([every[name]], settings, encoder, tokens) for name in args.sample}
    encoder.save()
    about = {
        "policy": settings.policy,
        "encoder": settings.encoder,
        "theta_sim": settings.similarity_threshold,
        "theta_count": settings.recurrence_count,
    }
    put({**about, "tokens": tokens.name, **document}, args.out, f"estimate-{settings.policy}.json")
    return 0


def put(document: Mapping[str, Any], out: Path | None, name: str) -> None:
    """A line on standard output, and the file of that name in `out`."""
    line = orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)
    sys.stdout.buffer.write(line)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / name).write_bytes(line)


def _options(argv: Sequence[str] | None) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="python -m undertow.bench.system.estimates.check")
    parser.add_argument("--data", type=Path, required=True, help="LoCoMo's file")
    parser.add_argument("--sample", action="append", help="only this conversation; may be given again")
    parser.add_argument("--vectors", type=Path, help="keep the vectors here")
    parser.add_argument("--tokenizer", type=Path, help="folder of the model whose tokens are counted")
    parser.add_argument("--policy", choices=get_args(PolicyName), default="recmem", help="whose cost it is")
    parser.add_argument("--out", type=Path, help="folder for estimate-POLICY.json")
    args = parser.parse_args(argv)
    args.sample = args.sample or list(SAMPLES)
    return parser, args


if __name__ == "__main__":
    raise SystemExit(main())
