"""What is tried again: failed requests at other servers, and once a bad reply, with a repair prompt.

A transport failure is no outcome of a request: it fails over to another server at once, and backs off when
every server has failed.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from dataclasses import dataclass, field

from undertow.engine.base.model import Usage
from undertow.engine.llm.circuit_breaker import backoff_s
from undertow.engine.llm.load_balancer import LoadBalancer
from undertow.engine.llm.replies import (
    BadReply,
    BrokenOff,
    Completion,
    OnCall,
    OnText,
    Rejected,
    ServerRefused,
    ServerReply,
    Trouble,
)
from undertow.engine.llm.server import Server
from undertow.prompts.builders import Prompt, repair_messages
from undertow.prompts.operations import Operation

log = logging.getLogger(__name__)

# Lower goes first: answers, then the first steps of jobs.
_PRIORITY: dict[Operation, int] = {
    "answer": 0,
    "sufficiency": 0,
    "merge": 1,
    "episode": 2,
    "extract": 2,
    "segment": 2,
    "partition": 2,
}
_LATER_STEP = 3

_SHOWN_REPLY_CHARS = 2_000
_OUTCOMES: dict[type[Exception], str] = {Trouble: "retry", Rejected: "rejected", ServerRefused: "refused"}


@dataclass(slots=True)
class LLMRequest:
    """One prompt, until its reply."""

    prompt: Prompt
    tenant: str
    number: int
    on_text: OnText | None = None
    # A piece of the reply was streamed, so that it cannot be requested again.
    begun: bool = False
    submitted_s: float = field(default_factory=time.perf_counter)

    def tell(self, text: str) -> None:
        assert self.on_text is not None, "somebody listens"
        self.begun = True
        self.on_text(text)


class Retries:
    """Carries out requests on the client's event loop. `on_call` receives each attempt."""

    def __init__(self, servers: LoadBalancer, on_call: OnCall) -> None:
        self.last_error: str | None = None
        self._servers = servers
        self._on_call = on_call

    async def complete(self, job: LLMRequest) -> Completion:
        """A usable reply. BadReply, BrokenOff, ServerRefused."""
        answer = await self._ask(job, job.prompt.messages, Usage())
        usage = answer.usage
        if answer.reply is None and not job.begun:
            bad_reply = answer.content[:_SHOWN_REPLY_CHARS]
            repair = repair_messages(job.prompt, bad_reply, answer.problem)
            answer = await self._ask(job, repair, usage, longer=answer.cut_off)
            usage += answer.usage
        if answer.reply is None:
            raise BadReply(answer.problem, usage)
        return Completion(answer.reply, usage, answer.model, time.perf_counter() - job.submitted_s)

    async def _ask(
        self, job: LLMRequest, messages: list[dict[str, str]], spent: Usage, *, longer: bool = False
    ) -> ServerReply:
        """One request, retried until a server answers. `spent` is the usage of earlier requests."""
        urgency = (_PRIORITY.get(job.prompt.operation, _LATER_STEP), job.number)
        avoid: Server | None = None
        for attempt in itertools.count():
            try:
                async with self._servers.hold(urgency, avoid) as server:
                    avoid = server
                    return await self._traced(job, server, messages, longer)
            except Trouble as trouble:
                self.last_error = str(trouble)
                if job.begun:
                    words = f"the answer broke off in the middle: {trouble}. Ask again."
                    raise BrokenOff(words, spent + Usage(calls=1)) from trouble
                wait_s = self._wait_s(attempt, trouble)
                log.debug("%s; next attempt in %.2f s", trouble, wait_s)
            except Rejected as rejection:
                raise BadReply(f"the server rejects the prompt: {rejection}", spent) from rejection
            except ServerRefused as refusal:
                self.last_error = str(refusal)
                if self._servers.all_refuse or job.begun:
                    raise
                wait_s = 0.0
            await asyncio.sleep(wait_s)
        raise AssertionError("a count without end ended")

    def _wait_s(self, attempt: int, trouble: Trouble) -> float:
        """Fail over at once; back off when every server has failed."""
        rounds, servers_left = divmod(attempt + 1, len(self._servers))
        return 0.0 if servers_left else max(backoff_s(rounds - 1), trouble.retry_after_s)

    async def _traced(
        self, job: LLMRequest, server: Server, messages: list[dict[str, str]], longer: bool
    ) -> ServerReply:
        started_s = time.perf_counter()
        outcome, usage = "cancelled", Usage()
        try:
            on_text = job.tell if job.on_text else None
            answer = await server.complete(job.prompt, messages, on_text, longer=longer)
            outcome, usage = ("bad" if answer.reply is None else "ok"), answer.usage
            return answer
        except (Trouble, Rejected, ServerRefused) as failure:
            outcome = "broken" if job.begun else _OUTCOMES[type(failure)]
            raise
        finally:
            ended_s = time.perf_counter()
            self._on_call(job.tenant, job.prompt.operation, started_s, ended_s, usage, outcome)
