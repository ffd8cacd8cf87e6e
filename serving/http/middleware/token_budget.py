"""LLM tokens of each key on each day (UTC): an answer reserves the most it may take, then settles the cost.

The journals cannot give these numbers: they count tokens by tenant and operation, not by key and day.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta

from undertow.engine.base.model import UndertowError, Usage
from undertow.serving.auth.audit import WITHOUT_KEY
from undertow.serving.auth.key_file import utc_now
from undertow.serving.auth.principal import Principal
from undertow.serving.http.problems import Problem
from undertow.serving.http.state_db import StateDb

log = logging.getLogger(__name__)


class TokenBudgets:
    """LLM tokens that each key has spent today (UTC), in the service's database.

    A call reserves the most that it may take and settles what it took, so concurrent calls do not exceed a
    budget together. Reserved tokens are stored as spent, because a call that a kill cut off may have used
    them.
    """

    def __init__(self, state: StateDb, *, now: Callable[[], datetime] = utc_now) -> None:
        """`now` is in UTC."""
        self._state = state
        self._now = now

    async def reserve(self, principal: Principal, tokens: int) -> str | None:
        """Count `tokens`, the most that a call can take, as spent; returns the day, for `settle`.

        None: the day's budget is too small. StateError. A caller that leaves may have reserved all the same.
        """
        key_id, budget, day = principal.key_id, principal.limits.tokens_per_day, self._today

        def reserve(db: sqlite3.Connection) -> bool:
            db.execute("delete from spending where day <> ?", (day,))
            spent = _spent(db, key_id, day)
            if budget is not None and spent + tokens > budget:
                return False
            db.execute("insert or replace into spending values (?, ?, ?)", (key_id, day, spent + tokens))
            return True

        return day if await self._state.run(reserve) else None

    def settle(self, principal: Principal, day: str, *, reserved: int, took: int) -> None:
        """The call that reserved tokens on a day has ended. Does not wait: the caller may be cancelled.

        If the disk refuses, the reserved tokens count, and the log says so.
        """
        change = (took - reserved, principal.key_id, day)

        def settle(db: sqlite3.Connection) -> None:
            db.execute("update spending set tokens = tokens + ? where key_id = ? and day = ?", change)

        def check(settled: Future[None]) -> None:
            if error := settled.exception():
                log.error("%s The key %s stays charged all that it reserved.", error, principal.key_id)

        self._state.submit(settle).add_done_callback(check)

    async def left(self, principal: Principal) -> int | None:
        """Tokens that may still be reserved today, 0 or more; None: there is no limit. StateError."""
        budget, day = principal.limits.tokens_per_day, self._today
        if budget is None:
            return None
        return max(0, budget - await self._state.run(lambda db: _spent(db, principal.key_id, day)))

    @property
    def renewal_s(self) -> float:
        """Seconds until every budget is whole again, at midnight in UTC."""
        now = self._now()
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0) + timedelta(days=1)
        return (midnight - now).total_seconds()

    @property
    def _today(self) -> str:
        return self._now().date().isoformat()


def _spent(db: sqlite3.Connection, key_id: str, day: str) -> int:
    row = db.execute("select tokens from spending where key_id = ? and day = ?", (key_id, day)).fetchone()
    return 0 if row is None else int(row[0])


@dataclass(slots=True)
class CallCost:
    """The tokens that one call of the LLM is known to have taken; None: nothing is known."""

    tokens: int | None = None

    def took(self, usage: Usage) -> None:
        self.tokens = usage.prompt_tokens + usage.completion_tokens


@asynccontextmanager
async def budgeted(budgets: TokenBudgets, principal: Principal, most_tokens: int) -> AsyncIterator[CallCost]:
    """Around one call of the LLM for the holder of a key. Problem 429 if the budget has no room for it.

    A failed call is charged what it is known to have taken; a call that its caller leaves, `most_tokens`.
    StateError, before the call: the reservation cannot be stored.
    """
    cost = CallCost()
    if principal.key_id == WITHOUT_KEY:
        yield cost
        return
    day = await budgets.reserve(principal, most_tokens)
    if day is None:
        detail = (
            f"This key has {await budgets.left(principal):,} tokens left today, and an answer may take "
            f"{most_tokens:,}. Budgets are whole again at midnight, UTC."
        )
        raise Problem(429, "token-budget", detail, retry_after_s=budgets.renewal_s)
    unknown = most_tokens
    try:
        yield cost
    except Exception as error:
        unknown = 0
        if isinstance(error, UndertowError):
            cost.took(error.usage)
        raise
    finally:
        took = unknown if cost.tokens is None else cost.tokens
        budgets.settle(principal, day, reserved=most_tokens, took=took)
