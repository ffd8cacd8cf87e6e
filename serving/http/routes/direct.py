"""Calls an endpoint without FastAPI's dependency solver, which takes longer than most adds and searches."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, get_type_hints

import orjson
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from undertow.serving.http.middleware.body_limits import read_all
from undertow.serving.http.middleware.front import sender_of
from undertow.serving.http.middleware.idempotency import KEY_HEADER, idempotency_key
from undertow.serving.http.routes.json_pages import written

JSON = (b"content-type", b"application/json")
# such a body is read in a millisecond or two
LARGE_BODY_BYTES = 32 << 10
# what an endpoint may ask for, by the name of its parameter
GIVEN = {"tenant", "asked", "service", "sender", "idempotency_key"}


class DirectEndpoint:
    """An endpoint with the parameters of GIVEN; its result is written as JSON.

    `asked` is the model of the body. Errors are those of FastAPI.
    """

    def __init__(self, endpoint: Callable[..., Awaitable[Any]]) -> None:
        """TypeError: the endpoint asks for something else."""
        self._endpoint = endpoint
        self._names = inspect.signature(endpoint).parameters.keys()
        if others := self._names - GIVEN:
            raise TypeError(
                f"{endpoint.__name__} asks for {', '.join(others)}, and can have {', '.join(GIVEN)}"
            )
        self._model: type[BaseModel] = get_type_hints(endpoint)["asked"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers, service, tenant = (
            Headers(scope=scope),
            scope["app"].state.service,
            scope["path_params"]["tenant"],
        )
        body = await read_all(receive)
        if len(body) > LARGE_BODY_BYTES:
            asked = await service.turns.aside(tenant, self._asked, headers, body)
        else:
            asked = self._asked(headers, body)
        given = {
            "tenant": tenant,
            "asked": asked,
            "service": service,
            "sender": sender_of(scope),
            "idempotency_key": idempotency_key(headers) if KEY_HEADER in headers else None,
        }
        told = await self._endpoint(**{name: given[name] for name in self._names})
        results = told.pop("results", None)
        in_json = (
            orjson.dumps(told) if results is None else await written(service.turns, tenant, results, told)
        )
        length = (b"content-length", str(len(in_json)).encode())
        await send({"type": "http.response.start", "status": 200, "headers": [JSON, length]})
        await send({"type": "http.response.body", "body": in_json})

    def _asked(self, headers: Headers, body: bytes) -> BaseModel:
        """The body, read and checked. RequestValidationError."""
        if not body:
            raise _invalid("missing", "Field required")
        value: Any = body
        if _is_json(headers.get("content-type", "")):
            try:
                value = orjson.loads(body)
            except orjson.JSONDecodeError as error:
                raise _invalid("json_invalid", "JSON decode error", error.pos) from None
        try:
            return self._model.model_validate(value)
        except ValidationError as error:
            flaws = [{**flaw, "loc": ("body", *flaw["loc"])} for flaw in error.errors(include_url=False)]
            raise RequestValidationError(flaws, body=value) from None


def _is_json(content_type: str) -> bool:
    kind, _, subtype = content_type.partition(";")[0].strip().lower().partition("/")
    return kind == "application" and (subtype == "json" or subtype.endswith("+json"))


def _invalid(kind: str, words: str, *place: int) -> RequestValidationError:
    return RequestValidationError([{"type": kind, "loc": ("body", *place), "msg": words, "input": None}])
