"""Consolidation policies: coroutines that read like their papers. Here a name becomes one."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from undertow.engine.policies.base import Policy, PromptBudget, Tiers
from undertow.engine.policies.eager import Eager
from undertow.engine.policies.nemori import Nemori
from undertow.engine.policies.nemori_knowledge import management_of
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
        case "nemori":
            management = management_of(settings.management, settings.theta_evoke)
            return Nemori(budget, settings.window_messages, management, settings.ablation)


def tiers_of(settings: Settings) -> Tiers:
    """What the policy gives an answer, and where the settings say something else, that."""
    named = {
        "k_sub": settings.k_sub,
        "k_epi": settings.k_epi,
        "k_sem": 2 * settings.k_epi
        if settings.k_sem is None and settings.k_epi is not None
        else settings.k_sem,
        "raw_of_best": settings.raw_of_best,
    }
    own = policy_of(settings).tiers
    return replace(own, **{name: value for name, value in named.items() if value is not None})
