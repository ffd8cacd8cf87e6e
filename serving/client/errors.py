"""The client's errors, by the service's response; each error's text names the cure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx2

from undertow.engine.base.model import UndertowError

# of a response that is no problem+json: enough to recognise a proxy's page
_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """A refused field of a request, and why."""

    field: str
    detail: str


class ServiceError(UndertowError):
    """A call failed. `status`: of HTTP, None without a response; `kind`: the problem's type, "" for none.

    `retry_after_s`: how long the service asks to wait before a retry; None: it does not say.
    """

    def __init__(
        self,
        detail: str,
        *,
        status: int | None = None,
        kind: str = "",
        fields: tuple[FieldProblem, ...] = (),
        retry_after_s: float | None = None,
    ) -> None:
        words = "; ".join(f"{field.field}: {field.detail}" for field in fields)
        # the service's detail names the first of them already
        super().__init__(f"{detail} ({words})" if words and words != detail else detail)
        self.detail = detail
        self.status = status
        self.kind = kind
        self.fields = fields
        self.retry_after_s = retry_after_s


class BadRequest(ServiceError):
    """The service cannot accept this request; `fields` names what is wrong."""


class TooLarge(BadRequest):
    """The request is larger than the service accepts."""


class AuthError(ServiceError):
    """The key is missing or not accepted."""


class Forbidden(AuthError):
    """The key is valid but lacks permission for this."""


class NotFound(ServiceError):
    """No such tenant, memory or job."""


class Conflict(ServiceError):
    """The request conflicts with the current state, or the same call is still running."""


class RateLimited(ServiceError):
    """The key or the service is at its limit now."""


class ServerError(ServiceError):
    """The service failed."""


class Unavailable(ServerError):
    """The service, or something that it depends on, is temporarily unavailable."""


class Unreachable(ServiceError):
    """No response: nothing listens there, or the connection broke."""


class TimedOut(ServiceError):
    """No response in time. The service may have carried out the request."""


class UnexpectedAnswer(ServiceError):
    """A response that does not come from an Undertow service."""

    def __init__(self, flaws: str) -> None:
        super().__init__(
            f"the answer is not one of Undertow's service: {flaws}. "
            "Check the URL, and that client and service are of versions that fit."
        )


_BY_STATUS: Mapping[int, type[ServiceError]] = {
    401: AuthError,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    413: TooLarge,
    429: RateLimited,
    503: Unavailable,
}


def failure_of(status: int, retry_after: str | None, body: bytes) -> ServiceError:
    """The error for an unsuccessful response. Retry-After counts in seconds, not as a date."""
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    problem = document if isinstance(document, dict) else {}
    errors = problem.get("errors")
    known = _BY_STATUS.get(status, ServerError if status >= 500 else BadRequest)
    return known(
        _detail(problem, status, body),
        status=status,
        kind=str(problem.get("type", "")),
        fields=tuple(
            FieldProblem(str(e.get("field", "")), str(e.get("detail", "")))
            for e in (errors if isinstance(errors, list) else [])
            if isinstance(e, dict)
        ),
        retry_after_s=float(retry_after) if retry_after and retry_after.isdecimal() else None,
    )


def failure_in(problem: Mapping[str, Any]) -> ServiceError:
    """The error for a problem document within a stream."""
    status = problem.get("status")
    return failure_of(status if isinstance(status, int) else 500, None, json.dumps(problem).encode())


def without_answer(url: str, error: httpx2.TransportError) -> ServiceError:
    """The error for a connection that failed."""
    why = str(error) or type(error).__name__
    if isinstance(error, httpx2.SSEError):
        return UnexpectedAnswer(why)
    if isinstance(error, httpx2.TimeoutException) and not isinstance(error, httpx2.ConnectTimeout):
        return TimedOut(
            f"{url} gave no answer in time ({why}); it may have done what was asked. Give a longer "
            "timeout_s, or let the service do it in a job."
        )
    return Unreachable(f"no answer from {url}: {why}. Check the URL and that the service runs.")


def _detail(problem: Mapping[str, Any], status: int, body: bytes) -> str:
    if isinstance(words := problem.get("detail") or problem.get("title"), str):
        return words
    shown = " ".join(body[: 4 * _SHOWN_CHARS].decode(errors="replace").split())[:_SHOWN_CHARS]
    return f"the server answered {status}: {shown or 'nothing more'}. Check the URL, and what stands between."
