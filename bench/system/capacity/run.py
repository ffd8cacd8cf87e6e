"""Capacity model: the engine's own scheduler and router in simulated time, on measured service times.

    python -m undertow.bench.system.capacity.run check [--rounds 3] [--data LOG] [--out docs/results]
    python -m undertow.bench.system.capacity.run plan [--profile FILE] [--with FILE] [--size GPUS:TENANTS ...]

`check` calibrates on this machine, runs the engine and predicts the same runs. `plan` says, from a
profile, what clusters can take. Both print a table and, last, one JSON line. docs/capacity.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from undertow.bench.machine import LOCOMO, ROOT
from undertow.bench.system.capacity.check import check
from undertow.bench.system.capacity.plan import Assumptions, Size, plan
from undertow.bench.system.capacity.profile import Profile

PROFILE = ROOT / "docs" / "results" / "capacity-profile.json"
H100 = Path(__file__).with_name("h100.json")
SIZES = ("1:100000", "10:1000000", "100:10000000", "1000:100000000")


def size_of(text: str) -> Size:
    """`GPUS:TENANTS` or `GPUS:TENANTS:TURNS_PER_S`. ValueError."""
    try:
        gpus, tenants, *rate = text.split(":")
        if len(rate) > 1:
            raise ValueError("too many parts")
        return Size(int(gpus), int(float(tenants)), float(rate[0]) if rate else None)
    except ValueError as error:
        raise ValueError(
            f"{text!r} is no size ({error}); write GPUS:TENANTS[:TURNS_PER_S], as in 10:1e6:5000"
        ) from None


def checked(args: argparse.Namespace) -> dict[str, Any]:
    """Calibrate, run, predict; with --out the profile and the result are written."""
    if not args.data.exists():
        raise ValueError(f"{args.data} does not exist. Name a log of conversations with --data.")
    if args.rounds < 1:
        raise ValueError(f"--rounds is {args.rounds}; give 1 or more")
    profile, result = check(args.data, args.rounds)
    title = "prediction against this machine"
    table = Table("what", "load", "figure", "measured", "predicted", "ratio", title=title)
    for row in result["cases"]:
        for what in ("searchable", "decided"):
            figures = (row[f"{what}_per_s"], row[f"{what}_predicted"], row[f"{what}_ratio"])
            load = f"{row['tenants']} x {row['turns']}, {row['name']}"
            table.add_row(row["target"], load, f"{what}/s", *map(str, figures))
    Console().print(table)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        profile.write(args.out / "capacity-profile.json")
    return result


def planned(args: argparse.Namespace) -> dict[str, Any]:
    """A row for each size, and what the figures rest on."""
    sizes = [size_of(text) for text in args.size or SIZES]
    profile = Profile.read(args.profile)
    for path in args.overlay or ():
        profile = profile.overlaid(path)
    given = Assumptions(
        skew=args.skew,
        history_turns=args.history_turns,
        largest_turns=args.largest_turns,
        slowdown=args.slowdown,
        turns=args.turns,
    )
    rows = [plan(profile, size, given, args.llm_servers) for size in sizes]
    _show(rows)
    return {"profile": profile.name, "sources": profile.sources, "assumptions": _plain(given), "sizes": rows}


def _plain(given: Assumptions) -> dict[str, Any]:
    return {name: getattr(given, name) for name in given.__slots__}


def _show(rows: list[dict[str, Any]]) -> None:
    """Sizes as columns: there are more figures than sizes."""
    table = Table("", *(f"{row['gpus']:,} GPU" for row in rows), title="capacity plan, turns/s and seconds")
    plain = {
        "tenants": "tenants",
        "capacity to searchable": "searchable_capacity_per_s",
        "capacity to decided": "decided_capacity_per_s",
        "offered": "offered_per_s",
        "LLM calls/s": "llm_calls_per_s",
        "LLM servers needed": "llm_servers_needed",
        "hottest shard / mean": "hottest_over_mean_shard",
        "tenants in memory": "resident_tenants",
        "turns of the largest tenant": "largest_tenant_turns",
    }
    for label, key in plain.items():
        table.add_row(label, *(f"{row[key]:,}" for row in rows))
    for name in ("hottest", "median"):
        for what in ("searchable_lag_s", "decided_lag_s"):
            cells = (f"{row[name][what]['p50']:.2f} / {row[name][what]['p95']:.2f}" for row in rows)
            table.add_row(f"{name} shard: {what.split('_')[0]} lag p50 / p95", *cells)
        for what in ("queued", "undecided"):
            cells = (f"{row[name][what]['mean']:,} / {row[name][what]['most']:,.0f}" for row in rows)
            table.add_row(f"{name} shard: {what} mean / most", *cells)
        cells = (f"{row[name]['llm_at_servers']:,} / {row[name]['llm_waiting']:,}" for row in rows)
        table.add_row(f"{name} shard: LLM calls at servers / waiting", *cells)
    for name in rows[0]["loads"]:
        table.add_row(f"load: {name}", *(f"{row['loads'][name]:.0%}" for row in rows))
    table.add_row(
        "tenants faster than their order", *(f"{row['tenants_beyond_their_order']:,}" for row in rows)
    )
    table.add_row("bottleneck", *(row["bottleneck"] for row in rows))
    Console(width=max(120, 34 + 24 * len(rows))).print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("check", help="calibrate here, and hold the prediction against real runs")
    checking.add_argument("--rounds", type=int, default=3)
    checking.add_argument("--data", type=Path, default=LOCOMO, help="a log of conversations (LoCoMo's JSON)")
    checking.set_defaults(run=checked)
    planning = commands.add_parser("plan", help="what clusters can take, from a profile")
    planning.add_argument("--profile", type=Path, default=PROFILE)
    planning.add_argument(
        "--with",
        dest="overlay",
        type=Path,
        action="append",
        help=f"given figures over it, such as {H100.name}",
    )
    planning.add_argument("--size", action="append", help="GPUS:TENANTS[:TURNS_PER_S], any number of times")
    planning.add_argument("--skew", type=float, default=Assumptions().skew, help="Zipf exponent of tenants")
    planning.add_argument("--history-turns", type=float, default=Assumptions().history_turns, help="a tenant")
    planning.add_argument("--largest-turns", type=float, default=Assumptions().largest_turns)
    planning.add_argument("--llm-servers", type=int, help="how many there are; else as many as needed")
    planning.add_argument("--slowdown", type=float, default=Assumptions().slowdown, help="of a shard's shell")
    planning.add_argument("--turns", type=int, default=Assumptions().turns, help="a simulated shard takes")
    planning.set_defaults(run=planned)
    for command in (checking, planning):
        command.add_argument("--out", type=Path, help="folder for the result's JSON")
    return parser


def main() -> None:
    args = _parser().parse_args()
    try:
        result = {"bench": f"capacity-{args.command}", **args.run(args)}
    except ValueError as error:
        sys.exit(f"capacity: {error}")
    line = json.dumps(result)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"{result['bench']}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(line)


if __name__ == "__main__":
    main()
