"""Settings with some changed: those of a sweep, and the ablations of the papers by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from undertow.engine.config import Ablation, Settings
from undertow.engine.policies import tiers_of

# Those of `Settings.ablation` make other memories. The others leave out of an answer, or of a search, what
# was made: they can be answered from the memories of the whole policy.
ABLATIONS: Mapping[str, Mapping[str, Any]] = {
    **{name: {"ablation": name} for name in get_args(Ablation)},
    "without-subconscious": {"k_sub": 0},
    "without-episodic": {"k_epi": 0},
    "without-semantic": {"k_sem": 0},
    "without-consolidated": {"retain_consolidated": False},
}


def varied(settings: Settings, **changed: Any) -> Settings:
    """The settings with others in their place, checked again; theta_merge follows theta_sim if not set."""
    return Settings(**{**settings.model_dump(exclude_unset=True), **changed})


def ablated(settings: Settings, name: str) -> Settings:
    """The settings with one part left out, and no other part that `Settings.ablation` may have named.

    k_sem stays as it is where k_epi becomes 0. KeyError: there is no such ablation; ValueError: the policy
    has no such part.
    """
    return varied(settings, **{"ablation": None, "k_sem": tiers_of(settings).k_sem, **ABLATIONS[name]})
