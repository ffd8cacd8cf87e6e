"""Storing turns, and what their sender is told of them, of repeated ones too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from undertow.engine.base.model import Message, Turn
from undertow.engine.base.results import Receipt, Report
from undertow.serving.http.problems import Problem
from undertow.serving.http.schemas.add import Added

if TYPE_CHECKING:
    from undertow.serving.async_memories import AsyncMemories

UNDER_WAY = "The first request with this Idempotency-Key is still under way. Ask again in a moment."
PARKED = "The engine failed at one of these turns, and has set it aside for its operator to look at."
OTHER_MESSAGES = "This Idempotency-Key was used for other messages. Take a new key for new messages."


@dataclass(frozen=True, slots=True)
class AddBatch:
    """The turns of one call; `call` makes their dedupe keys, `keyed`: from an Idempotency-Key."""

    call: str
    keyed: bool
    turns: Sequence[Turn]


Told = list[Added] | Problem


class AddCalls:
    """Stores parcels and tells what became of each; of one call there is but one under way."""

    def __init__(self, memories: AsyncMemories) -> None:
        self._memories = memories
        self._under_way: set[tuple[str, str]] = set()

    async def add(self, tenant: str, parcels: Sequence[AddBatch]) -> list[Told]:
        """Store parcels of one tenant; for each the results, or why nothing of it was stored."""
        told: dict[int, Told] = {}
        mine: set[tuple[str, str]] = set()
        try:
            for n, parcel in enumerate(parcels):
                if (mark := (tenant, parcel.call)) in self._under_way:
                    told[n] = Problem(409, "under-way", UNDER_WAY, retry_after_s=1)
                else:
                    self._under_way.add(mark)
                    mine.add(mark)
            told.update(await self._add(tenant, {n: p for n, p in enumerate(parcels) if n not in told}))
        finally:
            self._under_way -= mine
        return [told[n] for n in range(len(parcels))]

    async def _add(self, tenant: str, parcels: Mapping[int, AddBatch]) -> dict[int, Told]:
        """A turn that turns out to be stored already, though its call is new, is of this very call: its
        answer got lost between here and the shard, and it was sent again."""
        keys = [turn.dedupe_key for parcel in parcels.values() if parcel.keyed for turn in parcel.turns]
        known = await self._memories.turns_by_key(tenant, keys) if keys else {}
        told: dict[int, Told] = {
            n: Problem(422, "idempotency-key-reused", OTHER_MESSAGES)
            for n, parcel in parcels.items()
            if not all(_is_same(turn, known.get(turn.dedupe_key)) for turn in parcel.turns)
        }
        taken = {n: parcel for n, parcel in parcels.items() if n not in told}
        turns = [turn for parcel in taken.values() for turn in parcel.turns]
        receipts = await self._memories.add(turns) if turns else []
        pairs = zip(turns, receipts, strict=True)
        lost = [t.dedupe_key for t, r in pairs if r.duplicate and t.dedupe_key not in known]
        if lost:
            known = {**known, **await self._memories.turns_by_key(tenant, lost)}
        each = iter(receipts)
        for n, parcel in taken.items():
            told[n] = _told(parcel, [next(each) for _ in parcel.turns], known)
        return told


def _told(parcel: AddBatch, receipts: Sequence[Receipt], known: Mapping[str, Report]) -> Told:
    if any(receipt.parked for receipt in receipts):
        return Problem(422, "parked", PARKED)
    results = []
    for turn, receipt in zip(parcel.turns, receipts, strict=True):
        stored = known.get(turn.dedupe_key, {}) if receipt.duplicate else {}
        results.append(
            Added(
                id=stored.get("id", receipt.id),
                memory=turn.text,
                event="DUPLICATE" if receipt.duplicate and parcel.keyed else "ADD",
                seq=stored.get("seq", receipt.seq),
            )
        )
    return results


def _is_same(turn: Turn, stored: Report | None) -> bool:
    """Whether a turn is what is stored under its key, as far as there is any and it is still known."""
    if stored is None or "messages" not in stored:
        return True
    messages = [Message(**message) for message in stored["messages"]]
    return (
        messages == list(turn.messages)
        and stored["session"] == turn.session_id
        and stored["metadata"] == turn.metadata
        and turn.timestamp in (None, stored["timestamp"])
    )
