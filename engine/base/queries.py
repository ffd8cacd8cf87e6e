"""Each call on memories as data: a query reads, a command changes something.

A call travels as it is, from an interface to the router and on to a shard, where it is repeated if it got
lost. MemoryApi (memory_api.py) documents what each one does and raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import islice
from typing import Any, ClassVar, Generic, Literal, NamedTuple, TypeVar

from undertow.engine.base.model import AnswerMode, Memory
from undertow.engine.base.results import (
    Answer,
    Certificate,
    ImportReport,
    Page,
    Report,
    SearchResult,
    Updated,
    UsageReport,
    Wording,
)

R = TypeVar("R")

# of a filter by metadata: {key: {operator: value}}; MemoryApi.search documents them
FilterOperator = Literal["$eq", "$ne", "$gt", "$gte", "$lt", "$lte", "$in", "$prefix"]


@dataclass(frozen=True)
class ApiCall(Generic[R]):
    """One call that returns an `R`. `name`: in traces and metrics."""

    name: ClassVar[str]


@dataclass(frozen=True)
class TenantCall(ApiCall[R]):
    """A call about one tenant. The shard that has the tenant serves it."""

    tenant: str


@dataclass(frozen=True)
class MemoryCall(ApiCall[R]):
    """A call about one turn, episode or fact. Without `tenant`, every shard looks for it."""

    memory_id: str
    tenant: str | None = None


@dataclass(frozen=True)
class StoreCall(ApiCall[R]):
    """A call about the whole store. In a cluster every shard serves it."""

    def combined(self, answers: Collection[R]) -> R:
        """The cluster's answer, from those of all shards."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Repeatable:
    """A command that tells a repeat from a new call. `again`: that it was done already is no error."""

    again: bool = False


# ---- queries


@dataclass(frozen=True)
class SearchQuery(TenantCall[SearchResult]):
    name: ClassVar[str] = "search"
    text: str
    k_sub: int | None = None
    k_epi: int | None = None
    k_sem: int | None = None
    since: str | None = None
    until: str | None = None
    where: Mapping[str, Any] | None = None
    explain: bool = False
    dense: bool = False  # by cosine alone, whatever the settings say


@dataclass(frozen=True)
class AnswerQuery(TenantCall[Answer]):
    name: ClassVar[str] = "answer"
    question: str
    as_of: str | None = None
    mode: AnswerMode | None = None


@dataclass(frozen=True)
class MemoriesQuery(TenantCall[list[Memory]]):
    name: ClassVar[str] = "get_all"


@dataclass(frozen=True)
class ListQuery(TenantCall[Page]):
    name: ClassVar[str] = "list"
    kinds: Collection[str] | None = None
    since: str | None = None
    until: str | None = None
    where: Mapping[str, Any] | None = None
    limit: int = 100
    after: str | None = None


@dataclass(frozen=True)
class ExportQuery(TenantCall[Page]):
    name: ClassVar[str] = "export_page"
    after: str | None = None
    limit: int = 1000
    vectors: bool = False


@dataclass(frozen=True)
class ExplainQuery(TenantCall[list[Report]]):
    name: ClassVar[str] = "explain"
    limit: int | None = None
    after_seq: int = -1


@dataclass(frozen=True)
class PolicyQuery(TenantCall[Report]):
    name: ClassVar[str] = "policy"


@dataclass(frozen=True)
class TenantStatsQuery(TenantCall[dict[str, int]]):
    name: ClassVar[str] = "tenant_stats"


@dataclass(frozen=True)
class TenantUsageQuery(TenantCall[UsageReport]):
    name: ClassVar[str] = "usage"


@dataclass(frozen=True)
class TurnsByKeyQuery(TenantCall[dict[str, Report]]):
    name: ClassVar[str] = "turns_by_key"
    keys: Collection[str]


@dataclass(frozen=True)
class GetQuery(MemoryCall[Report]):
    name: ClassVar[str] = "get"


@dataclass(frozen=True)
class HistoryQuery(MemoryCall[list[Report]]):
    name: ClassVar[str] = "history"


@dataclass(frozen=True)
class StatsQuery(StoreCall[dict[str, int]]):
    name: ClassVar[str] = "stats"

    def combined(self, answers: Collection[dict[str, int]]) -> dict[str, int]:
        totals: Counter[str] = Counter()
        for counts in answers:
            totals.update(counts)
        return dict(totals)


@dataclass(frozen=True)
class UsageQuery(StoreCall[UsageReport]):
    name: ClassVar[str] = "usage"

    def combined(self, answers: Collection[UsageReport]) -> UsageReport:
        totals: dict[str, Counter[str]] = {}
        for usages in answers:
            for operation, used in usages.items():
                totals.setdefault(operation, Counter()).update(used)
        return {operation: dict(used) for operation, used in sorted(totals.items())}


@dataclass(frozen=True)
class TenantsQuery(StoreCall[list[str]]):
    name: ClassVar[str] = "tenants"
    prefix: str = ""
    limit: int = 1000
    after: str = ""

    def combined(self, answers: Collection[list[str]]) -> list[str]:
        """The first of the sorted names; one that two shards have, as it moves, once."""
        return list(islice(dict.fromkeys(merge(*answers)), self.limit))


class EventPage(NamedTuple):
    """Events of one shard, each with its lsn; `at`: the lsn that the next page comes after.

    `is_cut`: there are more rows, which may have no events.
    """

    items: tuple[tuple[int, Report], ...]
    at: int
    is_cut: bool = False


@dataclass(frozen=True)
class EventsQuery(StoreCall[dict[str, EventPage]]):
    """What has happened to memories (api/views/events.py), by shard. `after`: an lsn of each shard.

    `keys`: of the tenants, None: all. `limit` 0: no events, and the lsns of the ends. The shard sets `home`.
    `asker`: the tenant whose time the reading takes, see Pacing.
    """

    name: ClassVar[str] = "events"
    after: Mapping[str, int]
    keys: frozenset[str] | None = None
    limit: int = 0
    text: bool = False
    home: str = "single"
    asker: str = ""

    def combined(self, answers: Collection[dict[str, EventPage]]) -> dict[str, EventPage]:
        return {home: page for pages in answers for home, page in pages.items()}


# ---- commands


@dataclass(frozen=True)
class UpdateCommand(Repeatable, MemoryCall[Updated]):
    name: ClassVar[str] = "update"
    text: Wording = ""


@dataclass(frozen=True)
class DeleteCommand(Repeatable, MemoryCall[str]):
    name: ClassVar[str] = "delete"


@dataclass(frozen=True)
class FlushCommand(Repeatable, TenantCall[bool]):
    name: ClassVar[str] = "flush"


@dataclass(frozen=True)
class EraseCommand(Repeatable, TenantCall["Certificate | None"]):
    name: ClassVar[str] = "erase"
    now: bool = False


@dataclass(frozen=True)
class ImportCommand(Repeatable, TenantCall[ImportReport]):
    """`as_admin`: the records may set thresholds other than the store's, and a policy."""

    name: ClassVar[str] = "import_"
    records: Sequence[Report]
    as_admin: bool = True


@dataclass(frozen=True)
class SetPolicyCommand(TenantCall[Report]):
    name: ClassVar[str] = "set_policy"
    policy: str
    drop_edits: bool = False


@dataclass(frozen=True)
class ReplayJobsCommand(StoreCall[int]):
    name: ClassVar[str] = "replay_jobs"

    def combined(self, answers: Collection[int]) -> int:
        return sum(answers)


@dataclass(frozen=True)
class DrainCommand(StoreCall[bool]):
    name: ClassVar[str] = "drain"

    def combined(self, answers: Collection[bool]) -> bool:
        return all(answers)


@dataclass(frozen=True)
class PurgeCommand(StoreCall[dict[str, Certificate]]):
    name: ClassVar[str] = "purge"

    def combined(self, answers: Collection[dict[str, Certificate]]) -> dict[str, Certificate]:
        return {key: issued for certificates in answers for key, issued in certificates.items()}
