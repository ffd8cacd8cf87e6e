"""Ends what is done for a client that has disconnected."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.types import Scope

# in a request's scope: what is called when its client disconnects before the response is sent
GONE = "undertow.gone"


def gone(scope: Scope) -> None:
    """The client has disconnected."""
    scope.setdefault(GONE, _already)()


def _already() -> None:
    """The request was not in `unless_gone` yet when its client disconnected."""


@contextmanager
def unless_gone(scope: Scope) -> Iterator[None]:
    """Around work for a request that has come as a whole: it is cancelled if the client disconnects.

    For work that changes nothing, or that may end anywhere.
    """
    task, is_gone = asyncio.current_task(), False
    assert task is not None, "a request is served by a task"
    cancelling = task.cancelling()

    def end() -> None:
        nonlocal is_gone
        is_gone = True
        task.cancel()

    if scope.get(GONE) is _already:
        end()
    scope[GONE] = end
    try:
        yield
    except asyncio.CancelledError:
        # the request ends here, without a response, unless another one has cancelled it too
        if not is_gone or task.uncancel() > cancelling:
            raise
    finally:
        del scope[GONE]
