"""What a key may use: requests a second, as a token bucket, and LLM tokens a day.

What is spent is kept in a small file of its own. The journals could not give it: they count tokens by
tenant and operation, not by key and day.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import orjson
from filelock import FileLock, Timeout

from undertow.engine.base.model import AnswerMode, UndertowError
from undertow.engine.storage.location import make_folder, remove_drafts, replace_file
from undertow.serving.auth.key_file import KEY_ID, utc_now
from undertow.serving.auth.principal import Principal

if TYPE_CHECKING:
    from undertow.engine.base.config import Settings

log = logging.getLogger(__name__)

NS_PER_S = 1_000_000_000
MOST_BUCKETS = 65_536
SAVE_EVERY_S = 1.0
# maximum prompts an answer, by mode (engine/search/answer_modes.py); a bad reply is asked for once more
PROMPTS: Mapping[AnswerMode, int] = {"hybrid": 1, "best_effort": 3}
CALLS_A_PROMPT = 2
MODE = 0o600


def answer_tokens(engine: Settings, mode: AnswerMode | None = None) -> int:
    """The most that an answer in this mode (None: as set) may take; a budget must have it left."""
    return PROMPTS[mode or engine.answer_mode] * CALLS_A_PROMPT * engine.context_tokens


class SpendingError(UndertowError):
    """The file of what is spent cannot be used; the text names the cure."""


class RequestRates:
    """A token bucket for each key: `burst_size` requests at once, `requests_per_s` in the long run.

    Of a bucket only the moment is kept at which it is full again; the rest follows from it, in whole
    nanoseconds, so that who waits as long as he was told is let through (the generic cell rate algorithm).
    Thread-safe.
    """

    def __init__(
        self, *, clock_ns: Callable[[], int] = time.monotonic_ns, most_buckets: int = MOST_BUCKETS
    ) -> None:
        self._clock_ns = clock_ns
        self._most_buckets = most_buckets
        self._full_at_ns: dict[str, int] = {}
        self._taking = threading.Lock()

    def __len__(self) -> int:
        """How many buckets are kept."""
        return len(self._full_at_ns)

    def take(self, principal: Principal, n: int = 1) -> float:
        """0 if `n` requests may begin now, which are counted; else how many seconds to wait.

        Infinite where `n` is above the burst: so many never may begin at once.
        """
        limits = principal.limits
        if limits.requests_per_s is None:
            return 0.0
        if n > limits.burst_size:
            return math.inf
        interval_ns = round(NS_PER_S / limits.requests_per_s)
        with self._taking:
            now_ns = self._clock_ns()
            full_at_ns = max(self._full_at_ns.get(principal.key_id, now_ns), now_ns) + n * interval_ns
            wait_ns = full_at_ns - limits.burst_size * interval_ns - now_ns
            if wait_ns > 0:
                return wait_ns / NS_PER_S
            self._full_at_ns[principal.key_id] = full_at_ns
            if len(self._full_at_ns) > self._most_buckets:
                self._make_room(now_ns)
            return 0.0

    def _make_room(self, now_ns: int) -> None:
        """A full bucket is as good as none. Then those go that lack least, an eighth of all at a time."""
        lacking = {key: full_at for key, full_at in self._full_at_ns.items() if full_at > now_ns}
        keep = self._most_buckets - self._most_buckets // 8
        self._full_at_ns = dict(heapq.nlargest(keep, lacking.items(), key=lambda item: item[1]))


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Tokens of one key's budget for one LLM call that is under way; `day` is ISO 8601, in UTC."""

    key_id: str
    day: str
    tokens: int


class TokenBudgets:
    """LLM tokens of each key on the present day (UTC), kept across restarts. Thread-safe.

    A call reserves what it may take at most and settles what it took, so calls that run side by side do not
    exceed a budget together. The file is written once in `save_every_s` at most, and when closed: a kill
    forgets what that time has spent. Reserved tokens count as spent there: a call that was cut off by a kill
    may have used them.

    The file belongs to one process: another one is refused.
    """

    def __init__(
        self, path: Path, *, now: Callable[[], datetime] = utc_now, save_every_s: float = SAVE_EVERY_S
    ) -> None:
        """Goes on from the file, if it is of this day. `now` is in UTC. SpendingError."""
        self._path = path
        self._now = now
        self._save_every = timedelta(seconds=save_every_s)
        self._spent: Counter[str] = Counter()
        self._open: set[Reservation] = set()
        self._counting = threading.Lock()
        self._lock = FileLock(path.with_name(f".{path.name}.lock"), mode=MODE, thread_local=False)
        self._acquire()
        try:
            self._day = self._today
            self._saved_at = self._now()
            self._changed = False
            self._load()
        except BaseException:
            self._lock.release()
            raise

    def reserve(self, principal: Principal, tokens: int) -> Reservation | None:
        """Count `tokens`, the most that a call can take, as spent. None: the day's budget is too small."""
        budget = principal.limits.tokens_per_day
        with self._counting:
            self._turn_page()
            if budget is not None and self._spent[principal.key_id] + tokens > budget:
                return None
            reservation = Reservation(principal.key_id, self._day, tokens)
            self._open.add(reservation)
            self._count(principal.key_id, tokens)
            return reservation

    def settle(self, reservation: Reservation, tokens: int) -> None:
        """The call has ended and took `tokens`: they count for the reservation's day. A repeat is ignored."""
        with self._counting:
            self._turn_page()
            if reservation not in self._open:
                return
            self._open.remove(reservation)
            if reservation.day == self._day:
                self._count(reservation.key_id, tokens - reservation.tokens)

    def left(self, principal: Principal) -> int | None:
        """Tokens that may still be reserved today, 0 or more; None: there is no limit."""
        budget = principal.limits.tokens_per_day
        with self._counting:
            self._turn_page()
            return None if budget is None else max(0, budget - self._spent[principal.key_id])

    @property
    def renewal_s(self) -> float:
        """Seconds until every budget is whole again, at midnight in UTC."""
        now = self._now()
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
        return (midnight - now).total_seconds()

    def close(self) -> None:
        """Save what is spent and let others have the file. SpendingError: it could not be saved."""
        try:
            with self._counting:
                if self._changed:
                    self._save()
        except OSError as error:
            raise SpendingError(
                f"cannot write {self._path}: {error.strerror}. Check the disk's space; until then a restart "
                "gives keys again what they have spent."
            ) from error
        finally:
            self._lock.release()

    @property
    def _today(self) -> str:
        return self._now().date().isoformat()

    def _turn_page(self) -> None:
        if self._today != self._day:
            self._day = self._today
            self._spent.clear()
            self._changed = True

    def _count(self, key_id: str, tokens: int) -> None:
        self._spent[key_id] += tokens
        self._changed = True
        # a clock that was set back must not stop this
        if abs(self._now() - self._saved_at) < self._save_every:
            return
        try:
            self._save()
        except OSError as error:  # the calls go on, and the next one tries again
            log.error("cannot write %s: %s. What keys spend is not kept.", self._path, error.strerror)

    def _save(self) -> None:
        self._saved_at = self._now()
        spent = {key: tokens for key, tokens in self._spent.items() if tokens > 0}
        replace_file(self._path, orjson.dumps({"day": self._day, "tokens": spent}), mode=MODE)
        self._changed = False

    def _load(self) -> None:
        try:
            remove_drafts(self._path)
            kept = orjson.loads(self._path.read_bytes())
        except FileNotFoundError:
            return
        except OSError as error:
            raise SpendingError(
                f"cannot read {self._path}: {error.strerror}. Check its rights and its owner."
            ) from error
        except orjson.JSONDecodeError:
            kept = None
        if not _is_spending(kept):
            raise SpendingError(
                f"{self._path} is damaged. Remove it: then every key has this day's whole budget again."
            )
        if kept["day"] == self._day:
            self._spent.update(kept["tokens"])

    def _acquire(self) -> None:
        try:
            make_folder(self._path.parent)
            self._lock.acquire(timeout=0)
        except Timeout:
            raise SpendingError(
                f"{self._path} belongs to a service that is running. Stop it, or give this one another file."
            ) from None
        except OSError as error:
            raise SpendingError(
                f"cannot lock {self._path}: {error.strerror}. Is the folder read-only, or the disk full?"
            ) from error


def _is_spending(kept: object) -> bool:
    """Whether a JSON value is what `_save` writes."""
    if not isinstance(kept, dict) or kept.keys() != {"day", "tokens"}:
        return False
    tokens = kept["tokens"]
    return isinstance(kept["day"], str) and (
        isinstance(tokens, dict)
        and all(KEY_ID.fullmatch(key) for key in tokens)
        and all(type(n) is int and n >= 0 for n in tokens.values())
    )
