"""Search by time: what passes is what a look at each turn's time says, however the log grew and shrank."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.engine.api.engine import Engine
from undertow.engine.base.timestamps import parse_timestamp
from undertow.engine.search import time_index
from undertow.engine.search.ranking import Ranker, Window
from undertow.engine.tenants.payload_file import PayloadFile
from undertow.engine.tenants.tenant import Tenant
from undertow.kernels.arena.arena import Arena, make_arena
from undertow.kernels.gate.factory import make_gate

from ...support.engine import ENCODER, NEVER, open_engine, turn_of

ZONES: Any = st.one_of(  # hypothesis' types know of no draw between some zone and none
    st.none(), st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes)))
)
# close together, so that ends of windows fall on turns, and the ends of what there is
MOMENTS = st.one_of(
    st.datetimes(datetime(2026, 2, 27), datetime(2026, 3, 2), timezones=ZONES),
    st.sampled_from([datetime(2026, 3, 1), datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999_999)]),
)
STAMPS = st.one_of(
    MOMENTS.map(lambda moment: parse_timestamp(moment.isoformat())),
    MOMENTS.map(lambda moment: moment.date().isoformat()),
)
WINDOWS = st.builds(Window, st.none() | STAMPS, st.none() | STAMPS)
# of turns that come, and turns that are deleted, by their number
STEPS = st.lists(st.one_of(st.none(), STAMPS, st.integers(0, 30)), max_size=30)


def plain(tenant: Tenant, window: Window) -> list[int]:
    """The turns that are there and that the window allows, one by one."""
    rows = enumerate(tenant.seq_by_row)
    return [row for row, seq in rows if tenant.exists(seq) and window.allows(tenant.turn(seq).timestamp)]


@settings(max_examples=60, deadline=None)
@given(steps=STEPS, windows=st.lists(WINDOWS, min_size=1, max_size=4))
def test_the_index_passes_what_the_plain_filter_passes(
    steps: Sequence[str | int | None], windows: Sequence[Window]
) -> None:
    arena = make_arena(ENCODER.dim, "cpu")
    tenant, retrieval = (
        Tenant("ann", "key", arena, PayloadFile()),
        Ranker(arena, make_gate(arena), 10**6, 10**6),
    )
    for n, step in enumerate(steps):
        if isinstance(step, int):
            if step < tenant.next_seq:
                tenant.redact_turn(step)
        else:
            add(arena, tenant, n, step)
        for window in windows:
            within = retrieval.within(tenant, window)
            assert (within is None) == window.open
            there = range(len(tenant.seq_by_row)) if within is None else within.nonzero()[0].tolist()
            # a deleted turn keeps its time, and is out of every search
            assert [row for row in there if tenant.exists(tenant.seq_by_row[row])] == plain(tenant, window)


def add(arena: Arena, tenant: Tenant, n: int, timestamp: str | None) -> None:
    arena.extend(np.array([tenant.turns_segment]), ENCODER.encode([f"turn {n}"]), live=True)
    body = {"messages": [{"role": "user", "content": f"turn {n}"}], "session": "s", "timestamp": timestamp}
    payload = orjson.dumps({k: v for k, v in body.items() if v is not None})
    tenant.load_turns(payload, [len(payload)])


def seqs(engine: Engine, **window: Any) -> list[int]:
    return [hit.source_seqs[0] for hit in engine.search("ann", "boat", k_sub=100, **window).turns]


def test_times_are_read_once_and_follow_the_log(tmp_path: Path, calls_of: Callable[..., list[int]]) -> None:
    reads = calls_of(time_index, "_moment_of", len)
    march: dict[str, Any] = {"since": "2026-03-01", "until": "2026-03-31"}
    days = [f"2026-0{2 + n % 3}-11" for n in range(48)]
    turns = [turn_of("ann", n, f"boat {n}", timestamp=day) for n, day in enumerate(days)]
    with open_engine(tmp_path, **NEVER) as engine:
        receipts = engine.add_batch(turns[:40])
        for _ in range(3):
            assert sorted(seqs(engine, **march)) == list(range(1, 40, 3))
        assert len(reads) == 40
        engine.delete(receipts[4].id or "")
        engine.add_batch(turns[40:])
        found = sorted(seqs(engine, **march))
        assert found == [n for n in range(1, 40, 3) if n != 4] + [41, 44, 47]  # record 40 is the deletion
        assert [item["seq"] for item in engine.list("ann", kinds=["turn"], **march).items] == found
        assert len(reads) == 48
        assert engine.drain()
        engine.tenants.evict("ann")
        gc.collect()
        assert len(engine.ranker._times) == 0, "it goes with the tenant's live state"
        assert sorted(seqs(engine, **march)) == found
