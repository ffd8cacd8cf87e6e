"""What the log is told of an exception: its type and the places that it passed, never its words, which may
quote a turn."""

from __future__ import annotations

import logging
import traceback

PLACES = 8


def places(error: BaseException) -> list[str]:
    """Where an exception has passed, the innermost first."""
    frames = traceback.extract_tb(error.__traceback__)[-PLACES:]
    return [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames)]


def tell(log: logging.Logger, error: BaseException, where: str = "") -> None:
    """Write a failure of ours into a log. `where`: in what it happened, if the places do not tell."""
    log.error("%s%s at %s", type(error).__name__, where and f" in {where}", " < ".join(places(error)))
