"""Work of a request that is awaited or streamed: cancelled with its client, failing before it is streamed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from fastapi import Request

T = TypeVar("T")


class ClientDisconnected(asyncio.CancelledError):
    """The client disconnected, and its work was cancelled."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled if the client disconnects. The request's body must be read.

    ClientDisconnected.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
    finally:  # also where this is cancelled
        leaving.cancel()
        working.cancel()
        await asyncio.wait((working, leaving))
    raise ClientDisconnected


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def started(stream: AsyncGenerator[T]) -> AsyncGenerator[T]:
    """The same stream, once its first item is there: an error before it can still get a status of its own."""
    try:
        first = await anext(stream)
    except BaseException:
        await stream.aclose()
        raise
    return _resumed(first, stream)


async def _resumed(first: T, rest: AsyncGenerator[T]) -> AsyncGenerator[T]:
    async with aclosing(rest):
        yield first
        async for item in rest:
            yield item
