"""One OpenAI-compatible server: sends a prompt, reads the reply, and classifies errors."""

from __future__ import annotations

import asyncio
import email.utils
import json
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeVar

import orjson
from pydantic import BaseModel, ValidationError

from undertow.engine.base.config import Settings
from undertow.engine.base.model import Usage
from undertow.engine.llm.dialect import Part, Rejections, refused_part, refuses, request_body
from undertow.engine.llm.discovery import BY_NAME, NamedActor, NoCluster, NoServer
from undertow.engine.llm.openai_schema import ChatChunk, ChatCompletion, ModelList, ReplyStream
from undertow.engine.llm.replies import (
    SHOWN_ERROR_CHARS,
    CutOff,
    OnText,
    Rejected,
    ServerHealth,
    ServerRefused,
    ServerReply,
    Trouble,
    behind_reasoning,
    in_words,
    read_reply,
)
from undertow.prompts.builders import Prompt, size_tokens

if TYPE_CHECKING:  # imported at the first request: the import takes a second of a shard's restart
    import openai
    from openai._types import RequestOptions

log = logging.getLogger(__name__)

_MAX_RETRY_AFTER_S = 60.0
_CONNECT_TIMEOUT_S = 10.0
_PROBE_TIMEOUT_S = 10.0
_SETTINGS_PARAMS = ("model", "response_format", "temperature", "seed", "stream", "stream_options")
_CHAT = "/chat/completions"
JSON: RequestOptions = {"headers": {"content-type": "application/json"}}
CURE = "Check UNDERTOW_LLM_URL, UNDERTOW_LLM_MODEL and UNDERTOW_LLM_API_KEY (`undertow doctor` tests them)"

_Form = TypeVar("_Form", bound=BaseModel)


class ModelChoice:
    """The one model that all servers must serve: that of the settings, or the first offered by a server."""

    def __init__(self, name: str | None) -> None:
        self.name = name
        self._chosen_at: str | None = None

    def agree(self, url: str, offered: list[str]) -> str:
        """The model's name, chosen now if none was. ServerRefused if `url` does not offer it."""
        if self.name is None:
            self.name, self._chosen_at = offered[0], url
        if self.name in offered:
            return self.name
        has = f"{url} has no model {self.name}, it has {', '.join(offered)}"
        if self._chosen_at is not None:
            has += f"; {self._chosen_at} serves {self.name}, and all servers must serve one model"
        raise ServerRefused(f"{has}. {CURE}")


class Server:
    """HTTP to one server. Lives on the event loop that first awaits it."""

    def __init__(self, address: str, settings: Settings, model: ModelChoice) -> None:
        """`address`: one of `server_addresses`. `model` is shared by all servers. Does not connect."""
        self._address = address
        self._actor = NamedActor(address) if address.startswith(BY_NAME) else None
        self._url = address if self._actor is None else None
        self._asked: asyncio.Future[str] | None = None
        self._model = model
        self._agreed = model.name is not None
        self._reply_tokens, self._context_tokens = settings.reply_tokens, settings.context_tokens
        self._extra_body: dict[str, Any] = json.loads(settings.llm_extra_body)
        self._refused: frozenset[Part] = frozenset()
        self._rejections = Rejections()
        self._api_key, self._timeout_s = settings.llm_api_key, settings.llm_timeout_s
        self._probe_timeout_s = min(_PROBE_TIMEOUT_S, settings.llm_timeout_s)
        self._told_no_usage = False

    @property
    def url(self) -> str:
        """Its URL for messages, or its actor's name with the URL if known."""
        if self._actor is None or self._url is None:
            return self._address
        return f"{self._address} ({self._url})"

    @cached_property
    def _client(self) -> openai.AsyncOpenAI:
        import openai

        return openai.AsyncOpenAI(
            base_url=self._url,
            api_key=self._api_key,
            max_retries=0,  # the caller retries, without limit and visibly
            timeout=openai.Timeout(self._timeout_s, connect=_CONNECT_TIMEOUT_S),
        )

    async def find(self) -> bool:
        """Ask the server's actor for its URL. True: it has moved, and requests in flight use the old URL.

        A known URL stays in use if the actor is silent. Raises Trouble or ServerRefused if no URL is known.
        """
        if self._actor is None:
            return False
        if self._asked is None or self._asked.done():
            self._asked = asyncio.get_running_loop().run_in_executor(None, self._actor.url)
        try:
            url = await asyncio.shield(self._asked)  # all waiting calls share one answer
        except (NoServer, NoCluster) as unknown:
            if self._url is None:
                kind = Trouble if isinstance(unknown, NoServer) else ServerRefused
                raise kind(str(unknown)) from unknown
            log.debug("%s", unknown)
            return False
        before, self._url = self._url, url
        if before in (None, url):
            return False
        log.info("%s was at %s before", self.url, before)
        if "_client" in vars(self):
            self._client.base_url = url
        return True

    async def complete(
        self, prompt: Prompt, messages: list[dict[str, str]], on_text: OnText | None, *, longer: bool
    ) -> ServerReply:
        """One request, streamed if `on_text` is given. Raises Trouble, Rejected or ServerRefused.

        `longer`: a reply was cut off, and this one may have more tokens.
        """
        import openai

        await self._found()
        try:
            if not self._agreed:
                self._model.agree(self.url, await self._models())
                self._agreed = True
            reply_tokens = self._longest(prompt, messages) if longer else self._reply_tokens
            body_without = partial(request_body, prompt, messages, reply_tokens, longer)
            stream = None if on_text is None else ReplyStream(on_text, after_notes=prompt.after_notes)
            completion = await self._accepted(body_without, stream)
        except openai.APIStatusError as error:
            raise self._blamed(prompt, self._judged(error)) from error
        except openai.APIConnectionError as error:
            raise Trouble(f"{self.url}: {error.message} ({error.__cause__!r})") from error
        except openai.APIError as error:  # reported within a stream
            raise Trouble(f"{self.url}: {error.message}"[:SHOWN_ERROR_CHARS]) from error
        except json.JSONDecodeError as invalid:
            raise self._not_openai("no JSON") from invalid
        self._rejections.clear()
        return self._answer(prompt, completion)

    async def _accepted(
        self, body_without: Callable[[frozenset[Part]], dict[str, Any]], stream: ReplyStream | None
    ) -> ChatCompletion:
        """The completion. What the server refuses is left out, of later requests too if that helps."""
        import openai

        refused = self._refused
        while True:
            body = body_without(refused)
            try:
                sent = {"model": self._model.name} | body | self._extra_body
                completion = await (self._whole(sent) if stream is None else self._streamed(sent, stream))
            except openai.APIStatusError as error:
                part = refused_part(body, error.message, error.param, refused)
                if part is None or error.status_code not in (400, 422):
                    raise
                log.info("%s refuses %s: %s", self.url, part, error.message[:SHOWN_ERROR_CHARS])
                refused |= {part}
            else:
                self._refused |= refused
                return completion

    async def _whole(self, body: dict[str, Any]) -> ChatCompletion:
        # Not chat.completions.create: its inspection of parameter types costs 1 ms a request.
        completion = await self._client.post(_CHAT, content=orjson.dumps(body), options=JSON, cast_to=object)
        return self._read(ChatCompletion, completion)

    async def _streamed(self, body: dict[str, Any], pieces: ReplyStream) -> ChatCompletion:
        import openai

        body |= {"stream": True, "stream_options": {"include_usage": True}}
        async with await self._client.post(
            _CHAT,
            content=orjson.dumps(body),
            options=JSON,
            cast_to=object,
            stream=True,
            stream_cls=openai.AsyncStream[object],
        ) as chunks:
            if not chunks.response.headers.get("content-type", "").startswith("text/event-stream"):
                raise self._not_openai("it does not stream")
            async for chunk in chunks:
                pieces.take(self._read(ChatChunk, chunk))
        if pieces.finish_reason is None:
            raise Trouble(f"{self.url} broke off in the middle of a reply")
        return pieces.assembled

    async def offered(self) -> list[str]:
        """The models that the server lists. ServerRefused; Trouble if it does not answer within 10 s."""
        import openai

        await self._found()
        try:
            async with asyncio.timeout(self._probe_timeout_s):
                return await self._models()
        except openai.APIStatusError as error:
            judged = self._judged(error)
            raise ServerRefused(str(judged)) if isinstance(judged, Rejected) else judged from error
        except (openai.APIConnectionError, TimeoutError) as error:
            raise Trouble(f"{self.url} cannot be reached ({error.__cause__ or error!r}). {CURE}") from error
        except json.JSONDecodeError as invalid:
            raise self._not_openai("no JSON") from invalid

    async def probe(self) -> None:
        """Trouble unless the server answers. A refusal is an answer: not every server lists its models."""
        try:
            await self.offered()
        except ServerRefused as refusal:
            log.debug("%s answers a probe: %s", self.url, refusal)

    def health(self, model: ModelChoice, found: list[str] | Trouble | ServerRefused) -> ServerHealth:
        """Whether the server serves `model`, with a message. `found` is the result or error of `offered`."""
        if not isinstance(found, list):
            return ServerHealth(False, str(found))
        try:
            refused = f"; it refuses {', '.join(sorted(self._refused))}" if self._refused else ""
            return ServerHealth(True, f"{self.url} serves {model.agree(self.url, found)}{refused}")
        except ServerRefused as refusal:
            return ServerHealth(False, str(refusal))

    async def close(self) -> None:
        if self._asked is not None:
            self._asked.cancel()
        if "_client" in vars(self):
            await self._client.close()

    async def _found(self) -> None:
        if self._url is None:
            await self.find()

    def _read(self, form: type[_Form], body: object) -> _Form:
        try:
            return form.model_validate(body)
        except ValidationError as invalid:
            raise self._not_openai(in_words(invalid)) from invalid

    def _not_openai(self, why: str) -> ServerRefused:
        return ServerRefused(f"{self.url} does not answer as OpenAI's API does ({why}). {CURE}")

    def _longest(self, prompt: Prompt, messages: list[dict[str, str]]) -> int:
        """The tokens of a reply that was cut off: also the most that its schema needs, if there is room.

        The usual ones are added, for reasoning, and for scripts with fewer characters a token.
        """
        needed = self._reply_tokens if prompt.reply is None else prompt.reply.most_tokens()
        room = self._context_tokens - size_tokens(messages)
        return max(self._reply_tokens, min(self._reply_tokens + needed, room))

    def _answer(self, prompt: Prompt, completion: ChatCompletion) -> ServerReply:
        choice = completion.choices[0]
        content = behind_reasoning(choice.message.content or "")
        model = completion.model or str(self._model.name)
        told = ServerReply(content, None, "", self._usage(completion), model)
        try:
            return replace(told, reply=read_reply(prompt, content, choice.finish_reason))
        except ValueError as invalid:
            return replace(told, problem=str(invalid), cut_off=isinstance(invalid, CutOff))

    def _usage(self, completion: ChatCompletion) -> Usage:
        used = completion.usage
        if used is None:
            if not self._told_no_usage:
                self._told_no_usage = True
                log.warning("%s reports no token usage: calls are counted, tokens are not", self.url)
            return Usage(calls=1)
        cached = used.prompt_tokens_details.cached_tokens if used.prompt_tokens_details else None
        return Usage(1, used.prompt_tokens, cached or 0, used.completion_tokens or 0)

    def _judged(self, error: openai.APIStatusError) -> Trouble | Rejected | ServerRefused:
        if (trouble := passing_trouble(self.url, error)) is not None:
            return trouble
        status, text = error.status_code, status_text(error)
        # A server without this model or without schemas would reject every prompt.
        if status in (400, 413, 422) and not self._is_of_settings(error):
            return Rejected(text)
        return self._refusal(text)

    def _is_of_settings(self, error: openai.APIStatusError) -> bool:
        """Whether the server rejects what all requests have in common."""
        if error.code == "model_not_found" or str(error.param).split(".")[0] in _SETTINGS_PARAMS:
            return True
        return any(refuses(name, error.message, error.param) for name in self._extra_body)

    def _blamed(self, prompt: Prompt, error: Trouble | Rejected | ServerRefused) -> Exception:
        """The error, or ServerRefused in place of a rejection that is not due to the prompt."""
        if isinstance(error, Rejected) and self._rejections.are_systematic(prompt, str(error)):
            return self._refusal(f"each prompt gets {error}")
        return error

    def _refusal(self, why: str) -> ServerRefused:
        extra = f"UNDERTOW_LLM_EXTRA_BODY adds {', '.join(self._extra_body)}. " if self._extra_body else ""
        return ServerRefused(
            f"{self.url} refuses requests for model {self._model.name}: {why}. {extra}{CURE}"
        )

    async def _models(self) -> list[str]:
        listed = self._read(ModelList, await self._client.get("/models", cast_to=object))
        return [model.id for model in listed.data]


def passing_trouble(url: str, error: openai.APIStatusError) -> Trouble | None:
    """The Trouble of a status after which the request may be sent again; None for any other."""
    status = error.status_code
    if status not in (408, 409, 429) and status < 500:
        return None
    return Trouble(f"{url}: {status_text(error)}", _retry_after_s(error.response.headers.get("retry-after")))


def status_text(error: openai.APIStatusError) -> str:
    return f"HTTP {error.status_code}: {error.message}"[:SHOWN_ERROR_CHARS]


def _retry_after_s(header: str | None) -> float:
    """The seconds in a Retry-After header (RFC 9110, 10.2.3), at most 60; 0 if invalid."""
    if header is None:
        return 0.0
    try:
        wait_s = float(header)
    except ValueError:
        try:
            wait_s = email.utils.parsedate_to_datetime(header).timestamp() - time.time()
        except ValueError:
            return 0.0
    return min(max(0.0, wait_s), _MAX_RETRY_AFTER_S)  # in this order a "nan" becomes 0
