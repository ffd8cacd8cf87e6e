"""Client of one or more OpenAI-compatible servers: requests from one thread, replies as futures.

A request has one of three outcomes (`replies.py`): a validated reply, `BadReply`, or `ServerRefused`. What
is tried again, and how often, stands in `retries.py`.
"""

from __future__ import annotations

import asyncio
import itertools
from concurrent.futures import Future
from contextlib import AbstractContextManager
from typing import Any, Protocol

from undertow.engine.base.config import Settings
from undertow.engine.llm.discovery import server_addresses
from undertow.engine.llm.load_balancer import LoadBalancer
from undertow.engine.llm.loop_tasks import LoopTasks
from undertow.engine.llm.replies import (
    BadReply,
    BrokenOff,
    Completion,
    OnCall,
    OnText,
    ServerHealth,
    ServerRefused,
    Trouble,
    read_reply,
)
from undertow.engine.llm.retries import LLMRequest, Retries
from undertow.engine.llm.server import ModelChoice, Server
from undertow.prompts.builders import Prompt

__all__ = [
    "BadReply",
    "BrokenOff",
    "Completion",
    "Completions",
    "LLMClient",
    "OnCall",
    "OnText",
    "OpenAILLM",
    "ServerHealth",
    "ServerRefused",
    "read_reply",
]


class Completions(Protocol):
    """The LLM interface of the scheduler; called from one thread. `on_call` receives each request."""

    on_call: OnCall | None

    def submit(self, prompt: Prompt, *, tenant: str) -> Future[Completion]:
        """Queue `prompt`; never blocks. The future raises BadReply or ServerRefused."""
        ...

    def cancel(self, future: Future[Completion]) -> None: ...

    @property
    def in_flight(self) -> int: ...

    @property
    def unreachable_s(self) -> float | None: ...

    @property
    def last_error(self) -> str | None: ...


class LLMClient(Completions, Protocol):
    """The LLM interface of an engine, with streamed answers."""

    def stream(self, prompt: Prompt, *, tenant: str, on_text: OnText) -> Future[Completion]:
        """Like `submit`, for a prompt with a plain text reply, which is streamed to `on_text`.

        The pieces add up to the reply. The future raises BrokenOff if a reply ends early; a request that
        fails before its first piece is retried like any other.
        """
        ...

    def close(self) -> None: ...


class OpenAILLM(AbstractContextManager["OpenAILLM"]):
    """`LLMClient` over HTTP, with an event loop in its own thread."""

    def __init__(self, settings: Settings, *, on_call: OnCall | None = None) -> None:
        """ValueError if `settings.llm_url` names no server (`server_addresses`). Does not connect yet."""
        model = ModelChoice(settings.llm_model)
        self._named = [Server(at, settings, model) for at in server_addresses(settings.llm_url)]
        self._servers = LoadBalancer(self._named, settings.llm_in_flight, settings.llm_timeout_s)
        self._llm_model = settings.llm_model
        self.on_call = on_call
        self._retries = Retries(self._servers, self._report)
        self._numbers = itertools.count()
        self._tasks = LoopTasks(None, "LLM client")

    def submit(self, prompt: Prompt, *, tenant: str) -> Future[Completion]:
        return self._begin(LLMRequest(prompt, tenant, next(self._numbers)))

    def stream(self, prompt: Prompt, *, tenant: str, on_text: OnText) -> Future[Completion]:
        """See LLMClient.stream."""
        return self._begin(LLMRequest(prompt, tenant, next(self._numbers), on_text))

    def _begin(self, job: LLMRequest) -> Future[Completion]:
        if self._tasks.closed:
            raise RuntimeError("this LLM client is closed")
        return self._tasks.begin(self._retries.complete(job))

    def cancel(self, future: Future[Completion]) -> None:
        """Cancel a request in any state. No effect on a future that is done."""
        future.cancel()

    @property
    def in_flight(self) -> int:
        """Requests in flight at all servers."""
        return self._servers.active

    @property
    def unreachable_s(self) -> float | None:
        """Seconds from the first to the latest failure without an answer in between; None if healthy.

        Only failures extend it: a slow reply is no silence. With several servers, all must be silent, and the
        time is that of the last one to become silent.
        """
        return self._servers.silent_s

    @property
    def last_error(self) -> str | None:
        return self._retries.last_error

    def healthy(self) -> ServerHealth:
        """Ask every server for its models. Returns whether all are usable, with a message for each."""
        return self._tasks.begin(self._probe()).result()

    def close(self) -> None:
        """Cancel all requests and end the thread."""
        self._tasks.close(self._shut_down())

    def __exit__(self, *_: object) -> None:
        self.close()

    # Everything below runs on the event loop.

    def _report(self, *call: Any) -> None:
        if self.on_call is not None:
            self.on_call(*call)

    async def _probe(self) -> ServerHealth:
        async def offer(server: Server) -> list[str] | Trouble | ServerRefused:
            try:
                return await server.offered()
            except (Trouble, ServerRefused) as trouble:
                return trouble

        model = ModelChoice(self._llm_model)
        offers = await asyncio.gather(*map(offer, self._named))
        found = [server.health(model, of) for server, of in zip(self._named, offers, strict=True)]
        return ServerHealth(all(health.ok for health in found), "; ".join(health.text for health in found))

    async def _shut_down(self) -> None:
        await self._tasks.cancel()
        await self._servers.close()
