"""What the cluster's tests share: shards that run in this process and can be killed, and their end states."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from undertow.bench.mock.llm import MockLLM
from undertow.bench.mock.replies import Messages, MockReplies
from undertow.engine.api.engine import Engine, make_llm
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Turn
from undertow.engine.cluster import shard_map
from undertow.engine.cluster.routing.errors import ShardExited, ShardGone
from undertow.engine.cluster.shard.shard import Shard
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.cluster.shard_map import STORES, ShardMap
from undertow.engine.encoders.base import Float16
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.llm.client import LLMClient
from undertow.engine.storage.journal import Fenced
from undertow.engine.storage.location import Location

from ..engine import interleaved
from ..faults.harness import PARKING, RATES, THETA, State, end_state, turns_of, write_log

ENCODER = "hash:384"


@dataclass(frozen=True, slots=True)
class UsableAnswers(MockReplies):
    """Some jobs are parked; every question is answered, so that no test hangs on a prompt's words."""

    def reply(self, messages: Messages, schema: Mapping[str, Any] | None) -> str:
        told = self if schema is not None else replace(self, malformed_rate=0.0)
        return MockReplies.reply(told, messages, schema)


def mock_llm(settings: Settings) -> LLMClient:
    return MockLLM(UsableAnswers(**RATES, **PARKING))


PARTS = EngineParts(llm=mock_llm)


class FailingEncoder(HashingEncoder):
    """Fails for any batch that holds one of some words, as a broken kernel would."""

    def __init__(
        self, words: Sequence[str], error: Callable[[str], Exception] = RuntimeError, dim: int = 384
    ) -> None:
        super().__init__(dim)
        self.words = list(words)
        self.asked: list[Sequence[str]] = []
        self._error = error

    def encode(self, texts: Sequence[str]) -> Float16:
        self.asked.append(texts)
        if found := [word for word in self.words if any(word in text for text in texts)]:
            raise self._error(f"no vector for {found[0]}")
        return super().encode(texts)


def begin(folder: Path, count: int) -> Location:
    """A root with so many shards."""
    root = Location.of(folder)
    shard_map.publish(root, ShardMap.new([f"s{n}" for n in range(count)]))
    return root


def settings(**changes: Any) -> Settings:
    return Settings(device="cpu", encoder=ENCODER, **{**THETA, "batch_turns": 16, **changes})


class LocalShards:
    """Shards in this process. A killed one goes on as a zombie: it does not know that it is dead."""

    def __init__(self, root: Location, settings: Settings, parts: EngineParts = PARTS) -> None:
        self.root = root
        self.running: dict[str, Shard] = {}
        self.zombies: list[Shard] = []
        # shards whose calls are not let through, and those that cannot be restarted
        self.held: set[str] = set()
        self.down: set[str] = set()
        self.kills = 0
        self._settings = settings
        self._parts = parts

    def __enter__(self) -> LocalShards:
        return self

    def __exit__(self, *_: object) -> None:
        for shard in [*self.running.values(), *self.zombies]:
            shard.close()

    def shard(self, name: str) -> Shard:
        if name in self.down:
            raise ShardGone(f"shard {name} is down")
        if name not in self.running:
            self.running[name] = Shard(self.root, name, self._settings, self._parts)
        return self.running[name]

    def kill(self, name: str) -> None:
        if (shard := self.running.pop(name, None)) is not None:
            self.zombies.append(shard)
            self.kills += 1

    def calls(self, name: str) -> LocalCalls:
        return LocalCalls(self, name)


class LocalCalls:
    def __init__(self, shards: LocalShards, name: str) -> None:
        self._shards, self._name = shards, name

    async def call(self, method: str, *args: Any) -> Any:
        while self._name in self._shards.held:
            await asyncio.sleep(0.005)
        shard = self._shards.shard(self._name)
        future = shard.call(method, *args)
        while not future.done() and self._shards.running.get(self._name) is shard:
            await asyncio.sleep(0.001)
        if self._shards.running.get(self._name) is not shard:
            raise ShardGone(f"shard {self._name} was killed")
        try:
            return future.result()
        except Fenced:  # by a zombie that was slow to open: an actor ends itself then
            self._shards.kill(self._name)
            raise ShardExited(f"shard {self._name} was fenced") from None


def of_one_engine(folder: Path, settings: Settings) -> tuple[list[Turn], State]:
    """A line of turns of five tenants, and what one engine with the settings' LLM server makes of it."""
    turns = turns_of(write_log(folder / "log.jsonl", [f"tenant-{n}" for n in range(5)], 26))
    with Engine(folder / "plain", settings, HashingEncoder(384), llm=make_llm(settings)) as engine:
        engine.add_batch([turn for of_tenant in turns.values() for turn in of_tenant])
        assert engine.drain()
    return interleaved(turns, 4), end_state(folder / "plain")


def cluster_state(root: Location | Path) -> State:
    """The end states of all stores of a root, as one: a tenant at two of them fails the test."""
    exports: dict[str, list[str]] = {}
    jobs: list[dict[str, Any]] = []
    stores = Location.of(root) / STORES
    for shard in stores.children():
        if not stores.exists(f"{shard}/store.json"):
            continue  # no tenant has come to it
        state = end_state(stores / shard)
        assert not exports.keys() & state.exports.keys(), "a tenant is at two shards"
        exports |= state.exports
        jobs += state.jobs
    return State(exports, sorted(jobs, key=lambda job: (job["tenant"], job["seq"])))
