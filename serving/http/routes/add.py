"""POST .../memories: messages, or a batch of items with a result for each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

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

T = TypeVar("T")

MANY_MESSAGES = 64
# of most turns, see pair_chat
MESSAGES_A_TURN = 2

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
@Access(Scope.WRITE, direct=True, stores=True)
async def add(
    tenant: Tenant, asked: AddRequest, service: Served, sender: Sender, idempotency_key: IdempotencyKey = None
) -> Any:
    """Add messages to a tenant's memory. They are durable and searchable when the response arrives.

    `results` has one entry per turn; a turn is a message and its reply. With `items`, each item is accepted
    or rejected on its own: the response's `items` has a status, and results or a reason, for each.
    """
    whose = tenant, sender.key_id, idempotency_key, service.max_message_bytes
    if asked.items is None:
        make = partial(AddBatch.of, asked, *whose)
        batch = await _made(service, sender.key_id, tenant, len(asked.messages or ()), make)
        (result,) = await service.adding.add(sender.key_id, tenant, [batch])
        if isinstance(result, Problem):
            raise result
        return {"results": result}
    items, most = asked.items, service.settings.max_items
    if not 1 <= len(items) <= most:
        raise bad_field("items", f"holds {len(items)}; give 1 to {most:,} at a time.")
    lists = (item.get("messages") for item in items if isinstance(item, dict))
    count = sum(len(messages) for messages in lists if isinstance(messages, list))
    if count > MAX_MESSAGES:
        raise bad_field("items", f"holds {count:,} messages; give at most {MAX_MESSAGES:,} at a time.")
    batches = await _made(service, sender.key_id, tenant, count, partial(_batches, items, *whose))
    accepted = [batch for batch in batches if isinstance(batch, AddBatch)]
    added = iter(await service.adding.add(sender.key_id, tenant, accepted))
    results = [next(added) if isinstance(batch, AddBatch) else batch for batch in batches]
    return {
        "items": [
            _rejected(result) if isinstance(result, Problem) else {"status": 200, "results": result}
            for result in results
        ]
    }


async def _made(service: Service, key_id: str, tenant: str, messages: int, make: Callable[[], T]) -> T:
    """What `make` makes of so many messages. Many would hold the event loop. Problem 429, as of AddCalls."""
    if messages <= MANY_MESSAGES:
        return make()
    with service.load.storing(key_id, tenant, -(-messages // MESSAGES_A_TURN)):
        return await service.turns.aside(tenant, make)


def _batches(
    items: Sequence[Any], tenant: str, key_id: str, key: str | None, max_message_bytes: int
) -> list[AddBatch | Problem]:
    """Each item, in order, or why it is rejected. `key`: for items without a key, with their position."""
    made: list[AddBatch | Problem] = []
    for n, raw in enumerate(items):
        try:
            item = Item.model_validate(raw)
            own = item.idempotency_key or (key and f"{key}\x1f{n}")
            made.append(AddBatch.of(item, tenant, key_id, own, max_message_bytes))
        except ValidationError as invalid:
            made.append(problem_of(RequestValidationError(invalid.errors())))
        except InputError as bad:
            made.append(problem_of(bad))
    return made


def _rejected(problem: Problem) -> Report:
    errors = {"errors": problem.errors} if problem.errors else {}
    return {"status": problem.status_code, "detail": problem.detail, **errors}
