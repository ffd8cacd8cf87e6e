"""The calls on memories, once for all who serve them: an engine, a router, a cluster on Ray."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Self

from undertow.engine.base import queries as q
from undertow.engine.base.model import AnswerMode, Memory, Turn
from undertow.engine.base.results import (
    Answer,
    Certificate,
    ImportReport,
    Page,
    Receipt,
    Report,
    SearchResult,
    Updated,
    UsageReport,
    Wording,
)

# in a class with a method `list`, that name is no type
Memories = list[Memory]
Reports = list[Report]
Names = list[str]
Receipts = list[Receipt]


class MemoryApi(ABC):
    """Whoever serves memories implements `call` and `add_batch`; all other methods come with them.

    Calls about a tenant raise UnknownTenant if there is none of this name. Calls about a memory take any
    tenant's, unless `tenant` is given; UnknownMemory if there is none of this id. All errors are kinds of
    UndertowError, except ValueError for an argument that no call can take.
    """

    @abstractmethod
    def call(self, call: q.ApiCall[q.R]) -> q.R:
        """Carry out one call."""

    @abstractmethod
    def add_batch(self, turns: Sequence[Turn]) -> Receipts:
        """Store turns; durable and searchable on return. One receipt a turn, in order.

        InputError: one of them is invalid, and none was stored.
        """

    def close(self) -> None:  # noqa: B027 - not all hold something
        """Release what it holds."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- search and answers

    def search(
        self,
        tenant: str,
        query: str,
        *,
        k_sub: int | None = None,
        k_epi: int | None = None,
        k_sem: int | None = None,
        since: str | None = None,
        until: str | None = None,
        where: Mapping[str, Any] | None = None,
        explain: bool = False,
    ) -> SearchResult:
        """The nearest turns (`k_sub`), episodes (`k_epi`) and facts (`k_sem`).

        The counts default to the settings, then to the tenant's policy. `since`, `until`: ISO 8601, both
        inclusive; a date alone means the whole day. `where`: only turns whose metadata has this value of a
        key, or one of a list of values, and episodes and facts that rest on such a turn. An object of
        operators instead of a value, all of which must hold: `$eq`, `$ne`, `$gt`, `$gte`, `$lt`, `$lte`,
        `$in`, `$prefix`. Numbers compare with numbers, and text with text. A turn without the key passes
        `$ne` alone. `explain`: with the parts of each score, and what was
        left out.
        """
        return self.call(q.SearchQuery(tenant, query, k_sub, k_epi, k_sem, since, until, where, explain))

    def answer(
        self, tenant: str, question: str, *, as_of: str | None = None, mode: AnswerMode | None = None
    ) -> Answer:
        """Answer a question from memory with the LLM, and meter the cost as a query.

        `as_of`: when the question is asked. `mode`: None for the setting `answer_mode`. NoLLM; InputError:
        the tenant's policy has no such mode; BadReply, ServerRefused.
        """
        return self.call(q.AnswerQuery(tenant, question, as_of, mode))

    # ---- reading

    def get(self, memory_id: str, *, tenant: str | None = None) -> Report:
        """One turn, episode or fact as it stands."""
        return self.call(q.GetQuery(memory_id, tenant))

    def history(self, memory_id: str, *, tenant: str | None = None) -> Reports:
        """Every version of one memory, deletions included; nothing of a deleted turn."""
        return self.call(q.HistoryQuery(memory_id, tenant))

    def get_all(self, tenant: str) -> Memories:
        """All current episodes and facts, in order of birth."""
        return self.call(q.MemoriesQuery(tenant))

    def list(
        self,
        tenant: str,
        *,
        kinds: Collection[str] | None = None,
        since: str | None = None,
        until: str | None = None,
        where: Mapping[str, Any] | None = None,
        limit: int = 100,
        after: str | None = None,
    ) -> Page:
        """A page of the tenant's turns, episodes and facts (`kinds`; None: all) in order of birth.

        The filters, as those of `search`, are applied before the limit. What no search may find is not
        listed. `after`: the cursor of the page before. InputError.
        """
        return self.call(q.ListQuery(tenant, kinds, since, until, where, limit, after))

    def export_page(
        self, tenant: str, *, after: str | None = None, limit: int = 1000, vectors: bool = False
    ) -> Page:
        """Some of the tenant's export: at most `limit` records and a few megabytes. ExportBroken.

        See Reports.export_page in engine/api/views/reports.py.
        """
        return self.call(q.ExportQuery(tenant, after, limit, vectors))

    def explain(self, tenant: str, *, limit: int | None = None, after_seq: int = -1) -> Reports:
        """What was decided for each turn, on what grounds, and what it made.

        The first `limit` turns after record `after_seq`; None: all. See Reports.explain.
        """
        return self.call(q.ExplainQuery(tenant, limit, after_seq))

    def turns_by_key(self, tenant: str, keys: Collection[str]) -> dict[str, Report]:
        """The stored turns with these dedupe keys, by key. Empty for an unknown tenant."""
        return self.call(q.TurnsByKeyQuery(tenant, keys))

    def policy(self, tenant: str) -> Report:
        """Which policy makes the tenant's memories, and how far a change of it has come."""
        return self.call(q.PolicyQuery(tenant))

    def tenant_stats(self, tenant: str) -> dict[str, int]:
        """Counts and construction tokens of one tenant, by the names of `stats`."""
        return self.call(q.TenantStatsQuery(tenant))

    def usage(self, tenant: str | None = None) -> UsageReport:
        """LLM calls and tokens by operation, of one tenant or of all."""
        return self.call(q.UsageQuery() if tenant is None else q.TenantUsageQuery(tenant))

    def stats(self) -> dict[str, int]:
        """Counts over all tenants.

        In a cluster each shard counts at a moment of its own: a tenant that moves may be missing, or
        counted twice.
        """
        return self.call(q.StatsQuery())

    def tenant_names(self, prefix: str = "", *, limit: int = 1000, after: str = "") -> Names:
        """The first names, sorted, that begin with `prefix` and come after `after`. InputError.

        In a cluster a tenant that moves may be missing.
        """
        return self.call(q.TenantsQuery(prefix, limit, after))

    # ---- changes

    def update(self, memory_id: str, text: Wording, *, tenant: str | None = None) -> Updated:
        """Reword a memory.

        An episode or fact has a new version once the cursor reaches the record; until then no search finds
        it. Its sources and its history stay. A turn is deleted, and another one with its session, time and
        metadata is added at the log's end, in one commit: durable and searchable on return. `text` becomes
        its one message; give messages, as to `add`, for an exchange. InputError; ArenaFull for a turn;
        PolicyConflict for an episode or fact, see `set_policy`.
        """
        return self.call(q.UpdateCommand(memory_id, tenant, text))

    def delete(self, memory_id: str, *, tenant: str | None = None) -> str:
        """Delete a turn, an episode or a fact by id; returns its kind.

        A turn's text and vector are gone from every answer at once; what rests on it is remade when the
        cursor reaches the record. An episode or fact goes alone, out of search at once; its history stays.
        PolicyConflict for one of these, see `set_policy`.
        """
        return self.call(q.DeleteCommand(memory_id, tenant))

    def flush(self, tenant: str) -> bool:
        """Wait until all earlier records of the tenant are decided or parked. False: blocked."""
        return self.call(q.FlushCommand(tenant))

    def erase(self, tenant: str, *, now: bool = False) -> Certificate | None:
        """Erase a tenant: gone from every answer at once; the bytes go with the next purge.

        With `now`, purges and returns the certificate, also of a tenant that was erased before and not
        purged. NotCertified: the tenant's last bytes are still at the shard that it came from.
        """
        return self.call(q.EraseCommand(tenant, now))

    def import_(self, tenant: str, records: Sequence[Report]) -> ImportReport:
        """Import an export (engine/api/transfer/export.py) as the memories of `tenant`, in one commit.

        InputError for an invalid record, TenantExists: nothing is stored. ImportCancelled: the tenant was
        erased meanwhile.
        """
        return self.call(q.ImportCommand(tenant, records))

    def set_policy(self, tenant: str, policy: str, *, drop_edits: bool = False) -> Report:
        """Have `policy` make the tenant's memories, from a record of its log on; durable on return.

        A tenant that has no log yet begins under it. Otherwise the log is read again from its start into a
        new generation of memories. Searches see the former one until the new one has caught up; its history
        stays. A newer change replaces one that is under way. No effect where the tenant has the policy, or
        is to have it. Returns as `policy`. InputError; PolicyConflict, unless `drop_edits`: users have
        reworded or deleted memories; ArenaFull: the tenant cannot be loaded now.
        """
        return self.call(q.SetPolicyCommand(tenant, policy, drop_edits))

    # ---- the whole store

    def replay_jobs(self) -> int:
        """Log a replay of every parked job; returns their number. Drain to have them run."""
        return self.call(q.ReplayJobsCommand())

    def drain(self) -> bool:
        """Wait until everything is decided. False: something is blocked, or an LLM server is lost."""
        return self.call(q.DrainCommand())

    def purge(self) -> dict[str, Certificate]:
        """Remove the bytes of all erased tenants and deleted turns; certificates by tenant key."""
        return self.call(q.PurgeCommand())
