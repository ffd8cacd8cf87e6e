"""The ledger of LLM jobs: pending, parked and replayed jobs, and what abandoned jobs have cost.

A job is pending from its first prompt to its decision. A job whose reply or prompt cannot be used is parked
with its cluster until `undertow jobs --replay` logs a replay record for it. Each function updates the
tenant and returns the journal rows for the caller's next commit.
"""

from __future__ import annotations

from dataclasses import replace

import orjson

from undertow.engine.base.model import Decision, memory_id
from undertow.engine.policies.base import PolicyResult
from undertow.engine.step.decision_queue import DecisionRun
from undertow.engine.storage.journal import Row
from undertow.engine.storage.row_codec import LlmJob, job_row, usage_to_json
from undertow.engine.tenants.tenant import Tenant


def record_pending(run: DecisionRun, operation: str) -> list[Row]:
    """A run asks for its first LLM call."""
    tenant = run.tenant
    return [_put(tenant, LlmJob(_job_id(tenant, run.seq), run.seq, "pending", operation))]


def record_replayed(tenant: Tenant, job_id: str) -> list[Row]:
    """A replay record was decided. No rows where the job is unknown."""
    job = tenant.jobs.get(job_id)
    return [] if job is None else [_put(tenant, replace(job, state="replayed"))]


def record_parked(run: DecisionRun, outcome: PolicyResult) -> list[Row]:
    """A run was decided. No rows unless its job is parked."""
    if outcome.decision is not Decision.PARKED:
        return []
    tenant, seq = run.tenant, run.seq
    operation = outcome.operation or ""
    job = LlmJob(_job_id(tenant, seq), seq, "parked", operation, outcome.cluster, outcome.reason)
    return [_put(tenant, job)]


def close_jobs(tenant: Tenant, jobs: list[LlmJob]) -> list[Row]:
    """The log is read again, so these jobs are obsolete: their turns are decided again."""
    return [_put(tenant, replace(job, state="replayed")) for job in jobs]


def abandon(run: DecisionRun) -> list[Row]:
    """Close a run before its decision. Its tokens are metered; a later run decides the record again."""
    run.steps.close()
    if not run.usage:
        return []
    tenant = run.tenant
    for operation, usage in run.usage.items():
        tenant.add_usage(operation, usage)
    return [Row("usage", tenant.name, tenant.key, -1, orjson.dumps(usage_to_json(run.usage)))]


def _job_id(tenant: Tenant, seq: int) -> str:
    return memory_id(tenant.name, tenant.generation, seq, "job", 0)


def _put(tenant: Tenant, job: LlmJob) -> Row:
    tenant.add_job(job)
    return job_row(tenant.name, tenant.key, job)
