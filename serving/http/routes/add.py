"""POST .../memories: one lot of messages, or many with a result for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Header
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from undertow.engine.base.model import InputError
from undertow.serving.auth.principal import Scope
from undertow.serving.http.problems import Problem, bad_field, problem_of
from undertow.serving.http.routes.access import GuardedRoute, needs
from undertow.serving.http.routes.dependencies import Sender, Served, Tenant
from undertow.serving.http.routes.receipts import AddBatch, Told
from undertow.serving.http.routes.turns import call_of, turns_of
from undertow.serving.http.schemas.add import AddedItem, AddRequest, AddResponse, Item, Lot
from undertow.serving.http.services import Service

router = APIRouter(route_class=GuardedRoute, tags=["memories"])

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=255,
        description="Messages that were added under it are not added again. With items: for those "
        "that have no idempotency_key of their own, by their place.",
    ),
]


@router.post("/v1/tenants/{tenant}/memories", response_model_exclude_none=True)
@needs(Scope.WRITE)
async def add(
    tenant: Tenant, asked: AddRequest, service: Served, sender: Sender, idempotency_key: IdempotencyKey = None
) -> AddResponse:
    """Add messages to a tenant's memory: durable and searchable with the answer.

    `results` has one entry for each turn, which is a message and the reply to it. With `items`, each item is
    taken or refused by itself: `items` of the answer has a status and results, or the reason, for each; those
    that were taken are stored whatever becomes of the others.
    """
    if asked.items is None:
        lot = Lot(
            messages=asked.messages or [],
            session_id=asked.session_id or "",
            timestamp=asked.timestamp,
            metadata=asked.metadata or {},
        )
        parcel = parcel_of(service, tenant, sender.key_id, lot, idempotency_key)
        (told,) = await service.adding.add(tenant, [parcel])
        if isinstance(told, Problem):
            raise told
        return AddResponse(results=told)
    if not 1 <= len(asked.items) <= service.settings.max_items:
        raise bad_field(
            "items", f"holds {len(asked.items)}; give 1 to {service.settings.max_items:,} at a time."
        )
    return AddResponse(items=await _add_items(service, tenant, sender.key_id, asked.items, idempotency_key))


async def _add_items(
    service: Service, tenant: str, key_id: str, items: Sequence[Any], key: str | None
) -> list[AddedItem]:
    """What became of each item, in their order. `key`: for those without one of their own, by their place."""
    parcels: list[AddBatch] = []
    refused: dict[int, AddedItem] = {}
    for n, raw in enumerate(items):
        try:
            item = Item.model_validate(raw)
            own = item.idempotency_key or (key and f"{key}\x1f{n}")
            parcels.append(parcel_of(service, tenant, key_id, item, own))
        except ValidationError as invalid:
            refused[n] = _refusal(problem_of(RequestValidationError(invalid.errors())))
        except InputError as bad:
            refused[n] = _refusal(problem_of(bad))
    told = iter(await service.adding.add(tenant, parcels))
    return [refused[n] if n in refused else _item(next(told)) for n in range(len(items))]


def parcel_of(service: Service, tenant: str, key_id: str, lot: Lot, key: str | None) -> AddBatch:
    """The turns of some messages. InputError."""
    call = call_of(key_id, key)
    return AddBatch(call, key is not None, turns_of(tenant, lot, call, service.max_message_bytes))


def _item(told: Told) -> AddedItem:
    return _refusal(told) if isinstance(told, Problem) else AddedItem(status=200, results=told)


def _refusal(problem: Problem) -> AddedItem:
    return AddedItem(status=problem.status_code, detail=problem.detail, errors=problem.errors or None)
