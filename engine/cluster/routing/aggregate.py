"""What the shards' answers to one call come to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from heapq import merge
from itertools import islice
from typing import Any


def _counts(shards: Collection[Mapping[str, int]]) -> dict[str, int]:
    totals: Counter[str] = Counter()
    for figures in shards:
        totals.update(figures)
    return dict(totals)


def _usage(shards: Collection[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    totals: dict[str, Counter[str]] = {}
    for usages in shards:
        for operation, used in usages.items():
            totals.setdefault(operation, Counter()).update(used)
    return {operation: dict(used) for operation, used in sorted(totals.items())}


def _names(shards: Collection[list[str]], prefix: str, limit: int, after: str) -> list[str]:
    """The first of the shards' sorted names; one that is at two of them, as it moves, once."""
    return list(islice(dict.fromkeys(merge(*shards)), limit))


def _certificates(shards: Collection[Mapping[str, Any]]) -> dict[str, Any]:
    return {key: issued for certificates in shards for key, issued in certificates.items()}


# by the call's name: of the answers, and of what was asked
TOGETHER: dict[str, Callable[..., Any]] = {
    "drain": all,
    "purge": _certificates,
    "replay_jobs": sum,
    "stats": _counts,
    "tenants": _names,
    "usage": _usage,
}
