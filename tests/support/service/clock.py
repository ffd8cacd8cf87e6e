"""Clocks that a test sets."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

NOON = datetime(2026, 5, 8, 12, tzinfo=UTC)


class Seconds:
    """As time.monotonic."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Clock:
    def __init__(self) -> None:
        self.now = NOON

    def __call__(self) -> datetime:
        return self.now

    def pass_s(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)
