"""Logs, metrics and spans hold no content: secrets are driven through every route, errors included."""

from __future__ import annotations

import io
import json
import logging
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the service's packages are not installed")
pytest.importorskip("orjson", reason="the engine's packages are not installed")

import httpx2
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from undertow.bench.mock.llm import MockLLM
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.storage.location import StoreError
from undertow.serving.http import hosting
from undertow.serving.telemetry.logs import JSONLines
from undertow.serving.telemetry.tracing import LinkedSampler, Tracing

from ...support.cli import logged
from ...support.cluster.in_process import FailingEncoder
from ...support.service.http import Running, at, said, serving

# a tenant's name, its words, a query, metadata, an id, headers: nothing of these may be told
CANARY = "xyzzy"
TENANT = f"{CANARY}-tenant/ann"
POISON = f"{CANARY}poison"


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


# ---- a line


def record(name: str, text: str, *args: object, error: BaseException | None = None) -> logging.LogRecord:
    info = None if error is None else (type(error), error, error.__traceback__)
    return logging.LogRecord(name, logging.WARNING, "file.py", 1, text, args, info)


@pytest.mark.parametrize(
    ("name", "text", "args", "message"),
    [
        ("undertow.engine", "shard %s: %d turns", ("s0", 3), "shard s0: 3 turns"),
        ("undertow.engine", "it failed: %s", (ValueError("xyzzy"),), "it failed: ValueError"),
        ("undertow.engine", "it failed: %s", (StoreError("no disk"),), "it failed: no disk"),
        ("undertow.engine", "no: %s", (OSError(28, "No space left"),), "no: OSError: No space left"),
        ("uvicorn.error", "Exception in %s\n", ("xyzzy",), "Exception in %s"),
        ("asyncio", "Task exception\nfuture: xyzzy", (), "Task exception"),
    ],
)  # fmt: skip
def test_a_log_line_contains_no_foreign_text(
    name: str, text: str, args: tuple[object, ...], message: str
) -> None:
    line = json.loads(JSONLines().format(record(name, text, *args)))
    assert line["message"] == message
    assert line["level"] == "warning" and line["logger"] == name and line["time"].endswith("+00:00")


def test_an_exception_is_told_by_its_type_and_places() -> None:
    try:
        int("xyzzy")
    except ValueError as failure:
        line = JSONLines().format(record("uvicorn.error", "Exception", error=failure))
    assert "xyzzy" not in line
    told = json.loads(line)
    assert told["error"] == "ValueError"
    assert "test_an_exception_is_told_by_its_type_and_places" in told["at"][0]


# ---- the service


def test_a_request_is_one_line(tmp_path: Path) -> None:
    with logged() as stream, serving(tmp_path) as service:
        client = service.client()
        body = {"messages": said("hello")}
        assert client.post(at("ann", "/memories"), json=body, headers={"X-Request-Id": "r-1"}).is_success
        assert client.post(at("nobody", "/search"), json={"query": "x"}).status_code == 404
        assert client.request("PATCH", at("a/b", "/search")).status_code == 405
        assert client.post(at("a/b", "/search"), json={"query": "x"}).status_code == 404
        assert client.get("/health/live").is_success and client.get("/metrics").is_success
        assert service.service is not None
        key, other = (service.service.memories.tenant_key(name) for name in ("ann", "a/b"))
    added, missed, unknown, slashed = (line for line in lines(stream) if line["message"] == "request")
    assert added["request_id"] == "r-1" and added["route"] == "/v1/tenants/{tenant}/memories"
    assert (added["method"], added["status"], added["tenant"]) == ("POST", 200, key)
    assert added["ms"] > 0 and added["key_id"] and "problem" not in added
    assert (missed["status"], missed["problem"]) == (404, "unknown-tenant")
    assert missed["request_id"] and missed["tenant"] != key
    assert (unknown["status"], unknown.get("tenant")) == (405, None), "no route has read its name"
    assert slashed["tenant"] == other


def test_no_route_leaks_a_secret_into_logs_metrics_or_spans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through every route with every kind of trouble: bad bodies, no key, a turn that is poison."""
    spans = InMemorySpanExporter()
    provider = TracerProvider(LinkedSampler(1.0))
    provider.add_span_processor(SimpleSpanProcessor(spans))
    made = Tracing(provider)
    monkeypatch.setattr(hosting, "tracing", lambda: made)
    parts = EngineParts(
        lambda _: FailingEncoder([POISON], lambda text: ValueError(f"{text}: {POISON}")),
        lambda _: MockLLM(),
        lambda _: (made.observer(None),),
    )
    with logged(logging.DEBUG) as stream, serving(tmp_path, parts=parts, stream_s=0.1) as service:
        client = service.client()
        reached = drive(service, client, fill(client))
        metrics = client.get("/metrics").text
    told = [line for line in lines(stream) if line["message"] == "request"]
    assert {line["route"] for line in told} >= reached
    assert {line["status"] for line in told} >= {200, 401, 404, 422}
    assert any("turn makes the engine fail" in line["message"] for line in lines(stream))
    drawn = "\n".join(span.to_json() for span in spans.get_finished_spans())
    assert "shard search" in drawn and '"gen_ai.' in drawn
    for output in (stream.getvalue(), metrics, drawn):
        assert CANARY not in output.lower()


def fill(client: httpx2.Client) -> str:
    """Turns, the poisoned one, and an answer; the id of a turn."""
    for day in range(3):
        body = {
            "messages": said(f"{CANARY} secret, day {day}"),
            "session_id": CANARY,
            "metadata": {CANARY: CANARY},
        }
        added = client.post(at(TENANT, "/memories"), json=body)
        assert added.is_success
    client.post(at(TENANT, "/memories"), json={"messages": said(POISON)})
    assert client.post(at(TENANT, "/answer"), json={"question": f"What of {CANARY}?"}).is_success
    memory: str = added.json()["results"][0]["id"]
    return memory


WORDS = dict.fromkeys(("query", "question", "text"), CANARY)
BODIES: tuple[Any, ...] = (
    {**WORDS, "messages": said(CANARY), "filters": {CANARY: 1}},
    {CANARY: CANARY},
    [CANARY],
    *({name: CANARY} for name in WORDS),
    {"messages": said(CANARY)},
)
HEADERS = {"X-Request-Id": f"({CANARY})", "User-Agent": CANARY}


def drive(service: Running, client: httpx2.Client, memory: str) -> set[str]:
    """Every route of the application with the canary in all that a caller writes; the routes' paths.

    What deletes comes last, as it leaves nothing to ask for.
    """
    assert service.server is not None
    app: Any = service.server.config.app
    paths = {path: item for path, item in app.openapi()["paths"].items() if not path.startswith("/health")}
    routes = [(method, path) for path, item in paths.items() for method in item if path != "/metrics"]
    assert len(routes) > 15
    nobody = service.client_of(f"ut_{CANARY}_{CANARY}")
    for method, path in sorted(routes, key=lambda route: (route[0] == "delete", route[1])):
        for tenant, memory_id in ((TENANT, memory), (TENANT, CANARY), (f"{CANARY}-nobody", CANARY)):
            url = re.sub(r"\{(tenant|\w+)\}", lambda part: _part(part.group(1), tenant, memory_id), path)  # noqa: B023
            for n, body in enumerate(BODIES):
                once = {"Idempotency-Key": f"{CANARY}-{n}", **HEADERS}
                client.request(method, url, json=body, headers=once)
            where = f"{url}?after={CANARY}&since={CANARY}&filter.{CANARY}={CANARY}"
            client.request(method, where, content=CANARY.encode(), headers=HEADERS)
            nobody.request(method, url)
    client.get(f"/{CANARY}")
    return {path for _, path in routes}


def _part(name: str, tenant: str, memory_id: str) -> str:
    return at(tenant).rpartition("/")[2] if name == "tenant" else memory_id
