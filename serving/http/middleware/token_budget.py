"""LLM tokens of each key on each day (UTC): an answer reserves the most it may take, then settles the cost.

The journals cannot give these numbers: they count tokens by tenant and operation, not by key and day.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

import orjson

from undertow.engine.base.model import Usage
from undertow.engine.llm.client import BadReply, BrokenOff
from undertow.serving.auth.audit import WITHOUT_KEY
from undertow.serving.auth.key_file import utc_now
from undertow.serving.auth.principal import Principal
from undertow.serving.http.problems import Problem
from undertow.serving.http.state_db import StateDb, StateError

log = logging.getLogger(__name__)

FORMER_NAME = "spending.json"


@dataclass(frozen=True, slots=True, eq=False)
class Reservation:
    """Tokens of one key's budget for one LLM call that is under way; `day` is ISO 8601, in UTC."""

    key_id: str
    day: str
    tokens: int


class TokenBudgets:
    """LLM tokens that each key has spent today (UTC), kept across restarts. For one event loop.

    A call reserves the most that it may take and settles what it took, so concurrent calls do not exceed a
    budget together. Each change is written at once, behind the caller's back: a disk that refuses stops no
    call. Reserved tokens are stored as spent, because a call that a kill cut off may have used them.
    """

    def __init__(self, state: StateDb, *, now: Callable[[], datetime] = utc_now) -> None:
        """Continues with what the database has of this day. `now` is in UTC. StateError."""
        self._state = state
        self._now = now
        self._day = self._today
        self._open: set[Reservation] = set()
        # also changed on the database's thread, when a write fails
        self._unsaved: set[str] = set()
        self._unsaved_lock = threading.Lock()
        self._import_former_file()
        rows = state.submit(lambda db: _load(db, self._day)).result()
        self._spent: Counter[str] = Counter(dict(rows))

    def reserve(self, principal: Principal, tokens: int) -> Reservation | None:
        """Count `tokens`, the most that a call can take, as spent. None: the day's budget is too small."""
        left = self.left(principal)
        if left is not None and tokens > left:
            return None
        reservation = Reservation(principal.key_id, self._day, tokens)
        self._open.add(reservation)
        self._count(principal.key_id, tokens)
        return reservation

    def settle(self, reservation: Reservation, tokens: int) -> None:
        """The call has ended and took `tokens`: they count for the reservation's day. A repeat is ignored."""
        self._start_new_day()
        if reservation not in self._open:
            return
        self._open.remove(reservation)
        if reservation.day == self._day:
            self._count(reservation.key_id, tokens - reservation.tokens)

    def left(self, principal: Principal) -> int | None:
        """Tokens that may still be reserved today, 0 or more; None: there is no limit."""
        self._start_new_day()
        budget = principal.limits.tokens_per_day
        return None if budget is None else max(0, budget - self._spent[principal.key_id])

    @property
    def renewal_s(self) -> float:
        """Seconds until every budget is whole again, at midnight in UTC."""
        now = self._now()
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
        return (midnight - now).total_seconds()

    @property
    def _today(self) -> str:
        return self._now().date().isoformat()

    def _start_new_day(self) -> None:
        if self._today != self._day:
            self._day = self._today
            self._spent.clear()
            with self._unsaved_lock:
                self._unsaved = set()

    def _count(self, key_id: str, tokens: int) -> None:
        self._spent[key_id] += tokens
        with self._unsaved_lock:
            keys, self._unsaved = {*self._unsaved, key_id}, set()
        rows = [(key, self._day, self._spent[key]) for key in keys]

        def check(written: Future[None]) -> None:
            if error := written.exception():  # the next change writes these keys again
                with self._unsaved_lock:
                    self._unsaved |= keys
                log.error("%s Until then a restart gives keys again what they have spent.", error)

        self._state.submit(lambda db: _save(db, rows)).add_done_callback(check)

    def _import_former_file(self) -> None:
        """Move what an earlier Undertow kept in a file of its own into the database."""
        path = self._state.folder / FORMER_NAME
        try:
            kept = orjson.loads(path.read_bytes())
            rows = [(str(key), self._day, int(tokens)) for key, tokens in kept["tokens"].items()]
            rows = rows if kept["day"] == self._day else []
        except FileNotFoundError:
            return
        except OSError as error:
            raise StateError(f"cannot read {path}: {error.strerror}. Check its owner and rights.") from error
        except (ValueError, TypeError, KeyError, AttributeError):
            raise StateError(
                f"{path} is damaged. Remove it: then every key has this day's whole budget again."
            ) from None
        self._state.submit(lambda db: _save(db, rows)).result()
        path.unlink()
        path.with_name(f".{FORMER_NAME}.lock").unlink(missing_ok=True)


def _load(db: sqlite3.Connection, day: str) -> list[tuple[str, int]]:
    db.execute("delete from spending where day <> ?", (day,))
    return db.execute("select key_id, tokens from spending").fetchall()


def _save(db: sqlite3.Connection, rows: list[tuple[str, str, int]]) -> None:
    db.executemany("insert or replace into spending values (?, ?, ?)", rows)


@dataclass(slots=True)
class CallCost:
    """The tokens that one call of the LLM is known to have taken; None: nothing is known."""

    tokens: int | None = None

    def took(self, usage: Usage) -> None:
        self.tokens = usage.prompt_tokens + usage.completion_tokens


@contextmanager
def budgeted(budgets: TokenBudgets, principal: Principal, most_tokens: int) -> Iterator[CallCost]:
    """Around one call of the LLM for the holder of a key. Problem 429 if the budget has no room for it.

    A failed call is charged what it is known to have taken; a call that its caller leaves, `most_tokens`.
    """
    cost = CallCost()
    if principal.key_id == WITHOUT_KEY:
        yield cost
        return
    reservation = budgets.reserve(principal, most_tokens)
    if reservation is None:
        detail = (
            f"This key has {budgets.left(principal):,} tokens left today, and an answer may take "
            f"{most_tokens:,}. Budgets are whole again at midnight, UTC."
        )
        raise Problem(429, "token-budget", detail, retry_after_s=budgets.renewal_s)
    unknown = most_tokens
    try:
        yield cost
    except Exception as error:
        unknown = 0
        if isinstance(error, BadReply | BrokenOff):
            cost.took(error.usage)
        raise
    finally:
        budgets.settle(reservation, unknown if cost.tokens is None else cost.tokens)
