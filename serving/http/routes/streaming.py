"""Streams that fail before their response begins."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")


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
