"""Who may use a route: the scope that a key needs, and for which tenants."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from undertow.serving.auth.principal import Principal, Scope


class TenantAccess(Enum):
    """Which tenants a key must be for."""

    TENANT = "the one in the path"
    STORE = "all of them"
    ANY = "some"


TOLD = {TenantAccess.TENANT: "this tenant", TenantAccess.STORE: "all tenants", TenantAccess.ANY: "any tenant"}


@dataclass(frozen=True, slots=True)
class Access:
    """Who may use a route, and what it takes.

    `once`: it takes an Idempotency-Key, and keeps its answer. `act`: what the audit log calls it, where
    somebody who may not do it is to stand there. `imports`: its body may be as large as an import. `long`: it
    may take as long as an LLM, or as whoever reads the answer.
    """

    scope: Scope | None
    reaches: TenantAccess = TenantAccess.TENANT
    once: bool = False
    act: str | None = None
    imports: bool = False
    long: bool = False

    def allows(self, principal: Principal, tenant: str | None) -> bool:
        if self.scope is None:
            return True
        if self.reaches is TenantAccess.ANY:
            return self.scope in principal.scopes
        if self.reaches is TenantAccess.TENANT and tenant is None:
            return False
        return principal.may(self.scope, tenant)
