"""Client of any OpenAI-compatible server: requests from one thread, replies as futures.

Three outcomes, never confused (spec, "When the LLM fails"): a validated reply; `BadReply`, this
prompt will not get a usable reply; `ServerRefused`, the settings are wrong. Trouble of transport
is none of them: it is retried until it passes or the caller cancels.
"""

from __future__ import annotations

import asyncio
import email.utils
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol, Self, TypeVar
from urllib.parse import urlsplit

import openai
import orjson
from pydantic import BaseModel, ValidationError

from undertow.engine.config import Settings
from undertow.engine.llm_slots import Slots, backoff_s
from undertow.engine.llm_wire import ChatCompletion, ModelList
from undertow.engine.model import UndertowError, Usage
from undertow.prompts import Operation, Prompt, repair_messages
from undertow.prompts.replies import Reply

log = logging.getLogger(__name__)

PRIORITY: dict[Operation, int] = {"answer": 0, "merge": 1, "episode": 2, "refine": 3}

_MAX_RETRY_AFTER_S = 60.0
_CONNECT_TIMEOUT_S = 10.0
_PROBE_TIMEOUT_S = 10.0
_SHOWN_REPLY_CHARS = 2_000
_SHOWN_ERROR_CHARS = 300
_SETTINGS_PARAMS = ("model", "response_format", "temperature", "seed")
_CURE = "Check UNDERTOW_LLM_URL, UNDERTOW_LLM_MODEL and UNDERTOW_LLM_API_KEY (`undertow doctor` tests them)"

OnCall = Callable[[str, str, float, float, Usage, str], None]
"""(tenant, operation, started_s, ended_s, usage, outcome) of one HTTP request, from the client's
thread; times of `time.perf_counter`, the clock of `Trace`; outcome is ok, bad, retry, rejected,
refused or cancelled."""


class BadReply(UndertowError):
    """No usable reply to this prompt, after one repair. `usage` is what the attempts cost."""

    def __init__(self, reason: str, usage: Usage) -> None:
        super().__init__(f"The LLM gave no usable reply: {reason}")
        self.reason = reason
        self.usage = usage


class ServerRefused(UndertowError):
    """The server turns us away whatever we ask: wrong key, URL or model. Jobs stay pending."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A usable reply. `latency_s` runs from submission, with waiting, retries and repair."""

    reply: Reply | str
    usage: Usage
    model: str
    latency_s: float


class Health(NamedTuple):
    ok: bool
    text: str


class LLMClient(Protocol):
    """What the scheduler needs of an LLM; called from one thread."""

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

    def close(self) -> None: ...


def read_reply(prompt: Prompt, content: str, finish_reason: str | None = "stop") -> Reply | str:
    """The reply that `content` holds. ValueError says, for the model to read, what is wrong."""
    if finish_reason == "length":
        raise ValueError("it was cut off at the token limit; be shorter")
    if finish_reason == "content_filter":
        raise ValueError("a content filter withheld it")
    if not content.strip():
        raise ValueError("it was empty")
    if prompt.reply is None:
        return content.strip()
    try:
        return prompt.reply.model_validate_json(content)
    except ValidationError as invalid:
        raise ValueError(_in_words(invalid)) from invalid


def _in_words(invalid: ValidationError) -> str:
    problems = invalid.errors(include_url=False, include_context=False, include_input=False)
    lines = [f"{'.'.join(map(str, p['loc'])) or 'reply'}: {p['msg']}" for p in problems[:3]]
    return "; ".join(lines)[:_SHOWN_ERROR_CHARS]


class _Trouble(Exception):
    """A request that failed on the way; worth another attempt after `retry_after_s`."""

    def __init__(self, text: str, retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class _Rejected(Exception):
    """The server will not take this very prompt."""


_OUTCOMES: dict[type[Exception], str] = {_Trouble: "retry", _Rejected: "rejected", ServerRefused: "refused"}


_Form = TypeVar("_Form", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class _Answer:
    """What one request brought; `reply` is None where `problem` says why."""

    content: str
    reply: Reply | str | None
    problem: str
    usage: Usage
    model: str


@dataclass(slots=True)
class _Job:
    prompt: Prompt
    tenant: str
    number: int
    future: Future[Completion] = field(default_factory=Future)
    submitted_s: float = field(default_factory=time.perf_counter)
    task: asyncio.Task[Completion] | None = None


class OpenAILLM:
    """`LLMClient` over HTTP. An event loop in a thread of its own does the waiting."""

    def __init__(self, settings: Settings, *, on_call: OnCall | None = None) -> None:
        """ValueError if `settings.llm_url` is missing or no http(s) URL. Does not connect yet."""
        self.url = _base_url(settings.llm_url)
        self._reply_tokens = settings.reply_tokens
        self._model = settings.llm_model
        self._on_call = on_call
        self._client = openai.AsyncOpenAI(
            base_url=self.url,
            api_key=settings.llm_api_key,
            max_retries=0,  # retries are ours: without end, and visible
            timeout=openai.Timeout(settings.llm_timeout_s, connect=_CONNECT_TIMEOUT_S),
        )
        self._slots = Slots(settings.llm_in_flight, settings.llm_timeout_s)
        self._numbers = itertools.count()
        self._tasks: set[asyncio.Task[Completion]] = set()
        self._last_error: str | None = None
        self._told_no_usage = False
        self._closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="undertow-llm", daemon=True)
        self._thread.start()

    def submit(self, prompt: Prompt, *, tenant: str) -> Future[Completion]:
        if self._closed:
            raise RuntimeError("this LLM client is closed")
        job = _Job(prompt, tenant, next(self._numbers))
        self._loop.call_soon_threadsafe(self._start, job)
        job.future.add_done_callback(partial(self._stop_if_cancelled, job))
        return job.future

    def cancel(self, future: Future[Completion]) -> None:
        """Give the request up, wherever it stands. No effect on a future that is done."""
        future.cancel()

    @property
    def in_flight(self) -> int:
        """Requests at the server now."""
        return self._slots.active

    @property
    def unreachable_s(self) -> float | None:
        """Seconds from the first to the latest failure with no answer in between; None if healthy.

        It grows with failures, not while a request is under way: a slow reply is no silence.
        """
        return self._slots.silent_s

    @property
    def last_error(self) -> str | None:
        return self._last_error

    def healthy(self) -> Health:
        """Ask the server for its models and say, in words, whether it can serve us."""
        return asyncio.run_coroutine_threadsafe(self._probe(), self._loop).result()

    def close(self) -> None:
        """Cancel what is under way and end the thread."""
        if self._closed:
            return
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Everything below runs on the event loop.

    def _start(self, job: _Job) -> None:
        job.task = self._loop.create_task(self._complete(job))
        self._tasks.add(job.task)
        job.task.add_done_callback(partial(self._deliver, job))

    def _stop_if_cancelled(self, job: _Job, future: Future[Completion]) -> None:
        if future.cancelled() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(lambda: job.task and job.task.cancel())

    def _deliver(self, job: _Job, task: asyncio.Task[Completion]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            job.future.cancel()
        error = None if task.cancelled() else task.exception()
        if not job.future.set_running_or_notify_cancel():
            return
        if error is not None:
            job.future.set_exception(error)
        else:
            job.future.set_result(task.result())

    async def _complete(self, job: _Job) -> Completion:
        answer = await self._ask(job, job.prompt.messages, Usage())
        usage = answer.usage
        if answer.reply is None:
            bad_reply = answer.content[:_SHOWN_REPLY_CHARS]
            answer = await self._ask(job, repair_messages(job.prompt, bad_reply, answer.problem), usage)
            usage += answer.usage
        if answer.reply is None:
            raise BadReply(answer.problem, usage)
        return Completion(answer.reply, usage, answer.model, time.perf_counter() - job.submitted_s)

    async def _ask(self, job: _Job, messages: list[dict[str, str]], spent: Usage) -> _Answer:
        """One request, repeated until the server answers it; `spent` is what went before."""
        urgency = (PRIORITY[job.prompt.operation], job.number)
        for attempt in itertools.count():
            async with self._slots.hold(urgency):
                try:
                    answer = await self._traced(job, messages)
                except _Trouble as trouble:
                    self._last_error = str(trouble)
                    self._slots.failed()
                    wait_s = max(backoff_s(attempt), trouble.retry_after_s)
                    log.debug("%s; next attempt in %.2f s", trouble, wait_s)
                except _Rejected as rejection:
                    self._slots.succeeded()
                    raise BadReply(f"the server rejects the prompt: {rejection}", spent) from rejection
                except ServerRefused as refusal:
                    self._last_error = str(refusal)
                    self._slots.succeeded()
                    raise
                else:
                    self._slots.succeeded()
                    return answer
            await asyncio.sleep(wait_s)
        raise AssertionError("a count without end ended")

    async def _traced(self, job: _Job, messages: list[dict[str, str]]) -> _Answer:
        started_s = time.perf_counter()
        outcome, usage = "cancelled", Usage()
        try:
            answer = await self._request(job.prompt, messages)
            outcome, usage = ("bad" if answer.reply is None else "ok"), answer.usage
            return answer
        except (_Trouble, _Rejected, ServerRefused) as failure:
            outcome = _OUTCOMES[type(failure)]
            raise
        finally:
            if self._on_call is not None:
                self._on_call(
                    job.tenant, job.prompt.operation, started_s, time.perf_counter(), usage, outcome
                )

    async def _request(self, prompt: Prompt, messages: list[dict[str, str]]) -> _Answer:
        try:
            if self._model is None:
                self._model = (await self._models())[0]
            # not chat.completions.create: its walk over every parameter's type costs 1 ms a request
            completion = await self._client.post(
                "/chat/completions",
                content=orjson.dumps(self._body(prompt, messages)),
                options={"headers": {"content-type": "application/json"}},
                cast_to=object,
            )
        except openai.APIStatusError as error:
            raise self._judged(error) from error
        except openai.APIConnectionError as error:
            raise _Trouble(f"{self.url}: {error.message} ({error.__cause__!r})") from error
        except json.JSONDecodeError as invalid:
            raise self._not_openai("no JSON") from invalid
        return self._answer(prompt, self._read(ChatCompletion, completion))

    def _read(self, form: type[_Form], body: object) -> _Form:
        try:
            return form.model_validate(body)
        except ValidationError as invalid:
            raise self._not_openai(_in_words(invalid)) from invalid

    def _not_openai(self, why: str) -> ServerRefused:
        return ServerRefused(f"{self.url} does not answer as OpenAI's API does ({why}). {_CURE}")

    def _body(self, prompt: Prompt, messages: list[dict[str, str]]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "messages": messages,
            "temperature": 0,
            "seed": 0,
            "max_tokens": self._reply_tokens,
        }
        if prompt.reply is not None:
            form = {"name": prompt.operation, "schema": prompt.reply.wire_schema(), "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        return body

    def _answer(self, prompt: Prompt, completion: ChatCompletion) -> _Answer:
        choice = completion.choices[0]
        content = choice.message.content or ""
        try:
            reply, problem = read_reply(prompt, content, choice.finish_reason), ""
        except ValueError as invalid:
            reply, problem = None, str(invalid)
        return _Answer(content, reply, problem, self._usage(completion), completion.model or str(self._model))

    def _usage(self, completion: ChatCompletion) -> Usage:
        used = completion.usage
        if used is None:
            if not self._told_no_usage:
                self._told_no_usage = True
                log.warning("%s reports no token usage: calls are counted, tokens are not", self.url)
            return Usage(calls=1)
        cached = used.prompt_tokens_details.cached_tokens if used.prompt_tokens_details else None
        return Usage(1, used.prompt_tokens, cached or 0, used.completion_tokens or 0)

    def _judged(self, error: openai.APIStatusError) -> _Trouble | _Rejected | ServerRefused:
        status, text = error.status_code, f"HTTP {error.status_code}: {error.message}"[:_SHOWN_ERROR_CHARS]
        if status in (408, 409, 429) or status >= 500:
            return _Trouble(f"{self.url}: {text}", _retry_after_s(error.response.headers.get("retry-after")))
        # a server without this model or without schemas would reject every prompt alike
        if status in (400, 413, 422) and (error.param or "").split(".")[0] not in _SETTINGS_PARAMS:
            return _Rejected(text)
        return ServerRefused(f"{self.url} refuses requests for model {self._model}: {text}. {_CURE}")

    async def _models(self) -> list[str]:
        listed = self._read(ModelList, await self._client.get("/models", cast_to=object))
        return [model.id for model in listed.data]

    async def _probe(self) -> Health:
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                names = await self._models()
        except openai.APIStatusError as error:
            return Health(False, str(self._judged(error)))
        except (openai.APIConnectionError, TimeoutError) as error:
            return Health(False, f"{self.url} cannot be reached ({error.__cause__ or error!r}). {_CURE}")
        except json.JSONDecodeError:
            return Health(False, str(self._not_openai("no JSON")))
        except ServerRefused as refusal:
            return Health(False, str(refusal))
        if self._model is not None and self._model not in names:
            return Health(False, f"{self.url} has no model {self._model}, it has {', '.join(names)}. {_CURE}")
        return Health(True, f"{self.url} serves {self._model or names[0]}")

    async def _shut_down(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.close()


def _base_url(url: str | None) -> str:
    parts = urlsplit(url or "")
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ValueError(f"llm_url is {url!r}; give a server's URL such as http://127.0.0.1:8000/v1")
    return (url or "").rstrip("/") + ("" if parts.path.strip("/") else "/v1")


def _retry_after_s(header: str | None) -> float:
    """Seconds that a Retry-After header (RFC 9110, 10.2.3) asks for, at most a minute; 0 if unclear."""
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
