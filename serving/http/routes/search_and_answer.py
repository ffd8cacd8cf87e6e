"""Searching, and answers, on request as a stream."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import orjson
from fastapi import APIRouter, Request
from fastapi.responses import StreamingResponse

from undertow.engine.base.queries import AnswerQuery
from undertow.serving.auth.principal import Scope
from undertow.serving.http.middleware.disconnect import ClientDisconnected, unless_gone
from undertow.serving.http.middleware.token_budget import BudgetedCall
from undertow.serving.http.problems import Problem, bad_field, problem_of
from undertow.serving.http.routes.access import GuardedRoute, needs
from undertow.serving.http.routes.dependencies import Sender, Served, Tenant
from undertow.serving.http.schemas.search_and_answer import (
    AnswerRequest,
    AnswerResponse,
    FoundMemory,
    SearchRequest,
    SearchResponse,
    Tokens,
)

if TYPE_CHECKING:
    from undertow.engine.base.results import Answer, Hit

router = APIRouter(route_class=GuardedRoute, tags=["memories"])

TIERS = {"turn": "k_sub", "episode": "k_epi", "fact": "k_sem"}
EVENTS = {
    "schema": {"type": "string"},
    "example": 'event: delta\ndata: {"text": "On "}\n\nevent: done\ndata: {"answer": "On Sunday.", ...}\n\n',
}


@router.post("/v1/tenants/{tenant}/search")
@needs(Scope.READ)
async def search(tenant: Tenant, asked: SearchRequest, service: Served) -> SearchResponse:
    """The memories nearest to a query. Filters are applied before the ranking: a tenant that has k memories
    which pass them gets k, whatever else is stored.

    With `top_k`, so many over all kinds that are asked for; without, each kind has its own count.
    """
    if asked.top_k is not None and asked.top_k > service.settings.max_top_k:
        raise bad_field("top_k", f"is {asked.top_k}; ask for at most {service.settings.max_top_k:,}.")
    kinds = asked.kinds or TIERS.keys()
    tiers = {count: asked.top_k if kind in kinds else 0 for kind, count in TIERS.items()}
    found = await service.memories.search(
        tenant,
        asked.query,
        **tiers,
        since=_text(asked.since),
        until=_text(asked.until),
        where=asked.filters or None,
    )
    hits = found.ranked(asked.top_k)
    if asked.threshold is not None:
        hits = [hit for hit in hits if hit.score >= asked.threshold]
    return SearchResponse(results=_found(hits), recall=found.turn_recall)


@router.post(
    "/v1/tenants/{tenant}/answer",
    response_model=AnswerResponse,
    responses={
        200: {
            "description": "The answer; streamed: events `delta` with a piece of `text` each, then `done` "
            "with what is the body otherwise, or `error` with a problem.",
            "content": {"text/event-stream": EVENTS},
        }
    },
)
@needs(Scope.READ, long=True)
async def answer(
    tenant: Tenant, asked: AnswerRequest, service: Served, sender: Sender, request: Request
) -> Any:
    """Answer a question from a tenant's memory, with one call of the language model, or up to three where
    it is answered by best effort.

    Its tokens count towards the key's budget of the day. Before the call the most that it may take must fit
    into what is left. Who leaves before the answer has ended ends its call, and is charged the most.
    """
    query = AnswerQuery(tenant, asked.question, _text(asked.as_of), asked.mode)
    spending = BudgetedCall(service.budgets, sender, service.answer_tokens(asked.mode))
    if not asked.stream:
        try:
            with spending:
                given = await unless_gone(request, service.memories.call(query))
                spending.took(given.usage)
        except ClientDisconnected:
            raise Problem(400, "cut-off", "The sender left before the answer was there.") from None
        return _answered(given)
    pieces = _charged(service.memories.answer_stream(query), spending)
    try:
        first = await anext(pieces)  # what goes wrong before it is a problem with a status of its own
    except BaseException:
        await pieces.aclose()
        raise
    return StreamingResponse(_events(first, pieces), media_type="text/event-stream")


async def _charged(
    pieces: AsyncGenerator[str | Answer], spending: BudgetedCall
) -> AsyncGenerator[str | Answer]:
    """The same pieces; what they cost is charged. Closed before its end, it closes them."""
    with spending:
        async with aclosing(pieces) as stream:
            async for piece in stream:
                if not isinstance(piece, str):
                    spending.took(piece.usage)
                yield piece


async def _events(first: str | Answer, pieces: Any) -> AsyncIterator[bytes]:
    """Server-sent events: the pieces, the whole, or the error that came between."""
    async with aclosing(pieces):
        yield _event(first)
        try:
            async for piece in pieces:
                yield _event(piece)
        except Exception as error:  # noqa: BLE001 - the status is sent: this is how the reader is told
            yield _line("error", problem_of(error).document)


def _event(piece: str | Answer) -> bytes:
    if isinstance(piece, str):
        return _line("delta", {"text": piece})
    return _line("done", _answered(piece).model_dump())


def _line(event: str, data: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (event.encode(), orjson.dumps(data))


def _answered(given: Answer) -> AnswerResponse:
    return AnswerResponse(
        answer=given.text, memories=_found(given.found.ranked()), usage=Tokens(**asdict(given.usage))
    )


def _found(hits: Sequence[Hit]) -> list[FoundMemory]:
    return [FoundMemory(**{**asdict(hit), "source_seqs": list(hit.source_seqs)}) for hit in hits]


def _text(moment: str | int | float | None) -> str | None:
    """A moment as it was normalised."""
    return None if moment is None else str(moment)
