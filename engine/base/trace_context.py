"""The W3C traceparent of the request that the current code serves.

It travels with calls across threads, to shards, and into requests to the LLM server. The engine only hands
it on; tracing backends interpret it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_TRACEPARENT: ContextVar[str | None] = ContextVar("undertow_traceparent", default=None)


def current_traceparent() -> str | None:
    """The traceparent of the request that is being served; None where it is not traced."""
    return _TRACEPARENT.get()


@contextmanager
def use_traceparent(traceparent: str | None) -> Iterator[None]:
    """Work inside the block serves this request."""
    token = _TRACEPARENT.set(traceparent)
    try:
        yield
    finally:
        _TRACEPARENT.reset(token)
