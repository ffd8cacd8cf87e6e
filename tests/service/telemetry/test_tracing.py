"""Spans from the request to the LLM call: joined over threads and over Ray, sent as OTLP, without content."""

from __future__ import annotations

import gzip
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("opentelemetry.sdk", reason="the service's packages are not installed")
pytest.importorskip("orjson", reason="the engine's packages are not installed")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.base.config import Settings
from undertow.engine.base.trace import Observer, Phase, use_traceparent
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.llm.client import LLMClient
from undertow.serving.auth.principal import Scope
from undertow.serving.http import hosting
from undertow.serving.telemetry.tracing import LinkedSampler, SpanObserver, Tracing, tracing

from ...support.llm_servers import wait_until
from ...support.service.client import scripted
from ...support.service.http import at, is_problem, said, serving
from ...support.service.scripted_server import Reply, ScriptedServer

OURS = "4bf92f3577b34da6a3ce929d0e0e4736"
SAMPLED = {"traceparent": f"00-{OURS}-00f067aa0ba902b7-01"}
UNSAMPLED = {"traceparent": f"00-{OURS}-00f067aa0ba902b7-00"}


@pytest.fixture
def spans() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    yield exporter
    exporter.shutdown()


@pytest.fixture
def drawn(spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch) -> EngineParts:
    """Parts of shards that draw into `spans`, as the service does; nothing but what comes sampled."""
    provider = TracerProvider(LinkedSampler(0.0))
    provider.add_span_processor(SimpleSpanProcessor(spans))
    made = Tracing(provider)
    monkeypatch.setattr(hosting, "tracing", lambda: made)

    def observers(settings: Settings) -> Sequence[Observer]:
        return (made.observer("small"),)

    return EngineParts(llm=eager_llm, observers=observers)


def eager_llm(settings: Settings) -> LLMClient:
    return MockLLM(MockReplies())


def the(spans: Sequence[ReadableSpan], name: str) -> ReadableSpan:
    (found,) = (span for span in spans if span.name == name)
    return found


def inside(span: ReadableSpan, outer: ReadableSpan) -> bool:
    assert outer.context is not None
    return span.parent is not None and span.parent.span_id == outer.context.span_id


def operation(chat: ReadableSpan) -> object:
    assert chat.attributes is not None
    return chat.attributes["undertow.llm.operation"]


def links_to(span: ReadableSpan, other: ReadableSpan) -> bool:
    assert other.context is not None
    return other.context.span_id in {link.context.span_id for link in span.links}


def test_a_request_is_one_trace_with_the_steps_that_serve_it_linked(
    tmp_path: Path, drawn: EngineParts, spans: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("undertow.serving.telemetry.tracing._epoch_ns", 0)  # the wall clock was set
    with serving(tmp_path, parts=drawn, engine={"theta_count": 2, "theta_sim": 0.1}) as service:
        client = service.client()
        for day in range(4):
            body = {"messages": said(f"pottery course, day {day}")}
            assert client.post(at("ann", "/memories"), json=body, headers=SAMPLED).status_code == 200
        assert client.post(at("ann", "/flush")).status_code == 200
        asked = client.post(at("ann", "/answer"), json={"question": "What?"}, headers=SAMPLED)
        assert asked.status_code == 200
    made = spans.get_finished_spans()  # now: a span ends after its answer has been read
    adds = [span for span in made if span.name == "POST /v1/tenants/{tenant}/memories"]
    assert len(adds) == 4
    for add in adds:
        assert add.context is not None and f"{add.context.trace_id:032x}" == OURS
        assert add.kind is SpanKind.SERVER
        (call,) = (span for span in made if span.name == "shard add" and inside(span, add))
        assert add.start_time is not None and call.start_time is not None
        assert add.start_time <= call.start_time
        assert abs(add.start_time - time.time_ns()) < 600e9
        steps = [span for span in made if span.name == "step" and links_to(span, add)]
        assert steps and all(step.parent is None for step in steps)
        phases = {span.name for span in made for step in steps if inside(span, step)}
        assert {"admit", "decide", "commit"} <= phases
    assert {"encode", "append", "gate"} <= {span.name for span in made}
    gate = next(span for span in made if span.name == "gate")
    assert any(inside(gate, span) for span in made if span.name == "decide")
    chats = [span for span in made if span.name == "chat small"]
    for chat in chats:
        assert operation(chat) == "answer" or any(links_to(chat, add) for add in adds)
    assert "episode" in map(operation, chats), "a topic that recurs has the LLM write an episode"
    assert all(chat.kind is SpanKind.CLIENT for chat in chats)
    (chat,) = (chat for chat in chats if operation(chat) == "answer")
    answering = the(made, "POST /v1/tenants/{tenant}/answer")
    assert inside(chat, answering)
    assert all(inside(the(made, phase), answering) for phase in ("encode_query", "rank"))
    attributes = dict(chat.attributes or {})
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.request.model"] == "small"
    assert int(str(attributes["gen_ai.usage.input_tokens"])) > 0
    assert not [key for key in attributes if "message" in key or "prompt" in key]


def test_an_unsampled_request_makes_no_span(
    tmp_path: Path, drawn: EngineParts, spans: InMemorySpanExporter
) -> None:
    with serving(tmp_path, parts=drawn) as service:
        client = service.client()
        for headers in ({}, UNSAMPLED):
            body = {"messages": said("hello")}
            assert client.post(at("ann", "/memories"), json=body, headers=headers).status_code == 200
        assert client.post(at("ann", "/flush")).status_code == 200
    assert spans.get_finished_spans() == ()


def test_a_refusal_is_an_error_of_its_span_and_names_no_tenant(
    tmp_path: Path, drawn: EngineParts, spans: InMemorySpanExporter
) -> None:
    with serving(tmp_path, parts=drawn) as service:
        client = service.client(Scope.READ)
        is_problem(client.post(at("zebrafish", "/flush"), headers=SAMPLED), 403, "forbidden")
        found = client.post(at("zebrafish", "/search"), json={"query": "x"}, headers=SAMPLED)
        is_problem(found, 404, "unknown-tenant")
        assert service.service is not None
        key = service.service.memories.tenant_key("zebrafish")
    refused = the(spans.get_finished_spans(), "POST /v1/tenants/{tenant}/flush")
    unknown = the(spans.get_finished_spans(), "POST /v1/tenants/{tenant}/search")
    call = the(spans.get_finished_spans(), "shard search")
    assert refused.attributes is not None and unknown.attributes is not None and call.attributes is not None
    assert refused.attributes["error.type"] == "forbidden"
    assert refused.status.status_code is StatusCode.UNSET  # the caller's mistake is no failure of a server
    assert unknown.attributes["undertow.tenant"] == key
    assert call.attributes["error.type"] == "UnknownTenant"
    assert call.status.status_code is StatusCode.ERROR
    assert "zebrafish" not in "".join(span.to_json() for span in spans.get_finished_spans())


def test_spans_of_a_step_have_the_times_of_its_phases(spans: InMemorySpanExporter) -> None:
    provider = TracerProvider(LinkedSampler(0.0))
    provider.add_span_processor(SimpleSpanProcessor(spans))
    observer = SpanObserver(provider.get_tracer("test"), None)
    for causes in ([UNSAMPLED["traceparent"]], [SAMPLED["traceparent"], UNSAMPLED["traceparent"]]):
        observer.began("step")
        observer.began("admit")
        observer.linked(causes)
        observer.ended(Phase("admit", 2, 1.25, 1.5))
        observer.ended(Phase("step", 1, 1.0, 2.0))
    admit, step = spans.get_finished_spans()  # none of the first step, whose request is not drawn
    assert inside(admit, step)
    assert admit.start_time is not None and admit.end_time is not None and step.start_time is not None
    assert admit.start_time - step.start_time == 250_000_000
    assert admit.end_time - admit.start_time == 250_000_000
    assert len(step.links) == 2
    with use_traceparent(SAMPLED["traceparent"]):  # a commit of a call, outside of any step
        observer.began("commit")
        observer.ended(Phase("commit", 1, 3.0, 3.5))
    commit = spans.get_finished_spans()[-1]
    assert commit.context is not None and f"{commit.context.trace_id:032x}" == OURS


# ---- over OTLP


def received(server: ScriptedServer) -> list[Span]:
    """The spans that an OTLP/HTTP receiver has been sent."""
    spans: list[Span] = []
    for sent in tuple(server.seen):
        assert (sent.path, sent.headers["content-type"]) == ("/v1/traces", "application/x-protobuf")
        zipped = sent.headers.get("content-encoding") == "gzip"
        request = ExportTraceServiceRequest.FromString(gzip.decompress(sent.body) if zipped else sent.body)
        spans += [s for part in request.resource_spans for scope in part.scope_spans for s in scope.spans]
    return spans


@pytest.fixture
def no_tracing_yet() -> Iterator[None]:
    """What the process traces is read from its environment once; here anew."""
    tracing.cache_clear()
    yield
    if (made := tracing()) is not None:
        made.close()
    tracing.cache_clear()


def test_nothing_is_traced_unless_an_endpoint_is_set(
    monkeypatch: pytest.MonkeyPatch, no_tracing_yet: None
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", raising=False)
    assert tracing() is None
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    tracing.cache_clear()
    assert tracing() is None


@pytest.mark.parametrize("ray", [False, True], ids=["one process", "Ray"])
def test_spans_of_all_processes_come_as_otlp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_tracing_yet: None, ray: bool
) -> None:
    accepted = Reply(
        body=ExportTraceServiceResponse().SerializeToString(),
        headers={"content-type": "application/x-protobuf"},
    )
    with scripted(accepted) as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
        with served(tmp_path, ray) as add:
            add(SAMPLED)
            names = ("request", "shard add", "step")
            wait_until(lambda: {*names} <= {span.name for span in received(receiver)})
    came = received(receiver)
    request, call, step = (next(span for span in came if span.name == name) for name in names)
    assert request.trace_id.hex() == call.trace_id.hex() == OURS
    assert call.parent_span_id == request.span_id
    assert [link.span_id for link in step.links] == [request.span_id]


@contextmanager
def served(folder: Path, ray: bool) -> Iterator[Callable[[dict[str, str]], None]]:
    """Memories as `undertow serve` opens them, and an add of one turn within a request's span."""
    import asyncio

    from undertow.engine.base.model import Message, Turn
    from undertow.engine.storage.location import Location
    from undertow.serving.async_memories import AsyncMemories, open_memories
    from undertow.serving.cli.ray_session import open_cluster
    from undertow.serving.telemetry.tracing import observers

    from ...support.cluster.in_process import settings

    async def add(memories: object, headers: dict[str, str]) -> None:
        made = tracing()
        assert made is not None
        with made.request("POST", headers) as span:
            turn = Turn("ann", (Message("user", "hello"),), "key", "", None, {})
            (receipt,) = await memories.add([turn])  # type: ignore[attr-defined]
            span._span.update_name("request")
        assert not receipt.duplicate

    if ray:
        pytest.importorskip("ray", reason="Ray is not installed")
    store, parts = Location.of(folder / "store"), EngineParts(observers=observers)
    memories = (
        AsyncMemories.enter(open_cluster(store, settings(), "local", shards=1, parts=parts))
        if ray
        else open_memories(store, settings(), parts=parts)
    )
    try:
        yield lambda headers: asyncio.run(add(memories, headers))
    finally:
        asyncio.run(memories.close())
