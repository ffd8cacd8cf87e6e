"""Bulk ingest end to end: from log files to searchable turns, by the command as users run it.

    python -m undertow.bench.system.bulk [--data FILE] [--turns N] [--rounds N] [--formats jsonl parquet]

Writes logs of many tenants, then runs `undertow ingest` on them: as one process, and on a local Ray with
one shard and with two. The text is hashed (hash:384), no LLM. `command_s` is all of the command, with its
start and Ray's; `turns_per_s` is what the command itself tells: reading, sorting, embedding, storing. The
ways take turns, and the ratios are of runs one right after the other. Last, one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq

from undertow.bench.machine import LOCOMO, commit, describe
from undertow.bench.system.parts import load_averages
from undertow.bench.system.throughput_load import copies
from undertow.engine.base.model import Turn

TENANTS = 2_000
# each holds turns of all tenants, as the hours of a service's log do
FILES = 8
# libraries of one process may use both cores; a shard's have what Ray gives the shard
WAYS: dict[str, list[str]] = {
    "one process": [],
    "one shard": ["--ray", "local", "--shards", "1"],
    "two shards": ["--ray", "local", "--shards", "2"],
}
FORMATS = ("jsonl", "parquet")


def line_of(turn: Turn) -> dict[str, Any]:
    """A turn in the `messages` format, a session of one exchange."""
    return {
        "tenant": turn.tenant,
        "session": turn.session_id,
        "idempotency_key": turn.dedupe_key,
        "timestamp": turn.timestamp,
        "messages": [{"role": m.role, "name": m.name, "content": m.content} for m in turn.messages],
    }


def write_logs(folder: Path, turns: Sequence[Turn], format: str) -> int:
    """The turns in `FILES` files, in their order; returns their bytes."""
    folder.mkdir(parents=True)
    step = -(-len(turns) // FILES)
    for start in range(0, len(turns), step):
        path = folder / f"{start // step:02}.{format}"
        lines = [line_of(turn) for turn in turns[start : start + step]]
        if format == "parquet":
            pq.write_table(pa.Table.from_pylist(lines), path)
        else:
            path.write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    return sum(path.stat().st_size for path in folder.iterdir())


def ingest(logs: Path, way: Sequence[str], turns: int) -> dict[str, float]:
    """One run into a new store. RuntimeError: it failed, or did not store each turn."""
    with tempfile.TemporaryDirectory(prefix="undertow-bench-") as folder:
        command = [sys.executable, "-m", "undertow.serving.cli", "ingest", str(logs), "--json"]
        command += ["--store", f"{folder}/store", "--llm", "off", "--encoder", "hash:384", *way]
        began_s = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"NO_COLOR": "1"})
        command_s = time.perf_counter() - began_s
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-2_000:]}")
    told = json.loads(done.stdout)
    if told["turns"] != turns:
        raise RuntimeError(f"{' '.join(command)} stored {told['turns']} of {turns} turns")
    return {"command_s": round(command_s, 2), "turns_per_s": told["turns_per_s"]}


def rounds(logs: Path, turns: int, count: int) -> dict[str, list[dict[str, float]]]:
    """So many runs of each way, in turn."""
    runs: dict[str, list[dict[str, float]]] = defaultdict(list)
    for _ in range(count):
        for name, way in WAYS.items():
            runs[name].append(ingest(logs, way, turns))
            print(f"  {name:12} {runs[name][-1]}", flush=True)
    return dict(runs)


def summary(runs: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians, and each way's rate over that of one process in the same round."""
    alone = [run["turns_per_s"] for run in runs["one process"]]
    told: dict[str, Any] = {"runs": runs}
    for name, of in runs.items():
        rates = [run["turns_per_s"] for run in of]
        told[name] = {
            "turns_per_s": round(median(rates)),
            "command_s": median(run["command_s"] for run in of),
            "times_one_process": round(median(_ratios(rates, alone)), 2),
        }
    return told


def _ratios(some: Iterable[float], others: Iterable[float]) -> list[float]:
    return [a / b for a, b in zip(some, others, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, default=LOCOMO, help="LoCoMo in its published JSON")
    parser.add_argument("--turns", type=int, default=200_000, help="turns of all tenants together")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each way")
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS), help="of the logs")
    args = parser.parse_args()

    turns = list(copies(args.data, TENANTS, -(-args.turns // TENANTS)))
    figures: dict[str, Any] = {
        "bench": "bulk", "machine": describe(), "commit": commit(), "turns": len(turns), "files": FILES
    }  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="undertow-bench-") as folder:
        for format in args.formats:
            print(format)
            logs = Path(folder) / format
            mib = round(write_logs(logs, turns, format) / 2**20, 1)
            figures[format] = {"mib": mib} | summary(rounds(logs, len(turns), args.rounds))
    print(json.dumps(figures | {"load": load_averages()}))


if __name__ == "__main__":
    main()
