"""Shared by the client's tests: a server with scripted replies, and one way to call both clients."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from undertow.serving.client import AsyncClient, Client, Retries

from .scripted_server import Reply, ScriptedServer, Seen, served

# as patient as the default in the number of tries, but not in time
QUICK = Retries(patience_s=5, first_s=0.001, longest_s=0.01)


class Driven:
    """Either client, called synchronously: coroutines are run, iterators become lists."""

    def __init__(self, client: Client | AsyncClient, runner: asyncio.Runner) -> None:
        self.client = client
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.client, name)
        return lambda *args, **kwargs: self._whole(method(*args, **kwargs))

    def _whole(self, result: Any) -> Any:
        if inspect.isawaitable(result):
            return self._runner.run(_awaited(result))
        if isinstance(result, AsyncIterator):
            return self._runner.run(_collected(result))
        return list(result) if isinstance(result, Iterator) else result


async def _awaited(result: Any) -> Any:
    return await result


async def _collected(items: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in items]


@contextmanager
def driven(kind: str, url: str, key: str | None = None, **more: Any) -> Iterator[Driven]:
    """The client of a kind, "sync" or "async", open."""
    make: type[Client | AsyncClient] = {"sync": Client, "async": AsyncClient}[kind]
    with asyncio.Runner() as runner:
        client = Driven(make(url, key, **{"retries": QUICK, **more}), runner)
        yield client
        client.close()


@contextmanager
def scripted(*replies: Reply) -> Iterator[ScriptedServer]:
    """Gives its replies in turn and repeats the last; without any it is silent until it is closed."""
    numbers = itertools.count()

    def answer(_: Seen) -> Reply | None:
        return replies[min(next(numbers), len(replies) - 1)] if replies else None

    with served(answer, protocol="HTTP/1.1") as server:
        yield server


@contextmanager
def scene(
    kind: str, *replies: Reply, key: str | None = None, **more: Any
) -> Iterator[tuple[ScriptedServer, Driven]]:
    """A server with its replies, and a client of it."""
    with scripted(*replies) as server, driven(kind, server.url, key, **more) as client:
        yield server, client
