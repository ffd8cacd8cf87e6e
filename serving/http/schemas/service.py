"""What the service says of itself, and of what goes wrong."""

from __future__ import annotations

from typing import Literal

from undertow.serving.http.schemas.base import ResponseModel


class Health(ResponseModel):
    status: Literal["ok", "unready", "draining"]


class ProblemView(ResponseModel):
    """Problem details for HTTP APIs (RFC 9457). `detail` says what to do; `errors` names fields."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[dict[str, str]] | None = None
