"""OpenTelemetry spans of HTTP requests, shard calls, steps and LLM requests.

Off unless an OTLP endpoint is set. Sampling is decided once, at the incoming request; its traceparent
(engine/base/trace.py) carries the decision across threads and Ray calls. A step serves many requests,
so it is a trace of its own with a link to each, as is an LLM request of a later consolidation. A step without
a traced request makes no span. Spans contain no content and no tenant's name.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider, sampling
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import Attributes
from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from undertow.engine.base.config import Settings
from undertow.engine.base.trace import (
    LLMRequest,
    Observer,
    Phase,
    ShardCall,
    current_traceparent,
    use_traceparent,
)
from undertow.prompts.operations import QUERY_OPERATIONS

SERVICE = "undertow"

_W3C = TraceContextTextMapPropagator()
# offset from time.perf_counter to wall-clock nanoseconds, until the wall clock is set by more than _STEP_NS
_epoch_ns = time.time_ns() - time.perf_counter_ns()
_STEP_NS = 100_000_000


class TracingSettings(BaseSettings):
    """OpenTelemetry's variables that are read here; its SDK reads the others."""

    model_config = SettingsConfigDict(env_prefix="OTEL_", env_ignore_empty=True, frozen=True)

    exporter_otlp_endpoint: str | None = None
    exporter_otlp_traces_endpoint: str | None = None
    sdk_disabled: bool = False
    service_name: str = SERVICE
    # the share of requests to trace, of those without a traceparent
    traces_sampler_arg: float = Field(default=0.1, ge=0, le=1)

    @property
    def wanted(self) -> bool:
        return not self.sdk_disabled and bool(
            self.exporter_otlp_endpoint or self.exporter_otlp_traces_endpoint
        )


class LinkedSampler(sampling.Sampler):
    """Samples a span without a parent if any linked span is sampled; without links, by ratio."""

    def __init__(self, ratio: float) -> None:
        self._by_parent: sampling.Sampler = sampling.ParentBased(sampling.TraceIdRatioBased(ratio))

    def should_sample(
        self,
        parent_context: Context | None,
        trace_id: int,
        name: str,
        kind: SpanKind | None = None,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        trace_state: trace.TraceState | None = None,
    ) -> sampling.SamplingResult:
        sampler = self._by_parent
        if links and not trace.get_current_span(parent_context).get_span_context().is_valid:
            sampled = any(link.context.trace_flags.sampled for link in links)
            sampler = sampling.ALWAYS_ON if sampled else sampling.ALWAYS_OFF
        return sampler.should_sample(parent_context, trace_id, name, kind, attributes, links, trace_state)

    def get_description(self) -> str:
        return f"Linked({self._by_parent.get_description()})"


class Tracing:
    """Makes spans with one provider. `close` flushes them."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer: Tracer = provider.get_tracer(SERVICE)

    @contextmanager
    def request(self, method: str, headers: Mapping[str, str]) -> Iterator[RequestSpan]:
        """A span around an HTTP request, in the trace of its headers and the context of its work."""
        about, began_ns = {"http.request.method": method}, _wall_ns(time.perf_counter())
        cause = _W3C.extract(headers)
        span = self._tracer.start_span(method, cause, SpanKind.SERVER, about, start_time=began_ns)
        with use_traceparent(_traceparent(span)):
            try:
                yield RequestSpan(span)
            finally:
                span.end(_wall_ns(time.perf_counter()))

    def observer(self, model: str | None) -> Observer:
        """An observer for one shard. `model`: the model of its LLM requests, if set."""
        return SpanObserver(self._tracer, model)

    def close(self) -> None:
        self._provider.shutdown()


@cache
def tracing() -> Tracing | None:
    """The process's tracing as the environment configures it; None: off."""
    settings = TracingSettings()
    if not settings.wanted:
        return None
    resource = Resource.create({SERVICE_NAME: settings.service_name})
    provider = TracerProvider(LinkedSampler(settings.traces_sampler_arg), resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Tracing(provider)


def observers(settings: Settings) -> Sequence[Observer]:
    """The observers of a shard in any process, for EngineParts."""
    made = tracing()
    return () if made is None else (made.observer(settings.llm_model),)


class RequestSpan:
    """The span of an HTTP request under way."""

    def __init__(self, span: Span) -> None:
        self._span = span

    @property
    def ids(self) -> dict[str, str]:
        """The ids for the log."""
        context = self._span.get_span_context()
        return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}

    def end(self, method: str, route: str, status: int, tenant: str | None, problem: str | None) -> None:
        """Set the attributes that are known at the end; `tenant`: the keyed hash."""
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
    """A phase under way: its inner phases, and the requests that it serves."""

    inner: list[tuple[Phase, _Node]] = field(default_factory=list)
    traceparents: set[str] = field(default_factory=set)


class SpanObserver:
    """An engine's Observer. Makes a step's spans at its end, if it served a traced request."""

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
            self._make_spans(phase, node, _context_of(current_traceparent()), _links(node.traceparents))

    def called(self, call: ShardCall) -> None:
        if current_traceparent() is None:
            return
        span = self._tracer.start_span(
            f"shard {call.method}", _context_of(current_traceparent()), start_time=_wall_ns(call.began_s)
        )
        _fail(span, call.error)
        span.end(_wall_ns(call.ended_s))

    def requested(self, request: LLMRequest) -> None:
        """A span by OpenTelemetry's conventions for generative AI, without messages."""
        if (cause := current_traceparent()) is None:
            return
        waits = request.operation in QUERY_OPERATIONS
        span = self._tracer.start_span(
            f"chat {self._model}" if self._model else "chat",
            _context_of(cause) if waits else Context(),
            SpanKind.CLIENT,
            self._attributes(request),
            links=() if waits else _links({cause}),
            start_time=_wall_ns(request.began_s),
        )
        _fail(span, None if request.outcome == "ok" else request.outcome)
        span.end(_wall_ns(request.ended_s))

    def _attributes(self, request: LLMRequest) -> dict[str, str | int]:
        usage = request.usage
        return {
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "openai",  # the protocol; the server's provider is unknown
            **({"gen_ai.request.model": self._model} if self._model else {}),
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.cached_prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "undertow.llm.operation": request.operation,
        }

    def _make_spans(self, phase: Phase, node: _Node, parent: Context, links: Sequence[Link]) -> None:
        span = self._tracer.start_span(
            phase.name,
            parent,
            attributes={"undertow.count": phase.count},
            links=links,
            start_time=_wall_ns(phase.began_s),
        )
        if span.is_recording():
            inside = trace.set_span_in_context(span, Context())
            for inner, its in node.inner:
                self._make_spans(inner, its, inside, ())
        span.end(_wall_ns(phase.ended_s))


def _traceparent(span: Span) -> str | None:
    """None for a span that is not sampled."""
    if not span.get_span_context().trace_flags.sampled:
        return None
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, trace.set_span_in_context(span, Context()))
    return carrier["traceparent"]


def _context_of(traceparent: str | None) -> Context:
    return Context() if traceparent is None else _W3C.extract({"traceparent": traceparent}, Context())


def _links(traceparents: Iterable[str]) -> list[Link]:
    contexts = (_context_of(traceparent) for traceparent in sorted(traceparents))
    return [Link(trace.get_current_span(context).get_span_context()) for context in contexts]


def _fail(span: Span, error: str | None) -> None:
    if error is not None:
        span.set_attribute("error.type", error)
        span.set_status(Status(StatusCode.ERROR))


def _wall_ns(seconds: float) -> int:
    """The wall clock at a moment of time.perf_counter.

    All spans share one offset. With a new one for each, a span could begin before its parent.
    """
    global _epoch_ns
    now_ns = time.time_ns() - time.perf_counter_ns()
    if abs(now_ns - _epoch_ns) > _STEP_NS:
        _epoch_ns = now_ns
    return int(seconds * 1e9) + _epoch_ns
