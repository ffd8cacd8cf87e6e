"""How evenly RecMem fires over tenants: with a fixed theta, and by a share of each tenant's own pairs.

    python -m undertow.bench.quality.evidence.firing_rates --data FILE [--vectors FILE] [--parts N]

The mock LLM answers, and refuses half of the merges. `--parts N` cuts each conversation into tenants of N
turns.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, pstdev
from tempfile import TemporaryDirectory
from typing import Any

import orjson

from undertow.bench.mock.llm import MockLLM
from undertow.bench.mock.replies import MockReplies
from undertow.bench.quality.datasets import load
from undertow.bench.quality.run.summary import difference
from undertow.bench.quality.vectors import KeptVectors
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Turn
from undertow.engine.encoders.factory import make_encoder

# the gate of the paper, and that of the default, where turns that say little neither fire nor count
GATES: Mapping[str, Mapping[str, Any]] = {
    "the paper's gate": {"salience_turns": 0, "quiet_share": 0.0},
    "the default": {},
}
THETAS: Mapping[str, Mapping[str, Any]] = {"theta 0.7": {"theta_sim": 0.7}, "by share": {}}


def parts_of(turns: Mapping[str, Sequence[Turn]], size: int | None) -> dict[str, list[Turn]]:
    """Each tenant's whole parts of `size` turns, as tenants of their own; None: the tenants as they are."""
    if size is None:
        return {name: list(of) for name, of in turns.items()}
    return {
        f"{name}/{start}": [replace(turn, tenant=f"{name}/{start}") for turn in of[start : start + size]]
        for name, of in turns.items()
        for start in range(0, len(of) - size + 1, size)
    }


def rates(
    turns: Mapping[str, Sequence[Turn]],
    settings: Settings,
    vectors: KeptVectors,
    observed: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """Fires, and requests of any kind (fires and merges asked for), in 100 turns: over tenants.

    `observed`: LoCoMo's observations by the line of their message. How many a turn has says what is worth
    reading: of turns in fired clusters, of those read for their salience, and of all.
    """
    fires, requests = [], []
    told: dict[str, list[int]] = {"fired": [], "salient": [], "all": []}
    with (
        TemporaryDirectory(prefix="undertow-rates-") as store,
        MockLLM(MockReplies(refusal_rate=0.5)) as llm,
        Engine(Path(store), settings, vectors, llm=llm) as engine,
    ):
        for name, of in turns.items():
            receipts = engine.add_batch(of)
            engine.drain()
            held = [sum(len(observed.get(line, ())) for line in turn.text.split("\n")) for turn in of]
            by_seq = dict(zip((receipt.seq for receipt in receipts), held, strict=True))
            why = engine.explain(name)
            fired_seqs = {s for r in why if r["decision"] == "fired" for s in r["cluster_seqs"]}
            told["fired"] += [by_seq[seq] for seq in fired_seqs]
            told["salient"] += [by_seq[seq] for r in why for seq in r.get("salient_seqs", ())]
            told["all"] += by_seq.values()
            fired = [record["decision"] == "fired" for record in why]
            asked = [record["merge_asked"] for record in why]
            fires.append(100 * fmean(fired))
            requests.append(100 * fmean(map(any, zip(fired, asked, strict=True))))
    observations = {of: with_interval(counts) for of, counts in told.items()}
    rate = {"tenants": len(turns), "fires": spread(fires), "requests": spread(requests)}
    return {**rate, "observations_a_turn": observations}


def with_interval(counts: Sequence[int]) -> dict[str, float | None]:
    """How many, their mean, and the interval that holds it in 95 of 100 cases."""
    of = difference(counts)
    return {"turns": len(counts), "mean": of["mean"], "low": of["low"], "high": of["high"]}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, standard deviation, their ratio, the ends, and how many are 0."""
    mean, deviation = fmean(values), pstdev(values)
    told = {"mean": mean, "deviation": deviation, "ratio": deviation / mean if mean else 0.0}
    told |= {"least": min(values), "most": max(values)}
    return {**{name: round(value, 2) for name, value in told.items()}, "none": values.count(0.0)}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m undertow.bench.quality.evidence.firing_rates")
    parser.add_argument("--data", type=Path, required=True, help="LoCoMo's file")
    parser.add_argument("--vectors", type=Path, help="keep the vectors here")
    parser.add_argument("--parts", type=int, help="tenants of so many turns")
    parser.add_argument("--out", type=Path, help="write the figures here too")
    args = parser.parse_args(argv)
    settings = Settings(device="cpu", llm_url=None)
    vectors = KeptVectors(make_encoder(settings), args.vectors)
    samples = list(load(args.data, "locomo", settings.max_message_bytes))
    observed = {line: facts for sample in samples for line, facts in sample.observed().items()}
    turns = parts_of({sample.tenant: sample.turns for sample in samples}, args.parts)
    found = {
        gate: {
            theta: rates(turns, Settings(device="cpu", llm_url=None, **gated, **fixed), vectors, observed)
            for theta, fixed in THETAS.items()
        }
        for gate, gated in GATES.items()
    }
    vectors.save()
    told = {"encoder": settings.encoder, "parts": args.parts, **found}
    line = orjson.dumps(told, option=orjson.OPT_APPEND_NEWLINE)
    sys.stdout.buffer.write(line)
    if args.out is not None:
        args.out.write_bytes(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
