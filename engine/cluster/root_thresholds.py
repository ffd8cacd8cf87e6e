"""The thresholds of a root: the same at all its shards, whoever starts them.

ROOT/thresholds.json, made with the root. Else a shard that a command started, which was not about deciding at
all, would decide by the environment of that command.
"""

from __future__ import annotations

import orjson

from undertow.engine.base.config import Settings
from undertow.engine.base.model import UndertowError
from undertow.engine.storage.location import Location, StoreError

NAME = "thresholds.json"
# settings that say what the thresholds are to be
NAMING = {"profile", "theta_sim", "theta_merge", "theta_count"}


def agree(root: Location, settings: Settings) -> None:
    """Store the settings' thresholds, if the root has none. UndertowError: it has, and they name others.

    Settings that name none of them agree with any.
    """
    root.create(NAME, orjson.dumps(_of(settings), option=orjson.OPT_INDENT_2))
    stored = in_force(root, settings)
    if settings.model_fields_set & NAMING and _of(stored) != _of(settings):
        raise UndertowError(
            f"the tenants of {root} are decided by {_told(stored)}, and the settings say {_told(settings)}. "
            "Leave profile and thresholds out (the options, UNDERTOW_PROFILE and UNDERTOW_THETA_*); or, to "
            "change them for all later turns, end the shards (`undertow cluster drain --stop`) and change "
            f"{root / NAME}."
        )


def in_force(root: Location, settings: Settings) -> Settings:
    """The settings with the root's thresholds, where it has some. StoreError: they are no thresholds."""
    data = root.read(NAME)
    if data is None:
        return settings
    try:
        found = orjson.loads(data)
        if found.keys() != _of(settings).keys():
            raise ValueError(f"it must hold {', '.join(_of(settings))}")
        return Settings(**{**settings.model_dump(), **found})
    except (ValueError, AttributeError) as error:
        raise StoreError(f"{root / NAME} holds no thresholds ({error}). Restore it from a backup.") from error


def _of(settings: Settings) -> dict[str, float]:
    return {
        "theta_sim": settings.similarity_threshold,
        "theta_merge": settings.merge_threshold,
        "theta_count": settings.recurrence_count,
    }


def _told(settings: Settings) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in _of(settings).items())
