"""Consolidation policies: coroutines that read like their papers. Here a name becomes one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from undertow.engine.policies.base import Policy, PromptBudget
from undertow.engine.policies.eager import Eager
from undertow.engine.policies.himem import Alignment, HiMem
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
        case "himem":
            alignment = Alignment(settings.himem_align_notes, settings.himem_align_episodes)
            return HiMem(budget, alignment, settings.himem_max_notes)
