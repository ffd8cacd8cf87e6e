"""Exports of a tenant with a history, and what its user can see of it, for the tests of imports."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import orjson

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.api.policy_change import PolicyConflict
from undertow.engine.api.transfer.export import ExportTrailer
from undertow.engine.base.memory_api import MemoryApi
from undertow.engine.base.model import Message, Turn
from undertow.engine.base.results import Report
from undertow.engine.llm.client import BadReply
from undertow.engine.storage.row_codec import usage_from_json
from undertow.prompts.operations import QUERY_OPERATIONS

from ..engine import ENCODER, opened, settings_of
from ..faults.harness import PARKING, RATES, THETA, TOPICS

ID = re.compile(rb'"[0-9a-f]{32}"')


REPLIES = MockReplies(**{**RATES, **PARKING, "malformed_rate": 0.3})


def engine_at(store: Path, **changes: Any) -> Engine:
    return opened(store, settings_of(**{**THETA, **changes}), ENCODER, MockLLM(REPLIES))


def said(tenant: str, n: int) -> Turn:
    """The n-th turn: of one of few topics, so that it merges, fires or waits."""
    words = TOPICS[n * n % 3].split()
    text = " ".join([*(words[(n + i) % len(words)] for i in range(6)), f"n{n}."])
    messages = (Message("user", text, "Ada"), Message("assistant", "I see."))
    when = f"2026-03-{1 + n % 28:02d}T10:00:00" if n % 4 else None
    return Turn(tenant, messages, f"key {n}", f"s{n % 2}", when, {"topic": n % 3} if n % 2 else {})


def exported(engine: MemoryApi, tenant: str, *, limit: int = 1000, vectors: bool = False) -> list[Report]:
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
    seal = ExportTrailer()
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


def stats_of(engine: Engine, tenant: str) -> dict[str, int]:
    """As tenant_stats, less what jobs have cost that were given up half-way: that is their store's."""
    stats = engine.tenant_stats(tenant)
    for row in engine.journal.read(kinds=["usage"]):
        for operation, lost in usage_from_json(orjson.loads(row.payload)).items():
            if row.tenant == tenant and operation not in QUERY_OPERATIONS:
                stats["llm_calls"] -= lost.calls
                for name in ("prompt_tokens", "cached_prompt_tokens", "completion_tokens"):
                    stats[name] -= getattr(lost, name)
    return stats


def seen(engine: Engine, tenant: str) -> list[Any]:
    """What the tenant's user can see."""
    found = engine.search(tenant, "harbour boat garden", k_sub=99, k_epi=99, k_sem=99)
    hits = [(hit.kind, hit.memory, hit.score, hit.timestamp, hit.source_seqs) for hit in found.ranked()]
    listed = engine.list(tenant, limit=1000)
    live = engine.tenants.get(tenant)
    jobs = [(job.seq, job.state, job.operation, job.cluster, job.reason) for job in live.jobs.values()]
    gates = (live.cursor, live.next_seq, live.waiting_count, live.last_timestamp)
    some = [item["id"] for item in listed.items if item["kind"] != "turn"][:4]
    histories = [version for memory_id in some for version in engine.history(memory_id, tenant=tenant)]
    return [
        nameless(listed.items, tenant),
        nameless(engine.explain(tenant), tenant),
        nameless(histories, tenant),
        stats_of(engine, tenant),
        hits,
        jobs,
        gates,
        live.thresholds_from,
        live.told_from,
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
    elif what == "ask":  # HiMem learns from questions that its notes do not answer
        with suppress(BadReply):
            engine.answer(tenant, f"Who has a {TOPICS[n % 3]}?", mode="best_effort")
    elif what == "step":
        engine.step()
    elif what == "change policy":
        engine.set_policy(tenant, "eager" if n % 2 else "recmem", drop_edits=True)
    elif what in ("delete memory", "update memory") and memories:
        chosen = memories[n % len(memories)].id
        with suppress(PolicyConflict):  # while a log is read again
            if what == "delete memory":
                engine.delete(chosen)
            else:
                engine.update(chosen, f"The user sails boat number {n}.")
