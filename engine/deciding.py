"""How a record of the log is decided, whatever its kind, and what is written down of it."""

from __future__ import annotations

from typing import Any

from undertow.engine.model import Decision, Usage, memory_id
from undertow.engine.policies.base import (
    Decide,
    Draft,
    Embed,
    GateReading,
    Outcome,
    Policy,
    Reconsolidating,
    deletion,
    nothing_to_decide,
    rewording,
)
from undertow.engine.records import Control, usage_to_json
from undertow.engine.tenants import Tenant, View


def begin(policy: Policy, tenant: Tenant, seq: int) -> Decide:
    """The coroutine that decides record `seq`: the policy's for all that may make memories."""
    record = tenant.records[seq]
    view = View(tenant, seq)
    if isinstance(record, bytes):
        return policy.decide(seq, view)
    if isinstance(record, Control) and record.kind == "delete":
        if "turn_seq" in record.body:
            return policy.forget(seq, record.body["turn_seq"], view)
        return delete_memory(record, view)
    if isinstance(record, Control) and record.kind == "update":
        return update_memory(record, view)
    if isinstance(record, Control) and record.kind == "replay":
        job = tenant.jobs.get(record.body["job_id"])
        return nothing_to_decide() if job is None else policy.replay(seq, job, view)
    if isinstance(record, Control) and record.kind == "flush":
        return policy.flush(seq, view)
    if isinstance(policy, Reconsolidating) and isinstance(record, Control) and record.kind == "reconsolidate":
        return policy.reconsolidate(seq, record.body["question"], record.body["episode_ids"], view)
    return nothing_to_decide()


def job_id(tenant: Tenant, seq: int) -> str:
    return memory_id(tenant.name, tenant.generation, seq, "job", 0)


def delete_memory(control: Control, view: View) -> Decide:
    """Delete one episode or fact: a last, empty version; its history stays."""
    kind = control.body["kind"]
    found = [m for m in view.current(kind) if m.id == control.body["memory_id"]]
    drafts = tuple(Draft(deletion(m, control.seq), None) for m in found)
    return Outcome(Decision.WAITS, drafts=drafts)
    yield


def update_memory(control: Control, view: View) -> Decide:
    """Give one episode or fact a user's words: a new version; the earlier ones stay in its history."""
    kind, text = control.body["kind"], control.body["text"]
    found = [m for m in view.current(kind) if m.id == control.body["memory_id"]]
    if not found:
        return Outcome(Decision.WAITS, reason="the memory was deleted before its update was reached")
    (vector,) = yield Embed((text,))
    drafts = tuple(Draft(rewording(m, text, control.seq), vector) for m in found)
    return Outcome(Decision.WAITS, drafts=drafts)


def decision_body(outcome: Outcome, usage: dict[str, Usage]) -> dict[str, Any]:
    """The payload of a decision row: scores, cluster, what it made, what it cost."""
    body: dict[str, Any] = {"decision": outcome.decision.value}
    reading: GateReading | None = outcome.reading
    if reading is not None:
        if reading.episode is not None:
            body["nearest_episode"] = reading.episode.id
            body["score"] = reading.episode_score
        if reading.count:
            body["count"] = reading.count
            body["relevant"] = reading.relevant
            body["relevant_scores"] = reading.scores
    if outcome.merge_asked:
        body["merge_asked"] = True
    if outcome.cluster:
        body["cluster_seqs"] = outcome.cluster
    for name in ("settled", "revived", "reason", "operation"):
        if value := getattr(outcome, name):
            body[name] = value
    for kind, name in (("episode", "episode_ids"), ("fact", "fact_ids")):
        if ids := [d.memory.id for d in outcome.drafts if d.memory.kind == kind]:
            body[name] = ids
    if usage:
        body["usage"] = usage_to_json(usage)
    return body
