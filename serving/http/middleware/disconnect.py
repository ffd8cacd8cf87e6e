"""Senders that leave before they have their answer: what is done for them is called off."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

T = TypeVar("T")


class ClientDisconnected(asyncio.CancelledError):
    """The sender left; what was under way for it was cancelled."""


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What comes of `work`, which is cancelled once the sender of a request, read to its end, has left.

    SenderGone.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
    finally:  # also where this is cancelled
        leaving.cancel()
        working.cancel()
        await asyncio.wait((working, leaving))
    raise ClientDisconnected


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
