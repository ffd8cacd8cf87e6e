"""Sends prompts to the LLM server with bounded concurrency; yields each reply as it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from itertools import islice
from typing import TypeVar

from undertow.engine.base.config import Settings
from undertow.engine.llm.client import BadReply, Completion, LLMClient, OpenAILLM, ServerRefused
from undertow.engine.llm.discovery import server_addresses
from undertow.engine.llm.replies import Trouble
from undertow.engine.llm.server import ModelChoice, Server
from undertow.prompts.builders import Prompt

Result = TypeVar("Result")
# yields prompts one after the other and is sent the reply to each
Talk = Generator[Prompt, Completion | BadReply | None, Result]

_LOOK_S = 0.25


class Asker:
    """Holds talks with the server. No request is in flight once `hold` has ended, even by an error."""

    def __init__(self, settings: Settings, client: LLMClient | None = None) -> None:
        """`settings.llm_url` names the server."""
        self._client = client or OpenAILLM(settings)
        self._in_flight = settings.llm_requests
        self._patience_s = settings.llm_patience_s

    def hold(self, talks: Iterable[Talk[Result]]) -> Iterator[Result]:
        """The result of each talk, in order of completion.

        ServerRefused: the server rejects our requests, or has been silent for `llm_patience_s`.
        """
        waiting = iter(talks)
        asked: dict[Future[Completion], Talk[Result]] = {}
        try:
            while True:
                begun = list(islice(waiting, self._in_flight - len(asked)))
                for talk in begun:
                    yield from self._go_on(talk, None, asked)
                if not begun and not asked:
                    return
                done, _ = wait(asked, timeout=_LOOK_S, return_when=FIRST_COMPLETED)
                for future in done:
                    yield from self._go_on(asked.pop(future), _reply(future), asked)
                self._check_server()
        finally:
            for future in asked:
                self._client.cancel(future)

    def _go_on(
        self,
        talk: Talk[Result],
        reply: Completion | BadReply | None,
        asked: dict[Future[Completion], Talk[Result]],
    ) -> Iterator[Result]:
        """Send the talk's next prompt, or yield its result."""
        try:
            prompt = talk.send(reply)
        except StopIteration as ended:
            yield ended.value
        else:
            asked[self._client.submit(prompt, tenant="eval")] = talk

    def _check_server(self) -> None:
        silent_s = self._client.unreachable_s
        if silent_s is not None and silent_s > self._patience_s:
            raise ServerRefused(
                f"the LLM server does not answer: {self._client.last_error}. "
                "What was answered is kept: run the same command again once it works."
            )

    def close(self) -> None:
        self._client.close()


def _reply(future: Future[Completion]) -> Completion | BadReply:
    try:
        return future.result()
    except BadReply as bad:
        return bad


def named(settings: Settings) -> Settings:
    """The settings with a model name; by default the first model of the first server that responds.

    ServerRefused: no server responds, or one lists no model.
    """
    if settings.llm_model is not None:
        return settings
    return settings.model_copy(update={"llm_model": asyncio.run(_first_model(settings))})


async def _first_model(settings: Settings) -> str:
    trouble: list[str] = []
    for address in server_addresses(settings.llm_url):
        server = Server(address, settings, ModelChoice(None))
        try:
            return (await server.offered())[0]
        except Trouble as silent:
            trouble.append(str(silent))
        finally:
            await server.close()
    raise ServerRefused(
        f"the LLM server does not answer: {'; '.join(trouble)}. "
        "What was done is kept: run the same command again once it works."
    )
