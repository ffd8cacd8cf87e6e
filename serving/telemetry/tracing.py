"""OpenTelemetry spans: of HTTP requests, of the calls of shards, of steps and of requests to the LLM.

Off unless an OTLP endpoint is set. Sampling is decided once, where the request comes in; its traceparent
(engine/base/trace_context.py) carries the decision over threads and Ray calls. A step serves many
requests, so it is a trace of its own, linked to each; so is what the LLM is asked for consolidation, which
comes long after the request. Nothing is drawn of steps that serve no traced request. Spans hold no content
and no tenant's name.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Decision as Sampling
from opentelemetry.sdk.trace.sampling import (
    ParentBased,
    Sampler,
    SamplingResult,
    StaticSampler,
    TraceIdRatioBased,
)
from opentelemetry.trace import (
    Link,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    TraceState,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from undertow.engine.base.config import Settings
from undertow.engine.base.trace import LLMRequest, Observer, Phase, ShardCall
from undertow.engine.base.trace_context import current_traceparent, use_traceparent
from undertow.prompts.builders import QUERY_OPERATIONS

SERVICE = "undertow"

_W3C = TraceContextTextMapPropagator()
# from time.perf_counter to nanoseconds of the wall clock
_EPOCH_NS = time.time_ns() - time.perf_counter_ns()


class TracingSettings(BaseSettings):
    """Of OpenTelemetry's variables those that are read here; its SDK reads the rest."""

    model_config = SettingsConfigDict(env_prefix="OTEL_", env_ignore_empty=True, frozen=True)

    exporter_otlp_endpoint: str | None = None
    exporter_otlp_traces_endpoint: str | None = None
    sdk_disabled: bool = False
    service_name: str = SERVICE
    # of the requests that come without a sampled traceparent, how many are traced
    traces_sampler_arg: float = Field(default=0.1, ge=0, le=1)

    @property
    def wanted(self) -> bool:
        return not self.sdk_disabled and bool(
            self.exporter_otlp_endpoint or self.exporter_otlp_traces_endpoint
        )


class LinkedSampler(Sampler):
    """A span without a parent is drawn if one is that it is linked to; without links either, by ratio."""

    def __init__(self, ratio: float) -> None:
        self._by_parent: Sampler = ParentBased(TraceIdRatioBased(ratio))

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: TraceState | None = None,
    ) -> SamplingResult:
        if links and not get_current_span(parent_context).get_span_context().is_valid:
            sampled = any(link.context.trace_flags.sampled for link in links)
            decision = Sampling.RECORD_AND_SAMPLE if sampled else Sampling.DROP
            return StaticSampler(decision).should_sample(parent_context, trace_id, name, kind, attributes)
        return self._by_parent.should_sample(
            parent_context, trace_id, name, kind, attributes, links, trace_state
        )

    def get_description(self) -> str:
        return f"Linked({self._by_parent.get_description()})"


class Tracing:
    """Draws spans with one provider. `close` sends what waits."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer(SERVICE)

    @contextmanager
    def request(self, method: str, headers: Mapping[str, str]) -> Iterator[RequestSpan]:
        """A span around an HTTP request, in the trace that its headers name; its work is done for that."""
        span = self._tracer.start_span(
            method, _W3C.extract(headers), SpanKind.SERVER, {"http.request.method": method}
        )
        with use_traceparent(_traceparent(span)):
            try:
                yield RequestSpan(span)
            finally:
                span.end()

    def observer(self, model: str | None) -> Observer:
        """For one shard. `model`: that its LLM server is asked for, if it is set."""
        return SpanObserver(self._tracer, model)

    def close(self) -> None:
        self._provider.shutdown()


@cache
def tracing() -> Tracing | None:
    """What the environment asks for, made once a process; None: nothing is to be traced."""
    settings = TracingSettings()
    if not settings.wanted:
        return None
    resource = Resource.create({SERVICE_NAME: settings.service_name})
    provider = TracerProvider(LinkedSampler(settings.traces_sampler_arg), resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider)


def observers(settings: Settings) -> Sequence[Observer]:
    """For `Parts`: a shard's, in whatever process it runs."""
    made = tracing()
    return () if made is None else (made.observer(settings.llm_model),)


class RequestSpan:
    """The span of an HTTP request that is under way."""

    def __init__(self, span: Span) -> None:
        self._span = span

    @property
    def ids(self) -> dict[str, str]:
        """For the log."""
        context = self._span.get_span_context()
        return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}

    def end(self, method: str, route: str, status: int, tenant: str | None, problem: str | None) -> None:
        """What is known once it was answered; `tenant` is the keyed hash."""
        self._span.update_name(f"{method} {route}")
        self._span.set_attributes({"http.route": route, "http.response.status_code": status})
        if tenant is not None:
            self._span.set_attribute("undertow.tenant", tenant)
        if problem is not None or status >= 500:
            self._span.set_attribute("error.type", problem or str(status))
        if status >= 500:
            self._span.set_status(Status(StatusCode.ERROR))


@dataclass(slots=True)
class _Node:
    """A phase that has begun: what was in it, and for whom."""

    inner: list[tuple[Phase, _Node]] = field(default_factory=list)
    traceparents: set[str] = field(default_factory=set)


class SpanObserver:
    """An engine's Observer. A step becomes spans when it is over, if it has served a traced request."""

    def __init__(self, tracer: Tracer, model: str | None) -> None:
        self._tracer = tracer
        self._model = model
        self._under_way: list[_Node] = []

    def began(self, name: str) -> None:
        self._under_way.append(_Node())

    def linked(self, traceparents: Iterable[str]) -> None:
        for node in self._under_way:
            node.traceparents.update(traceparents)

    def ended(self, phase: Phase) -> None:
        node = self._under_way.pop()
        if self._under_way:
            self._under_way[-1].inner.append((phase, node))
        elif node.traceparents or current_traceparent() is not None:
            self._draw(phase, node, _context_of(current_traceparent()), _links(node.traceparents))

    def called(self, call: ShardCall) -> None:
        if current_traceparent() is None:
            return
        span = self._tracer.start_span(
            f"shard {call.method}", _context_of(current_traceparent()), start_time=_wall_ns(call.began_s)
        )
        _fail(span, call.error)
        span.end(_wall_ns(call.ended_s))

    def requested(self, request: LLMRequest) -> None:
        """As OpenTelemetry's conventions for generative AI have it, without any message."""
        asked_by = current_traceparent()
        if asked_by is None:
            return
        waits = request.operation in QUERY_OPERATIONS
        span = self._tracer.start_span(
            f"chat {self._model}" if self._model else "chat",
            _context_of(asked_by) if waits else Context(),
            SpanKind.CLIENT,
            self._of_request(request),
            links=() if waits else _links({asked_by}),
            start_time=_wall_ns(request.began_s),
        )
        _fail(span, None if request.outcome == "ok" else request.outcome)
        span.end(_wall_ns(request.ended_s))

    def _of_request(self, request: LLMRequest) -> dict[str, str | int]:
        usage = request.usage
        return {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "openai",  # by the protocol: whose server it is, nobody says
            **({"gen_ai.request.model": self._model} if self._model else {}),
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "undertow.llm.operation": request.operation,
        }

    def _draw(self, phase: Phase, node: _Node, parent: Context, links: Sequence[Link]) -> None:
        span = self._tracer.start_span(
            phase.name,
            parent,
            attributes={"undertow.count": phase.count},
            links=links,
            start_time=_wall_ns(phase.began_s),
        )
        if span.is_recording():
            inside = set_span_in_context(span, Context())
            for inner, its in node.inner:
                self._draw(inner, its, inside, ())
        span.end(_wall_ns(phase.ended_s))


def _traceparent(span: Span) -> str | None:
    """None for a span that is not drawn: nobody is to be told of it then."""
    if not span.get_span_context().trace_flags.sampled:
        return None
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, set_span_in_context(span, Context()))
    return carrier["traceparent"]


def _context_of(traceparent: str | None) -> Context:
    return Context() if traceparent is None else _W3C.extract({"traceparent": traceparent}, Context())


def _span_context(traceparent: str) -> SpanContext:
    return get_current_span(_context_of(traceparent)).get_span_context()


def _links(traceparents: Iterable[str]) -> list[Link]:
    return [Link(_span_context(traceparent)) for traceparent in sorted(traceparents)]


def _fail(span: Span, error: str | None) -> None:
    if error is not None:
        span.set_attribute("error.type", error)
        span.set_status(Status(StatusCode.ERROR))


def _wall_ns(seconds: float) -> int:
    return int(seconds * 1e9) + _EPOCH_NS
