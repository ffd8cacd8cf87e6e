"""Counts and costs of tenants and of whole stores, under the names that every summary uses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict

from undertow.engine.model import Usage
from undertow.engine.tenants import Tenant, Tenants

TENANTS_AT_A_TIME = 256


def tenant_stats(tenant: Tenant) -> dict[str, int]:
    """Counts and construction tokens of one tenant (answers are a cost of their own)."""
    spent = sum((u for op, u in tenant.meter.items() if op != "answer"), Usage())
    states = Counter(job.state for job in tenant.jobs.values())
    return {
        "turns": len(tenant.seq_by_row) - tenant.counts["deleted"],
        "episodes": len(tenant.current("episode")),
        "facts": len(tenant.current("fact")),
        "merges": tenant.counts["merges"],
        "merge_refusals": tenant.counts["merge_refusals"],
        "consolidations": tenant.counts["consolidations"],
        "waiting_turns": tenant.waiting_count,
        "undecided_turns": tenant.undecided_count,
        "pending_jobs": states["pending"],
        "dead_letters": states["parked"],
        "llm_calls": spent.calls,
        "prompt_tokens": spent.prompt_tokens,
        "cached_prompt_tokens": spent.cached_prompt_tokens,
        "completion_tokens": spent.completion_tokens,
    }


def store_stats(tenants: Tenants) -> dict[str, int]:
    """The counts of all tenants together."""
    total: Counter[str] = Counter()
    for tenant in _one_by_one(tenants):
        total.update(tenant_stats(tenant))
    return {"tenants": len(tenants.names()), **total}


def store_usage(tenants: Tenants, name: str | None = None) -> dict[str, dict[str, int]]:
    """LLM calls and tokens by operation, of all tenants or of one. UnknownTenant."""
    usage: dict[str, Usage] = {}
    for tenant in _one_by_one(tenants) if name is None else [tenants.existing(name)]:
        for operation, used in tenant.meter.items():
            usage[operation] = usage.get(operation, Usage()) + used
    return {operation: asdict(used) for operation, used in sorted(usage.items())}


def _one_by_one(tenants: Tenants) -> Iterator[Tenant]:
    """Every tenant. What is not loaded is loaded, a few at a time, and let go again."""
    resident = {tenant.name for tenant in tenants.loaded()}
    names = tenants.names()
    for i in range(0, len(names), TENANTS_AT_A_TIME):
        some = names[i : i + TENANTS_AT_A_TIME]
        yield from tenants.get_many(some)
        for name in some:
            if name not in resident:
                tenants.evict(name)
