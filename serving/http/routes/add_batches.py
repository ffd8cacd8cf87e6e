"""Turns of add requests: makes them from messages, stores them, and reports each one, duplicates included."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from undertow.engine.api.message_turns import turns_of, utc_now
from undertow.engine.base.model import Message, Turn
from undertow.engine.base.queries import TurnsByKeyQuery
from undertow.engine.base.results import Receipt, Report
from undertow.engine.storage.row_codec import check_turn
from undertow.serving.http.middleware.idempotency import under_way
from undertow.serving.http.middleware.load_limits import LoadLimits
from undertow.serving.http.problems import Problem
from undertow.serving.http.routes.schemas import AddRequest, Item

if TYPE_CHECKING:
    from undertow.serving.async_memories import AsyncMemories

PARKED = (
    "The engine failed at one of these turns and set it aside. The operator of the service can look at it; "
    "afterwards, send the turn again."
)
OTHER_MESSAGES = "This Idempotency-Key was used for other messages. Take a new key for new messages."


@dataclass(frozen=True, slots=True)
class AddBatch:
    """The turns of one add. `call` makes their dedupe keys; `keyed`: it comes from an Idempotency-Key."""

    call: str
    keyed: bool
    turns: Sequence[Turn]

    @classmethod
    def of(
        cls, item: Item | AddRequest, tenant: str, key_id: str, key: str | None, max_message_bytes: int
    ) -> AddBatch:
        """The turns of some messages. InputError.

        `key`: the caller's Idempotency-Key, distinct for each API key. Without one, each call is new.
        """
        call = secrets.token_hex(12) if key is None else f"{key_id}\x1f{key}"
        turns = turns_of(
            tenant,
            item.messages or (),
            session_id=item.session_id or "",
            timestamp=None if item.timestamp is None else str(item.timestamp),
            metadata=item.metadata or {},
            call=call,
            max_message_bytes=max_message_bytes,
            arrived=utc_now(),
        )
        for turn in turns:
            check_turn(turn)
        return cls(call, key is not None, turns)


# one report a turn, with the fields of serving.client.results.Added
BatchResult = Sequence[Report] | Problem


class AddCalls:
    """Stores batches and reports each turn. One request at a time may add under an Idempotency-Key."""

    def __init__(self, memories: AsyncMemories, load: LoadLimits) -> None:
        self._memories = memories
        self._load = load
        self._under_way: set[tuple[str, str]] = set()

    async def add(self, key_id: str, tenant: str, batches: Sequence[AddBatch]) -> list[BatchResult]:
        """Store batches of one tenant. For each: its results, or why nothing of it was stored.

        Problem 429: too many turns of the tenant, or with the key, are being stored.
        """
        with self._load.storing(key_id, tenant, sum(len(batch.turns) for batch in batches)):
            return await self._add_each(tenant, batches)

    async def _add_each(self, tenant: str, batches: Sequence[AddBatch]) -> list[BatchResult]:
        results: dict[int, BatchResult] = {}
        mine: set[tuple[str, str]] = set()
        try:
            for n, batch in enumerate(batches):
                if (mark := (tenant, batch.call)) in self._under_way:
                    results[n] = under_way()
                else:
                    self._under_way.add(mark)
                    mine.add(mark)
            results |= await self._add(tenant, {n: b for n, b in enumerate(batches) if n not in results})
        finally:
            self._under_way -= mine
        return [results[n] for n in range(len(batches))]

    async def _add(self, tenant: str, batches: Mapping[int, AddBatch]) -> dict[int, BatchResult]:
        known = await self._stored(
            tenant, [t.dedupe_key for b in batches.values() if b.keyed for t in b.turns]
        )
        results: dict[int, BatchResult] = {
            n: Problem(422, "idempotency-key-reused", OTHER_MESSAGES)
            for n, batch in batches.items()
            if not all(_is_same(turn, known.get(turn.dedupe_key)) for turn in batch.turns)
        }
        accepted = {n: batch for n, batch in batches.items() if n not in results}
        turns = [turn for batch in accepted.values() for turn in batch.turns]
        receipts = await self._memories.add(turns) if turns else []
        # A duplicate that was unknown before belongs to this very call: its receipt was lost on the way from
        # the shard, and the turn was sent again.
        pairs = zip(turns, receipts, strict=True)
        resent = [t.dedupe_key for t, r in pairs if r.duplicate and t.dedupe_key not in known]
        known |= await self._stored(tenant, resent)
        each = iter(receipts)
        for n, batch in accepted.items():
            results[n] = _result(batch, [next(each) for _ in batch.turns], known)
        return results

    async def _stored(self, tenant: str, keys: list[str]) -> dict[str, Report]:
        return await self._memories.call(TurnsByKeyQuery(tenant, keys)) if keys else {}


def _result(batch: AddBatch, receipts: Sequence[Receipt], known: Mapping[str, Report]) -> BatchResult:
    if any(receipt.parked for receipt in receipts):
        return Problem(422, "parked", PARKED)
    results: list[Report] = []
    for turn, receipt in zip(batch.turns, receipts, strict=True):
        stored = known.get(turn.dedupe_key, {}) if receipt.duplicate else {}
        results.append(
            {
                "id": stored.get("id", receipt.id),
                "memory": turn.text,
                "event": "DUPLICATE" if receipt.duplicate and batch.keyed else "ADD",
                "seq": stored.get("seq", receipt.seq),
            }
        )
    return results


def _is_same(turn: Turn, stored: Report | None) -> bool:
    """Whether a turn equals the one stored under its key. True where none is, or its words are deleted."""
    if stored is None or "messages" not in stored:
        return True
    messages = [Message(**message) for message in stored["messages"]]
    return (
        messages == list(turn.messages)
        and stored["session"] == turn.session_id
        and stored["metadata"] == turn.metadata
        and (turn.arrived or turn.timestamp in (None, stored["timestamp"]))
    )
