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
    own = policy_of(settings).tiers
    k_sem = settings.k_sem
    if k_sem is None and settings.k_epi is not None:
        k_sem = 2 * settings.k_epi
    return replace(
        own,
        k_sub=own.k_sub if settings.k_sub is None else settings.k_sub,
        k_epi=own.k_epi if settings.k_epi is None else settings.k_epi,
        k_sem=own.k_sem if k_sem is None else k_sem,
        raw_of_best=own.raw_of_best if settings.raw_of_best is None else settings.raw_of_best,
    )
