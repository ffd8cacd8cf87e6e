"""Limits on a request's body in bytes and in time, whoever reads it."""

from __future__ import annotations

import asyncio
import math

from starlette.datastructures import Headers
from starlette.types import Message, Receive

from undertow.serving.http.problems import CLOSE, Problem

# after the time of grace; a body that comes more slowly holds a place for nothing
MIN_BYTES_PER_S = 64 << 10


def bounded(
    receive: Receive, headers: Headers, max_bytes: int, timeout_s: float, grace_s: float = math.inf
) -> Receive:
    """`receive` for a body of at most `max_bytes` that must be complete within `timeout_s` from now.

    After `grace_s` it must have come at MIN_BYTES_PER_S at least.
    Problem at once if the announced length is too large. The returned function raises Problem 413, 408, or
    400 for a client that disconnects before the end. A response before the end closes the connection.
    """
    announced = headers.get("content-length", "0")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_large(max_bytes)
    begun_s = asyncio.get_running_loop().time()
    taken, complete = 0, False

    async def receive_within() -> Message:
        nonlocal taken, complete
        if complete:  # the next message is the disconnect
            return await receive()
        allowed_s = min(timeout_s, grace_s + taken / MIN_BYTES_PER_S)
        try:
            async with asyncio.timeout_at(begun_s + allowed_s):
                message = await receive()
        except TimeoutError:
            detail = f"The request's body was not complete after {allowed_s:.3g} s. Send it faster, or less."
            raise Problem(408, "slow", detail, headers=CLOSE) from None
        if message["type"] == "http.disconnect":
            raise Problem(400, "cut-off", "The connection ended within the request's body.", headers=CLOSE)
        taken += len(message.get("body", b""))
        complete = not message.get("more_body", False)
        if taken > max_bytes:
            raise too_large(max_bytes)
        return message

    return receive_within


def too_large(max_bytes: int) -> Problem:
    detail = f"The request's body is larger than {max_bytes:,} bytes. Send it in parts."
    return Problem(413, "too-large", detail, headers=CLOSE)


async def read_all(receive: Receive) -> bytes:
    """The whole body."""
    parts: list[bytes] = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def replayed(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns a body that was read already, then further messages."""
    given = False

    async def receive_again() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again
