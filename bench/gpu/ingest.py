"""Ingest on the card, end to end: tables of exchanges in, durable and searchable turns out."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from undertow.bench.gpu.figures import Figure, Part, WrongResults
from undertow.bench.gpu.load import exchanges
from undertow.bench.gpu.rig import Limits, Rig, Scale
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.trace import Trace
from undertow.engine.encoders.factory import make_encoder

_CHECKED = 8
# phases inside "admit"; what they leave of it is Python: seqs, rows, receipts
_INSIDE_ADMIT = ("encode", "append")


def measure(rig: Rig, scale: Scale, limits: Limits, **changes: Any) -> Part:
    """Rate with the journal on local disk and no LLM, and which phase it is that limits it.

    `changes`: settings other than this machine's.
    """
    part = Part()
    settings = Settings(
        **{
            "device": rig.kind,
            "batch_turns": scale.ingest_batch,
            "queue_turns": 4 * scale.ingest_batch,
            **changes,
        }
    )
    encoder, sizes = make_encoder(settings), ((scale.ingest_batch, 7), (scale.ingest_exchanges, 8))
    warm, log = (_rows(count, scale.tenants, seed) for count, seed in sizes)
    before_table, table = map(pa.Table.from_pylist, (warm, log))
    with tempfile.TemporaryDirectory(prefix="undertow-bench-") as folder:
        trace = Trace(Path(folder) / "trace.json")
        with Engine(Path(folder) / "store", settings, encoder, trace=trace) as engine:
            engine.add_table(before_table)
            before, began_s = trace.seconds(), time.perf_counter()
            engine.add_table(table)
            rig.sync()
            elapsed_s = time.perf_counter() - began_s
            spent = {name: s - before.get(name, 0.0) for name, s in trace.seconds().items()}
            _check(engine, [*warm, *log])
    phases = shares(spent, elapsed_s)
    slowest = max(phases, key=lambda name: phases[name])
    rate, limit = len(log) / elapsed_s / 1e3, len(log) / (phases[slowest] * elapsed_s) / 1e3
    part.reach("ingest", rate, limit, f"the limit is {slowest}, {phases[slowest]:.0%} of the time")
    for name, share in sorted(phases.items(), key=lambda item: -item[1]):
        part.figures.append(Figure(f"ingest_{name}", f"ingest: {name}, of the time", "%", 100 * share))
    part.details = {
        "exchanges": len(log),
        "elapsed_s": elapsed_s,
        "shares": phases,
        "batch": scale.ingest_batch,
        "encoder": Path(settings.encoder).name,
    }
    return part


def shares(seconds: dict[str, float], elapsed_s: float) -> dict[str, float]:
    """Share of the elapsed time by phase; "rows" is the Python in admission, "rest" what no phase covers."""
    inside = {name: seconds.get(name, 0.0) for name in _INSIDE_ADMIT}
    phases = {
        **inside,
        "rows": max(seconds.get("admit", 0.0) - sum(inside.values()), 0.0),
        **{name: seconds.get(name, 0.0) for name in ("decide", "commit")},
    }
    phases["rest"] = max(elapsed_s - sum(phases.values()), 0.0)
    return {name: spent_s / elapsed_s for name, spent_s in phases.items()}


def _rows(count: int, tenants: int, seed: int) -> list[dict[str, Any]]:
    """`count` exchanges in the `messages` format, the tenants in turn."""
    made = []
    for i, text in enumerate(exchanges(count, seed)):
        asked, _, answered = text.partition("\n")
        said = [
            {"role": role, "content": words.partition(": ")[2], "name": name}
            for role, name, words in (("user", "john", asked), ("assistant", "mary", answered))
            if words.partition(": ")[2]
        ]
        made.append({"tenant": f"tenant-{i % tenants}", "messages": said, "idempotency_key": f"{seed}-{i}"})
    return made


def _check(engine: Engine, log: Sequence[Mapping[str, Any]]) -> None:
    """WrongResults unless every turn is stored, and some are found by their own words."""
    if (stored := engine.stats()["turns"]) != len(log):
        raise WrongResults(f"{stored} turns are stored of {len(log)}")
    for row in log[:: max(1, len(log) // _CHECKED)]:
        text = "\n".join(f"{message['name']}: {message['content']}" for message in row["messages"])
        found = engine.search(row["tenant"], text, k_sub=1, k_epi=0, k_sem=0).ranked(1)
        if not found or found[0].memory != text:
            raise WrongResults(f"a turn of {row['tenant']} is not found by its own text")
