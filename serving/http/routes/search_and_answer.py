"""Search, and answers: whole, or streamed as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing
from typing import Any

import orjson
from fastapi import APIRouter
from fastapi.responses import StreamingResponse

from undertow.engine.base.queries import AnswerQuery, SearchQuery
from undertow.engine.base.results import Answer
from undertow.serving.auth.principal import Scope
from undertow.serving.client.results import Found, Kind
from undertow.serving.http.middleware.token_budget import CallCost, budgeted
from undertow.serving.http.problems import bad_field, problem_of
from undertow.serving.http.routes.access import Access, GuardedRoute
from undertow.serving.http.routes.schemas import AnswerRequest, AnswerResponse, SearchRequest
from undertow.serving.http.routes.streaming import started
from undertow.serving.http.service import Sender, Served, Tenant

router = APIRouter(route_class=GuardedRoute, tags=["memories"])

# in the order of k_sub, k_epi, k_sem
KINDS: tuple[Kind, ...] = ("turn", "episode", "fact")
EVENTS = {
    "schema": {"type": "string"},
    "example": 'event: delta\ndata: {"text": "On "}\n\nevent: done\ndata: {"answer": "On Sunday.", ...}\n\n',
}


@router.post("/v1/tenants/{tenant}/search", response_model=Found)
@Access(Scope.READ, direct=True)
async def search(tenant: Tenant, asked: SearchRequest, service: Served) -> Any:
    """The memories nearest to a query. Filters are applied before the ranking: a tenant with k matching
    memories gets k, whatever else is stored.

    `top_k` counts over all requested kinds; without it, each kind has its own count.
    """
    if asked.top_k is not None and asked.top_k > service.settings.max_top_k:
        raise bad_field("top_k", f"is {asked.top_k}; ask for at most {service.settings.max_top_k:,}.")
    kinds = asked.kinds or KINDS
    k_sub, k_epi, k_sem = (asked.top_k if kind in kinds else 0 for kind in KINDS)
    since, until = _text(asked.since), _text(asked.until)
    counts, filters = (k_sub, k_epi, k_sem), asked.filters or None
    query = SearchQuery(tenant, asked.query, *counts, since, until, filters, asked.explain)
    found = await service.memories.call(query)
    hits = found.ranked(asked.top_k)
    if asked.threshold is not None:
        hits = [hit for hit in hits if hit.score >= asked.threshold]
    told = {"results": hits, "recall": found.turn_recall, "words_only": found.words_only}
    return {**told, "explanation": found.explained(hits, asked.threshold)} if asked.explain else told


@router.post(
    "/v1/tenants/{tenant}/answer",
    response_model=AnswerResponse,
    responses={
        200: {
            "description": "The answer. Streamed: `delta` events with a piece of `text` each, then `done` "
            "with the body of a whole answer, or `error` with a problem.",
            "content": {"text/event-stream": EVENTS},
        }
    },
)
@Access(Scope.READ, long=True)
async def answer(tenant: Tenant, asked: AnswerRequest, service: Served, sender: Sender) -> Any:
    """Answer a question from a tenant's memory, with one call of the language model, or up to three in
    best-effort mode.

    Its tokens are charged to the key's daily budget. The most that the call may cost must fit into the rest
    of the budget. A client that disconnects early cancels the call, and is charged that maximum.
    """
    query = AnswerQuery(tenant, asked.question, _text(asked.as_of), asked.mode)
    spending = budgeted(service.budgets, sender, service.answer_tokens(asked.mode))
    if not asked.stream:
        async with spending as cost:
            given = await service.memories.call(query)
            cost.took(given.usage)
        return _response(given)
    pieces = await started(_charged(service.memories.answer_stream(query), spending))
    return StreamingResponse(_events(pieces), media_type="text/event-stream")


async def _charged(
    pieces: AsyncGenerator[str | Answer], spending: AbstractAsyncContextManager[CallCost]
) -> AsyncGenerator[str | Answer]:
    """The same pieces, charged to the budget. Closing it closes them."""
    async with spending as cost, aclosing(pieces) as stream:
        async for piece in stream:
            if not isinstance(piece, str):
                cost.took(piece.usage)
            yield piece


async def _events(pieces: AsyncGenerator[str | Answer]) -> AsyncIterator[bytes]:
    """Server-sent events: the pieces, then the whole answer or an error."""
    async with aclosing(pieces):
        try:
            async for piece in pieces:
                yield _event(piece)
        except Exception as error:  # noqa: BLE001 - the status is sent already: an event reports the error
            yield _line("error", problem_of(error).document)


def _event(piece: str | Answer) -> bytes:
    if isinstance(piece, str):
        return _line("delta", {"text": piece})
    return _line("done", _response(piece).model_dump())


def _line(event: str, data: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event.encode(), orjson.dumps(data))


def _response(answer: Answer) -> AnswerResponse:
    found = answer.found
    fields = {"answer": answer.text, "memories": found.ranked(), "usage": answer.usage}
    return AnswerResponse.model_validate({**fields, "words_only": found.words_only}, from_attributes=True)


def _text(moment: str | int | float | None) -> str | None:
    """A moment, which its validation has normalised."""
    return None if moment is None else str(moment)
