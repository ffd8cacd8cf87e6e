"""What is done to a tenant's log and work between two steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from undertow.engine.base.model import Turn
from undertow.engine.base.results import Receipt
from undertow.engine.base.trace import Trace
from undertow.engine.step import job_ledger
from undertow.engine.step.admission import Admission, Inbox
from undertow.engine.step.decision_queue import DecisionQueue, DecisionRun
from undertow.engine.step.llm_calls import LLMCalls
from undertow.engine.storage.journal import Journal, Row, Rows
from undertow.engine.storage.journal_rows import row_count
from undertow.engine.storage.row_codec import Control, ControlKind, control_row
from undertow.engine.tenants.tenant import Tenant


class BetweenSteps(ABC):
    """A part of Scheduler. It declares what this part needs of the rest."""

    inbox: Inbox
    decisions: DecisionQueue
    llm_calls: LLMCalls
    # Evicts a tenant whose live state must go before its whole log is decided.
    evict: Callable[[Tenant], None] | None
    _journal: Journal
    _admission: Admission
    _rows: list[Rows]
    _trace: Trace

    @abstractmethod
    def commit_step(self) -> None: ...

    def begin_log(self, tenant: Tenant, control: Control) -> None:
        """Commit the first record of an empty log, together with the thresholds in force."""
        rows = self._admission.settle_thresholds(tenant)
        tenant.add_control(control)
        self._append([*rows, control_row(tenant.name, tenant.key, control)])

    def log(self, tenant: Tenant, records: Iterable[tuple[ControlKind, Mapping[str, Any]]]) -> None:
        """Append control records (kind and body) to a tenant's log, in one commit before this returns."""
        controls = [Control(kind, seq, body) for seq, (kind, body) in enumerate(records, tenant.next_seq)]
        for control in controls:
            tenant.add_control(control)
        self._append([control_row(tenant.name, tenant.key, control) for control in controls])
        self.decisions.add(tenant)

    def replace(self, tenant: Tenant, deletion: Mapping[str, Any], turn: Turn) -> Receipt:
        """Append a turn's deletion and the turn that replaces it to the log, in one commit. ArenaFull."""
        rows, receipt = self._admission.replace(tenant, deletion, turn)
        self._append(rows)
        self.decisions.add(tenant)
        return receipt

    def _append(self, rows: Sequence[Rows]) -> None:
        with self._trace.span("commit", rows=row_count(rows)):
            self._journal.append(rows)

    def drop_tenant(self, name: str) -> None:
        """Drop all work of a tenant that is being erased. Late replies are ignored."""
        self.inbox.drop(name)
        if run := self._remove(name):
            run.steps.close()

    def release_tenants(self, names: Sequence[str], records: Sequence[Row]) -> list[str]:
        """Stop all work of tenants that move away, and commit `records`, the last of their logs here.

        The tokens of their running jobs are metered; the other shard runs these jobs again. Returns the
        tenants whose waiting turns were dropped: those are not stored.
        """
        dropped = [name for name in names if self.inbox.drop(name)]
        for name in names:
            if run := self._remove(name):
                self._rows += job_ledger.abandon(run)
        self._rows += records
        self.commit_step()
        return dropped

    def _remove(self, name: str) -> DecisionRun | None:
        """Take a tenant out of every queue. Returns its run, which the caller closes."""
        run = self.decisions.remove(name)
        if run is not None:
            self.llm_calls.cancel(run)
        return run

    def suspend(self) -> None:
        """Abandon all ready and running decisions and evict their tenants, to free memory for others.

        The log still holds the undecided records, so that the decisions begin again later.
        """
        active = self.decisions.active_tenants()
        for tenant in active:
            if run := self._remove(tenant.name):
                self._rows += job_ledger.abandon(run)
        self.commit_step()
        for tenant in active:
            self._evict(tenant)

    def stop(self) -> None:
        """Before closing: abandon the running jobs and commit what they have cost."""
        for run in self.decisions.finish_all():
            self._rows += job_ledger.abandon(run)
        self.commit_step()

    def _evict(self, tenant: Tenant) -> None:
        self.decisions.unready(tenant.name)
        if self.evict is None:
            raise MemoryError(f"the arena has no room for the memories of tenant {tenant.name!r}")
        self.evict(tenant)
