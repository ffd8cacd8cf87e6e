"""The service under load: what a request costs, how many it answers in time, and what it does beyond that.

    python -m undertow.bench.system.service [cost] [rate] [overload] [hostile] [background] [memory] [kill]
        [--out FOLDER]
    python -m undertow.bench.system.service --against ../old [--rounds 2]
    python -m undertow.bench.system.service --mem0 [--rate 5]
    python -m undertow.bench.system.service --workers 2 [--mixes 1:0 0:1 1:1 1:9]

The service runs as `undertow serve` in a process of its own, without an LLM and with the hashing encoder,
over a store that was filled before. Every turn is decided, which the run checks. The requests come
over loopback from this process, or from wrk, on the same machine. Ends in one JSON line. `--mem0`: topics
recur, and both services have a mock LLM (see mem0.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from undertow.bench.machine import ROOT, commit, describe
from undertow.bench.system.parts import load_averages, run_parts
from undertow.bench.system.service.background import background_part
from undertow.bench.system.service.closed_loop import CONNECTIONS
from undertow.bench.system.service.compare import compare
from undertow.bench.system.service.hostile import hostile_part
from undertow.bench.system.service.mem0 import LLM_LATENCY_S, SMALL, Mem0Service, llm_part
from undertow.bench.system.service.parts import (
    Figures,
    Filled,
    Mix,
    cost_part,
    kill_part,
    memory_part,
    overload_part,
    rate_part,
)
from undertow.bench.system.service.served import Checkout
from undertow.bench.system.service.world import SIZES, World
from undertow.bench.system.throughput import MOCK_REFUSALS, mock_llm
from undertow.engine.base.model import UndertowError

PARTS = ("cost", "rate", "overload", "hostile", "background", "memory", "kill")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m undertow.bench.system.service")
    made.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; left out: all")
    made.add_argument("--turns", type=int, choices=SIZES, default=1_000, help="of each tenant")
    made.add_argument("--durability", nargs="+", choices=("commit", "fsync"), default=["commit", "fsync"])
    made.add_argument(
        "--mixes", nargs="+", type=Mix.of, default=[Mix(1, 1), Mix(1, 9)], metavar="ADDS:SEARCHES"
    )
    made.add_argument("--rate", type=float, default=50.0, help="requests a second of parts with a fixed rate")
    made.add_argument("--seconds", type=float, default=15.0, help="of each stretch")
    made.add_argument("--memory-seconds", type=float, default=300.0)
    made.add_argument(
        "--theta-count", type=int, help="left out: 1,000, as nothing may wait for an LLM that is off"
    )
    made.add_argument("--against", type=Path, metavar="DIR", help="another checkout with its own .venv")
    made.add_argument("--mem0", action="store_true", help="beside mem0ai, both with a mock LLM")
    made.add_argument("--workers", type=int, help="a service of so many, beside one of a single process")
    made.add_argument("--connections", type=int, default=CONNECTIONS, help="of the closed loop in `cost`")
    made.add_argument("--rounds", type=int, default=2, help="of a comparison")
    made.add_argument("--out", type=Path, help="a folder for the figures")
    return made


def parts_of(args: argparse.Namespace, filled: Filled) -> dict[str, Callable[[Path], Figures]]:
    """`cost` and `rate` run for each durability and mix, the others for the first of each."""
    first = args.mixes[0], args.durability[0]
    cost = partial(cost_part, filled, seconds=args.seconds, rate=args.rate, connections=args.connections)

    def each(part: Callable[[Mix, str], Figures]) -> Figures:
        pairs = [(mix, durability) for durability in args.durability for mix in args.mixes]
        return {f"{durability} {mix}": part(mix, durability) for mix, durability in pairs}

    return {
        "cost": lambda _: each(cost),
        "rate": lambda _: each(partial(rate_part, filled, seconds=args.seconds)),
        "overload": lambda _: overload_part(filled, *first, args.seconds),
        "hostile": lambda _: hostile_part(filled, *first, args.seconds, args.rate),
        "background": lambda _: background_part(filled, *first, args.seconds, args.rate),
        "memory": lambda _: memory_part(filled, *first, args.memory_seconds, args.rate),
        "kill": lambda _: kill_part(filled, *first, args.seconds),
    }


def alone(args: argparse.Namespace, folder: Path) -> Figures:
    filled = Filled.make(Checkout(theta_count=args.theta_count), world_of(args), folder / "ours")
    parts = parts_of(args, filled)
    return {**run_parts("service", parts, args.parts), **about(args), "filled": filled.figures}


def beside(args: argparse.Namespace, folder: Path) -> Figures:
    """This checkout beside another one or mem0ai, or with workers beside itself without them."""
    root = ROOT if args.against is None else args.against.resolve()
    other = Mem0Service(args.llm) if args.mem0 else Checkout(root, args.theta_count)
    sides = Checkout(theta_count=args.theta_count, workers=args.workers or 0, llm=args.llm), other
    part = partial(llm_part, llm=args.llm) if args.mem0 else partial(cost_part, connections=args.connections)
    ours, theirs = (
        Filled.make(side, world_of(args), folder / name)
        for side, name in zip(sides, ("ours", "theirs"), strict=True)
    )
    document: Figures = {
        "bench": f"service.{'mem0' if args.mem0 else 'workers' if args.workers else 'against'}",
        "commit": commit(),
        "machine": describe(),
        **about(args),
        "ours": ours.side.name,
        "theirs": theirs.side.name,
        "filled": {"ours": ours.figures, "theirs": theirs.figures},
    }
    for durability in args.durability:
        for mix in args.mixes:
            cost = partial(part, mix=mix, durability=durability, seconds=args.seconds, rate=args.rate)
            figures = {"rate_per_s": args.rate, **compare(ours, theirs, cost, args.rounds)}
            document[f"{durability} {mix}"] = figures
            print(f"\n{durability} {mix}, ours over theirs", flush=True)
            for name, ratio in figures["ours_over_theirs"].items():
                print(f"  {name:44} {ratio}")
    return document | {"load": load_averages()}


def world_of(args: argparse.Namespace) -> World:
    return SMALL if args.mem0 else World(args.turns, SIZES[args.turns])


def about(args: argparse.Namespace) -> Figures:
    world = world_of(args)
    return {
        "command": " ".join(["python -m undertow.bench.system.service", *sys.argv[1:]]),
        "world": {"tenants": world.tenants, "turns_a_tenant": world.turns},
        "theta_count": args.theta_count,
        "llm": f"mock, {LLM_LATENCY_S} s, refuses {MOCK_REFUSALS:.0%}" if args.mem0 else "off",
    }


def name_of(args: argparse.Namespace) -> str:
    """The file of the figures. A run of some parts does not replace the figures of a whole one."""
    if args.mem0:
        return "service-mem0"
    if args.against is not None:
        return f"service-against-{args.turns}"
    if args.workers:
        return f"service-workers-{args.turns}-{args.connections}"
    parts = () if set(args.parts) == set(PARTS) else tuple(args.parts)
    return "-".join(("service", str(args.turns), *parts))


def main() -> None:
    options = parser()
    args = options.parse_args()
    args.parts = args.parts or list(PARTS)
    if args.theta_count is None and not args.mem0:
        args.theta_count = 1_000
    if unknown := set(args.parts) - set(PARTS):
        options.error(f"no part is called {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    if args.workers is not None and args.workers < 2:
        options.error("--workers needs at least 2: one worker is one process")
    beside_what = [args.mem0, args.against is not None, bool(args.workers)].count(True)
    if beside_what > 1:
        options.error("--mem0, --against and --workers exclude each other: leave all but one out")
    run = beside if beside_what else alone
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
    try:
        llm = mock_llm(LLM_LATENCY_S) if args.mem0 else nullcontext("off")
        with TemporaryDirectory(prefix="undertow-bench-") as folder, llm as args.llm:
            figures = run(args, Path(folder))
    except UndertowError as error:
        options.exit(1, f"{error}\n")
    text = json.dumps(figures)
    print(text)
    if args.out is not None:
        (args.out / f"{name_of(args)}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
