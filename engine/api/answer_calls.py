"""The engine's answers: sends the LLM calls of an answer mode and meters them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial

import orjson

from undertow.engine.api.search_calls import SearchCalls
from undertow.engine.base.model import InputError, NoLLM, UndertowError, Usage
from undertow.engine.base.queries import AnswerQuery
from undertow.engine.base.results import Answer, SearchResult
from undertow.engine.base.timestamps import parse_timestamp
from undertow.engine.base.trace import use_traceparent
from undertow.engine.llm.client import BadReply, BrokenOff, Completion, OnText
from undertow.engine.policies.base import Learns, PromptTooLong
from undertow.engine.search.answer_modes import Answering, Question, Say, answering
from undertow.engine.search.rerank import Rerank
from undertow.engine.step.answer_feedback import Feedback, new_ones
from undertow.engine.storage.journal import Row
from undertow.engine.storage.row_codec import usage_to_json
from undertow.engine.tenants.migration_records import InTransit, Moved
from undertow.engine.tenants.registry import ArenaFull, UnknownTenant


@dataclass(slots=True)
class PendingAnswer:
    """A question under way: the mode that answers it, the LLM call that it waits for, and its cost.

    `incarnation`: the tenant's; no other one receives the feedback. `learns`: what its policy learns from the
    answer. `rerank`: what the mode waits for before it begins. `due`: the cost that is not metered yet, by
    operation. `given`: the answer and the memories it was given, once the mode has ended.
    """

    tenant: str
    incarnation: int
    question: str
    learns: Learns
    steps: Answering
    on_text: OnText | None
    rerank: Rerank | None = None
    say: Say | None = None
    call: Future[Completion] | None = None
    spent: Usage = field(default_factory=Usage)
    due: dict[str, Usage] = field(default_factory=dict)
    given: tuple[str, SearchResult] | None = None

    @property
    def waits(self) -> bool:
        """Whether `heard` has nothing to do, as the LLM's reply or the rerank has not come."""
        if self.rerank is not None:
            return self.rerank.waits
        return self.call is not None and not self.call.done()

    def spend(self, usage: Usage) -> None:
        """Add the cost of the last call."""
        assert self.say is not None, "there was a call"
        operation = self.say.prompt.operation
        self.spent += usage
        self.due[operation] = self.due.get(operation, Usage()) + usage


class AnswerCalls(SearchCalls):
    """A part of Engine."""

    def _answer(self, query: AnswerQuery) -> Answer:
        asked = self.ask(query)
        while (answer := self.heard(asked)) is None:
            time.sleep(0.01)
        return answer

    def ask(self, query: AnswerQuery, *, on_text: OnText | None = None) -> PendingAnswer:
        """Send the LLM call of an answer, for a caller that polls `heard` for it.

        `on_text` gets the answer's text piece by piece, on another thread; `heard` may then raise BrokenOff
        too. `let_go` cancels the call. InputError: the policy has no such mode; ValueError: `as_of` is no
        timestamp; NoLLM; UnknownTenant.
        """
        if self._llm is None:
            raise NoLLM("answering needs an LLM server. Give --llm URL or set UNDERTOW_LLM_URL.")
        tenant, question = query.tenant, query.question
        rerank = self.begin_rerank(tenant, question)
        recall = partial(self.recall, tenant, question, rerank)
        try:
            settings = self._settings_of(tenant)
            answered_by, style = settings.mode_of(query.mode), settings.style_of_answers
        except ValueError as error:
            raise InputError.of("answer", "mode", str(error), "Leave it out.") from None
        as_of = None if query.as_of is None else parse_timestamp(query.as_of)
        steps = answering(answered_by, Question(question, as_of, recall, self._budget, style))
        incarnation, learns = self.tenants.incarnation(tenant), self._learns_of(tenant)
        asked = PendingAnswer(tenant, incarnation, question, learns, steps, on_text, rerank)
        if rerank is None:
            self._go_on(asked)
        return asked

    def let_go(self, asked: PendingAnswer) -> None:
        """Cancel the LLM call of an answer that nobody waits for any more.

        Its earlier calls are metered, if the tenant is still here in the same incarnation and is writable.
        """
        if asked.rerank is not None:
            asked.rerank.scores.cancel()
        if self._llm is not None and asked.call is not None:
            self._llm.cancel(asked.call)
        if self.journal.writable and self._failure is None:
            with suppress(UnknownTenant, Moved, InTransit):
                self._meter_query(asked)

    def heard(self, asked: PendingAnswer) -> Answer | None:
        """The answer; None: not yet. UndertowError, BadReply, BrokenOff, ServerRefused.

        The calls are metered even if no answer came of them; an error's `usage` is that of all of them. What
        the policy learns is logged in a later step. UnknownTenant: the tenant was erased meanwhile; the LLM
        call is cancelled and replies are dropped, even if a new tenant has the name.
        """
        try:
            return self._heard(asked)
        except UndertowError as error:
            error.usage = asked.spent
            raise

    def _heard(self, asked: PendingAnswer) -> Answer | None:
        self._check_lives(asked)
        if asked.rerank is not None and not self._end_rerank(asked, asked.rerank):
            return None
        try:
            while asked.given is None:
                assert asked.call is not None, "a mode that has not ended waits for a call"
                if not asked.call.done():
                    self._check_not_lost(asked)
                    return None
                self._hear_call(asked, asked.call)
        finally:
            if asked.call is None or asked.call.done():
                self._meter_query(asked)
        text, found = asked.given
        if asked.say is not None and asked.say.answers:
            self._teach(asked, asked.say.missed, found)
        return Answer(text, found, asked.spent)

    def _check_lives(self, asked: PendingAnswer) -> None:
        """UnknownTenant; Moved, InTransit."""
        try:
            self.tenants.require_incarnation(asked.tenant, asked.incarnation)
        except UndertowError:
            self.let_go(asked)
            raise

    def _end_rerank(self, asked: PendingAnswer, rerank: Rerank) -> bool:
        """Begin the mode once the rerank has ended, or its time. The trace has how it ended."""
        if (outcome := rerank.settle()) is None:
            return False
        with self.trace.span(outcome, hits=len(rerank.hits)):
            asked.rerank = None
        self._go_on(asked)
        return True

    def _check_not_lost(self, asked: PendingAnswer) -> None:
        if self._llm is not None and self.server_lost:
            self.let_go(asked)
            raise UndertowError(f"the LLM server does not answer: {self._llm.last_error}. Is it running?")

    def _hear_call(self, asked: PendingAnswer, call: Future[Completion]) -> None:
        """Hand the reply to the mode, or the error: some modes go on without a reply."""
        try:
            completion = call.result()
        except (BadReply, BrokenOff) as failed:  # it has cost what it has cost
            asked.spend(failed.usage)
            self._go_on(asked, failed=failed)
        else:
            asked.spend(completion.usage)
            self._go_on(asked, completion.reply)

    def _go_on(
        self, asked: PendingAnswer, reply: object = None, *, failed: UndertowError | None = None
    ) -> None:
        """Send the mode's next prompt, or take its answer."""
        assert self._llm is not None, "nothing is asked without one"
        try:
            say = asked.steps.send(reply) if failed is None else asked.steps.throw(failed)
        except StopIteration as done:
            asked.given = done.value
            if asked.on_text is not None and not (asked.say and asked.say.answers):
                asked.on_text(done.value[0])
            return
        except PromptTooLong as error:
            raise UndertowError(
                f"{error}; the model's context holds {self._budget.context_tokens}."
            ) from None
        asked.say = say
        if say.answers and asked.on_text is not None:
            asked.call = self._llm.stream(say.prompt, tenant=asked.tenant, on_text=asked.on_text)
        else:
            asked.call = self._llm.submit(say.prompt, tenant=asked.tenant)

    def _teach(self, asked: PendingAnswer, missed: Sequence[str], found: SearchResult) -> None:
        """Queue what the policy learns from an answer; nothing on a store opened for reading."""
        if not self.journal.writable or self._failure is not None:
            return
        if asked.learns.missed and missed:
            body = {"question": asked.question, "episode_ids": list(missed)}
            self._feedback.put(Feedback(asked.tenant, asked.incarnation, "reconsolidate", body))
        if asked.learns.used and found.facts:
            body = {"fact_ids": [hit.id for hit in found.facts]}
            self._feedback.put(Feedback(asked.tenant, asked.incarnation, "used", body))

    def _log_feedback(self, most: int) -> None:
        """Log the oldest feedback from answers, one commit a tenant. JournalError.

        Drops that of tenants that have gone, that change their policy, or that the arena has no room for.
        """
        if self.journal.is_read_beside:  # an evicted tenant would be read
            return
        for (name, incarnation), feedback in self._feedback.take(most).items():
            with suppress(UnknownTenant, Moved, InTransit, ArenaFull):
                self.tenants.require_incarnation(name, incarnation)
                of = self.tenants.existing(name)
                records = [(one.kind, one.body) for one in new_ones(of, feedback)]
                if records and of.change_ahead is None:
                    with use_traceparent(feedback[0].traceparent):
                        self.scheduler.log(of, records)

    def _meter_query(self, asked: PendingAnswer) -> None:
        if not asked.due:
            return
        self.tenants.require_incarnation(asked.tenant, asked.incarnation)
        due, asked.due = asked.due, {}
        if (of := self.tenants.in_memory(asked.tenant)) is not None:  # if not, it has it from the journal
            for operation, usage in due.items():
                of.add_usage(operation, usage)
        if self.journal.writable:
            key = self.journal.info.tenant_key(asked.tenant)
            body = orjson.dumps(usage_to_json(due))
            with self.trace.span("commit", rows=1):
                self.journal.append([Row("usage", asked.tenant, key, -1, body)])
