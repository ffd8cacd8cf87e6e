"""What the client raises, by what the service answered; each error's text says what to do about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from undertow.engine.base.model import UndertowError

# of an answer that is no problem+json: as much as tells a proxy's page from a service's
_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class FieldProblem:
    """One field of a request that cannot be taken, and why."""

    field: str
    detail: str


class ServiceError(UndertowError):
    """A call failed. `status`: of HTTP, None without an answer; `kind`: the problem's type, "" for none."""

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
        # the service tells the first of them in its detail already
        super().__init__(f"{detail} ({words})" if words and words != detail else detail)
        self.detail = detail
        self.status = status
        self.kind = kind
        self.fields = fields
        self.retry_after_s = retry_after_s
        """So long the service asks to wait before the call is made again; None: it does not say."""


class BadRequest(ServiceError):
    """The request cannot be taken as it is; `fields` names what is wrong in it."""


class TooLarge(BadRequest):
    """More than the service takes at once."""


class AuthError(ServiceError):
    """There is no key, or it is not accepted."""


class Forbidden(AuthError):
    """The key is good, and may not do this."""


class NotFound(ServiceError):
    """No such tenant, memory or job."""


class Conflict(ServiceError):
    """It does not fit what is there, or the same call is under way."""


class RateLimited(ServiceError):
    """More than the key or the service has room for now."""


class ServerError(ServiceError):
    """The service failed."""


class Unavailable(ServerError):
    """The service, or what it needs for this, is away for now."""


class Unreachable(ServiceError):
    """No answer: nobody listens there, or the connection broke."""


class TimedOut(ServiceError):
    """No answer in time. The service may have done what was asked."""


class UnexpectedAnswer(ServiceError):
    """An answer that is not the service's."""

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
    """The error that an answer other than success tells of."""
    problem = _problem(body)
    return _class_of(status)(
        _words(problem, status, body),
        status=status,
        kind=str(problem.get("type", "")),
        fields=tuple(_fields(problem.get("errors"))),
        retry_after_s=_seconds(retry_after),
    )


def failure_in(problem: Mapping[str, Any]) -> ServiceError:
    """The error that a problem tells of which came in the midst of a stream."""
    status = problem.get("status")
    return failure_of(status if isinstance(status, int) else 500, None, json.dumps(problem).encode())


def _class_of(status: int) -> type[ServiceError]:
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    return ServerError if status >= 500 else BadRequest


def _problem(body: bytes) -> Mapping[str, Any]:
    try:
        problem = json.loads(body)
    except ValueError:
        return {}
    return problem if isinstance(problem, dict) else {}


def _words(problem: Mapping[str, Any], status: int, body: bytes) -> str:
    if isinstance(words := problem.get("detail") or problem.get("title"), str):
        return words
    shown = " ".join(body[: 4 * _SHOWN_CHARS].decode(errors="replace").split())[:_SHOWN_CHARS]
    return f"the server answered {status}: {shown or 'nothing more'}. Check the URL, and what stands between."


def _fields(errors: Any) -> list[FieldProblem]:
    found = errors if isinstance(errors, list) else []
    return [
        FieldProblem(str(e.get("field", "")), str(e.get("detail", ""))) for e in found if isinstance(e, dict)
    ]


def _seconds(retry_after: str | None) -> float | None:
    """Retry-After in seconds; its other form, a date, counts as not given."""
    try:
        return max(0.0, float(retry_after or ""))
    except ValueError:
        return None
