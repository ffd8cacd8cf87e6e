"""What the sender of turns is told of them once they are stored, of repeated ones too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from undertow.engine.admission import Receipt
from undertow.engine.model import Turn
from undertow.serving.http.problems import Problem
from undertow.serving.http.wire import Added

if TYPE_CHECKING:
    from undertow.serving.memories import Memories

OTHER_MESSAGES = (
    "This Idempotency-Key was used for other messages. Take a new key for new messages. Nothing was stored."
)


async def told_of(
    memories: Memories, lots: Sequence[Sequence[Turn]], keyed: Sequence[bool]
) -> list[list[Added] | Problem]:
    """Store lots of turns, in one call; for each the results, or why it was not taken.

    `keyed`: which of them have an Idempotency-Key. A turn that turns out to be stored already, though its
    lot has none, is of this very call: its answer got lost on the way, and it was sent again.
    """
    receipts = iter(await memories.add([turn for lot in lots for turn in lot]) if any(lots) else ())
    told: list[list[Added] | Problem] = []
    for lot, has_key in zip(lots, keyed, strict=True):
        told.append(_told(lot, [next(receipts) for _ in lot], has_key))
    return told


def _told(turns: Sequence[Turn], receipts: Sequence[Receipt], has_key: bool) -> list[Added] | Problem:
    if any(receipt.parked for receipt in receipts):
        detail = "The engine failed at one of these turns, and has set it aside for its operator to look at."
        return Problem(422, "parked", detail)
    return [
        Added(
            id=receipt.id,
            memory=turn.text,
            event="DUPLICATE" if receipt.duplicate and has_key else "ADD",
            seq=receipt.seq,
        )
        for turn, receipt in zip(turns, receipts, strict=True)
    ]
