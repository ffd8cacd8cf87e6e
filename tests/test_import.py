"""Export and import: what was a tenant somewhere is one here, whatever it has lived through, all or nothing."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from undertow.bench.mock_llm import MockLLM, MockReplies
from undertow.engine.engine import Engine
from undertow.engine.exporting import Seal
from undertow.engine.importing import Imported
from undertow.engine.model import Message, Turn
from undertow.engine.reports import Report

from .engine_harness import ENCODER, opened, settings_of
from .fault_harness import PARKING, RATES, THETA, TOPICS

ID = re.compile(rb'"[0-9a-f]{32}"')
REPLIES = MockReplies(**{**RATES, **PARKING, "malformed_rate": 0.3})


def engine_at(store: Path, **changes: Any) -> Engine:
    return opened(store, settings_of(**{**THETA, **changes}), ENCODER, MockLLM(REPLIES))


def said(tenant: str, n: int) -> Turn:
    """The n-th turn: of one of few topics, so that it merges, fires or waits."""
    words = TOPICS[n * n % 3].split()
    text = " ".join([*(words[(n + i) % len(words)] for i in range(6)), f"n{n}"])
    messages = (Message("user", text, "Ada"), Message("assistant", "I see."))
    when = f"2026-03-{1 + n % 28:02d}T10:00:00" if n % 4 else None
    return Turn(tenant, messages, f"key {n}", f"s{n % 2}", when, {"topic": n % 3} if n % 2 else {})


def exported(engine: Engine, tenant: str, *, limit: int = 1000, vectors: bool = False) -> list[Report]:
    """By pages, through JSON, as a client has it."""
    records: list[Report] = []
    after = None
    while True:
        page = engine.export_page(tenant, after=after, limit=limit, vectors=vectors)
        records += [orjson.loads(orjson.dumps(item)) for item in page.items]
        if (after := page.after) is None:
            return records


def resealed(records: Sequence[Report]) -> list[Report]:
    """With the end that belongs to these records: as a forger would write it."""
    seal = Seal()
    for record in records[1:-1]:
        seal.add(record)
    return [*records[:-1], seal.end(records[0]["tenant"])]


def nameless(records: Sequence[Report], *names: str) -> bytes:
    """As JSON, with ids and names by the order of their appearance; without the fingerprint of all."""
    records = [record for record in records if record.get("kind") != "end"]
    text = orjson.dumps(records, option=orjson.OPT_SORT_KEYS)
    seen: dict[bytes, bytes] = {}
    text = ID.sub(lambda found: seen.setdefault(found[0], b'"id %d"' % len(seen)), text)
    for name in names:
        text = text.replace(orjson.dumps(name), b'"name"')
    return text


def seen(engine: Engine, tenant: str) -> list[Any]:
    """What the tenant's user can see."""
    found = engine.search(tenant, "harbour boat garden", k_sub=99, k_epi=99, k_sem=99)
    hits = [(hit.kind, hit.memory, hit.score, hit.timestamp, hit.source_seqs) for hit in found.ranked()]
    listed = engine.list(tenant, limit=1000)
    live = engine.tenants.get(tenant)
    jobs = [(job.seq, job.state, job.operation, job.cluster, job.reason) for job in live.jobs.values()]
    gates = (live.cursor, live.next_seq, live.waiting_count, sorted(live.keys), live.last_timestamp)
    some = [item["id"] for item in listed.items if item["kind"] != "turn"][:4]
    histories = [version for memory_id in some for version in engine.history(memory_id, tenant=tenant)]
    return [
        nameless(listed.items, tenant),
        nameless(engine.explain(tenant), tenant),
        nameless(histories, tenant),
        engine.tenant_stats(tenant),
        hits,
        jobs,
        gates,
        live.thresholds_from,
    ]


def act(engine: Engine, tenant: str, what: str, n: int) -> None:
    """One thing that a user does, to what they have."""
    live = engine.tenants.get(tenant)
    turns = [seq for seq in live.seq_by_row if live.exists(seq)]
    memories = [*live.current("episode"), *live.current("fact")]
    if what == "add":
        engine.add_batch([said(tenant, n), said(tenant, n + 1)])
    elif what == "drain":
        engine.drain()
    elif what == "flush":
        engine.log_flush(tenant)
    elif what == "replay":
        engine.replay_jobs()
    elif what in ("delete turn", "update turn") and turns:
        hits = engine.list(tenant, kinds=["turn"], limit=1000).items
        chosen = hits[n % len(hits)]["id"]
        if what == "delete turn":
            engine.delete(chosen)
        else:
            engine.update(chosen, f"garden seed soil {n}")
    elif what in ("delete memory", "update memory") and memories:
        chosen = memories[n % len(memories)].id
        if what == "delete memory":
            engine.delete(chosen)
        else:
            engine.update(chosen, f"The user sails boat number {n}.")


ACTS = ("add", "add", "drain", "flush", "replay", "delete turn", "update turn", "delete memory", "update memory")
LIVES = st.lists(st.tuples(st.sampled_from(ACTS), st.integers(0, 40)), max_size=14)


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(life=LIVES, limit=st.sampled_from([1, 7, 1000]), vectors=st.booleans())
def test_an_imported_tenant_is_as_the_one_that_was_exported(
    tmp_path_factory: pytest.TempPathFactory, life: list[tuple[str, int]], limit: int, vectors: bool
) -> None:
    folder = tmp_path_factory.mktemp("stores")
    with engine_at(folder / "a") as here, engine_at(folder / "b") as there:
        here.add_batch([said("ann", n) for n in range(100, 112)])
        assert here.drain()
        for what, n in life:
            act(here, "ann", what, n)
        records = exported(here, "ann", limit=limit, vectors=vectors)
        there.add_batch([said("bob/2", n) for n in range(3)])
        there.erase("bob/2")  # so that the name lives its second life
        done = there.import_("bob/2", records)
        counts = [sum(r["kind"] == kind for r in records) for kind in ("turn", "episode", "fact", "decision")]
        assert done == Imported(*counts)
        copy = exported(there, "bob/2", vectors=vectors)
        assert nameless(copy, "bob/2") == nameless(records, "ann")
        assert not {r["id"] for r in copy if "id" in r} & {r["id"] for r in records if "id" in r}
        here.drain(), there.drain()
        assert seen(there, "bob/2") == seen(here, "ann")
        for what, n in (("add", 20), ("add", 30), ("delete turn", 3), ("replay", 0)):
            for engine, tenant in ((here, "ann"), (there, "bob/2")):
                act(engine, tenant, what, n)
        here.drain(), there.drain()
        assert seen(there, "bob/2") == seen(here, "ann")
    with engine_at(folder / "a") as here, engine_at(folder / "b") as there:
        assert nameless(exported(there, "bob/2"), "bob/2") == nameless(exported(here, "ann"), "ann")
