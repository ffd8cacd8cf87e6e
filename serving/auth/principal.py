"""The holder of a key: its tenants, its scopes and its limits. Light to import, for the command line."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

LONGEST_LABEL_CHARS = 200
# above it a bucket's refill would be rounded by more than a tenth of a percent
HIGHEST_RATE = 1_000_000.0


class Scope(StrEnum):
    """What a key is for. None includes another: a key that erases need not read."""

    READ = "read"
    WRITE = "write"
    ERASE = "erase"
    ADMIN = "admin"


class StrictModel:
    """Part of a file: pydantic refuses unknown fields and values of other types."""

    __slots__ = ()
    __pydantic_config__: ClassVar[Mapping[str, Any]] = {"extra": "forbid", "strict": True}


@dataclass(frozen=True, slots=True)
class TenantScope(StrictModel):
    """Tenants by name, by a prefix of their names, or all: exactly one of these, else ValueError.

    A prefix is compared letter by letter: "acme" covers "acme2" too, "acme/" does not.
    """

    tenants: tuple[str, ...] = ()
    prefix: str | None = None
    all_tenants: bool = False

    def __post_init__(self) -> None:
        if (bool(self.tenants), self.prefix is not None, self.all_tenants).count(True) != 1:
            raise ValueError(
                "a key is bound to tenants by name, to a prefix, or to all tenants: give one "
                "(--tenant, --tenant-prefix, --all-tenants)"
            )
        for name in (*self.tenants, *(() if self.prefix is None else (self.prefix,))):
            check_name(name)

    def covers(self, tenant: str) -> bool:
        if self.all_tenants:
            return True
        if self.prefix is not None:
            return tenant.startswith(self.prefix)
        return tenant in self.tenants

    def __str__(self) -> str:
        if self.all_tenants:
            return "all tenants"
        return ", ".join(self.tenants) if self.prefix is None else f"{self.prefix}..."


def check_name(name: str) -> None:
    """ValueError for an impossible name or prefix of a tenant."""
    try:
        name.encode()
    except UnicodeEncodeError:
        raise ValueError("a tenant's name holds half a surrogate pair; give valid Unicode") from None
    if not name or "\x00" in name:
        raise ValueError("a tenant's name or prefix is empty or holds a NUL; name the owner of the memories")


@dataclass(frozen=True, slots=True)
class KeyLimits(StrictModel):
    """Requests a second with a burst, and LLM tokens a day (UTC); None: no limit. ValueError.

    Without `burst`, it is the requests of one second.
    """

    requests_per_s: float | None = None
    burst: int | None = None
    tokens_per_day: int | None = None

    def __post_init__(self) -> None:
        rate = self.requests_per_s
        if rate is not None and not 0 < rate <= HIGHEST_RATE:
            raise ValueError(f"requests_per_s is {rate}; give more than 0 and at most {HIGHEST_RATE:,.0f}")
        if self.burst is not None and (rate is None or self.burst < 1):
            raise ValueError(f"burst is {self.burst}; give 1 or more, and requests_per_s with it")
        if self.tokens_per_day is not None and self.tokens_per_day < 0:
            raise ValueError(f"tokens_per_day is {self.tokens_per_day}; give 0 or more")

    @property
    def burst_size(self) -> int:
        """Requests at once after a pause."""
        return self.burst or math.ceil(self.requests_per_s or 1)


NO_LIMITS = KeyLimits()


@dataclass(frozen=True, slots=True)
class Principal:
    """The holder of a key that was accepted. It knows nothing of the secret."""

    key_id: str
    label: str
    reach: TenantScope
    scopes: frozenset[Scope]
    limits: KeyLimits

    def may(self, scope: Scope, tenant: str | None) -> bool:
        """Whether it may do this with a tenant; with None: with the store as a whole, so with all tenants."""
        if scope not in self.scopes:
            return False
        return self.reach.all_tenants if tenant is None else self.reach.covers(tenant)
