"""Feedback from answers to the log: which facts they used, and which questions the facts did not cover.

Feedback is queued when an answer is handed over, and logged in a later step, so that no answer waits for a
commit. A kill or a full queue may lose feedback but no memory: the next such question queues it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from undertow.engine.base.trace import current_traceparent
from undertow.engine.storage.row_codec import ControlKind
from undertow.engine.tenants.generations import missed_of
from undertow.engine.tenants.tenant import Tenant

# Bound of one engine's queue. A full queue drops the oldest.
MOST_FEEDBACK = 1_024
# Their tenants may have to be loaded, and a step must stay short.
FEEDBACK_PER_STEP = 64


@dataclass(frozen=True, slots=True)
class Feedback:
    """A control record for the log of one incarnation of a tenant.

    `traceparent` belongs to the request that was answered.
    """

    tenant: str
    incarnation: int
    kind: ControlKind
    body: Mapping[str, Any]
    traceparent: str | None = field(default_factory=current_traceparent)


class FeedbackQueue:
    """Feedback that waits to be logged, oldest first."""

    def __init__(self, most: int = MOST_FEEDBACK) -> None:
        self._waiting: deque[Feedback] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, feedback: Feedback) -> None:
        self._waiting.append(feedback)

    def holds(self, tenant: str) -> bool:
        """Whether feedback of this tenant waits."""
        return any(feedback.tenant == tenant for feedback in self._waiting)

    def take(self, most: int) -> dict[tuple[str, int], list[Feedback]]:
        """Remove and return the oldest `most`, by tenant and incarnation."""
        taken: dict[tuple[str, int], list[Feedback]] = {}
        for _ in range(min(most, len(self._waiting))):
            feedback = self._waiting.popleft()
            taken.setdefault((feedback.tenant, feedback.incarnation), []).append(feedback)
        return taken

    def forget(self, tenants: Collection[str]) -> None:
        """Drop the feedback of tenants that are erased or move away."""
        kept = [feedback for feedback in self._waiting if feedback.tenant not in tenants]
        self._waiting = deque(kept, maxlen=self._waiting.maxlen)


def new_ones(of: Tenant, feedback: Iterable[Feedback]) -> Sequence[Feedback]:
    """The feedback without questions that are already in the log undecided, or were already learned from.

    A learned question counts as such until something other than a question changes the memories. Otherwise
    a change by one question would cause others to be paid for again, without end where notes are bounded
    and replace each other.
    """
    undecided = of.controls_from(of.cursor)
    asked = {control.body["question"] for control in undecided if control.kind == "reconsolidate"}
    kept = []
    for one in feedback:
        if one.kind == "reconsolidate":
            if one.body["question"] in asked or missed_of(one.body) in of.making.learned:
                continue
            asked.add(one.body["question"])
        kept.append(one)
    return kept
