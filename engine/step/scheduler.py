"""The step loop: admit, hear replies, decide, commit, ask. It owns every queue of the engine.

A tenant's log is decided in order, at most one LLM job at a time; across tenants order is free, so
the effects of all tenants are gathered by kind and each kind runs as one batch.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

import orjson

from undertow.engine.base.model import Decision, Memory, Turn, UndertowError, Usage
from undertow.engine.base.trace import Trace
from undertow.engine.base.trace_context import cause, caused_by
from undertow.engine.llm.client import BadReply, Completion, Completions, ServerRefused
from undertow.engine.policies.base import Complete, Decide, Effect, Embed, Nearest, PolicyResult, ReadGate
from undertow.engine.policies.registry import Policies
from undertow.engine.step.admission import Admission, Inbox, Receipt, Ticket
from undertow.engine.step.batch_size import BatchSizer
from undertow.engine.step.dispatch import begin, decision_body, job_id
from undertow.engine.step.effects import EffectReader
from undertow.engine.step.lag import LagTracker
from undertow.engine.storage.journal import Journal, Row
from undertow.engine.storage.row_codec import (
    Control,
    ControlKind,
    LlmJob,
    control_row,
    job_row,
    memory_of,
    memory_row,
    outdated_updates,
    usage_to_json,
)
from undertow.engine.tenants.generations import BEFORE_LOG
from undertow.engine.tenants.registry import ArenaFull
from undertow.engine.tenants.tenant import Tenant
from undertow.prompts.builders import QUERY_OPERATIONS

# Gate queries of one step: enough to fill the kernel, few enough that a step stays short.
LOOKAHEAD_PER_STEP = 8_192


class TenantFault(UndertowError):
    """Deciding a record of one tenant failed in a way that nobody foresaw."""

    def __init__(self, tenant: str, seq: int, reason: str) -> None:
        super().__init__(tenant, seq, reason)
        self.tenant, self.seq, self.reason = tenant, seq, reason

    def __str__(self) -> str:
        return (
            f"deciding record {self.seq} of tenant {self.tenant!r} failed: {self.reason}. Please report it."
        )


@dataclass(slots=True)
class Running:
    """A policy coroutine at work on one record of one tenant's log. `cause`: the request it came with."""

    tenant: Tenant
    seq: int
    steps: Decide
    operation: str = ""
    usage: dict[str, Usage] = field(default_factory=dict)
    model: str | None = None
    call: Future[Completion] | None = None
    cause: str | None = None


@dataclass(slots=True)
class StepReport:
    """What one step did: how many turns it stored, or knew already; what it decided, by kind."""

    admitted: int = 0
    duplicates: int = 0
    decisions: Counter[Decision] = field(default_factory=Counter)
    made: list[Memory] = field(default_factory=list)

    @property
    def decided(self) -> int:
        return self.decisions.total()


class Scheduler:
    """Drives all tenants of one shard. Not thread-safe: one thread steps."""

    def __init__(
        self,
        journal: Journal,
        admission: Admission,
        readings: EffectReader,
        policies: Policies,
        llm: Completions | None,
        *,
        queue_turns: int,
        batch_sizer: BatchSizer,
        lookahead_turns: int,
        llm_in_flight: int,
        token_budget: int | None,
        trace: Trace,
    ) -> None:
        self._journal = journal
        self._admission = admission
        self._readings = readings
        self._policies = policies
        self._llm = llm
        self._batch_sizer = batch_sizer
        self._lookahead_turns = lookahead_turns
        self._llm_in_flight = llm_in_flight
        self._token_budget = token_budget
        self._trace = trace
        self.inbox = Inbox(queue_turns)
        self.lag_tracker = LagTracker()
        self.blocked: dict[str, str] = {}
        self.refused: ServerRefused | None = None
        self._ready: OrderedDict[str, Tenant] = OrderedDict()
        self._running: dict[str, Running] = {}
        self._to_ask: list[tuple[Running, Complete]] = []
        self._replies: SimpleQueue[Running] = SimpleQueue()
        self._rows: list[Row] = []
        self._notes: list[Row] = []
        # after the arena was full: how few tenants may be at work when admission tries again
        self._admit_at: int | None = None
        # within a step, once turns are admitted: what is undecided may be in use though not `at_work`
        self.deciding = False
        # whom to tell of a tenant whose live state is to go before all of its log is decided
        self.put_out: Callable[[Tenant], None] | None = None
        # Memories remade without a deleted turn: their older versions still hold its words.
        self._shed: dict[str, int] = {}  # id -> first version without it
        # tenants, by key, whose updates of such memories have lost their words
        self._redacted: set[str] = set()
        self._report = StepReport()

    # ---- what the outside sees

    @property
    def idle(self) -> bool:
        """Nothing left that a step could do without new turns, a server, or another budget."""
        return not (len(self.inbox) or self._ready or self._running)

    @property
    def running_count(self) -> int:
        return len(self._running)

    @property
    def lacks_room(self) -> bool:
        """Turns wait that the arena had no room for: what comes free is for them."""
        return len(self.inbox) > 0 and self._admit_at is not None

    @property
    def holds_back(self) -> bool:
        """Turns wait to be stored until tenants at work, who fill the arena, have come to rest."""
        return len(self.inbox) > 0 and self._admit_at is not None and self._at_work > self._admit_at

    @property
    def _at_work(self) -> int:
        return len(self._ready) + len(self._running)

    def tenants_at_work(self) -> list[Tenant]:
        """Those whose live state must stay."""
        return [*self._ready.values(), *(running.tenant for running in self._running.values())]

    def wake(self, tenant: Tenant) -> None:
        """Have the tenant's undecided records decided."""
        if tenant.cursor >= tenant.next_seq:
            return
        self.lag_tracker.note(tenant.name, tenant.next_seq - 1, cause())
        if tenant.name not in self._running and tenant.name not in self.blocked:
            self._ready[tenant.name] = tenant

    def begin_log(self, tenant: Tenant, control: Control) -> None:
        """Store what a tenant begins with, beside the thresholds in force; its log has nothing yet."""
        rows = self._admission.settle_thresholds(tenant)
        tenant.add_control(control)
        self._append([*rows, control_row(tenant.name, tenant.key, control)])

    def log(self, tenant: Tenant, records: Iterable[tuple[ControlKind, Mapping[str, Any]]]) -> None:
        """Append control records (kind and body) to a tenant's log, in one commit before this returns."""
        controls = [Control(kind, seq, body) for seq, (kind, body) in enumerate(records, tenant.next_seq)]
        for control in controls:
            tenant.add_control(control)
        self._append([control_row(tenant.name, tenant.key, control) for control in controls])
        self.wake(tenant)

    def replace(self, tenant: Tenant, deletion: Mapping[str, Any], turn: Turn) -> Receipt:
        """Append a turn's deletion and the turn that takes its place to the log, in one commit. ArenaFull."""
        rows, receipt = self._admission.replace(tenant, deletion, turn)
        self._append(rows)
        self.wake(tenant)
        return receipt

    def _append(self, rows: Sequence[Row]) -> None:
        with self._trace.span("commit", rows=len(rows)):
            self._journal.append(rows)

    def note(self, row: Row) -> None:
        """Have a row of the shard's own committed together with the last of the turns that are queued."""
        self._notes.append(row)

    def at_work(self, name: str) -> bool:
        """Whether the tenant's records are being decided; then its live state must stay."""
        return name in self._running or name in self._ready

    def forget(self, name: str) -> None:
        """Drop all work of a tenant that is being erased; late replies will find no one."""
        self.inbox.drop(name)
        if running := self._drop(name):
            running.steps.close()

    def dismiss(self, names: Sequence[str], records: Sequence[Row]) -> list[Ticket]:
        """Stop all work of tenants, and commit `records`, the last of their logs here.

        What their jobs have cost is metered; what those have made is made again elsewhere. Returns the
        tickets of turns that were not stored yet.
        """
        tickets = [ticket for name in names for ticket in self.inbox.drop(name)]
        for name in names:
            if running := self._drop(name):
                self._abandon(running)
        self._rows += records
        self._commit()
        return tickets

    def _drop(self, name: str) -> Running | None:
        """Take a tenant out of every queue; the job that it had under way, which the caller closes."""
        self._ready.pop(name, None)
        self.blocked.pop(name, None)
        self.lag_tracker.forget(name)
        running = self._running.pop(name, None)
        if running is not None and running.call is not None and self._llm is not None:
            self._llm.cancel(running.call)
        return running

    def block(self, name: str, why: str) -> None:
        """Decide nothing of a tenant until the engine is opened again; its turns are still stored."""
        self._ready.pop(name, None)
        self.blocked[name] = why

    def put_off(self) -> None:
        """Abandon what is ready or running, to be taken up again from the log: others need the room."""
        at_work = self.tenants_at_work()
        for tenant in at_work:
            if running := self._drop(tenant.name):
                self._abandon(running)
        self._commit()
        for tenant in at_work:
            self._put_out(tenant)

    def stop(self) -> None:
        """Before closing: abandon the jobs under way and commit what they have cost."""
        for running in self._running.values():
            self._abandon(running)
        self._running.clear()
        self._commit()

    def step(self, wait_s: float = 0.0) -> StepReport:
        """One round. Waits up to `wait_s` for a reply when there is nothing else to do.

        ArenaFull: the turns that wait do not fit into the arena though nobody is at work; they are dropped.
        JournalError: nothing of this step is stored or acknowledged; the engine must be reopened.
        """
        self._report = StepReport()
        tickets, receipts = self._admit()
        if not len(self.inbox):
            self._rows += self._notes
            self._notes.clear()
        self.deciding = True
        more = len(self.inbox) > 0 and not self.holds_back
        self._hear(0.0 if tickets or more or self._ready else wait_s)
        self._decide()
        self._commit()
        for ticket, receipt in zip(tickets, receipts, strict=True):
            ticket.receipt = receipt
        self._ask()
        self.deciding = False
        return self._report

    # ---- the phases of a step

    def _commit(self) -> None:
        with self._trace.span("commit", rows=len(self._rows)):
            rows, self._rows = self._rows, []
            self._journal.append(rows)
            if self._shed:
                shed, self._shed = self._shed, {}
                versions = self._journal.read(ids=list(shed), kinds=["episode", "fact"], vectors=False)
                older = [row.lsn for row in versions if row.id and memory_of(row).version < shed[row.id]]
                self._journal.delete_rows([*older, *self._outdated_updates()])

    def _outdated_updates(self) -> list[int]:
        """Lsns of the records whose copies without words have been committed."""
        keys, self._redacted = self._redacted, set()
        if not keys:
            return []
        return outdated_updates(
            self._journal.read(tenant_keys=sorted(keys), kinds=["control"], vectors=False)
        )

    def _admit(self) -> tuple[list[Ticket], list[Receipt]]:
        """A batch from the queue, if it holds any and the arena has room for it."""
        if not len(self.inbox):
            self._admit_at = None  # those who waited may have been erased or moved away
        if not len(self.inbox) or self.holds_back:
            return [], []
        tickets = self.inbox.take(self._batch_sizer.turns)
        try:
            with self._batch_sizer.measured() as admitted, self._trace.span("admit", turns=len(tickets)):
                rows, receipts, touched = self._admission.admit(tickets)
                admitted.fresh_turns = sum(not receipt.duplicate for receipt in receipts)
                self._trace.link(ticket.cause for ticket in tickets)
        except ArenaFull:
            if not self._at_work:
                self._refuse()
                raise
            # half as many: few attempts, and room for more than a turn or two
            self._admit_at = self._at_work // 2
            self.inbox.put_back(tickets)
            return [], []
        self._admit_at = None
        self._rows += rows
        self._report.admitted = admitted.fresh_turns
        self._report.duplicates = len(receipts) - admitted.fresh_turns
        self._note_arrivals(tickets, receipts)
        for tenant in touched:
            self.wake(tenant)
        return tickets, receipts

    def _note_arrivals(self, tickets: Sequence[Ticket], receipts: Sequence[Receipt]) -> None:
        """Where some came with requests that are traced; else `wake` does it, tenant by tenant."""
        if any(ticket.cause is not None for ticket in tickets):
            for ticket, receipt in zip(tickets, receipts, strict=True):
                if receipt.seq is not None:
                    self.lag_tracker.note(receipt.tenant, receipt.seq, ticket.cause)

    def _refuse(self) -> None:
        """Drop all that waits: a later turn of a tenant must not be stored without an earlier one."""
        self._admit_at = None
        self.inbox.clear()
        self._notes.clear()

    def _hear(self, wait_s: float) -> None:
        """Resume the jobs whose replies have come."""
        arrived: list[tuple[Running, Any]] = []
        try:
            running = self._replies.get(timeout=wait_s) if wait_s else self._replies.get_nowait()
            while True:
                if (effect := self._reply_to(running)) is not None:
                    arrived.append((running, effect))
                running = self._replies.get_nowait()
        except Empty:
            pass
        if arrived:
            with self._trace.span("resume", jobs=len(arrived)):
                self._trace.link(running.cause for running, _ in arrived)
                self._run(arrived)

    def _decide(self) -> None:
        """Settle each ready tenant's records up to the first that needs more than the gate."""
        if not self._ready or (len(self.inbox) and self._server_is_full and not self.holds_back):
            return
        with self._trace.span("decide", tenants=len(self._ready)):
            ahead = self._look_ahead()
            queries = [(r.tenant, effect.seq) for r, effect in ahead if isinstance(effect, ReadGate)]
            with self._trace.span("gate", queries=len(queries)):
                readings = iter(self._readings.gate(queries))
            stopped: set[str] = set()
            started: list[tuple[Running, Effect]] = []
            for running, effect in ahead:
                answer = next(readings) if isinstance(effect, ReadGate) else None
                if running.tenant.name in stopped:
                    running.steps.close()  # begun ahead of a record that changes what it sees
                    continue
                follow_up = self._resume(running, answer) if isinstance(effect, ReadGate) else effect
                if isinstance(follow_up, PolicyResult):
                    self._settle(running, follow_up)
                    if follow_up.drafts or follow_up.settled or follow_up.revived:
                        stopped.add(running.tenant.name)  # those behind it were read too early
                else:
                    stopped.add(running.tenant.name)
                    started.append((running, follow_up))
            self._start(started)

    @property
    def _server_is_full(self) -> bool:
        """While turns queue up to be stored, deciding more of them can wait for the LLM to catch up."""
        return self._llm is None or len(self._running) >= 2 * self._llm_in_flight

    def _look_ahead(self) -> list[tuple[Running, Effect | PolicyResult]]:
        """Begin the next records of the ready tenants: an equal share each, in their order."""
        begun: list[tuple[Running, Effect | PolicyResult]] = []
        budget = max(len(self._ready), LOOKAHEAD_PER_STEP)
        share = min(self._lookahead_turns, budget // len(self._ready))
        while self._ready:
            _, tenant = self._ready.popitem(last=False)
            for seq in tenant.upcoming(share):
                running = Running(tenant, seq, begin(self._policies, tenant, seq))
                effect = self._resume(running, None)
                begun.append((running, effect))
                if not isinstance(effect, ReadGate | PolicyResult) or isinstance(
                    tenant.records[seq], Control
                ):
                    break  # those behind a control record may see something else for it
        return begun

    def _start(self, started: Sequence[tuple[Running, Effect]]) -> None:
        for running, _ in started:
            self._running[running.tenant.name] = running
            self._ready.pop(running.tenant.name, None)  # settling the records before it has woken it
        self._run(started)

    def _run(self, pending: Sequence[tuple[Running, Effect]]) -> None:
        """Run effects, each kind as one batch, until every job waits for the LLM or is done."""
        while pending:
            gates = [(r, e) for r, e in pending if isinstance(e, ReadGate)]
            embeds = [(r, e) for r, e in pending if isinstance(e, Embed)]
            nearest = [(r, e) for r, e in pending if isinstance(e, Nearest)]
            for running, effect in pending:
                if isinstance(effect, Complete):
                    self._queue_call(running, effect)
            done = [
                *self._batch("gate", self._readings.gate, [(r, (r.tenant, e.seq)) for r, e in gates]),
                *self._batch("embed", self._readings.embed, [(r, (r.tenant, e.texts)) for r, e in embeds]),
                *self._batch("nearest", self._readings.nearest, [(r, (r.tenant, e)) for r, e in nearest]),
            ]
            pending = [(r, e) for r, value in done if (e := self._next(r, value)) is not None]

    def _batch(
        self, name: str, read: Callable[[list[Any]], Sequence[Any]], asks: Sequence[tuple[Running, Any]]
    ) -> Iterable[tuple[Running, Any]]:
        """One kind of effect for all that ask, as one phase of the trace: each with its answer."""
        if not asks:
            return ()
        with self._trace.span(name, asks=len(asks)):
            return zip((r for r, _ in asks), read([ask for _, ask in asks]), strict=True)

    def _resume(self, running: Running, value: Any) -> Effect | PolicyResult:
        """Hand a result to the coroutine; its next effect, or what it has decided."""
        try:
            if isinstance(value, BadReply):
                return running.steps.throw(value)
            return running.steps.send(value)
        except StopIteration as stop:
            outcome: PolicyResult = stop.value
            return outcome
        except Exception as error:
            raise TenantFault(running.tenant.name, running.seq, repr(error)) from error

    def _next(self, running: Running, value: Any) -> Effect | None:
        """Like `_resume`, and settles what was decided."""
        step = self._resume(running, value)
        if isinstance(step, PolicyResult):
            self._settle(running, step)
            return None
        return step

    def _settle(self, running: Running, outcome: PolicyResult) -> None:
        """Turn an outcome into rows and state: memories, marks and cursor in one commit.

        Where the arena has no room for the memories, they are in the journal alone: the tenant's live
        state goes, and is loaded with them when it is wanted again.
        """
        tenant, seq = running.tenant, running.seq
        if tenant.begins_reread(seq):
            self._begin_reread(running, outcome)
            return
        made = [(_signed(running, d.memory), d.vector) for d in outcome.drafts]
        made += [(d.memory, None) for d in outcome.shed]
        body = decision_body(outcome, running.usage)
        self._rows += [memory_row(memory, tenant.key, vector) for memory, vector in made]
        self._rows.append(Row("decision", tenant.name, tenant.key, seq, orjson.dumps(body)))
        self._report.made += [memory for memory, _ in made]
        self._report.decisions[outcome.decision] += 1
        if stays := not made or tenant.make_place([memory for memory, _ in made]):
            for memory, vector in made:
                tenant.set_memory(memory, vector)
            tenant.add_decision(seq, body)
        self._settle_jobs(running, outcome)
        self._running.pop(tenant.name, None)
        self.lag_tracker.decided(tenant.name, seq + 1)
        if stays:
            self.wake(tenant)
        else:
            tenant.cursor = seq + 1
            self._put_out(tenant)

    def _begin_reread(self, running: Running, outcome: PolicyResult) -> None:
        """The cursor has come to a change of policy: it goes back to the log's start.

        Jobs that were parked are of no use any more: their turns are decided again.
        """
        tenant, parked = running.tenant, list(running.tenant.jobs.values())
        body = {**decision_body(outcome, running.usage), "reread": running.seq}
        self._rows.append(Row("decision", tenant.name, tenant.key, BEFORE_LOG, orjson.dumps(body)))
        tenant.add_decision(BEFORE_LOG, body)
        for job in parked:
            self._put_job(tenant, replace(job, state="replayed"))
        self._report.decisions[outcome.decision] += 1
        self._running.pop(tenant.name, None)
        self.wake(tenant)

    def _put_out(self, tenant: Tenant) -> None:
        self._ready.pop(tenant.name, None)
        if self.put_out is None:
            raise MemoryError(f"the arena has no room for the memories of tenant {tenant.name!r}")
        self.put_out(tenant)

    def _settle_jobs(self, running: Running, outcome: PolicyResult) -> None:
        tenant, seq = running.tenant, running.seq
        record = tenant.records[seq]
        body = record.body if isinstance(record, Control) else {}
        if (job := tenant.jobs.get(body.get("job_id", ""))) is not None:
            self._put_job(tenant, replace(job, state="replayed"))
        if "turn_seq" in body:
            self._shed_words(tenant, seq, [d.memory for d in (*outcome.drafts, *outcome.shed)])
        if outcome.decision is Decision.PARKED:
            self._put_job(
                tenant,
                LlmJob(
                    job_id(tenant, seq),
                    seq,
                    "parked",
                    outcome.operation or "",
                    outcome.cluster,
                    outcome.reason,
                ),
            )

    def _shed_words(self, tenant: Tenant, seq: int, remade: Sequence[Memory]) -> None:
        """What was written of these memories before record `seq` may hold a deleted turn's words: it goes.

        Not what users have written since: the turn was gone by then.
        """
        versions = {memory.id: memory.version for memory in remade}
        self._shed.update(versions)
        for control in tenant.redact_updates(seq, versions.keys()):
            self._rows.append(control_row(tenant.name, tenant.key, control))
            self._redacted.add(tenant.key)

    def _put_job(self, tenant: Tenant, job: LlmJob) -> None:
        tenant.add_job(job)
        self._rows.append(job_row(tenant.name, tenant.key, job))

    # ---- LLM calls

    def _queue_call(self, running: Running, call: Complete) -> None:
        tenant = running.tenant
        operation = call.prompt.operation
        if not running.usage:
            self._put_job(tenant, LlmJob(job_id(tenant, running.seq), running.seq, "pending", operation))
        obstacle = self._obstacle(running)
        if obstacle is not None:
            self._block(running, obstacle)
            return
        running.operation = operation
        running.cause = self.lag_tracker.cause_of(tenant.name, running.seq)
        self._to_ask.append((running, call))

    def _obstacle(self, running: Running) -> str | None:
        if self._llm is None:
            return "no LLM server is set (--llm)"
        meter = running.tenant.meter.items()
        spent = sum(u.prompt_tokens + u.completion_tokens for op, u in meter if op not in QUERY_OPERATIONS)
        if self._token_budget is not None and spent >= self._token_budget:
            return f"its budget of {self._token_budget} tokens is spent; search goes on"
        return None

    def _block(self, running: Running, why: str) -> None:
        """The job stays pending: a later run, or another budget, takes it up from the log."""
        self._abandon(running)
        self._running.pop(running.tenant.name, None)
        self._ready.pop(running.tenant.name, None)
        self.blocked[running.tenant.name] = why

    def _abandon(self, running: Running) -> None:
        """Close a job half-way. What it has cost is metered; what it has made is made again later."""
        running.steps.close()
        if running.usage:
            body = orjson.dumps(usage_to_json(running.usage))
            tenant = running.tenant
            self._rows.append(Row("usage", tenant.name, tenant.key, -1, body))
            for operation, usage in running.usage.items():
                tenant.add_usage(operation, usage)

    def _ask(self) -> None:
        """Send the prompts. The turns they rest on are committed by now."""
        asks, self._to_ask = self._to_ask, []
        if self._llm is None or not asks:
            return
        with self._trace.span("submit", prompts=len(asks)):
            self._trace.link(running.cause for running, _ in asks)
            for running, call in asks:
                if self._running.get(running.tenant.name) is running:
                    with caused_by(running.cause):
                        running.call = self._llm.submit(call.prompt, tenant=running.tenant.name)
                    running.call.add_done_callback(self._on_reply(running))

    def _on_reply(self, running: Running) -> Callable[[Future[Completion]], None]:
        return lambda _: self._replies.put(running)

    def _reply_to(self, running: Running) -> Effect | None:
        """The job's next effect after its reply, or None: it has decided, is gone, or is blocked."""
        call, running.call = running.call, None
        if call is None or call.cancelled() or self._running.get(running.tenant.name) is not running:
            return None
        error = call.exception()
        if isinstance(error, ServerRefused):
            self.refused = error
            self._block(running, str(error))
            return None
        if isinstance(error, BadReply):
            self._meter(running, error.usage)
            return self._next(running, error)
        completion = call.result()
        running.model = completion.model
        self._meter(running, completion.usage)
        return self._next(running, completion.reply)

    def _meter(self, running: Running, usage: Usage) -> None:
        running.usage[running.operation] = running.usage.get(running.operation, Usage()) + usage


def _signed(running: Running, memory: Memory) -> Memory:
    """A memory with what its policy does not know: its generation, and the model that has made it."""
    number = running.tenant.making.number
    model = memory.model if memory.deleted else running.model
    return replace(memory, generation=number, model=model)
