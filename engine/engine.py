"""The engine of one shard: the public calls, thin over the scheduler, the journal and the index."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import orjson
import torch

from undertow.engine.admission import Admission, Receipt
from undertow.engine.config import Settings
from undertow.engine.encoder import Encoder, Fingerprint
from undertow.engine.erasure import Certificate, bury, left_behind, purge
from undertow.engine.figures import store_stats
from undertow.engine.journal import Journal, JournalError, Row
from undertow.engine.llm import LLMClient, OpenAILLM
from undertow.engine.model import BadInput, InputError, Memory, Turn, UndertowError, Usage, dedupe_key
from undertow.engine.policies.base import PromptBudget, PromptTooLong, Thresholds
from undertow.engine.policies.recmem import RecMem
from undertow.engine.readers import pair_chat, parse_messages
from undertow.engine.readings import Readings
from undertow.engine.records import Control, control_row, usage_to_json
from undertow.engine.retrieval import Found, Retrieval, Window, question_prompt
from undertow.engine.scheduler import Scheduler, StepReport
from undertow.engine.store import StoreError
from undertow.engine.tenants import ArenaFull, Tenant, Tenants
from undertow.engine.text_cache import TenantTextCache
from undertow.engine.timestamps import parse_timestamp
from undertow.engine.trace import Trace
from undertow.kernels.arena import Arena, make_arena
from undertow.kernels.device import resolve
from undertow.kernels.gate import make_gate

WAIT_FOR_REPLY_S = 0.05
# of a pool on a card, kept free between steps: evicting and packing little by little would cost more
POOL_SPARE = 1 / 16
# of a pool, filled with undecided tenants of earlier runs at most: each grows by the memories it makes
TAKE_UP_SHARE = 1 / 4
# tenants that are taken up at a time where a pool bounds them
TENANTS_AT_A_TIME = 64

# this process's pools on the card; a closed arena counts as none
_pools: WeakSet[Arena] = WeakSet()


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, the memories it was given, and what the call cost."""

    text: str
    found: Found
    usage: Usage


@dataclass(frozen=True, slots=True)
class Lag:
    """Consolidation lag: what is stored and searchable but not yet decided."""

    undecided_turns: int
    running_jobs: int
    blocked_tenants: int


class Engine:
    """Many tenants' memories in one store. Use as a context manager, from one thread.

    Opening takes the store's writer lock unless `writable=False`, where only reading calls work.
    """

    def __init__(
        self,
        store: Path,
        settings: Settings,
        encoder: Encoder,
        *,
        llm: LLMClient | None = None,
        writable: bool = True,
        trace: Trace | None = None,
    ) -> None:
        self.settings = settings
        self.trace = trace or Trace()
        self.warnings: list[str] = []
        self._failure: BaseException | None = None
        self._stepping = False
        # tenants with undecided records of earlier runs, which the arena had no room for yet
        self._behind: deque[str] = deque()
        self._budget = PromptBudget(settings.context_tokens, settings.reply_tokens)
        self.arena = arena_of(settings, encoder.dim)
        self.arena.reclaim = self._reclaim
        try:
            self._open(store, encoder, llm, writable=writable)
        except BaseException:
            self.arena.close()
            raise

    def _open(self, store: Path, encoder: Encoder, llm: LLMClient | None, *, writable: bool) -> None:
        settings, plain = self.settings, encoder.fingerprint
        self._fingerprint = plain.with_timestamps() if settings.embed_timestamp else plain
        if writable and not (store / "store.json").exists():
            Journal.create(store, encoder.dim, asdict(self._fingerprint))
        self.journal = Journal.open(store, writable=writable, durability=settings.durability)
        try:
            self._check_encoder()
            self.tenants = Tenants(self.journal, self.arena)
            self._llm = llm
            self._texts = TenantTextCache(encoder, settings.encode_cache_texts)
            gate = make_gate(self.arena)
            self._readings = Readings(self.arena, gate, self._texts)
            self.retrieval = Retrieval(self.arena, gate, settings.ivf_rows)
            self.scheduler = self._make_scheduler()
        except BaseException:
            self.journal.close()
            raise

    def _make_scheduler(self) -> Scheduler:
        s = self.settings
        thresholds = Thresholds(s.similarity_threshold, s.merge_threshold, s.recurrence_count)
        return Scheduler(
            self.journal,
            Admission(
                self.tenants,
                self.arena,
                self._texts,
                thresholds,
                embed_timestamp=s.embed_timestamp,
                trace=self.trace,
            ),
            self._readings,
            RecMem(self._budget),
            self._llm,
            queue_turns=s.queue_turns,
            batch_turns=s.batch_turns,
            lookahead_turns=s.gate_lookahead_turns,
            llm_in_flight=s.llm_in_flight,
            token_budget=s.tenant_token_budget,
            trace=self.trace,
        )

    def _check_encoder(self) -> None:
        stored = Fingerprint.stored(self.journal.info.encoder)
        if refusal := stored.mismatch(self._fingerprint):
            raise StoreError(refusal)
        if drift := stored.drift(self._fingerprint):
            self.warnings.append(drift)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the store and the vectors' memory; no call works after it.

        Jobs in flight are dropped; a later run takes them up from the log.
        """
        try:
            if self.journal.writable and self._failure is None:
                self.scheduler.stop()
        finally:
            # not left to the collector: tenants and indexes refer to it, and a card holds few pools
            self.arena.close()
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
        bound = self.settings.max_message_bytes
        parsed = parse_messages(messages, source="add", line=None, max_message_bytes=bound)
        try:
            when = None if timestamp is None else parse_timestamp(timestamp)
        except ValueError as error:
            raise InputError(BadInput("add", None, "timestamp", str(error), "Nothing was stored.")) from None
        call = idempotency_key or secrets.token_hex(12)
        turns = []
        for n, pair in enumerate(pair_chat(parsed)):
            own = next((m.timestamp for m in pair if m.timestamp), when)
            key = dedupe_key("add", "", f"{call}:{n}", ())
            turns.append(Turn(tenant, tuple(pair), key, session_id, own, dict(metadata or {})))
        return self.add_batch(turns)

    def add_batch(self, turns: Sequence[Turn]) -> list[Receipt]:
        """Store turns; durable and searchable on return. Decisions follow in later steps."""
        tickets = []
        for turn in turns:
            while self.scheduler.inbox.room <= 0:
                self.step()
            tickets.append(self.scheduler.inbox.put(turn))
        while len(self.scheduler.inbox):
            self.step()
        return [ticket.receipt for ticket in tickets if ticket.receipt is not None]

    def note(self, row: Row) -> None:
        """Have a row of the shard's own (a source offset) committed with the next step."""
        self.scheduler.note(row)

    def step(self, wait_s: float = 0.0) -> StepReport:
        """One round of the step loop; see Scheduler.step.

        ArenaFull: the turns that were to be stored do not fit into a card's pool together with what is
        at work. They were dropped, nothing else has changed.
        """
        self._check_sound()
        self._make_room()
        self._take_up_behind()
        self._stepping = True
        try:
            return self.scheduler.step(wait_s)
        except ArenaFull:
            raise
        except MemoryError as error:
            self._failure = self.tenants.full("what this step adds", error)
            raise self._failure from error
        except BaseException as error:
            self._failure = error  # memory may be ahead of the journal: only reopening helps
            raise
        finally:
            self._stepping = False

    def _check_sound(self) -> None:
        if self._failure is not None:
            kind = JournalError if isinstance(self._failure, JournalError) else UndertowError
            raise kind(f"the engine must be opened again to go on: it stopped at an error ({self._failure}).")

    def drain(self, *, until: Tenant | None = None) -> bool:
        """Step until everything (or one tenant's log) is decided. False: something is blocked.

        Gives up when the server has shown no sign of life for `llm_patience_s`; the jobs stay pending.
        """
        while not self.idle:
            if until is not None and (until.cursor >= until.next_seq or until.name in self.scheduler.blocked):
                break
            self.step(WAIT_FOR_REPLY_S)
            if self.server_lost:
                return False
        return not self.scheduler.blocked if until is None else until.cursor >= until.next_seq

    @property
    def idle(self) -> bool:
        """Nothing left that a step could do; see Scheduler.idle."""
        return self.scheduler.idle and not self._behind

    @property
    def server_lost(self) -> bool:
        """The LLM server has been silent, with requests waiting, for longer than our patience."""
        silent_s = self._llm.unreachable_s if self._llm is not None else None
        return silent_s is not None and silent_s > self.settings.llm_patience_s

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
        self.journal.delete_rows(left_behind(self.journal))
        self.scheduler.blocked.clear()
        self._behind = deque(self.tenants.behind())
        count = len(self._behind)
        self._take_up_behind()
        return count

    def _take_up_behind(self) -> None:
        """Load tenants that are behind as far as the arena has room; the rest when these are decided."""
        at_a_time = self._tenants_at_a_time(len(self._behind))
        while self._behind and (self._has_room_for_work or self.scheduler.idle):
            try:
                tenants = self.tenants.get_many(list(islice(self._behind, at_a_time)))
            except ArenaFull:
                if at_a_time == 1 and self.scheduler.idle:
                    raise
                if at_a_time == 1:
                    return
                at_a_time //= 2
                continue
            while len(tenants) > 1 and not self._has_room_for_work:
                self.tenants.evict(tenants.pop().name)
            for tenant in tenants:
                self._behind.popleft()
                self.scheduler.wake(tenant)

    @property
    def _has_room_for_work(self) -> bool:
        """Tenants taken up fill a part of a pool: until they are decided they stay, and they will grow."""
        pool = self.arena.capacity_bytes
        if pool is None:
            return True
        bound = int(pool * TAKE_UP_SHARE)
        return self.tenants.make_room(lambda: self.arena.nbytes <= bound, self._may_go)

    def _tenants_at_a_time(self, count: int) -> int:
        """How many of `count` tenants to load at a time: all with one read, unless a pool bounds them."""
        return max(1, count if self.arena.capacity_bytes is None else min(count, TENANTS_AT_A_TIME))

    def flush(self, tenant: str) -> bool:
        """Barrier: returns when all earlier records are decided or parked (False: blocked)."""
        self._check_sound()
        of = self._tenant(tenant)
        control = Control("flush", of.next_seq)
        self.scheduler.log(of, control, control_row(of.name, of.key, control))
        return self.drain(until=of)

    @property
    def lag(self) -> Lag:
        undecided = sum(t.undecided_count for t in self.tenants.loaded())
        return Lag(undecided, self.scheduler.running_count, len(self.scheduler.blocked))

    @property
    def _room_bytes(self) -> int:
        """What the arena may hold between steps."""
        pool = self.arena.capacity_bytes
        return self.settings.arena_bytes if pool is None else int(pool * (1 - POOL_SPARE))

    @property
    def _has_room(self) -> bool:
        return self.arena.nbytes <= self._room_bytes

    def _make_room(self) -> None:
        """Between steps: evict idle tenants while the arena is over its bound."""
        if not self._has_room:
            self.tenants.make_room(lambda: self._has_room, self._may_go)

    def _reclaim(self, rows: int) -> bool:
        """The arena has no room for a segment of `rows` rows: evict some idle tenants. False: none is."""
        before = self.arena.nbytes
        enough = before - max(rows * self.arena.row_bytes, int(self._room_bytes * POOL_SPARE))
        self.tenants.make_room(lambda: self.arena.nbytes <= enough, self._may_go)
        return self.arena.nbytes < before

    def _may_go(self, tenant: Tenant) -> bool:
        """Whether nobody holds the tenant's live state; within a step, what is undecided may be in use."""
        if self.scheduler.busy(tenant.name):
            return False
        decided = tenant.cursor >= tenant.next_seq or tenant.name in self.scheduler.blocked
        return decided or not self._stepping

    # ---- reading

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
    ) -> Found:
        """The nearest turns, episodes and facts; counts default to the settings (section 3.5)."""
        of = self._tenant(tenant)
        if not query.strip():
            raise ValueError("the query is empty. Give some words to search for.")
        vector = self._texts.encode([tenant], [query])[0]
        window = Window(since and parse_timestamp(since), until and parse_timestamp(until))
        s = self.settings
        return self.retrieval.search(
            of,
            vector,
            k_sub=s.k_sub if k_sub is None else k_sub,
            k_epi=s.k_epi if k_epi is None else k_epi,
            k_sem=s.k_sem if k_sem is None else k_sem,
            window=window,
        )

    def answer(self, tenant: str, question: str, *, as_of: str | None = None) -> Answer:
        """Answer from memory with one LLM call, metered as a query. BadReply, ServerRefused."""
        if self._llm is None:
            raise UndertowError("answering needs an LLM server. Give --llm URL or set UNDERTOW_LLM_URL.")
        found = self.search(tenant, question)
        try:
            prompt = question_prompt(question, found, as_of, self._budget)
        except PromptTooLong as error:
            raise UndertowError(
                f"{error}; the model's context holds {self._budget.context_tokens}."
            ) from None
        call = self._llm.submit(prompt, tenant=tenant)
        while not call.done():
            if self.server_lost:
                self._llm.cancel(call)
                raise UndertowError(f"the LLM server does not answer: {self._llm.last_error}. Is it running?")
            time.sleep(0.01)
        completion = call.result()
        self._meter_query(tenant, completion.usage)
        return Answer(str(completion.reply), found, completion.usage)

    def _meter_query(self, tenant: str, usage: Usage) -> None:
        of = self._tenant(tenant)
        of.add_usage("answer", usage)
        if self.journal.writable:
            body = orjson.dumps(usage_to_json({"answer": usage}))
            self.journal.append([Row("usage", of.name, of.key, -1, body)])

    def get_all(self, tenant: str) -> list[Memory]:
        """All current episodes and facts, in order of birth."""
        of = self._tenant(tenant)
        return [*of.current("episode"), *of.current("fact")]

    # ---- what users do to their memories

    def delete(self, memory_id: str) -> str:
        """Delete a turn, an episode or a fact by id; returns its kind.

        A turn's text and vector are gone from every answer at once; what rests on it is remade
        when the cursor reaches the record. An episode or fact goes alone; its history stays.
        """
        self._check_sound()
        rows = self.journal.read(ids=[memory_id], kinds=["turn", "episode", "fact"])
        row = next((row for row in rows if not self.tenants.buried(row)), None)
        if row is None or row.tenant not in self.tenants:
            raise UndertowError(f"no memory has the id {memory_id}. `undertow list` shows the ids.")
        tenant = self._tenant(row.tenant)
        if row.kind == "turn":
            return self._delete_turn(tenant, row)
        body = {"memory_id": memory_id, "kind": row.kind}
        control = Control("delete", tenant.next_seq, body)
        self.scheduler.log(tenant, control, control_row(tenant.name, tenant.key, control))
        return row.kind

    def _delete_turn(self, tenant: Tenant, row: Row) -> str:
        turn = orjson.loads(row.payload)
        # What the log still needs of the turn: its dedupe key, and the time that later ones inherit.
        kept = {"key": turn["key"], "session": turn["session"], "timestamp": row.timestamp}
        control = Control("delete", tenant.next_seq, {"turn_seq": row.seq, "id": row.id, **kept})
        self.scheduler.log(tenant, control, control_row(tenant.name, tenant.key, control))
        tenant.redact_turn(row.seq)
        self.journal.delete_rows([row.lsn])
        return "turn"

    def replay_jobs(self) -> int:
        """Log a replay of every parked job; returns their number. Drain to have them run."""
        self._check_sound()
        count, names = 0, self.tenants.names()
        at_a_time = self._tenants_at_a_time(len(names))
        some = [names[start : start + at_a_time] for start in range(0, len(names), at_a_time)]
        for tenant in (tenant for part in some for tenant in self.tenants.get_many(part)):
            for job in [j for j in tenant.jobs.values() if j.state == "parked"]:
                control = Control("replay", tenant.next_seq, {"job_id": job.id})
                self.scheduler.log(tenant, control, control_row(tenant.name, tenant.key, control))
                count += 1
        return count

    def erase(self, tenant: str, *, now: bool = False) -> Certificate | None:
        """Erase a tenant: gone from every answer at once; the bytes go with the next purge.

        The certificate is issued after the purge, so only with `now`.
        """
        self._check_sound()
        of = self._tenant(tenant)
        self.scheduler.forget(tenant)
        self._texts.forget(tenant)
        bury(self.journal, self.tenants, of)
        return self.purge().get(of.key) if now else None

    def purge(self) -> dict[str, Certificate]:
        """Remove the bytes of all erased tenants and deleted turns; certificates by tenant key."""
        return purge(self.journal, self.tenants)

    # ---- figures

    def stats(self) -> dict[str, int]:
        """Counts over all tenants of the store."""
        return store_stats(self.tenants)

    def _tenant(self, name: str) -> Tenant:
        return self.tenants.existing(name)


def arena_of(settings: Settings, dim: int) -> Arena:
    """The arena where the settings put it, on a card its share of it. UndertowError where it cannot be."""
    try:
        device = resolve(settings.device)
    except ValueError as error:
        raise UndertowError(str(error)) from None
    if device == "cpu":
        return make_arena(dim, device)
    # torch keeps what was freed, as the pool of a closed engine, from the driver's figure
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    pools_bytes = sum(arena.capacity_bytes or 0 for arena in _pools)
    own_bytes = torch.cuda.memory_reserved() - pools_bytes
    nbytes = settings.shares.arena_bytes(total_bytes, free_bytes, own_bytes, pools_bytes)
    try:
        arena = make_arena(dim, device, nbytes)
    except MemoryError as error:
        raise UndertowError(str(error)) from None
    _pools.add(arena)
    return arena


def make_llm(settings: Settings, trace: Trace | None = None) -> LLMClient | None:
    """The client of the server that the settings name; None for none."""
    if settings.llm_url is None:
        return None

    def on_call(
        tenant: str, operation: str, began_s: float, ended_s: float, usage: Usage, outcome: str
    ) -> None:
        if trace is not None:
            trace.event(operation, began_s, ended_s, track=f"llm {tenant}", outcome=outcome, **asdict(usage))

    return OpenAILLM(settings, on_call=on_call)
