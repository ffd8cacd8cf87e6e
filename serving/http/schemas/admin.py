"""The store as a whole."""

from __future__ import annotations

from undertow.serving.http.schemas.base import ResponseModel
from undertow.serving.http.schemas.tenants import CertificateView


class TenantList(ResponseModel):
    """By name; `next` is the cursor of what follows, null at the end."""

    results: list[str]
    next: str | None


class Purged(ResponseModel):
    """The certificates of all tenants whose bytes went."""

    certificates: list[CertificateView]


class Replayed(ResponseModel):
    replayed: int
