"""Listing what a tenant has, page by page, in order of birth."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import get_args

import orjson

from undertow.engine.api.report_format import bad_cursor, check_limit, memory_report, turn_report
from undertow.engine.base.model import InputError
from undertow.engine.base.results import HitKind, Page, Report
from undertow.engine.search.ranking import Rows, Window, rests_on, shows
from undertow.engine.storage.journal import Row
from undertow.engine.tenants.tenant import Tenant

MAX_LISTED = 1_000
# of what was born at one record of the log: turns before episodes before facts
KINDS: tuple[HitKind, ...] = get_args(HitKind)

# record of the log, number of the kind, ordinal
Place = tuple[int, int, int]
Item = tuple[Place, Callable[[], Report]]
BEFORE_ALL: Place = (-1, -1, -1)


def kinds_of(kinds: Collection[str] | None) -> frozenset[HitKind]:
    """Those named, or all. InputError."""
    if wrong := sorted(set(kinds or ()) - set(KINDS)):
        raise InputError.of("list", "kinds", f"{wrong[0]!r:.80} is none", f"Name some of {', '.join(KINDS)}.")
    return frozenset(kind for kind in KINDS if kinds is None or kind in kinds)


def list_page(
    tenant: Tenant,
    kinds: frozenset[HitKind],
    window: Window,
    passing: Rows | None,
    within: Rows | None,
    *,
    limit: int,
    after: str | None,
) -> Page:
    """The first `limit` of the tenant's turns and memories that pass the filters and stand behind `after`.

    Those that a search may find, in the form of Reports.get. `passing`, and `within` of the window, as of
    Retrieval. Nothing stands twice in the pages of one walk, and nothing that stays is left out, whatever is
    added meanwhile; what is born meanwhile at a record that the walk has passed is not in it. InputError.
    """
    check_limit("list", limit, MAX_LISTED)
    start = BEFORE_ALL if after is None else _place_of(after)
    lines: list[Iterator[Item]] = []
    if "turn" in kinds:
        lines.append(_turns(tenant, start, passing, within))
    lines += [
        _memories(tenant, kind, start, window, passing) for kind in ("episode", "fact") if kind in kinds
    ]
    found = list(islice(merge(*lines, key=itemgetter(0)), limit + 1))
    shown = found[:limit]
    last = ".".join(map(str, shown[-1][0])) if len(found) > limit else None
    return Page(tuple(report() for _, report in shown), last)


def after_record(seq: int) -> str:
    """The cursor of a page that begins behind record `seq` of the log."""
    return f"{seq}.{len(KINDS)}.0"


def names_page(names: Iterable[str], prefix: str, limit: int, after: str) -> list[str]:
    """Of sorted names, the first `limit` that begin with `prefix` and stand behind `after`. InputError."""
    check_limit("list", limit, MAX_LISTED)
    return list(islice((name for name in names if name > after and name.startswith(prefix)), limit))


def _turns(tenant: Tenant, start: Place, passing: Rows | None, within: Rows | None) -> Iterator[Item]:
    rank = KINDS.index("turn")
    for row in range(bisect_left(tenant.seq_by_row, start[0]), len(tenant.seq_by_row)):
        seq = tenant.seq_by_row[row]
        if (seq, rank, 0) <= start or not tenant.exists(seq):
            continue
        if all(rows is None or rows[row] for rows in (passing, within)):
            yield (seq, rank, 0), partial(_turn, tenant, seq)


def _turn(tenant: Tenant, seq: int) -> Report:
    payload = tenant.payload(seq)
    identity = tenant.turn_id(seq)
    timestamp = orjson.loads(payload).get("timestamp")
    return turn_report(Row("turn", tenant.name, tenant.key, seq, payload, identity, timestamp))


def _memories(
    tenant: Tenant, kind: HitKind, start: Place, window: Window, passing: Rows | None
) -> Iterator[Item]:
    rank = KINDS.index(kind)
    for memory in tenant.current("episode" if kind == "episode" else "fact"):
        place = (memory.born_at_seq, rank, memory.ordinal)
        if place > start and shows(tenant, memory, window) and rests_on(tenant, memory, passing):
            yield place, partial(memory_report, memory)


def _place_of(after: str) -> Place:
    try:
        seq, rank, ordinal = map(int, after.split("."))
    except ValueError:
        raise bad_cursor("list", after) from None
    return seq, rank, ordinal
