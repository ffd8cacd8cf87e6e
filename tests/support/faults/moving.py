"""What the tests of moving share: shards as plain objects, with traffic, that can be killed and looked at."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.model import PolicyName, Turn
from undertow.engine.cluster.resharding.coordinator import AskShard
from undertow.engine.cluster.resharding.participant import ReshardingParticipant
from undertow.engine.cluster.shard_map import ShardMap, exists, load, publish
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.llm.client import LLMClient
from undertow.engine.storage.lance_log import LanceLog
from undertow.engine.storage.location import Location
from undertow.engine.storage.wal import WriteAheadLog
from undertow.engine.tenants.migration_records import InTransit

from ..engine import settings_of
from .harness import THETA, WINDOWS, State, end_state

ENCODER = HashingEncoder(64)
REPLIES = MockReplies(1, 0.3, 0.15, malformed_rate=0.12, malformed_sticky=True)
# of tests: a fixed one, so that owners do not differ from run to run
HASH_KEY = "5e" * 32


def mock_llm() -> LLMClient:
    return MockLLM(REPLIES)


class Shards:
    """The shards of a root in this process, opened when first asked for; close with `close` or `crash`."""

    def __init__(
        self,
        root: Location | Path,
        first: Sequence[str] = ("a", "b"),
        llm: Callable[[], LLMClient] = mock_llm,
        policy: PolicyName = "recmem",
        **options: Any,
    ) -> None:
        self.root = Location.of(root)
        self._llm = llm
        self._settings = settings_of(**THETA, **WINDOWS, policy=policy, **options)
        self._open: dict[str, ReshardingParticipant] = {}
        self.engines: dict[str, Engine] = {}
        if not exists(self.root):
            publish(self.root, ShardMap(1, tuple(first), hash_key=HASH_KEY))

    @property
    def map(self) -> ShardMap:
        return load(self.root)

    def store(self, shard: str) -> Location:
        return self.root / "shards" / shard

    def __call__(self, shard: str) -> ReshardingParticipant:
        if shard not in self._open:
            store, now = self.store(shard), self.map
            engine = Engine(store, self._settings, ENCODER, llm=self._llm(), hash_key=now.hash_key)
            engine.resume()
            self.engines[shard] = engine
            self._open[shard] = ReshardingParticipant(engine, shard, self.root / "shards", now)
        return self._open[shard]

    def ask(self, shard: str, method: str, *args: Any) -> Any:
        """See coordinator.AskShard."""
        return getattr(self(shard), method)(*args)

    def busy(self, happen: Callable[[], None]) -> AskShard:
        """`ask` for shards that hear each call only after something else has happened."""

        def ask(shard: str, method: str, *args: Any) -> Any:
            happen()
            return self.ask(shard, method, *args)

        return ask

    def __enter__(self) -> Shards:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()
        self._open.clear()
        self.engines.clear()

    def crash(self) -> None:
        """As a kill leaves them: nothing more is written, and the locks are free."""
        for engine in self.engines.values():
            engine.journal.close()
        self._open.clear()
        self.engines.clear()

    # ---- what a router does

    def holder(self, tenant: str) -> Engine:
        """The engine that serves the tenant. InTransit."""
        shard = self.map.home(tenant)
        for _ in range(2):
            refusal = self(shard).refusals([tenant]).get(tenant)
            if refusal is None:
                return self.engines[shard]
            if isinstance(refusal, InTransit):
                raise refusal
            shard = refusal.to
        raise AssertionError(f"{tenant} is sent from shard to shard")

    def add(self, turns: Sequence[Turn]) -> list[Turn]:
        """Store turns, but those of tenants in transit, which are returned."""
        holders: dict[str, Engine | None] = {}
        for tenant in {turn.tenant: None for turn in turns}:
            try:
                holders[tenant] = self.holder(tenant)
            except InTransit:
                holders[tenant] = None
        for engine in {id(e): e for e in holders.values()}.values():
            if engine is not None:
                engine.add_batch([turn for turn in turns if holders[turn.tenant] is engine])
        return [turn for turn in turns if holders[turn.tenant] is None]

    def drain(self) -> None:
        for shard in self.map.all_shards:
            self(shard)
            assert self.engines[shard].drain()


def alone(folder: Path, turns: Sequence[Turn], policy: PolicyName = "recmem") -> State:
    """What one engine makes of the turns that never moves anyone."""
    settings = settings_of(**THETA, **WINDOWS, policy=policy)
    with Engine(folder, settings, ENCODER, llm=mock_llm()) as engine:
        engine.add_batch(turns)
        assert engine.drain()
    return end_state(folder)


# ---- kills

COMMITS = (
    (WriteAheadLog, "append"),
    (LanceLog, "append"),
    (LanceLog, "append_stream"),
    (LanceLog, "delete"),
    (LanceLog, "rewrite_deleted"),
    (LanceLog, "drop_history"),
    (Location, "create"),
)


class Killed(BaseException):
    """Stands for SIGKILL."""


@dataclass
class Strike:
    """Kills at the n-th commit."""

    left: int

    def __call__(self, _: str) -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed


@contextmanager
def after_commits(do: Callable[[str], None]) -> Iterator[None]:
    """Call `do` with its name after everything that changes a root's files; a kill falls between two."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in COMMITS:
            patch.setattr(owner, name, _then(getattr(owner, name), name, do))
        yield


def _then(method: Callable[..., Any], name: str, do: Callable[[str], None]) -> Callable[..., Any]:
    def wrapped(*args: Any, **named: Any) -> Any:
        result = method(*args, **named)
        do(name)
        return result

    return wrapped


@dataclass
class Snapshots:
    """The files of a root as they lay after each commit, with what had been acknowledged by then."""

    root: Path
    folder: Path
    taken: list[tuple[str, Path, Counter[str]]] = field(default_factory=list)
    acked: Counter[str] = field(default_factory=Counter)

    def take(self, commit: str) -> None:
        path = self.folder / f"{len(self.taken)}-{commit}"
        shutil.copytree(self.root, path)
        self.taken.append((commit, path, self.acked.copy()))


@dataclass
class Traffic:
    """Clients that send turns, a few at a time, and send again what had to wait."""

    shards: Shards
    line: list[Turn]
    acked: Counter[str] = field(default_factory=Counter)
    under_way: bool = False

    def send(self, count: int) -> None:
        self.under_way = True
        some, rest = self.line[:count], self.line[count:]
        waiting = self.shards.add(some)
        self.acked.update(turn.tenant for turn in some)
        self.acked.subtract(turn.tenant for turn in waiting)
        self.line = waiting + rest
        self.under_way = False


def assert_stored(shards: Shards, turns: Sequence[Turn], acked: Counter[str]) -> None:
    """Each tenant's acknowledged turns are stored, as its first ones and in their order."""
    for tenant, count in acked.items():
        of = shards.holder(tenant).tenants.existing(tenant)
        stored = [of.turn(seq).text for seq in range(of.next_seq) if of.exists(seq)]
        assert stored == [turn.text for turn in turns if turn.tenant == tenant][: len(stored)], tenant
        assert len(stored) >= count, f"{tenant}: an acknowledged turn is lost"


def ids_of(shards: Shards, tenant: str) -> set[str]:
    """Ids of a tenant's turns and memories."""
    engine = shards.holder(tenant)
    key = engine.journal.info.tenant_key(tenant)
    rows = engine.journal.read(tenant_keys=[key], kinds=["turn", "episode", "fact"], vectors=False)
    return {row.id for row in rows if row.id is not None and not engine.tenants.is_erased(row)}
