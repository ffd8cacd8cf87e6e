"""Futures that hand their results on."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

S = TypeVar("S")
T = TypeVar("T")


def hand_on(source: Future[S], to: Future[T], take: Callable[[S], T]) -> None:
    """What comes by `source` comes by `to`, its result as `take` has it; nothing once `to` was cancelled."""

    def settle(done: Future[S]) -> None:
        if not to.set_running_or_notify_cancel():
            return
        if (error := done.exception()) is not None:
            to.set_exception(error)
        else:
            to.set_result(take(done.result()))

    source.add_done_callback(settle)
