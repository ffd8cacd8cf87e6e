"""What an event loop may wait for: work of an engine that takes some milliseconds at most."""

from __future__ import annotations

from typing import Any

from undertow.engine.api.engine import Engine
from undertow.engine.base.queries import AnswerQuery, ApiCall, ListQuery, SearchQuery
from undertow.engine.cluster.shard.call_queue import TurnCall
from undertow.engine.step.batch_size import MOST_TURNS

# Tenants that are loaded one by one for a call that adds turns.
MOST_HELD = 4
# The dedupe keys of so many turns are read in a millisecond; and of so many of each tenant in a step.
KEYS_AT_ONCE, FEW_KEYS = 250, 32
# Longer than this for one text, and the loop cannot wait for the encoder.
QUICK_TEXT_S = 0.002


def never(_: Engine) -> bool:
    """Of a call that may take as long as a disk, or as the rows of a store."""
    return False


def is_at_hand(engine: Engine, tenant: str) -> bool:
    """Whether the tenant's live state is in memory, or there is nothing of the tenant to be loaded."""
    return engine.tenants.in_memory(tenant) is not None or tenant not in engine.tenants


def takes_turns(engine: Engine, tenant: str) -> bool:
    """Whether a step adds turns to the tenant quickly: it compares their keys with those of all its turns."""
    loaded = engine.tenants.in_memory(tenant)
    return tenant not in engine.tenants if loaded is None else loaded.keys_missing <= FEW_KEYS


def read_keys(engine: Engine, tenant: str) -> bool:
    """Read some dedupe keys of a tenant, if it was loaded. Whether none is left to read."""
    if (loaded := engine.tenants.in_memory(tenant)) is None:
        return True
    loaded.index_keys(KEYS_AT_ONCE)
    return not loaded.keys_missing


def logs_quickly(engine: Engine, tenant: str) -> bool:
    """Of a call that adds a record to the tenant's log."""
    return is_at_hand(engine, tenant) and engine.journal.commits_quickly


def is_quick_call(engine: Engine, call: ApiCall[Any]) -> bool:
    """Of a query that reads no journal, and builds a slice of an index."""
    if not isinstance(call, SearchQuery | AnswerQuery | ListQuery):
        return False
    if isinstance(call, SearchQuery) and call.explain:
        return False  # it ranks twice, and tells the parts of each score
    tenant = engine.tenants.in_memory(call.tenant)
    if tenant is None:
        return is_at_hand(engine, call.tenant)
    if isinstance(call, ListQuery):
        return engine.ranker.is_quick(tenant, filters=True) and engine.is_ready(call)
    filters = isinstance(call, SearchQuery) and bool(call.where or call.since or call.until)
    return engine.embeds_in_s <= QUICK_TEXT_S and engine.ranker.is_quick(tenant, filters=filters)


def is_quick_add(engine: Engine, call: TurnCall) -> bool:
    """Of a call whose tenants are ready for it; brief steps take its turns a few at a time."""
    return len(call) <= MOST_TURNS and all(takes_turns(engine, tenant) for tenant in call.tenants)


def may_be_held(engine: Engine, call: TurnCall) -> bool:
    """Of a call that `is_quick_add` once its tenants, which are few, are made ready for it."""
    return len(call) <= MOST_TURNS and len(call.tenants) <= MOST_HELD and engine.journal.commits_quickly


def steps_quickly(engine: Engine) -> bool:
    """Of the next step, if it is brief; its commit aside."""
    may_wait = engine.embeds_in_s <= QUICK_TEXT_S and not engine.waits_for_tenants
    return may_wait and (engine.journal.is_read_beside or not engine.scheduler.deletes_rows)
