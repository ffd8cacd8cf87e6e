"""Turns/s of Undertow beside a peer's: the same turns, encoder and mock LLM, on the same machine.

    python -m undertow.bench.peers.throughput [--encoder hash:384] [--peer mem0|langmem] [--out FILE]

A peer has no turn that is searchable before its LLM call, so both of Undertow's rates stand beside the one
of the peer's `add` returning. Its thread counts are tried on the first turns, and the best one runs the first
`--peer-turns`; as its store grows it gets slower, so that a part of the turns flatters it. Undertow gets all
of them, put through its queue by one thread: short conversations would hardly ever need its LLM. Ends in one
JSON line.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from undertow.bench.machine import LOCOMO
from undertow.bench.peers.process import OPERATION, RUNNERS, PeerProcess, Reply, added, command_of
from undertow.bench.system.parts import percentiles
from undertow.bench.system.throughput import MOCK_REFUSALS, ingest, mock_llm, settings_for
from undertow.bench.system.throughput_report import Load, chosen, conditions
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Turn, UndertowError, Usage
from undertow.engine.encoders.factory import make_encoder

THREADS = (1, 2, 4, 8, 16, 32, 64)
_WARM_UP_TURNS = 4
_TOLD = ("searchable_turns_per_s", "consolidated_turns_per_s", "elapsed_s", "cpu_s", "llm_calls")


def through_peer(name: str, log: Sequence[Turn], settings: Settings, threads: int) -> dict[str, Any]:
    """The turns into a new store, each tenant's in order, `threads` tenants at a time. PeerError."""
    with tempfile.TemporaryDirectory(prefix="undertow-bench-") as made:
        folder = Path(made)
        with PeerProcess(name, command_of(name, settings, folder, threads), folder) as peer:
            for turn in log[:_WARM_UP_TURNS]:
                peer.ask(OPERATION, **added(replace(turn, tenant="warm-up"))).result()
            process = psutil.Process(peer.pid)
            before, began_s = process.cpu_times(), time.perf_counter()
            waits_s, replies = drive(peer, log, threads)
            elapsed_s, after = time.perf_counter() - began_s, process.cpu_times()
            version = peer.version
    usage = sum((reply.spent.usage for reply in replies), Usage())
    return {
        "peer": version,
        "threads": threads,
        "turns": len(log),
        "turns_per_s": round(len(log) / elapsed_s, 2),
        "elapsed_s": round(elapsed_s, 2),
        "wait_s": percentiles(waits_s),
        "cpu_s": round(after.user + after.system - before.user - before.system, 2),
        "llm_calls": usage.calls,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "complaints": sum(len(reply.spent.complaints) for reply in replies),
    }


def drive(peer: PeerProcess, log: Sequence[Turn], at_once: int) -> tuple[list[float], list[Reply]]:
    """Seconds that each add took, and its reply. PeerError as soon as one fails."""
    lines: dict[str, deque[Turn]] = {}
    for turn in log:
        lines.setdefault(turn.tenant, deque()).append(turn)
    idle = deque(lines.values())
    asked: dict[Future[Reply], tuple[deque[Turn], float]] = {}
    waits_s, replies = [], []
    while idle or asked:
        while idle and len(asked) < at_once:
            line = idle.popleft()
            asked[peer.ask(OPERATION, **added(line.popleft()))] = line, time.perf_counter()
        done, _ = wait(asked, return_when=FIRST_COMPLETED)
        for future in done:
            line, began_s = asked.pop(future)
            replies.append(future.result())
            waits_s.append(time.perf_counter() - began_s)
            if line:
                idle.append(line)
    return waits_s, replies


def compare(args: argparse.Namespace) -> dict[str, Any]:
    load = Load(args.data, args.tenants, args.turns, salted=True)
    log = load.turns()
    given = {"encoder": args.encoder} if args.encoder else {}
    settings = settings_for(Settings(**given), log)
    encoder = make_encoder(settings)
    figures = {
        "bench": "peers.throughput",
        **conditions(),
        **load.about(len(log)),
        **chosen(settings, encoder),
    }
    figures |= {"llm_latency_s": args.llm_latency, "mock_refusal_rate": MOCK_REFUSALS}
    with mock_llm(args.llm_latency) as url:
        settings = settings.model_copy(update={"llm_url": url, "llm_model": None})
        trials = [through_peer(args.peer, log[: args.trial_turns], settings, n) for n in args.threads]
        best = max(trials, key=lambda trial: trial["turns_per_s"])
        theirs = through_peer(args.peer, log[: args.peer_turns], settings, best["threads"])
        ours = ingest(log, settings, encoder)
    # without a call nothing was consolidated, and a rate of it would mean nothing
    compared = ("searchable", "consolidated") if ours["llm_calls"] else ("searchable",)
    ratios = {
        f"times_{args.peer}_{of}": round(ours[f"{of}_turns_per_s"] / theirs["turns_per_s"], 1)
        for of in compared
    }
    return {**figures, "trials": trials, args.peer: theirs, "undertow": ours, **ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=LOCOMO, help="a log that `undertow ingest` takes")
    parser.add_argument("--peer", choices=sorted(RUNNERS), default="mem0")
    parser.add_argument("--encoder", help="of both; left out: UNDERTOW_ENCODER, or MiniLM")
    parser.add_argument("--tenants", type=int, default=50)
    parser.add_argument("--turns", type=int, help="of each tenant; left out: the whole conversation")
    parser.add_argument("--peer-turns", type=int, default=2_000, help="the first so many, through the peer")
    parser.add_argument("--trial-turns", type=int, default=160, help="of those, for each number of threads")
    parser.add_argument("--threads", type=int, nargs="+", default=THREADS)
    parser.add_argument("--llm-latency", type=float, default=0.2, metavar="SECONDS")
    parser.add_argument("--out", type=Path, help="write the figures here too")
    args = parser.parse_args()
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
    try:
        figures = compare(args)
    except UndertowError as error:
        parser.exit(1, f"{error}\n")
    for trial in figures["trials"]:
        print(f"  {args.peer}, {trial['threads']:2} threads {trial['turns_per_s']:>10,.1f} turns/s")
    print(f"  {args.peer}, all turns  {figures[args.peer]['turns_per_s']:>10,.1f} turns/s")
    for name in _TOLD:
        print(f"  undertow, {name:26} {figures['undertow'][name]:>12,.1f}")
    print(json.dumps(figures))
    if args.out is not None:
        args.out.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
