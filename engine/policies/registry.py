"""Makes the consolidation policy that a setting names."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from undertow.engine.policies.a_mem.policy import AMem
from undertow.engine.policies.base import Policy, PromptBudget, Tiers
from undertow.engine.policies.eager import Eager
from undertow.engine.policies.himem.policy import HiMem
from undertow.engine.policies.memory_os.policy import MemoryOS
from undertow.engine.policies.nemori.knowledge import Append, Batched, Native, Summary
from undertow.engine.policies.nemori.management import Management
from undertow.engine.policies.nemori.policy import Nemori
from undertow.engine.policies.nemori.third_party import AMemNotes, MemoryOSPages
from undertow.engine.policies.recmem import RecMem
from undertow.engine.policies.salience import Salience

if TYPE_CHECKING:
    from undertow.engine.base.config import Settings


def policy_of(settings: Settings) -> Policy:
    """The policy that the settings name."""
    budget = PromptBudget(settings.context_tokens, settings.reply_tokens)
    is_fused = settings.call_form == "fused"
    match settings.policy:
        case "recmem":
            return RecMem(budget, settings.ablation, _salience_of(settings), is_fused=is_fused)
        case "eager":
            return Eager(budget)
        case "nemori":
            parts = (management_of(settings), settings.ablation, is_fused, settings.nemori_index)
            return Nemori(budget, settings.window_messages, *parts)
        case "himem":
            return HiMem(
                budget,
                align_notes=settings.himem_align_notes,
                align_episodes=settings.himem_align_episodes,
                max_notes=settings.himem_max_notes,
                self_evolution=settings.himem_self_evolution,
                is_fused=is_fused,
            )
        case "a-mem":
            return AMem(budget)
        case "memory-os":
            return MemoryOS(budget, settings.short_term_pages, settings.heat_threshold)


def management_of(settings: Settings) -> Management:
    """NEMORI's management of facts. With fused calls, "native" has one call for several facts."""
    theta = settings.theta_evoke
    match settings.management:
        case "native":
            return Batched(theta, settings.theta_compare) if settings.call_form == "fused" else Native(theta)
        case "append":
            return Append(theta)
        case "summary":
            return Summary()
        case "a-mem":
            return AMemNotes()
        case "memory-os":
            return MemoryOSPages(settings.short_term_pages, settings.heat_threshold)


def _salience_of(settings: Settings) -> Salience | None:
    """None under the paper's profile, for an ablation of the paper's, and where nothing is set."""
    is_set = settings.salience_turns or settings.quiet_share
    if settings.profile == "paper" or settings.ablation is not None or not is_set:
        return None
    return Salience(settings.salience_turns, settings.quiet_share, settings.salience_day_tokens)


# What a budget of tokens is filled from, under every policy: more than fits.
TO_FILL = Tiers(k_sub=100, k_epi=20, k_sem=100)


def tiers_of(settings: Settings) -> Tiers:
    """The context of an answer: the policy's tiers, or what fills a budget, overridden by the settings."""
    return _for_answers(policy_of(settings).tiers, settings)


def _for_answers(own: Tiers, settings: Settings) -> Tiers:
    budget = settings.answer_budget
    to_fill = replace(TO_FILL, tokens=budget, k_epi=TO_FILL.k_epi if own.k_epi else 0)
    return _as_set(to_fill if budget else own, settings)


def _as_set(own: Tiers, settings: Settings) -> Tiers:
    k_sem = settings.k_sem
    if k_sem is None and settings.k_epi is not None:
        k_sem = 2 * settings.k_epi
    return replace(
        own,
        k_sub=own.k_sub if settings.k_sub is None else settings.k_sub,
        k_epi=own.k_epi if settings.k_epi is None else settings.k_epi,
        k_sem=own.k_sem if k_sem is None else k_sem,
        raw_of_best=own.raw_of_best if settings.raw_of_best is None else settings.raw_of_best,
        narratives=settings.nemori_retrieve == "narrative",
    )


class Policies:
    """The policies by name: that of the settings, and those of single tenants."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._made: dict[str, Policy] = {}
        self._searched: dict[str | None, Tiers] = {}

    def named(self, name: str | None) -> Policy:
        """The policy of this name, or with None that of the settings. UndertowError: no such policy."""
        wanted = self._settings.policy if name is None else name
        if wanted not in self._made:
            self._made[wanted] = policy_of(self.settings_of(wanted))
        return self._made[wanted]

    def settings_of(self, name: str | None) -> Settings:
        """The settings in force under this policy. UndertowError: no such policy."""
        return self._settings if name is None else self._settings.under(name)

    def tiers(self, name: str | None) -> Tiers:
        """What a search returns where it names no counts, consolidated turns among them."""
        if (tiers := self._searched.get(name)) is None:
            own = replace(self.named(name).tiers, consolidated=True)
            tiers = self._searched[name] = _as_set(own, self._settings)
        return tiers

    def answer_tiers(self, name: str | None) -> Tiers:
        """As `tiers_of`, for this policy."""
        return _for_answers(self.named(name).tiers, self.settings_of(name))
