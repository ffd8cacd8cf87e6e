"""The clients of the simulated cluster: one a tenant, which knows what it was told is stored."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from undertow.engine.api.erasure import NotCertified
from undertow.engine.api.policy_change import PolicyConflict
from undertow.engine.base.model import Message, Turn
from undertow.engine.base.queries import (
    ApiCall,
    DeleteCommand,
    EraseCommand,
    FlushCommand,
    ListQuery,
    MemoriesQuery,
    R,
    SearchQuery,
    SetPolicyCommand,
    UpdateCommand,
)
from undertow.engine.step.admission import QueueFull

from ...faults.harness import FILLER, TOPICS

if TYPE_CHECKING:
    from .world import World

ALL = 1_000
GREETING = (Message("user", "hello"),)


def wording(memory_id: str) -> str:
    """What a user makes of a memory."""
    return f"What was said of the {TOPICS[int(memory_id, 16) % len(TOPICS)]}."


class Client:
    """Does one thing after the other for one tenant."""

    def __init__(self, world: World, name: str, careless: bool) -> None:
        """`careless`: it does not wait for all receipts; then it changes nothing that is stored."""
        self.name, self.careless = name, careless
        self.sent: dict[str, Turn] = {}
        # of this life: what is stored for sure, in order, with its id; what may be; what was deleted
        self.acked: dict[str, str] = {}
        self.unsure: set[str] = set()
        self.deleted: set[str] = set()
        # words that may be nowhere any more
        self.buried: set[str] = set()
        self.lives = 1
        self._world = world
        self._rng = world.rng(f"client {name}")

    async def run(self, acts: int) -> None:
        kinds = [self.add] * 9 + [self.look] * 3 + [self.add_again]
        kinds += [self.abandon] * 3 if self.careless else [self.forget, self.edit, self.change, self.erase]
        for act in (self.add, *self._rng.choices(kinds, k=acts)):
            await asyncio.sleep(self._rng.expovariate(1 / 0.3))
            self._world.note("acts", self.name, act.__name__)
            await act()
            self._world.note("has acted", self.name)

    # ---- turns

    def _turns(self, count: int) -> list[Turn]:
        made = []
        for n in range(len(self.sent), len(self.sent) + count):
            topic = self._rng.choice(TOPICS).split()
            word = self.word(n)
            said = " ".join([*self._rng.sample(topic, 6), self._rng.choice(FILLER), word])
            answer = f"Tell me of the {topic[0]} and the {topic[1]}."
            key, when = f"{self.name}-{n}", f"2026-03-{1 + n // 24:02d}T{n % 24:02d}:00:00"
            made.append(
                Turn(
                    self.name, (Message("user", said), Message("assistant", answer)), key, f"s{n // 9}", when
                )
            )
            self.sent[key] = made[-1]
        return made

    def word(self, n: int | str) -> str:
        """Of the n-th turn alone."""
        return f"q{self.name}x{str(n).rpartition('-')[2]}z"

    def _some(self) -> list[Turn]:
        rng = self._rng
        return self._turns(140 if rng.random() < self._world.plan.blocks else rng.choice((1, 1, 1, 2, 3, 6)))

    async def add(self) -> None:
        await self._store(self._some())

    async def add_again(self) -> None:
        """What was sent before, in this life: an old log, read once more."""
        known = [*self.acked, *sorted(self.unsure)]
        await self._store([self.sent[key] for key in self._rng.sample(known, min(2, len(known)))])

    async def _store(self, turns: Sequence[Turn]) -> None:
        while True:
            try:
                receipts = await asyncio.wrap_future(self._world.router.begin_add(turns))
                break
            except QueueFull:
                await asyncio.sleep(0.05)
        for turn, receipt in zip(turns, receipts, strict=True):
            key = turn.dedupe_key
            if receipt.parked is not None:
                self._world.parked.append(receipt.parked)
                self.unsure.add(key)
                continue
            if key in self.acked:
                assert receipt.duplicate, f"{key} is stored twice"
                assert receipt.id in (None, self.acked[key])
            self.acked[key] = receipt.id or self.acked.get(key, "")
            self.unsure.discard(key)

    async def abandon(self) -> None:
        """Send turns, and go away before the answer comes."""
        turns = self._some()
        self.unsure |= {turn.dedupe_key for turn in turns}
        with suppress(QueueFull):
            sent = self._world.router.begin_add(turns)
            await asyncio.sleep(self._rng.expovariate(1 / 0.005))
            sent.cancel()

    # ---- looking

    async def _ask(self, call: ApiCall[R]) -> R:
        return await asyncio.wrap_future(self._world.router.begin(call))

    async def look(self) -> None:
        """What is found is this tenant's; all that was acknowledged is found."""
        if not self.acked:
            return
        query = SearchQuery(self.name, self._rng.choice(TOPICS), k_sub=ALL, k_epi=ALL, k_sem=ALL)
        found = await self._ask(query)
        self._check(hit.memory for hit in found.turns)
        page = await self._ask(ListQuery(self.name, limit=ALL))
        self._check(item["text"] for item in page.items if item["kind"] == "turn")
        made = [hit.memory for hit in (*found.episodes, *found.facts)]
        strange = [text for text in made for word in text.split() if self._is_strange(word)]
        assert not strange, f"{self.name} is shown {strange[0]!r}"

    def _check(self, texts: Any) -> None:
        found = sorted(texts)
        sure = {self.sent[key].text for key in self.acked if key not in self.deleted}
        may_be = {self.sent[key].text for key in self.unsure}
        assert len(set(found)) == len(found), f"{self.name}: a turn is found twice"
        assert sure <= {*found}, f"{self.name}: {sorted(sure - {*found})[:3]} is acknowledged and not found"
        assert {*found} <= sure | may_be, f"{self.name}: {sorted({*found} - sure - may_be)[:3]} is found"

    def _is_strange(self, word: str) -> bool:
        """Whether it is another tenant's, or of something that is gone."""
        known = {self.word(key) for key in (*self.acked, *self.unsure) if key not in self.deleted}
        return word.startswith("q") and word.endswith("z") and word not in known

    # ---- changes, while nothing is undecided, so that they do not depend on how far decisions had come

    async def _rests(self) -> bool:
        return bool(self.acked) and await self._ask(FlushCommand(self.name))

    async def forget(self) -> None:
        """A turn, or a memory."""
        if not await self._rests():
            return
        left = [key for key in self.acked if key not in self.deleted and self.acked[key]]
        if self._rng.random() < 0.6 and left:
            key = self._rng.choice(left)
            assert await self._ask(DeleteCommand(self.acked[key], self.name)) == "turn"
            self.deleted.add(key)
            self.buried.add(self.word(key))
        elif made := await self._ask(MemoriesQuery(self.name)):
            with suppress(PolicyConflict):
                await self._ask(DeleteCommand(self._rng.choice(made).id, self.name))

    async def edit(self) -> None:
        if await self._rests() and (made := await self._ask(MemoriesQuery(self.name))):
            with suppress(PolicyConflict):
                memory_id = self._rng.choice(made).id
                await self._ask(UpdateCommand(memory_id, self.name, text=wording(memory_id)))

    async def change(self) -> None:
        """Of policy."""
        if await self._rests():
            policy = self._rng.choice(("recmem", "eager", "nemori"))
            await self._ask(SetPolicyCommand(self.name, policy, drop_edits=True))

    async def erase(self) -> None:
        if not self.acked:
            return
        with suppress(NotCertified):
            await self._ask(EraseCommand(self.name, now=self._rng.random() < 0.5))
        self.buried |= {self.word(key) for key in self.acked}
        self.acked, self.deleted, self.lives = {}, set(), self.lives + 1
