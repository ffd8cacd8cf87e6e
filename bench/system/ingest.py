"""Ingest throughput: to searchable, to decided, against a slow LLM; memory; opening a large store.

    python -m undertow.bench.system.ingest [--data LOCOMO_JSON] [searchable] [decided] [latency] [open]

Prints a table and, last, one JSON line. The encoder is a table of vectors made beforehand (the
"cached vectors" of the name), the LLM is the in-process mock: what is measured is the engine.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from undertow.bench.machine import LOCOMO, peak_rss_bytes
from undertow.bench.mock.llm import MockLLM
from undertow.bench.mock.replies import MockReplies
from undertow.bench.system.parts import run_parts
from undertow.bench.system.throughput_load import copies
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Turn
from undertow.engine.encoders.base import Fingerprint
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.prompts.operations import QUERY_OPERATIONS

Vectors = NDArray[np.float16]


class CachedVectors:
    """An encoder that looks texts up; a text it has not seen is hashed once."""

    def __init__(self) -> None:
        self._hashing = HashingEncoder(384)
        self._table: dict[str, Vectors] = {}
        self.dim = 384
        self.fingerprint: Fingerprint = self._hashing.fingerprint

    def warm(self, texts: Sequence[str]) -> None:
        distinct = list(dict.fromkeys(texts))
        self._table.update(zip(distinct, self._hashing.encode(distinct), strict=True))

    def encode(self, texts: Sequence[str]) -> Vectors:
        self.warm([t for t in texts if t not in self._table])
        return np.stack([self._table[t] for t in texts]) if texts else np.empty((0, 384), np.float16)


def settings(**changes: Any) -> Settings:
    return Settings(encoder="hash:384", theta_sim=0.55, queue_turns=65_536, **changes)


@dataclass(frozen=True, slots=True)
class Run:
    """What one ingest took: seconds until all turns were searchable, and until all were decided."""

    turns: int
    searchable_s: float
    decided_s: float
    llm_calls: int
    longest_chain_calls: int
    arena_used_bytes: int
    rss_growth_bytes: int


def ingest(log: Sequence[Turn], folder: Path, llm: MockLLM | None, **changes: Any) -> Run:
    """Store the log in large batches, then decide it if there is an LLM. Kernels are compiled beforehand."""
    encoder = CachedVectors()
    encoder.warm([turn.text for turn in log])
    with Engine(folder / "warm", settings(), encoder, llm=MockLLM()) as engine:
        engine.add_batch(log[:600])
        engine.drain()
    gc.collect()
    gc.freeze()  # the prepared log is the benchmark's own; a reader hands over a batch at a time
    before = psutil.Process().memory_info().rss
    with Engine(folder / "store", settings(**changes), encoder, llm=llm) as engine:
        began_s = time.perf_counter()
        for start in range(0, len(log), 65_536):
            engine.add_batch(log[start : start + 65_536])
        searchable_s = time.perf_counter() - began_s
        if llm is not None:
            engine.drain()
        decided_s = time.perf_counter() - began_s
        meters = [tenant.meter.items() for tenant in engine.tenants.loaded()]
        chains = [sum(used.calls for op, used in meter if op not in QUERY_OPERATIONS) for meter in meters]
        growth = psutil.Process().memory_info().rss - before
        used = engine.arena.used_bytes
    return Run(len(log), searchable_s, decided_s, sum(chains), max(chains, default=0), used, growth)


def searchable(data: Path, folder: Path, tenants: int, turns: int) -> dict[str, Any]:
    """Turns/s until durable and searchable, LLM off, in steps of 2,048 turns as a bulk load would."""
    run = ingest(list(copies(data, tenants, turns // tenants)), folder, None, batch_turns=2048)
    return {
        "turns": run.turns,
        "tenants": tenants,
        "searchable_turns_per_s": round(run.turns / run.searchable_s),
        "rss_growth_bytes": run.rss_growth_bytes,
        "rss_growth_bound_bytes": int(1.5 * run.arena_used_bytes) + 700_000_000,
        "arena_used_bytes": run.arena_used_bytes,
        "store_bytes": sum(f.stat().st_size for f in (folder / "store").rglob("*") if f.is_file()),
    }


def decided(data: Path, folder: Path, tenants: int, turns: int) -> dict[str, Any]:
    """The same run with an instant mock LLM: turns/s until every turn is decided."""
    llm = MockLLM(MockReplies(refusal_rate=0.3))
    run = ingest(list(copies(data, tenants, turns // tenants)), folder, llm)
    return {
        "turns": run.turns,
        "tenants": tenants,
        "searchable_turns_per_s": round(run.turns / run.searchable_s),
        "decided_turns_per_s": round(run.turns / run.decided_s),
        "llm_calls": run.llm_calls,
        "llm_calls_per_s": round(run.llm_calls / run.decided_s),
    }


def latency(data: Path, folder: Path, tenants: int, latency_s: float) -> dict[str, Any]:
    """Wall time as a multiple of the longest tenant's chain of LLM calls, the least that order allows."""
    llm = MockLLM(MockReplies(refusal_rate=0.3), latency_s=latency_s)
    run = ingest(list(copies(data, tenants)), folder, llm)
    return {
        "turns": run.turns,
        "tenants": tenants,
        "llm_latency_s": latency_s,
        "longest_chain_calls": run.longest_chain_calls,
        "max_in_flight": llm.max_in_flight,
        "elapsed_s": round(run.decided_s, 2),
        "times_the_limit": round(run.decided_s / (run.longest_chain_calls * latency_s), 3),
    }


def open_large(data: Path, folder: Path, tenants: int, turns: int) -> dict[str, Any]:
    """Time to open a large store and find something in one tenant's memory."""
    log = copies(data, tenants, turns // tenants)
    encoder = CachedVectors()
    with Engine(folder / "store", settings(batch_turns=4096), encoder) as engine:
        while batch := list(islice(log, 4096)):
            engine.add_batch(batch)
        engine.journal.compact()
        rows = engine.journal.row_count
    gc.collect()
    times: dict[str, float] = {}
    began_s = time.perf_counter()
    with Engine(folder / "store", settings(), encoder, writable=False) as engine:
        times["open_s"] = time.perf_counter() - began_s
        found = engine.search("tenant-7", "When did the dance studio open?")
        times["open_and_first_search_s"] = time.perf_counter() - began_s
        began_s = time.perf_counter()
        engine.search("tenant-8", "When did the dance studio open?")
        times["next_tenant_s"] = time.perf_counter() - began_s
    return {"rows": rows, "hits": len(found.ranked()), **{k: round(v, 3) for k, v in times.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", default=["searchable", "decided", "latency", "open"])
    parser.add_argument("--data", type=Path, default=LOCOMO, help="LoCoMo in its published JSON")
    parser.add_argument("--tenants", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=100_000)
    parser.add_argument("--open-turns", type=int, default=1_000_000)
    args = parser.parse_args()
    parts: dict[str, Callable[[Path], dict[str, Any]]] = {
        "searchable": lambda f: searchable(args.data, f, args.tenants, args.turns),
        "decided": lambda f: decided(args.data, f, args.tenants, args.turns),
        "latency": lambda f: latency(args.data, f, 50, 0.2),
        "open": lambda f: open_large(args.data, f, 5000, args.open_turns),
    }
    figures = run_parts("ingest", parts, args.parts)
    print(json.dumps(figures | {"peak_rss_bytes": peak_rss_bytes()}))


if __name__ == "__main__":
    main()
