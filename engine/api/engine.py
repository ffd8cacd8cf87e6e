"""The engine of one shard: the public calls, thin over the scheduler, the journal and the index."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from undertow.engine.api.answer_calls import AnswerCalls
from undertow.engine.api.edit_calls import EditCalls
from undertow.engine.api.erasure import bury, left_behind, purge
from undertow.engine.api.message_turns import turns_of
from undertow.engine.api.search_calls import WAIT_FOR_REPLY_S as WAIT_FOR_REPLY_S
from undertow.engine.api.table_calls import TableCalls
from undertow.engine.api.tenant_calls import TenantCalls
from undertow.engine.api.views.listing import names_page
from undertow.engine.api.views.reports import Reports
from undertow.engine.api.views.stats import store_stats, store_usage, tenant_stats
from undertow.engine.base import queries as q
from undertow.engine.base.config import Settings
from undertow.engine.base.memory_api import MemoryApi
from undertow.engine.base.model import Turn, UndertowError
from undertow.engine.base.pacing import Pacing
from undertow.engine.base.results import Certificate, Receipt
from undertow.engine.base.trace import Trace
from undertow.engine.encoders.base import Encoder, Fingerprint
from undertow.engine.encoders.embedding_cache import EmbeddingCache
from undertow.engine.encoders.encode_ahead import EncodeAhead
from undertow.engine.encoders.outage import EncoderDown
from undertow.engine.llm.client import LLMClient, OpenAILLM
from undertow.engine.policies.base import PromptBudget, Thresholds
from undertow.engine.policies.registry import Policies
from undertow.engine.search.ranking import Ranker
from undertow.engine.search.rerank import make_reranker
from undertow.engine.step.admission import Admission
from undertow.engine.step.answer_feedback import FEEDBACK_PER_STEP, FeedbackQueue
from undertow.engine.step.batch_size import MOST_TURNS, BatchSizer
from undertow.engine.step.effects import EffectReader
from undertow.engine.step.eviction import ArenaResidency, arena_of
from undertow.engine.step.lag import Lag
from undertow.engine.step.scheduler import Scheduler, StepReport
from undertow.engine.storage.journal import Journal, JournalError
from undertow.engine.storage.location import Location
from undertow.engine.storage.parked_turns import forget as forget_parked
from undertow.engine.storage.row_codec import Control, ControlKind, control_row
from undertow.engine.storage.store_info import StoreError
from undertow.engine.tenants.registry import ArenaFull, TenantRegistry
from undertow.engine.tenants.tenant import Tenant
from undertow.kernels.device import nvtx_ranges
from undertow.kernels.gate.factory import make_gate


@dataclass(slots=True)
class _Failing:
    """Around work in memory, which may be ahead of the journal after other errors: only reopening helps."""

    engine: Engine

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, ArenaFull | EncoderDown):
            self.engine._failure = error


class Engine(MemoryApi, EditCalls, AnswerCalls, TableCalls, TenantCalls):
    """Many tenants' memories in one store. Use as a context manager, from one thread.

    Opening makes it the store's one writer, unless `writable=False`, where only reading calls work.
    `takeover`: a former writer that may still be alive is fenced off; else its lock refuses this one.
    `life`: the shard's incarnation, for shards that restart themselves. `hash_key`: for a store that does not
    exist yet. See Journal.open and Journal.create.
    """

    def __init__(
        self,
        store: Location | Path | str,
        settings: Settings,
        encoder: Encoder,
        *,
        llm: LLMClient | None = None,
        writable: bool = True,
        takeover: bool = False,
        life: str = "",
        hash_key: str | None = None,
        trace: Trace | None = None,
    ) -> None:
        self.settings = settings
        self.trace = trace or Trace()
        self.trace.use_ranges(nvtx_ranges())
        self.warnings: list[str] = []
        self._failure: BaseException | None = None
        self._failing = _Failing(self)
        self._budget = PromptBudget(settings.context_tokens, settings.reply_tokens)
        plain = encoder.fingerprint
        self._fingerprint = plain.with_timestamps() if settings.embed_timestamp else plain
        self.arena = arena_of(settings, encoder.dim)
        try:
            if writable:
                Journal.create(
                    store, encoder.dim, asdict(self._fingerprint), hash_key=hash_key, policy=settings.policy
                )
            self.journal = Journal.open(
                store, writable=writable, takeover=takeover, owner=life, durability=settings.durability
            )
            self._set_up(encoder, llm)
        except BaseException:
            self.arena.close()
            raise

    def _set_up(self, encoder: Encoder, llm: LLMClient | None) -> None:
        """Build everything that needs the open journal."""
        try:
            self._check_encoder()
            settings = self.settings = self._with_policy()
            self._policies = Policies(settings)
            self.tenants = TenantRegistry(self.journal, self.arena)
            self._reports = Reports(self.journal, self.tenants)
            self._feedback = FeedbackQueue()
            self._llm = llm
            if llm is not None:
                llm.on_call = self.trace.llm_request
            self._reranker = make_reranker(settings)
            self._texts = EmbeddingCache(encoder, settings.encode_cache_texts)
            self._encode_ahead = EncodeAhead(self._texts)
            gate = make_gate(self.arena)
            self._effects = EffectReader(self.arena, gate, self._texts)
            bounds, keeps = (settings.ivf_rows, settings.words_rows), settings.retain_consolidated
            self.ranker = Ranker(self.arena, gate, *bounds, retain_consolidated=keeps)
            self.scheduler = self._make_scheduler()
            self._residency = ArenaResidency(self.tenants, self.arena, self.scheduler, settings.arena_bytes)
        except BaseException:
            self.journal.close()
            raise

    def _make_scheduler(self) -> Scheduler:
        s = self.settings
        return Scheduler(
            self.journal,
            Admission(
                self.tenants,
                self.arena,
                self._encode_ahead,
                Thresholds.of(s),
                embed_timestamp=s.embed_timestamp,
                trace=self.trace,
            ),
            self._effects,
            self._policies,
            self._llm,
            queue_turns=s.queue_turns,
            batch_sizer=BatchSizer(s.batch_turns),
            lookahead_turns=s.gate_lookahead_turns,
            encoder_patience_s=s.llm_patience_s,
            llm_in_flight=s.llm_requests,
            token_budget=s.tenant_token_budget,
            trace=self.trace,
        )

    def _check_encoder(self) -> None:
        stored = Fingerprint.stored(self.journal.info.encoder)
        if refusal := stored.mismatch(self._fingerprint):
            raise StoreError(refusal)
        if drift := stored.drift(self._fingerprint):
            self.warnings.append(drift)

    def _with_policy(self) -> Settings:
        """The settings, by default with the store's policy. StoreError: those of a writer name another."""
        stored, given = self.journal.info.policy, self.settings
        if "policy" in given.model_fields_set and self.journal.writable and stored != given.policy:
            raise StoreError(
                f"the memories of {self.journal.location} use the policy {stored!r}, and the settings "
                f"name {given.policy!r}. Leave UNDERTOW_POLICY out, or read the turns into a new store; "
                "`undertow policy` gives single tenants another."
            )
        return given if "policy" in given.model_fields_set else given.under(stored)

    def close(self) -> None:
        """Release the store and the vectors' memory; no call works after it.

        Drops jobs in flight; a later run resumes them from the log. Logs the feedback of answers.
        """
        try:
            if self.journal.writable and self._failure is None:
                self.scheduler.stop()
                with suppress(JournalError):  # what has to be stored is by now
                    self._log_feedback(len(self._feedback))
        finally:
            self._encode_ahead.close()
            if self._reranker is not None:
                self._reranker.close()
            # not left to the collector: tenants and indexes refer to it, and a card holds few pools
            self.arena.close()
            self.tenants.texts.close()
            if self._llm is not None:
                self._llm.close()
            self.journal.close()
            self.trace.write()

    # ---- ingestion

    def add(
        self,
        tenant: str,
        messages: Sequence[Mapping[str, Any]],
        *,
        session_id: str = "",
        timestamp: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        idempotency_key: str | None = None,
    ) -> list[Receipt]:
        """Store OpenAI-style messages, one receipt a turn; durable and searchable on return.

        InputError names the message and field that cannot be taken; then nothing is stored.
        Without an idempotency key, each call is new.
        """
        turns = turns_of(
            tenant,
            messages,
            session_id=session_id,
            timestamp=timestamp,
            metadata=metadata,
            call=idempotency_key,
            max_message_bytes=self.settings.max_message_bytes,
        )
        return self.add_batch(turns)

    def add_batch(self, turns: Sequence[Turn]) -> list[Receipt]:
        """Store turns; durable and searchable on return. Decisions follow in later steps.

        Waits for decisions where undecided tenants fill a card's pool. ArenaFull, EncoderDown: see `step`;
        the turns of an earlier step may have been stored.
        """
        self.tenants.require_here(turn.tenant for turn in turns)
        tickets = []
        for turn in turns:
            while not self.scheduler.inbox.has_room_for(turn.tenant):
                self.step(WAIT_FOR_REPLY_S)
            tickets.append(self.scheduler.inbox.put(turn))
        while left := len(self.scheduler.inbox):
            self.step(WAIT_FOR_REPLY_S, storing=left > MOST_TURNS)
        return [ticket.receipt for ticket in tickets if ticket.receipt is not None]

    def step(self, wait_s: float = 0.0, *, storing: bool = False, pacing: Pacing | None = None) -> StepReport:
        """One round of the step loop. Waits up to `wait_s` for a reply when there is nothing else to do.

        `storing`: the caller has more turns to store; decisions take a tenth of the time meanwhile.
        `pacing`: the caller has requests to serve; storing and deciding take a few milliseconds, and no
        tenant's decisions more than their share of the time.
        JournalError: nothing of this step is stored or acknowledged; the engine must be reopened.
        Turns that a card's pool has no room for wait in the queue while tenants at work may still give some
        back. ArenaFull: nobody is; EncoderDown: waiting would not help. Then the queue's turns are dropped.
        """
        self._check_sound()
        self._residency.load(() if self.journal.is_read_beside else self.scheduler.decisions.retries())
        self.begin_step(wait_s, storing=storing, pacing=pacing)
        self.commit_step()
        return self.end_step()

    def begin_step(self, wait_s: float = 0.0, *, storing: bool = False, pacing: Pacing | None = None) -> None:
        """As `step`, up to its commit. Until `end_step`, search no tenant in `scheduler.uncommitted`."""
        self._check_sound()
        self._residency.prepare(may_read=not self.journal.is_read_beside)
        with self._failing:
            self._log_feedback(FEEDBACK_PER_STEP)
            if self.scheduler.admission_paused and self.server_lost:
                self.scheduler.suspend()  # what is stored does not wait for a server
            self.scheduler.begin_step(wait_s, storing=storing, pacing=pacing)

    def commit_step(self) -> None:
        """The commit of a step that was begun; on any thread. JournalError."""
        with self._failing:
            self.scheduler.commit_step()

    def end_step(self) -> StepReport:
        """Hand out what a committed step has stored."""
        with self._failing:
            return self.scheduler.end_step()

    def _check_sound(self) -> None:
        if self._failure is not None:
            kind = JournalError if isinstance(self._failure, JournalError) else UndertowError
            raise kind(f"the engine must be opened again to go on: it stopped at an error ({self._failure}).")

    def _drain(self, _: q.DrainCommand | None = None, *, until: str | None = None) -> bool:
        """Step until everything, or all of one tenant's log, is decided. False: something is blocked.

        Gives up once a server has been silent for `llm_patience_s`; the jobs stay pending.
        """
        while not (self.idle if until is None else self.idle or self.at_rest(until)):
            self.step(WAIT_FOR_REPLY_S)
            if self.is_stalled:
                return False
        return until not in self.scheduler.blocked if until is not None else not self.scheduler.blocked

    def at_rest(self, tenant: str) -> bool:
        """Whether the tenant has no queued turns and no undecided records."""
        scheduler = self.scheduler
        queued = scheduler.inbox.holds(tenant) or self._feedback.holds(tenant)
        return not (queued or scheduler.decisions.is_active(tenant) or self._residency.is_waiting(tenant))

    @property
    def idle(self) -> bool:
        """Nothing left that a step could do; see Scheduler.idle."""
        return self.scheduler.idle and self._residency.complete and not len(self._feedback)

    @property
    def embeds_in_s(self) -> float:
        """How long the encoder takes for a text: a moving average."""
        return self._texts.text_s

    @property
    def waits_for_tenants(self) -> bool:
        """Whether tenants with undecided records are yet to be loaded."""
        return not self._residency.complete

    @property
    def server_lost(self) -> bool:
        """The LLM server has been silent, with requests waiting, for longer than our patience."""
        return (self.llm_silent_s or 0.0) > self.settings.llm_patience_s

    @property
    def is_stalled(self) -> bool:
        """Whether work waits for an LLM server or an embedding endpoint for longer than our patience."""
        return self.server_lost or self.scheduler.encoder_lost

    @property
    def llm_silent_s(self) -> float | None:
        """See OpenAILLM.unreachable_s; None also where no server is set."""
        return self._llm.unreachable_s if self._llm is not None else None

    @property
    def llm_in_flight(self) -> int:
        """Requests at the LLM server now."""
        return self._llm.in_flight if self._llm is not None else 0

    @property
    def llm_error(self) -> str | None:
        """The last trouble with the LLM server."""
        return self._llm.last_error if self._llm is not None else None

    def resume(self) -> int:
        """Take up what earlier runs left undecided. Returns the number of tenants with such work."""
        self.journal.delete_rows(left_behind(self.journal, self.tenants))
        self.scheduler.blocked.clear()
        behind = self.tenants.behind()
        self._residency.load(behind)
        return len(behind)

    def _flush(self, command: q.FlushCommand) -> bool:
        self.log_flush(command.tenant)
        return self._drain(until=command.tenant)

    def log_flush(self, tenant: str) -> None:
        """Log a flush, for a caller that has other work until the tenant is `at_rest`."""
        self._check_sound()
        self._log_feedback(len(self._feedback))
        self._log(tenant, "flush", [{}])

    def _log(self, name: str, kind: ControlKind, bodies: Sequence[Mapping[str, Any]]) -> Tenant | None:
        """Append control records to a tenant's log, durably. None: the arena has no room for the tenant.

        Its log grows all the same, and is decided when there is room.
        """
        try:
            tenant = self._tenant(name)
        except ArenaFull:
            key, start = self.journal.info.tenant_key(name), self.tenants.next_seq(name)
            controls = [Control(kind, seq, body) for seq, body in enumerate(bodies, start)]
            self.journal.append([control_row(name, key, control) for control in controls])
            self._residency.load([name])
            return None
        self.scheduler.log(tenant, [(kind, body) for body in bodies])
        return tenant

    @property
    def lag(self) -> Lag:
        undecided = sum(t.undecided_count for t in self.tenants.loaded())
        oldest_s = round(self.scheduler.decisions.lag_tracker.oldest_s, 3)
        return Lag(undecided, oldest_s, self.scheduler.running_count, len(self.scheduler.blocked))

    # ---- jobs and tenants

    def _replay_jobs(self, _: q.ReplayJobsCommand) -> int:
        """Tenants that the arena has no room for now are replayed later."""
        self._check_sound()
        parked = self.tenants.parked_jobs()
        for name, jobs in parked.items():
            self._log(name, "replay", [{"job_id": job} for job in jobs])
        return sum(map(len, parked.values()))

    def _erase(self, command: q.EraseCommand) -> Certificate | None:
        self._check_sound()
        tenant, key = command.tenant, self.journal.info.tenant_key(command.tenant)
        if not (command.now and self.tenants.awaits_purge(tenant)):
            self.tenants.require(tenant)
            self.scheduler.drop_tenant(tenant)
            self._feedback.forget([tenant])
            self._forget_vectors([tenant])
            bury(self.journal, self.tenants, tenant)
        forget_parked(self.journal.location, key)  # quarantined by a service on this store
        return self.purge().get(key) if command.now else None

    # ---- queries and commands

    def call(self, call: q.ApiCall[q.R]) -> q.R:
        """Carry out one call of MemoryApi."""
        result: q.R = HANDLERS[type(call)](self, call)
        return result


HANDLERS: Mapping[type[q.ApiCall[Any]], Callable[[Engine, Any], Any]] = {
    q.AnswerQuery: Engine._answer,
    q.DeleteCommand: Engine._delete,
    q.DrainCommand: Engine._drain,
    q.EraseCommand: Engine._erase,
    q.EventsQuery: Engine._events,
    q.ExplainQuery: lambda engine, c: engine._reports.explain(c.tenant, limit=c.limit, after_seq=c.after_seq),
    q.ExportQuery: lambda engine, c: engine._reports.export_page(
        c.tenant, after=c.after, limit=c.limit, vectors=c.vectors
    ),
    q.FlushCommand: Engine._flush,
    q.GetQuery: Engine._get,
    q.HistoryQuery: Engine._history,
    q.ImportCommand: Engine._import,
    q.ListQuery: Engine._list,
    q.MemoriesQuery: Engine._get_all,
    q.PolicyQuery: lambda engine, c: engine._reports.policy(c.tenant),
    q.PurgeCommand: lambda engine, _: purge(engine.journal, engine.tenants),
    q.ReplayJobsCommand: Engine._replay_jobs,
    q.SearchQuery: Engine._search,
    q.SetPolicyCommand: Engine._set_policy,
    q.StatsQuery: lambda engine, _: store_stats(engine.tenants),
    q.TenantsQuery: lambda engine, c: names_page(engine.tenants.names(), c.prefix, c.limit, c.after),
    q.TenantStatsQuery: lambda engine, c: tenant_stats(engine._tenant(c.tenant)),
    q.TenantUsageQuery: lambda engine, c: store_usage(engine.tenants, c.tenant),
    q.TurnsByKeyQuery: Engine._turns_by_key,
    q.UpdateCommand: Engine._update,
    q.UsageQuery: lambda engine, _: store_usage(engine.tenants),
}


def make_llm(settings: Settings) -> LLMClient | None:
    """The client of the server that the settings name; None for none."""
    return None if settings.llm_url is None else OpenAILLM(settings)
