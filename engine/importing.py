"""Taking in an export: the records of engine/exporting.py become a tenant of this store."""

from __future__ import annotations

from dataclasses import dataclass

from undertow.engine.model import UndertowError


class TenantExists(UndertowError):
    """An export can only be taken in where nothing is: the tenant has memories here."""


@dataclass(frozen=True, slots=True)
class Imported:
    """What an import has stored: turns (deleted ones left out), and all versions of episodes and facts."""

    turns: int
    episodes: int
    facts: int
    decisions: int
