"""POST .../memories: messages, or a batch of items with a result for each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Header
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from undertow.engine.base.limits import MAX_MESSAGES
from undertow.engine.base.model import InputError
from undertow.engine.base.results import Report
from undertow.serving.auth.principal import Scope
from undertow.serving.http.problems import Problem, bad_field, problem_of
from undertow.serving.http.routes.access import Access, GuardedRoute
from undertow.serving.http.routes.add_batches import AddBatch
from undertow.serving.http.routes.schemas import AddRequest, AddResponse, Item
from undertow.serving.http.service import Sender, Served, Service, Tenant

MANY_MESSAGES = 64

router = APIRouter(route_class=GuardedRoute, tags=["memories"])

IdempotencyKey = Annotated[
    str | None,
    Header(
        min_length=1,
        max_length=255,
        description="Messages added under this key before are not added again. With items: it applies to "
        "items without an idempotency_key, by their position.",
    ),
]


@router.post("/v1/tenants/{tenant}/memories", response_model=AddResponse)
@Access(Scope.WRITE, direct=True)
async def add(
    tenant: Tenant, asked: AddRequest, service: Served, sender: Sender, idempotency_key: IdempotencyKey = None
) -> Any:
    """Add messages to a tenant's memory. They are durable and searchable when the response arrives.

    `results` has one entry per turn; a turn is a message and its reply. With `items`, each item is accepted
    or rejected on its own: the response's `items` has a status, and results or a reason, for each.
    """
    if asked.items is None:
        item = Item(**{name: value for name, value in asked if value is not None})
        given = tenant, item, sender.key_id, idempotency_key, service.max_message_bytes
        many = len(item.messages) > MANY_MESSAGES  # which would hold the event loop
        batch = await asyncio.to_thread(AddBatch.of, *given) if many else AddBatch.of(*given)
        (result,) = await service.adding.add(sender.key_id, tenant, [batch])
        if isinstance(result, Problem):
            raise result
        return {"results": result}
    if not 1 <= len(asked.items) <= service.settings.max_items:
        raise bad_field(
            "items", f"holds {len(asked.items)}; give 1 to {service.settings.max_items:,} at a time."
        )
    return {"items": await _add_items(service, tenant, sender.key_id, asked.items, idempotency_key)}


async def _add_items(
    service: Service, tenant: str, key_id: str, items: Sequence[Any], key: str | None
) -> list[Report]:
    """The result of each item, in order. `key`: for items without a key, with their position. Problem 422."""
    given = (item.get("messages") for item in items if isinstance(item, dict))
    count = sum(len(messages) for messages in given if isinstance(messages, list))
    if count > MAX_MESSAGES:
        raise bad_field("items", f"holds {count:,} messages; give at most {MAX_MESSAGES:,} at a time.")
    batches: list[AddBatch] = []
    rejected: dict[int, Problem] = {}
    for n, raw in enumerate(items):
        try:
            item = Item.model_validate(raw)
            own = item.idempotency_key or (key and f"{key}\x1f{n}")
            batches.append(AddBatch.of(tenant, item, key_id, own, service.max_message_bytes))
        except ValidationError as invalid:
            rejected[n] = problem_of(RequestValidationError(invalid.errors()))
        except InputError as bad:
            rejected[n] = problem_of(bad)
    added = iter(await service.adding.add(key_id, tenant, batches))
    results = [rejected[n] if n in rejected else next(added) for n in range(len(items))]
    return [
        _rejected(result) if isinstance(result, Problem) else {"status": 200, "results": result}
        for result in results
    ]


def _rejected(problem: Problem) -> Report:
    errors = {"errors": problem.errors} if problem.errors else {}
    return {"status": problem.status_code, "detail": problem.detail, **errors}
