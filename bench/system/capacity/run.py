"""Capacity model: what a cluster of so many GPUs and LLM servers can take.

    python -m undertow.bench.system.capacity.run check [--rounds 3] [--data LOG] [--out docs/results]
    python -m undertow.bench.system.capacity.run plan [--profile FILE] [--with FILE] [--size GPUS:TENANTS ...]

`check` measures this machine's constants, runs the engine and predicts the same runs. `plan` computes
capacities from a profile. Both print a table and, last, one JSON line. See docs/capacity.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from undertow.bench.machine import LOCOMO, ROOT
from undertow.bench.system.capacity.model import Assumptions, Profile, Size, plan

PROFILE = ROOT / "docs" / "results" / "capacity-profile.json"
H100 = Path(__file__).with_name("h100.json")
SIZES = ("1:100000", "10:1000000", "100:10000000", "1000:100000000")


def checked(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, run, predict; with --out the profile and the result are written."""
    from undertow.bench.system.capacity.check import TARGETS, check  # `plan` needs no engine

    if not args.data.exists():
        raise ValueError(f"{args.data} does not exist. Name a log of conversations with --data.")
    if args.rounds < 1:
        raise ValueError(f"--rounds is {args.rounds}; give 1 or more")
    profile, result = check(args.data, args.rounds, list(TARGETS) if args.ray else ["engine"])
    table = Table("what", "load", "figure", "measured", "predicted", "ratio", title="prediction and machine")
    for row in result["cases"]:
        for what in ("searchable", "decided"):
            figures = (row[f"{what}_per_s"], row[f"{what}_predicted"], row[f"{what}_ratio"])
            load = f"{row['tenants']} x {row['turns']}, {row['name']}"
            table.add_row(row["target"], load, f"{what}/s", *map(str, figures))
    Console().print(table)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        profile.write(args.out / PROFILE.name)
    return result


def planned(args: argparse.Namespace) -> dict[str, Any]:
    """One row per size, and the sources of the figures."""
    sizes = [Size.of(text) for text in args.size or SIZES]
    profile = Profile.read(args.profile, *(args.overlay or ()))
    given = Assumptions(**{name: getattr(args, name) for name in Assumptions.__slots__})
    rows = [plan(profile, size, given, args.llm_servers) for size in sizes]
    table = Table("", *(f"{row['gpus']:,} GPU" for row in rows), title="capacity plan, turns/s and seconds")
    for key in (key for key in rows[0] if key not in ("gpus", "loads")):
        table.add_row(key.replace("_", " "), *(_cell(row[key]) for row in rows))
    for name in rows[0]["loads"]:
        table.add_row(f"load: {name}", *(f"{row['loads'][name]:.0%}" for row in rows))
    Console(width=max(120, 34 + 24 * len(rows))).print(table)
    return {"profile": profile.name, "sources": profile.sources, "assumptions": asdict(given), "sizes": rows}


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    checking = commands.add_parser("check", help="measure this machine and compare predictions with runs")
    checking.add_argument("--rounds", type=int, default=3)
    checking.add_argument("--data", type=Path, default=LOCOMO, help="a log of conversations (LoCoMo's JSON)")
    checking.add_argument("--no-ray", dest="ray", action="store_false", help="the engine alone")
    checking.set_defaults(run=checked)
    planning = commands.add_parser("plan", help="what clusters can take, from a profile")
    planning.add_argument("--profile", type=Path, default=PROFILE)
    planning.add_argument(
        "--with", dest="overlay", type=Path, action="append", help=f"given figures, such as {H100.name}"
    )
    planning.add_argument("--size", action="append", help="GPUS:TENANTS[:TURNS_PER_S], any number of times")
    planning.add_argument("--llm-servers", type=int, help="how many there are; else as many as needed")
    for name, default in asdict(Assumptions()).items():
        planning.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
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
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / f"{result['bench']}.json").write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
