"""Who has asked for what is being done: a request's W3C traceparent, known to all that is done for it.

It goes with calls over threads, to shards and into requests to the LLM server. What it says is for whoever
draws traces; the engine itself only hands it on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_CAUSE: ContextVar[str | None] = ContextVar("undertow_cause", default=None)


def cause() -> str | None:
    """The traceparent of the request that is being served here; None: of none that is traced."""
    return _CAUSE.get()


@contextmanager
def caused_by(traceparent: str | None) -> Iterator[None]:
    """What is begun inside is done for this request."""
    token = _CAUSE.set(traceparent)
    try:
        yield
    finally:
        _CAUSE.reset(token)
