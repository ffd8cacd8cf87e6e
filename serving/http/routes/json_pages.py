"""Large JSON answers, written in parts between which the event loop serves others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import orjson

from undertow.serving.http.middleware.fair_turns import FairTurns

T = TypeVar("T")

# Memories that are written in about a millisecond.
AT_ONCE = 40


async def written(
    turns: FairTurns,
    tenant: str,
    results: Sequence[T],
    rest: Mapping[str, Any],
    view: Callable[[T], Any] | None = None,
) -> bytes:
    """A JSON object of `results`, each as `view` shows it, and the `rest` of its fields."""
    parts: list[bytes] = []
    for start in range(0, len(results), AT_ONCE):
        if start:
            await turns.give_way(tenant)
        part = results[start : start + AT_ONCE]
        parts.append(orjson.dumps(part if view is None else [view(one) for one in part])[1:-1])
    fields = orjson.dumps(rest)[1:]
    return b'{"results":[' + b",".join(parts) + (b"]," if rest else b"]") + fields
