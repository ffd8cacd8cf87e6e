"""What an answer takes of its key's tokens: reserved before, settled after; off the event loop."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from undertow.engine.base.model import Usage
from undertow.engine.llm.client import BadReply, BrokenOff
from undertow.serving.auth.audit import WITHOUT_KEY
from undertow.serving.auth.limits import Reservation, TokenBudgets
from undertow.serving.auth.principal import Principal
from undertow.serving.http.problems import Problem


class BudgetedCall:
    """Around one call of the LLM for the holder of a key. Problem 429 where the budget has no room for it.

    A call that fails is charged what it is known to have taken; one that its caller leaves, the most.
    """

    def __init__(self, budgets: TokenBudgets, principal: Principal, tokens: int) -> None:
        """`tokens`: the most that the call may take."""
        self._budgets, self._principal, self._tokens = budgets, principal, tokens
        self._reservation: Reservation | None = None
        self._taken: int | None = None

    def took(self, usage: Usage) -> None:
        """What the call has cost."""
        self._taken = usage.prompt_tokens + usage.completion_tokens

    async def __aenter__(self) -> Self:
        if self._principal.key_id == WITHOUT_KEY:
            return self
        reserve = self._budgets.reserve
        self._reservation = await asyncio.to_thread(reserve, self._principal, self._tokens)
        if self._reservation is None:
            left = self._budgets.left(self._principal)
            detail = (
                f"This key has {left:,} tokens left today, and an answer may take {self._tokens:,}. "
                "Budgets are whole again at midnight, UTC."
            )
            raise Problem(429, "token-budget", detail, retry_after_s=self._budgets.renewal_s)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reservation is None:
            return
        if isinstance(error, BadReply | BrokenOff):
            self.took(error.usage)
        failed = error is not None and isinstance(error, Exception)
        unknown = 0 if failed else self._tokens
        taken = unknown if self._taken is None else self._taken
        settling = asyncio.to_thread(self._budgets.settle, self._reservation, taken)
        await asyncio.shield(settling)  # also where the caller has left, and this is cancelled
