"""The LLM calls of decisions: prompts are sent after the commit, replies resume their decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from undertow.engine.base.trace import Trace, use_traceparent
from undertow.engine.llm.client import BadReply, Completion, Completions, ServerRefused
from undertow.engine.policies.base import Complete
from undertow.engine.step.decision_queue import DecisionQueue, DecisionRun
from undertow.prompts.operations import QUERY_OPERATIONS


class LLMCalls:
    """Owns the prompts that wait for the commit, and the replies that have arrived.

    The client itself repairs a bad reply once; a `BadReply` that gets here goes to the policy, which parks
    its job.
    """

    def __init__(
        self,
        llm: Completions | None,
        decisions: DecisionQueue,
        *,
        in_flight: int,
        token_budget: int | None,
        trace: Trace,
    ) -> None:
        self.llm = llm
        self.refused: ServerRefused | None = None
        self._decisions = decisions
        self._in_flight = in_flight
        self._token_budget = token_budget
        self._trace = trace
        self._unsent: list[tuple[DecisionRun, Complete]] = []
        self._replies: SimpleQueue[DecisionRun] = SimpleQueue()
        # The most of late: where steps are long, many requests end in one, and as many more must be queued.
        self._replies_a_step = 0

    @property
    def is_saturated(self) -> bool:
        """Whether the server has work until the next step, so that storing turns may go first."""
        queued = max(self._in_flight, 2 * self._replies_a_step)
        return self.llm is None or self._decisions.running_count >= self._in_flight + queued

    def obstacle(self, run: DecisionRun) -> str | None:
        """Why the tenant may not call the LLM now. None: it may."""
        if self.llm is None:
            return "no LLM server is set (--llm)"
        meter = run.tenant.meter.items()
        spent = sum(u.prompt_tokens + u.completion_tokens for op, u in meter if op not in QUERY_OPERATIONS)
        if self._token_budget is not None and spent >= self._token_budget:
            return f"its budget of {self._token_budget} tokens is spent; search goes on"
        return None

    def enqueue(self, run: DecisionRun, call: Complete) -> None:
        """Send this prompt with the next `submit`."""
        run.operation = call.prompt.operation
        run.traceparent = self._decisions.lag_tracker.traceparent_of(run.tenant.name, run.seq)
        self._unsent.append((run, call))

    def submit(self) -> None:
        """Send the queued prompts. The turns that they show must be committed."""
        calls, self._unsent = self._unsent, []
        if self.llm is None or not calls:
            return
        with self._trace.span("submit", prompts=len(calls)):
            self._trace.link(run.traceparent for run, _ in calls)
            for run, call in calls:
                if self._decisions.is_running(run):
                    with use_traceparent(run.traceparent):
                        run.call = self.llm.submit(call.prompt, tenant=run.tenant.name)
                    run.call.add_done_callback(self._on_reply(run))

    def cancel(self, run: DecisionRun) -> None:
        """Cancel the call in flight of a run that was removed."""
        if run.call is not None and self.llm is not None:
            self.llm.cancel(run.call)

    def replied(self, wait_s: float) -> Iterator[DecisionRun]:
        """The runs whose calls are done, as they come in. Waits up to `wait_s` for the first."""
        count = 0
        try:
            yield self._replies.get(timeout=wait_s) if wait_s else self._replies.get_nowait()
            while count := count + 1:
                yield self._replies.get_nowait()
        except Empty:
            self._replies_a_step = max(count, self._replies_a_step * 7 // 8)

    def take_reply(self, run: DecisionRun) -> Completion | BadReply | ServerRefused | None:
        """The reply to a run's call. None: it was cancelled, or the run is over."""
        call, run.call = run.call, None
        if call is None or call.cancelled() or not self._decisions.is_running(run):
            return None
        error = call.exception()
        if isinstance(error, ServerRefused):
            self.refused = error
            return error
        if isinstance(error, BadReply):
            return error
        self.refused = None
        return call.result()

    def _on_reply(self, run: DecisionRun) -> Callable[[Future[Completion]], None]:
        return lambda _: self._replies.put(run)
