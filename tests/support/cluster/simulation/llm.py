"""The LLM server of the simulation: the mock's replies, late, and some to requests that nobody waits for."""

from __future__ import annotations

from concurrent.futures import Future
from typing import TYPE_CHECKING

from undertow.bench.mock.llm import MockLLM
from undertow.engine.llm.client import BadReply, Completion
from undertow.prompts.builders import Prompt

from ...faults.harness import PARKING, RATES
from ..in_process import UsableAnswers

if TYPE_CHECKING:
    from .processes import Process
    from .world import World

REPLIES = UsableAnswers(**RATES, **PARKING)


class SimLLM(MockLLM):
    """The client of one engine. A reply depends on its prompt alone, however often that is sent."""

    def __init__(self, world: World, process: Process) -> None:
        super().__init__(REPLIES)
        self._world, self._process = world, process
        self._rng = world.rng(f"llm {process.name}")
        self._under_way = 0

    @property
    def in_flight(self) -> int:
        return self._under_way

    @property
    def unreachable_s(self) -> float | None:
        """An outage that has been noticed."""
        since_s = self._world.llm_down_since_s
        return None if since_s is None or not self._under_way else self._world.loop.time() - since_s

    def submit(self, prompt: Prompt, *, tenant: str) -> Future[Completion]:
        future: Future[Completion] = Future()
        self._under_way += 1
        self._later(prompt, tenant, future)
        return future

    def cancel(self, future: Future[Completion]) -> None:
        """Some replies are on their way by then, and come all the same."""
        if self._rng.random() < 0.5:
            future.cancel()

    def _later(self, prompt: Prompt, tenant: str, future: Future[Completion]) -> None:
        slow = self._world.faults_on and self._rng.random() < 0.1
        delay_s = self._rng.expovariate(1 / (2.0 if slow else 0.05))
        self._process.call_later(delay_s, self._reply, prompt, tenant, future)

    def _reply(self, prompt: Prompt, tenant: str, future: Future[Completion]) -> None:
        down = self._world.llm_down_since_s is not None
        if down or (self._world.faults_on and self._rng.random() < 0.05):  # an error: the client asks again
            self._later(prompt, tenant, future)
            return
        self._under_way -= 1
        answer = MockLLM.submit(self, prompt, tenant=tenant) if not self._closed else None
        if answer is None or not future.set_running_or_notify_cancel():
            return
        self._world.note("replies", self._process.name, tenant, prompt.operation)
        if isinstance(error := answer.exception(), BadReply):
            future.set_exception(error)
        else:
            future.set_result(answer.result())
