"""Counts and costs of tenants and of whole stores, under the names that every summary uses."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice

from undertow.engine.base.model import Usage
from undertow.engine.tenants.registry import ArenaFull, TenantRegistry
from undertow.engine.tenants.tenant import Tenant
from undertow.prompts.operations import QUERY_OPERATIONS

TENANTS_AT_A_TIME = 256

SUMMARY_KEYS = (
    *("turns", "episodes", "facts", "merges", "merge_refusals", "consolidations", "partition_repairs"),
    *("waiting_turns", "undecided_turns", "pending_jobs", "dead_letters"),
    *("llm_calls", "prompt_tokens", "cached_prompt_tokens", "completion_tokens"),
)


def tenant_stats(tenant: Tenant) -> dict[str, int]:
    """Counts and construction tokens of one tenant (answers are a cost of their own)."""
    spent = sum((u for op, u in tenant.meter.items() if op not in QUERY_OPERATIONS), Usage())
    states = Counter(job.state for job in tenant.jobs.values())
    figures = (
        len(tenant.seq_by_row) - tenant.counts["deleted"],
        len(tenant.current("episode")),
        len(tenant.current("fact")),
        tenant.counts["merges"],
        tenant.counts["merge_refusals"],
        tenant.counts["consolidations"],
        tenant.counts["partition_repairs"],
        tenant.waiting_count,
        tenant.undecided_count,
        states["pending"],
        states["parked"],
        spent.calls,
        spent.prompt_tokens,
        spent.cached_prompt_tokens,
        spent.completion_tokens,
    )
    return dict(zip(SUMMARY_KEYS, figures, strict=True))


def store_stats(tenants: TenantRegistry) -> dict[str, int]:
    """The counts of all tenants together."""
    total = dict.fromkeys(SUMMARY_KEYS, 0)
    for tenant in _one_by_one(tenants):
        for key, count in tenant_stats(tenant).items():
            total[key] += count
    return {"tenants": len(tenants.names()), **total}


def store_usage(tenants: TenantRegistry, name: str | None = None) -> dict[str, dict[str, int]]:
    """LLM calls and tokens by operation, of all tenants or of one. UnknownTenant."""
    usage: dict[str, Usage] = {}
    for tenant in _one_by_one(tenants) if name is None else [tenants.existing(name)]:
        for operation, used in tenant.meter.items():
            usage[operation] = usage.get(operation, Usage()) + used
    return {operation: asdict(used) for operation, used in sorted(usage.items())}


def _one_by_one(tenants: TenantRegistry) -> Iterator[Tenant]:
    """Every tenant. What is not loaded is loaded, a few at a time, and let go again. ArenaFull."""
    resident = {tenant.name for tenant in tenants.loaded()}
    names, at_a_time = deque(tenants.names()), TENANTS_AT_A_TIME
    while names:
        some = list(islice(names, at_a_time))
        try:
            loaded = tenants.get_many(some)
        except ArenaFull:  # a small device pool: fewer may fit
            if at_a_time == 1:
                raise
            at_a_time = min(at_a_time, len(some)) // 2 or 1
            continue
        yield from loaded
        for name in some:
            names.popleft()
            if name not in resident:
                tenants.evict(name)
