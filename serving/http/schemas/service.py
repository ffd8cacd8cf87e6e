"""What the service says of itself, and of what goes wrong."""

from __future__ import annotations

from typing import Literal

from undertow.serving.http.schemas.base import Answered


class Health(Answered):
    status: Literal["ok", "unready", "draining"]


class ProblemView(Answered):
    """Problem details for HTTP APIs (RFC 9457). `detail` says what to do; `errors` names fields."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[dict[str, str]] | None = None
