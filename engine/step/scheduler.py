"""The step loop of one shard: admit turns, resume answered jobs, decide records, commit, send prompts.

A tenant's log is decided in order, with at most one LLM job at a time. Tenants are independent, so the
effects of all tenants are gathered by kind and each kind runs as one batch. Each queue has one owner: turns
to be stored `admission.Inbox`, decisions `DecisionQueue`, prompts and replies `LLMCalls`, rows `Scheduler`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import orjson

from undertow.engine.base.model import Decision, Memory
from undertow.engine.base.pacing import Pacing
from undertow.engine.base.trace import Trace
from undertow.engine.encoders.encode_ahead import LEAST_AHEAD
from undertow.engine.encoders.outage import EncoderDown
from undertow.engine.llm.client import BadReply, Completions, ServerRefused
from undertow.engine.policies.base import Complete, Effect, PolicyResult, ReadGate
from undertow.engine.policies.registry import Policies
from undertow.engine.step import job_ledger
from undertow.engine.step.admission import Admission, Admitted, Batch, Inbox
from undertow.engine.step.batch_size import DECIDING_SHARE, BatchSizer, BriefWork
from undertow.engine.step.between_steps import BetweenSteps
from undertow.engine.step.decision_queue import DecisionQueue, DecisionRun
from undertow.engine.step.dispatch import begin, decision_body
from undertow.engine.step.effects import EffectReader, read_by_kind
from undertow.engine.step.llm_calls import LLMCalls
from undertow.engine.step.redaction import Redaction
from undertow.engine.storage.journal import Journal, Row, Rows
from undertow.engine.storage.journal_rows import row_count
from undertow.engine.storage.row_codec import memory_row
from undertow.engine.tenants.generations import BEFORE_LOG
from undertow.engine.tenants.registry import ArenaFull

# Turns that get their vectors in one step, after an outage of the encoder.
AWAITED_AT_A_TIME = 256


@dataclass(slots=True)
class StepReport:
    """What one step did: new and repeated turns, decisions by kind, memories made."""

    admitted: int = 0
    duplicates: int = 0
    decisions: Counter[Decision] = field(default_factory=Counter)
    made: list[Memory] = field(default_factory=list)

    @property
    def stored(self) -> int:
        """Turns that are stored by now, new or not."""
        return self.admitted + self.duplicates

    @property
    def decided(self) -> int:
        return self.decisions.total()


class Scheduler(BetweenSteps):
    """Drives all tenants of one shard. Not thread-safe: one thread steps."""

    def __init__(
        self,
        journal: Journal,
        admission: Admission,
        effects: EffectReader,
        policies: Policies,
        llm: Completions | None,
        *,
        queue_turns: int,
        batch_sizer: BatchSizer,
        lookahead_turns: int,
        encoder_patience_s: float,
        llm_in_flight: int,
        token_budget: int | None,
        trace: Trace,
    ) -> None:
        self._journal = journal
        self._admission = admission
        self._effects = effects
        self._batch_sizer = batch_sizer
        self._while_storing = Pacing(None, burst_s=0.0, share=DECIDING_SHARE)
        self._brief_turns, self._brief_mixed = BriefWork("turns"), BriefWork("turns beside a large call")
        self._brief_records = BriefWork("records")
        self._lookahead_turns = lookahead_turns
        self._encoder_patience_s = encoder_patience_s
        self._trace = trace
        self.inbox = Inbox(queue_turns)
        self.decisions = DecisionQueue(partial(begin, policies))
        # Owned by the queue: the reason why a tenant is blocked, by name.
        self.blocked = self.decisions.blocked
        self.llm_calls = LLMCalls(
            llm, self.decisions, in_flight=llm_in_flight, token_budget=token_budget, trace=trace
        )
        self._redaction = Redaction(journal)
        self._rows: list[Rows] = []
        # What an endpoint could not embed: of decisions, and why; the queue has the turns.
        self._unembedded: list[tuple[DecisionRun, Effect]] = []
        self._encoder_down: EncoderDown | None = None
        # After the arena was full: admission resumes when at most this many tenants are active.
        self._resume_admission_at: int | None = None
        # True within a step once turns are admitted: a tenant may then be in use without being active.
        self.deciding = False
        self.evict = None
        self._report = StepReport()
        # of a step that was begun: what its commit makes durable
        self._stored: tuple[Batch, Admitted] | None = None

    # ---- state

    @property
    def idle(self) -> bool:
        """Whether a step has nothing to do without new turns, an LLM server, or another budget."""
        waits = self.decisions.active_count or self.decisions.retry_is_due
        return not (len(self.inbox) or waits or self.deletes_rows)

    @property
    def running_count(self) -> int:
        return self.decisions.running_count

    @property
    def deletes_rows(self) -> bool:
        """Whether rows are due to be deleted after a commit. They wait while the journal is read beside."""
        return self._redaction.is_due

    @property
    def waits_for_arena(self) -> bool:
        """Whether turns wait for arena memory. Then freed memory is reserved for them."""
        return len(self.inbox) > 0 and self._resume_admission_at is not None

    @property
    def admission_paused(self) -> bool:
        """Whether turns wait until the active tenants, which fill the arena, have been decided."""
        limit = self._resume_admission_at
        return len(self.inbox) > 0 and limit is not None and self.decisions.active_count > limit

    @property
    def encoder_down(self) -> EncoderDown | None:
        """Why turns or decisions wait for an embedding endpoint; None: none does."""
        waits = len(self.inbox) or self._unembedded or self.decisions.awaiting
        return self._encoder_down if waits else None

    @property
    def encoder_lost(self) -> bool:
        """Whether they have waited for longer than our patience."""
        down = self.encoder_down
        return down is not None and down.silent_s > self._encoder_patience_s

    # ---- the step

    def begin_step(self, wait_s: float, *, storing: bool, pacing: Pacing | None) -> None:
        """The part of a step before its commit; see `uncommitted`."""
        self._report = StepReport()
        self._redaction.begin_step()
        self._stored = self._admit(brief=pacing is not None)
        if pacing is None:
            self._encode_next()
        self.deciding = True
        busy = self._report.stored > 0 or (len(self.inbox) > 0 and not self.admission_paused)
        self._resume_replied(0.0 if busy or self.decisions.ready_count else wait_s)
        self._embed_again()
        self._embed_awaited()
        if not storing or self.admission_paused or not self._while_storing.rest_s(""):
            began_s = time.perf_counter()
            self._decide(pacing)
            took_s = time.perf_counter() - began_s
            self._brief_records.note(self._report.decided, took_s)
            if storing:
                self._while_storing.worked("", took_s)

    @property
    def uncommitted(self) -> frozenset[str]:
        """The tenants that have rows to be committed: their state in memory is ahead of the journal."""
        names: set[str] = set()
        for rows in self._rows:
            names.update([rows.tenant] if isinstance(rows, Row) else rows.column("tenant").to_pylist())
        return frozenset(names)

    def end_step(self) -> StepReport:
        """The part of a step after its commit: receipts, and prompts to the LLM."""
        if self._stored is not None:
            batch, new = self._stored
            batch.acknowledge(new)
        self.llm_calls.submit()
        self.deciding = False
        return self._report

    def commit_step(self) -> None:
        """Commit the rows of a step that was begun. Another thread may do it, while searches read."""
        with self._trace.span("commit", rows=row_count(self._rows)):
            rows, self._rows = self._rows, []
            self._journal.append(rows)
            self._redaction.delete_obsolete_rows()

    def _admit(self, *, brief: bool) -> tuple[Batch, Admitted] | None:
        """Store a batch of the inbox, if there is one and the arena has room for it; a small one if `brief`.

        Returns the batch, to be acknowledged once it is committed.
        """
        if self.inbox.is_empty:
            self._resume_admission_at = None  # the waiting tenants may have been erased or moved away
        if self.inbox.is_empty or self.admission_paused:
            return None
        most = self._batch_sizer.step_turns(bulk=not self.inbox.has_tickets)
        mixed = self.inbox.has_blocks
        few = self._brief_mixed if mixed else self._brief_turns
        batch = self.inbox.take(min(most, few.count) if brief else most)
        turns = batch.turns.size
        try:
            began_s, began_cpu_s = time.perf_counter(), time.thread_time()
            with self._trace.span("admit", turns=turns):
                new = self._admission.admit(batch.turns)
                self._trace.link(batch.traceparents)
            took_s = time.perf_counter() - began_s
            self._batch_sizer.note(new.fresh_turns, took_s)
            # CPU time: a busy machine gains nothing from smaller steps. But encoders use other threads.
            few.note(turns, took_s if mixed else max(time.thread_time() - began_cpu_s, took_s / 2))
        except ArenaFull:
            if not self.decisions.active_count:
                self._drop_inbox()
                raise
            # Half as many: few attempts, and room for more than a turn or two.
            self._resume_admission_at = self.decisions.active_count // 2
            self.inbox.put_back(batch)
            return None
        except EncoderDown as down:
            self._encoder_down = down
            self._drop_inbox()
            raise
        self._resume_admission_at = None
        self._encoder_down = new.outage
        self._rows += [*new.rows, *batch.rows]
        self._report.admitted = new.fresh_turns
        self._report.duplicates = turns - new.fresh_turns
        self.decisions.lag_tracker.note_all(batch.turns.tenants, new.seqs, batch.traceparents)
        for tenant in new.tenants:
            self.decisions.add(tenant)
        return batch, new

    def _encode_next(self) -> None:
        """Have the turns of the next step embedded beside what this one still has to do.

        Not where turns were known: those that follow may be, too, and need no vector.
        """
        count = min(self._batch_sizer.step_turns(bulk=not self.inbox.has_tickets), len(self.inbox))
        if count >= LEAST_AHEAD and self._report.admitted and not self._report.duplicates:
            self._admission.encode_ahead(self.inbox.peek(count))

    def _drop_inbox(self) -> None:
        """Drop all waiting turns: a later turn of a tenant must not be stored without an earlier one."""
        self._resume_admission_at = None
        self.inbox.clear()

    def _resume_replied(self, wait_s: float) -> None:
        """Resume the jobs whose replies have arrived."""
        resumed: list[tuple[DecisionRun, Effect]] = []
        for run in self.llm_calls.replied(wait_s):
            if (effect := self._resume_with_reply(run)) is not None:
                resumed.append((run, effect))
        if resumed:
            with self._trace.span("resume", jobs=len(resumed)):
                self._trace.link(run.traceparent for run, _ in resumed)
                self._run(resumed)

    def _resume_with_reply(self, run: DecisionRun) -> Effect | None:
        """The job's next effect. None: it is decided, gone, or blocked."""
        reply = self.llm_calls.take_reply(run)
        if reply is None:
            return None
        if isinstance(reply, ServerRefused):
            self._block(run, str(reply), self.decisions.refuse)
            return None
        if isinstance(reply, BadReply):
            run.add_usage(reply.usage)
            return self._next(run, reply)
        self.decisions.answered()
        run.model = reply.model
        run.add_usage(reply.usage)
        return self._next(run, reply.reply)

    def _decide(self, pacing: Pacing | None) -> None:
        """Decide each ready tenant's records up to the first that needs more than the gate.

        A few in all with `pacing`, and none of those that rest.
        """
        if not self.decisions.ready_count:
            return
        if self.inbox.has_tickets and self.llm_calls.is_saturated and not self.admission_paused:
            return
        with self._trace.span("decide", tenants=self.decisions.ready_count):
            began_s = time.perf_counter()
            records = self._brief_records.most if pacing is None else self._brief_records.count
            resting = None if self.admission_paused else pacing  # else turns of all tenants wait for them
            ahead = self.decisions.begin_ahead(self._lookahead_turns, records, resting)
            queries = [(run.tenant, effect.seq) for run, effect in ahead if isinstance(effect, ReadGate)]
            with self._trace.span("gate", queries=len(queries)):
                readings = iter(self._effects.gate(queries))
            stopped: set[str] = set()
            started: list[tuple[DecisionRun, Effect]] = []
            for run, effect in ahead:
                reading = next(readings) if isinstance(effect, ReadGate) else None
                if run.tenant.name in stopped:
                    run.steps.close()  # begun ahead of a record that changes what it sees
                    continue
                follow_up = run.resume(reading) if isinstance(effect, ReadGate) else effect
                if isinstance(follow_up, PolicyResult):
                    self._settle(run, follow_up)
                    if follow_up.drafts or follow_up.settled or follow_up.revived:
                        stopped.add(run.tenant.name)  # later records were read too early
                else:
                    stopped.add(run.tenant.name)
                    started.append((run, follow_up))
            self.decisions.start(run for run, _ in started)
            self._run(started)
            if pacing is not None:
                took_s = time.perf_counter() - began_s
                for run, _ in ahead:
                    pacing.worked(run.tenant.name, took_s / len(ahead))

    def _run(self, pending: Sequence[tuple[DecisionRun, Effect]]) -> None:
        """Run effects, each kind as one batch, until every job waits for the LLM or is decided."""
        while pending:
            for run, effect in pending:
                if isinstance(effect, Complete):
                    self._enqueue_call(run, effect)
            try:
                read = read_by_kind(self._effects, self._trace, pending)
            except EncoderDown as down:
                self._encoder_down = down
                self._unembedded += [(run, e) for run, e in pending if not isinstance(e, Complete)]
                return
            pending = [(run, e) for run, value in read if (e := self._next(run, value)) is not None]

    def _embed_again(self) -> None:
        """Go on with decisions that an endpoint has held up, but for those of tenants that have left."""
        held, self._unembedded = self._unembedded, []
        if held:
            self._encoder_down = None
        self._run([(run, effect) for run, effect in held if self.decisions.is_running(run)])

    def _embed_awaited(self) -> None:
        """Make vectors of turns that were stored without."""
        try:
            if turns := self.decisions.awaited(AWAITED_AT_A_TIME):
                self._rows += self._admission.embed_awaited(turns)
                self._encoder_down = None
        except EncoderDown as down:
            self._encoder_down = down
        self.decisions.wake()

    def _next(self, run: DecisionRun, value: Any) -> Effect | None:
        """Resume a run. Returns its next effect, or settles its decision."""
        effect = run.resume(value)
        if isinstance(effect, PolicyResult):
            self._settle(run, effect)
            return None
        return effect

    def _enqueue_call(self, run: DecisionRun, call: Complete) -> None:
        if not run.usage:
            self._rows += job_ledger.record_pending(run, call.prompt.operation)
        if (obstacle := self.llm_calls.obstacle(run)) is not None:
            self._block(run, obstacle, self.decisions.block)
            return
        self.llm_calls.enqueue(run, call)

    def _block(self, run: DecisionRun, reason: str, block: Callable[[str, str], None]) -> None:
        """Block the tenant. Its job stays pending: a later try, engine or budget decides it."""
        self._rows += job_ledger.abandon(run)
        self.decisions.finish(run)
        block(run.tenant.name, reason)

    # ---- outcomes

    def _settle(self, run: DecisionRun, outcome: PolicyResult) -> None:
        """Turn an outcome into rows and state: memories, flags and cursor in one commit.

        If the arena has no room for the memories, only the journal gets them: the tenant is evicted, and
        loaded with them when it is needed again.
        """
        tenant, seq = run.tenant, run.seq
        if tenant.begins_reread(seq):
            self._begin_reread(run, outcome)
            return
        made = [(_signed(run, d.memory), d.vector) for d in outcome.drafts]
        made += [(d.memory, None) for d in outcome.earlier_deletions]
        body = decision_body(outcome, run.usage)
        self._rows += [memory_row(memory, tenant.key, vector) for memory, vector in made]
        self._rows.append(Row("decision", tenant.name, tenant.key, seq, orjson.dumps(body)))
        self._report.made += [memory for memory, _ in made]
        self._report.decisions[outcome.decision] += 1
        if fits := not made or tenant.reserve_rows([memory for memory, _ in made]):
            for memory, vector in made:
                tenant.set_memory(memory, vector)
            tenant.add_decision(seq, body)
        self._rows += self._job_rows(run, outcome)
        self.decisions.finish(run)
        self.decisions.lag_tracker.decided(tenant.name, seq + 1)
        if fits:
            self.decisions.add(tenant)
        else:
            tenant.cursor = seq + 1
            self._evict(tenant)

    def _job_rows(self, run: DecisionRun, outcome: PolicyResult) -> list[Row]:
        """What a decision changes in the job ledger, and what a turn's deletion redacts."""
        control = run.tenant.control(run.seq)
        body = {} if control is None else control.body
        rows = job_ledger.record_replayed(run.tenant, body.get("job_id", ""))
        if "turn_seq" in body:
            remade = [d.memory for d in (*outcome.drafts, *outcome.earlier_deletions)]
            rows += self._redaction.redact(run.tenant, run.seq, remade)
        return [*rows, *job_ledger.record_parked(run, outcome)]

    def _begin_reread(self, run: DecisionRun, outcome: PolicyResult) -> None:
        """The cursor has reached a change of policy: it returns to the start of the log."""
        tenant, jobs = run.tenant, list(run.tenant.jobs.values())
        body = {**decision_body(outcome, run.usage), "reread": run.seq}
        self._rows.append(Row("decision", tenant.name, tenant.key, BEFORE_LOG, orjson.dumps(body)))
        tenant.add_decision(BEFORE_LOG, body)
        self._rows += job_ledger.close_jobs(tenant, jobs)
        self._report.decisions[outcome.decision] += 1
        self.decisions.finish(run)
        self.decisions.add(tenant)


def _signed(run: DecisionRun, memory: Memory) -> Memory:
    """The memory with the generation and the model, which its policy does not know."""
    model = memory.model if memory.deleted else run.model
    return replace(memory, generation=run.tenant.making.number, model=model)
