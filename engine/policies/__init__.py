"""Consolidation policies: coroutines that read like their papers. Here a name becomes one."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from undertow.engine.config import PolicyName
from undertow.engine.model import UndertowError
from undertow.engine.policies.base import Policy, PromptBudget
from undertow.engine.policies.eager import Eager
from undertow.engine.policies.recmem import RecMem

if TYPE_CHECKING:
    from undertow.engine.config import Settings


def policy_of(settings: Settings) -> Policy:
    """The policy that the settings name."""
    budget = PromptBudget(settings.context_tokens, settings.reply_tokens)
    match settings.policy:
        case "recmem":
            return RecMem(budget, settings.ablation)
        case "eager":
            return Eager(budget)


class Policies:
    """The policies by name: that of the settings, and those that tenants have of their own."""

    def __init__(self, settings: Settings) -> None:
        self.default = settings.policy
        self._settings = settings
        self._made: dict[str, Policy] = {}

    def named(self, name: str | None) -> Policy:
        """None: the one of the settings. An ablation is of that one alone. UndertowError: no such policy."""
        wanted = self.default if name is None else name
        if wanted not in self._made:
            if wanted not in get_args(PolicyName):
                raise UndertowError(f"a tenant has the policy {wanted!r}, which this Undertow does not have.")
            changed = {} if wanted == self.default else {"policy": wanted, "ablation": None}
            self._made[wanted] = policy_of(self._settings.model_copy(update=changed))
        return self._made[wanted]
