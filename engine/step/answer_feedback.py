"""What answers teach, between an answer and the log: no answer waits for a commit of it.

It is queued when the answer is handed over, and logged in a later step. What a kill or a full queue takes is
a lesson, and no memory: the next such question teaches it again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from undertow.engine.base.trace_context import cause
from undertow.engine.storage.row_codec import Control, ControlKind
from undertow.engine.tenants.generations import missed_of
from undertow.engine.tenants.tenant import Tenant

# of one engine; of more the oldest go
MOST_LESSONS = 1_024
# their tenants may have to be loaded, and a step is to stay short
LESSONS_PER_STEP = 64


@dataclass(frozen=True, slots=True)
class Feedback:
    """A record for the log of a tenant, if it lives this life still. `cause`: as cause.cause."""

    tenant: str
    life: int
    kind: ControlKind
    body: Mapping[str, Any]
    cause: str | None = field(default_factory=cause)


class FeedbackQueue:
    """Those that wait to be logged, oldest first."""

    def __init__(self, most: int = MOST_LESSONS) -> None:
        self._waiting: deque[Feedback] = deque(maxlen=most)

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, lesson: Feedback) -> None:
        self._waiting.append(lesson)

    def holds(self, tenant: str) -> bool:
        """Whether one of the tenant's waits."""
        return any(lesson.tenant == tenant for lesson in self._waiting)

    def take(self, most: int) -> dict[tuple[str, int], list[Feedback]]:
        """The oldest ones, `most` at most, by tenant and life; they wait no more."""
        taken: dict[tuple[str, int], list[Feedback]] = {}
        for _ in range(min(most, len(self._waiting))):
            lesson = self._waiting.popleft()
            taken.setdefault((lesson.tenant, lesson.life), []).append(lesson)
        return taken

    def forget(self, tenants: Collection[str]) -> None:
        """Drop those of tenants that are erased, or leave."""
        kept = [lesson for lesson in self._waiting if lesson.tenant not in tenants]
        self._waiting = deque(kept, maxlen=self._waiting.maxlen)


def new_ones(of: Tenant, feedback: Iterable[Feedback]) -> Sequence[Feedback]:
    """Without questions that the tenant's log has already, undecided, or that would teach nothing more.

    That is so until anything but a question changes the memories: what one question changes must not make
    others be paid for again, which would not end where notes are bounded and take each other's place.
    """
    undecided = (record for record in of.records[of.cursor :] if isinstance(record, Control))
    asked = {record.body["question"] for record in undecided if record.kind == "reconsolidate"}
    kept = []
    for lesson in feedback:
        if lesson.kind == "reconsolidate":
            if lesson.body["question"] in asked or missed_of(lesson.body) in of.making.learned:
                continue
            asked.add(lesson.body["question"])
        kept.append(lesson)
    return kept
