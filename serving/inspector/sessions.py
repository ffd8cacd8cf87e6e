"""Sign-ins of browsers. They live in this process's memory and end with it."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

IDLE_S = 30 * 60.0
LIFETIME_S = 8 * 3600.0
MOST_SESSIONS = 1_024
MOST_OF_A_KEY = 16
TOKEN_BYTES = 32


@dataclass(slots=True)
class _Session:
    """The key is kept as it was sent: each request with it is authenticated anew, as any other."""

    key: str = field(repr=False)
    begun_s: float
    used_s: float


class Sessions:
    """Keys by random tokens, of which only digests are kept. Used on the event loop only."""

    def __init__(self, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._sessions: dict[bytes, _Session] = {}

    def open(self, key: str) -> str | None:
        """The token of a new session. The oldest of this key may end for it. None: too many are open."""
        now_s = self._expire()
        same = [digest for digest, session in self._sessions.items() if session.key == key]
        for digest in same[: max(0, len(same) + 1 - MOST_OF_A_KEY)]:
            del self._sessions[digest]
        if len(self._sessions) >= MOST_SESSIONS:
            return None
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._sessions[_digest(token)] = _Session(key, now_s, now_s)
        return token

    def key_of(self, token: str) -> str | None:
        """The key that a session was opened with; None: it has ended, or never was."""
        now_s = self._expire()
        if (session := self._sessions.get(_digest(token))) is None:
            return None
        session.used_s = now_s
        return session.key

    def close(self, token: str) -> None:
        self._sessions.pop(_digest(token), None)

    def _expire(self) -> float:
        """Ends those whose time is over; returns the time in seconds."""
        now_s = self._clock_s()
        for digest, session in [*self._sessions.items()]:
            if now_s - session.used_s >= IDLE_S or now_s - session.begun_s >= LIFETIME_S:
                del self._sessions[digest]
        return now_s


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
