"""What endpoints take as arguments."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Header, Path, Request

from undertow.serving.auth.principal import Principal
from undertow.serving.http.middleware.idempotency import AGAIN
from undertow.serving.http.services import Service, principal_of, service_of

Served = Annotated[Service, Depends(service_of)]
Sender = Annotated[Principal, Depends(principal_of)]
Tenant = Annotated[str, Path(min_length=1, description="Whose memories; percent-encoded.")]
MemoryId = Annotated[str, Path(min_length=1, description="A turn, an episode or a fact.")]
Prefer = Annotated[
    str | None,
    Header(description="`respond-async`: 202 with a job, at once.", examples=["respond-async"]),
]


async def is_again(request: Request) -> bool:
    """Whether a request was begun before, under its Idempotency-Key, by a service that has ended since."""
    return bool(request.scope.get(AGAIN, False))


Again = Annotated[bool, Depends(is_again)]


def is_async(prefer: str | None) -> bool:
    """Whether a Prefer header (RFC 7240) asks for a job."""
    return any(part.strip().lower() == "respond-async" for part in (prefer or "").split(","))
