"""Starts the decision of a log record by its kind, and builds the body of its decision row."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from typing import Any

from undertow.engine.base.model import Decision, Memory, Usage
from undertow.engine.llm.client import BadReply
from undertow.engine.policies.base import (
    Complete,
    Decide,
    Draft,
    Effect,
    Embed,
    Nearest,
    PolicyResult,
    deletion,
    nothing_to_decide,
    rewording,
)
from undertow.engine.policies.registry import Policies
from undertow.engine.storage.row_codec import Control, usage_to_json
from undertow.engine.tenants.generations import Generation
from undertow.engine.tenants.tenant import Tenant
from undertow.engine.tenants.view import View


def begin(policies: Policies, tenant: Tenant, seq: int) -> Decide:
    """The coroutine that decides record `seq`: the policy's own wherever memories may be made."""
    control = tenant.control(seq)
    policy = policies.named(tenant.making.policy)
    view = View(tenant, seq, tenant.making)
    match control:
        case None if tenant.exists(seq):
            return policy.decide(seq, view)
        case Control(kind="delete", body={"turn_seq": turn_seq}):
            return forget(policies, tenant, seq, turn_seq)
        case Control(kind="delete"):
            return delete_memory(control, view)
        case Control(kind="update"):
            return update_memory(control, view)
        case Control(kind="replay", body={"job_id": job_id}) if job_id in tenant.jobs:
            return policy.replay(seq, tenant.jobs[job_id], view)
        case Control(kind="flush"):
            return policy.flush(seq, view)
        case Control(kind="reconsolidate", body=asked):
            return policy.reconsolidate(seq, asked["question"], asked["episode_ids"], view)
        case _:  # settings, facts used by answers, deleted turns
            return nothing_to_decide()


def forget(policies: Policies, tenant: Tenant, seq: int, turn_seq: int) -> Decide:
    """Remake what was derived from a deleted turn, and delete it from the other generations.

    While the log is read again, turns deleted before the change of policy were not read: nothing to remake.
    """
    gone: list[Draft] = []
    for generation in tenant.generations[1:]:
        gone += yield from _deletions_in_earlier(
            policies, View(tenant, seq, generation), turn_seq, generation
        )
    if tenant.reread_to is not None and seq < tenant.reread_to:
        return PolicyResult(Decision.WAITS, earlier_deletions=tuple(gone))
    policy = policies.named(tenant.making.policy)
    outcome = yield from policy.forget(seq, turn_seq, View(tenant, seq, tenant.making))
    return replace(outcome, earlier_deletions=tuple(gone))


def _deletions_in_earlier(
    policies: Policies, view: View, turn_seq: int, generation: Generation
) -> Generator[Effect, Any, list[Draft]]:
    """The deletions of what an earlier generation derived from a turn, without those already made.

    They are what its policy deletes while no LLM is available: nothing replaces the deleted memories.
    """
    steps = policies.named(generation.policy).forget(view.seq, turn_seq, view)
    try:
        effect = next(steps)
        while True:
            if isinstance(effect, Complete):
                effect = steps.throw(BadReply("memories of an earlier generation are not remade", Usage()))
            else:
                effect = steps.send([] if isinstance(effect, Nearest) else (yield effect))
    except StopIteration as stop:
        drafts: tuple[Draft, ...] = stop.value.drafts
    done = {m.id for kind in generation.tiers for m in view.ended(kind) if m.made_at_seq >= view.seq}
    return [d for d in drafts if d.memory.deleted and d.memory.id not in done]


def delete_memory(control: Control, view: View) -> Decide:
    """Delete one episode or fact with a last, empty version. Its history stays."""
    drafts = tuple(Draft(deletion(m, control.seq), None) for m in _edited(control, view))
    return PolicyResult(Decision.WAITS, drafts=drafts)
    yield


def update_memory(control: Control, view: View) -> Decide:
    """Give one episode or fact a user's text as a new version. Its history stays."""
    found = _edited(control, view)
    if not found:  # always so while the log is read again; the update's text may be redacted
        return PolicyResult(Decision.WAITS, reason="the memory was deleted before its update was reached")
    text = control.body["text"]
    (vector,) = yield Embed((text,))
    drafts = tuple(Draft(rewording(m, text, control.seq), vector) for m in found)
    return PolicyResult(Decision.WAITS, drafts=drafts)


def _edited(control: Control, view: View) -> list[Memory]:
    """The memory that a user's deletion or update names; empty if it is gone."""
    return [m for m in view.current(control.body["kind"]) if m.id == control.body["memory_id"]]


def decision_body(outcome: PolicyResult, usage: dict[str, Usage]) -> dict[str, Any]:
    """The payload of a decision row: scores, cluster, ids of the memories made, token usage."""
    body: dict[str, Any] = {"decision": outcome.decision.value}
    if (reading := outcome.reading) is not None:
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
    for name in ("settled", "revived", "reason", "operation", "repairs"):
        if value := getattr(outcome, name):
            body[name] = value
    if outcome.salient:
        body["salient_seqs"] = outcome.salient
    if outcome.salient_day is not None:
        body["salient_day"] = outcome.salient_day
    if outcome.thetas:
        body["thetas"] = dict(outcome.thetas)
    made = [draft.memory for draft in (*outcome.drafts, *outcome.earlier_deletions)]
    for kind in ("episode", "fact"):
        if ids := [memory.id for memory in made if memory.kind == kind]:
            body[f"{kind}_ids"] = ids
    if usage:
        body["usage"] = usage_to_json(usage)
    return body
