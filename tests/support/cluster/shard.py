"""What test_shard.py and test_shard_failures.py share."""

from __future__ import annotations

import threading
from typing import Any

from undertow.engine.base.model import Turn
from undertow.engine.base.queries import ApiCall, R
from undertow.engine.cluster.shard.call_queue import CallStamp
from undertow.engine.cluster.shard.shard import Shard
from undertow.engine.cluster.wire import pack

from ...support.engine import turn_of

SOON_S = 30


class Sender:
    """A client of one shard, which numbers its calls."""

    def __init__(self, shard: Shard, name: str = "client") -> None:
        self.shard, self.name = shard, name
        self.greet()

    def greet(self) -> None:
        self.token = self.shard.hello(self.name, 1).result(SOON_S).token
        self.number = 0

    def stamp(self) -> CallStamp:
        self.number += 1
        return CallStamp(self.name, self.token, self.number - 1, 1)

    def add(self, turns: list[Turn]) -> list[dict[str, Any]]:
        receipts: list[dict[str, Any]] = self.shard.add(pack(turns), self.stamp()).result(SOON_S).to_pylist()
        return receipts


def ask(shard: Shard, call: ApiCall[R]) -> Any:
    """The result of one call of MemoryApi."""
    return shard.ask(call).result(SOON_S)


def some(tenant: str, *numbers: int) -> list[Turn]:
    return [turn_of(tenant, n, f"word{n} other{n}") for n in numbers]


def hold(shard: Shard) -> Any:
    """Stop the shard's thread until the returned function is called."""
    began, gate = threading.Event(), threading.Event()

    def wait() -> bool:
        began.set()
        return gate.wait(SOON_S)

    shard._work.ask_without(wait)
    assert began.wait(SOON_S)
    return gate.set
