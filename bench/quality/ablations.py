"""Settings with some changed: those of a sweep, and the ablations of the papers by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from undertow.engine.base.config import ABLATIONS as OF_CONSTRUCTION
from undertow.engine.base.config import Ablation, Settings
from undertow.engine.base.model import PolicyName
from undertow.engine.policies.registry import tiers_of


@dataclass(frozen=True, slots=True)
class Left:
    """What an ablation sets, and the policies that have the part which it leaves out or replaces."""

    of: tuple[PolicyName, ...]
    changes: Mapping[str, Any]


# Those of `Settings.ablation`, `management` and alignment make other memories. The others leave out of an
# answer, or of a search, what was made: they can be answered from the memories of the whole policy.
ABLATIONS: Mapping[str, Left] = {
    **{name: Left(OF_CONSTRUCTION[name], {"ablation": name}) for name in get_args(Ablation)},
    "append-management": Left(("nemori",), {"management": "append"}),
    "summary-management": Left(("nemori",), {"management": "summary"}),
    "a-mem-management": Left(("nemori",), {"management": "a-mem"}),
    "memory-os-management": Left(("nemori",), {"management": "memory-os"}),
    "index-messages": Left(("nemori",), {"nemori_index": "messages"}),
    "retrieve-messages": Left(("nemori",), {"nemori_retrieve": "messages"}),
    "index-and-retrieve-messages": Left(
        ("nemori",), {"nemori_index": "messages", "nemori_retrieve": "messages"}
    ),
    "without-alignment": Left(("himem",), {"himem_align_notes": False}),
    "aligned-episodes": Left(("himem",), {"himem_align_episodes": True}),
    "without-subconscious": Left(("recmem", "nemori"), {"k_sub": 0}),
    "without-episodic": Left(("recmem", "nemori", "himem"), {"k_epi": 0}),
    "without-semantic": Left(("recmem", "nemori", "himem"), {"k_sem": 0}),
    "without-consolidated": Left(("recmem", "nemori"), {"retain_consolidated": False}),
}
# without a part that the environment may name: two at once are none of the papers'
_WHOLE: Mapping[str, Any] = {
    "ablation": None,
    "management": "native",
    "nemori_index": "narrative",
    "nemori_retrieve": "narrative",
    "himem_align_notes": True,
    "himem_align_episodes": False,
}


def varied(settings: Settings, **changed: Any) -> Settings:
    """The settings with others in their place, checked again; theta_merge follows theta_sim if not set."""
    return Settings(**{**settings.model_dump(exclude_unset=True), **changed})


def whole(settings: Settings, policy: PolicyName) -> Settings:
    """The settings under this policy, without the ablation and the options that the environment may name."""
    return varied(settings.under(policy), **_WHOLE)


def ablated(settings: Settings, name: str) -> Settings:
    """The settings with one part left out or replaced, and no other part of those that make memories.

    k_sem stays as it is where k_epi becomes 0. KeyError: there is no such ablation; ValueError: the policy
    has no such part.
    """
    left = ABLATIONS[name]
    if settings.policy not in left.of:
        raise ValueError(f"{name} is an ablation of {' or '.join(left.of)}, and not of {settings.policy}")
    kept = {"k_sem": tiers_of(settings).k_sem} if "k_epi" in left.changes else {}
    return varied(settings, **{**_WHOLE, **kept, **left.changes})
