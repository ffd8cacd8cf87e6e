"""The client alone, sync and async: its requests, how it reads responses, and when it retries."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx2
import pytest

from undertow.serving.client import (
    Answer,
    AsyncClient,
    AuthError,
    BadRequest,
    Client,
    Conflict,
    FieldProblem,
    Forbidden,
    NotFound,
    RateLimited,
    Retries,
    ServerError,
    ServiceError,
    TimedOut,
    TooLarge,
    Unavailable,
    UnexpectedAnswer,
    Unreachable,
    generate,
)

from ...support.service.client import driven, scene, scripted
from ...support.service.scripted_server import Reply

ADDED = {"results": [{"id": "a1", "memory": "user: hello", "event": "ADD", "seq": 0}]}
FOUND: dict[str, Any] = {"results": [], "recall": 1.0}
MEMORY = {"id": "1", "kind": "turn", "memory": "m", "timestamp": None}


def problem(status: int, slug: str = "any", detail: str = "Do otherwise.", **more: Any) -> Reply:
    document = {"type": f"urn:undertow:error:{slug}", "title": "T", "status": status, "detail": detail}
    return Reply.of({**document, **more}, status)


# --- what is sent ---


@pytest.mark.parametrize(
    "tenant",
    ["ann", "acme/bob", "a?b", "a#b", "50%", "%2F", "..", ".", "...", "a b", "名前", "é\u0301", "a\nb", "//"],
)
def test_any_tenant_s_name_arrives_as_one_part_of_the_path(kind: str, tenant: str) -> None:
    with scene(kind, Reply.of(FOUND)) as (server, client):
        client.search(tenant, "x")
    (seen,) = server.seen
    *head, part, tail = seen.path.split("/")
    assert (head, unquote(part), tail) == (["", "v1", "tenants"], tenant, "search")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        *[({"tenant": name}, "tenant's name") for name in ("", "a\x00b", "\ud800")],
        ({"metadata": {"x": float("nan")}}, "not JSON compliant"),
        ({"metadata": {"x": "\ud800"}}, "surrogates not allowed"),
        ({"metadata": {"x": object()}}, "cannot be sent as JSON"),
        *[({"idempotency_key": key}, "printable ASCII") for key in ("", "名前", "a\r\nb: c", "k" * 256)],
    ],
)
def test_what_cannot_be_sent_is_refused_by_the_client(kind: str, given: dict[str, Any], told: str) -> None:
    with scene(kind, Reply.of(ADDED)) as (server, client):
        with pytest.raises(ValueError, match=told):
            client.add(**{"tenant": "ann", "messages": "hello", **given})
        assert server.seen == []


def test_a_call_carries_the_key_and_what_was_given(kind: str) -> None:
    with scripted(Reply.of(ADDED)) as server, driven(kind, server.url + "/", "ut_k") as client:
        how = {"session_id": "s2", "timestamp": datetime(2026, 5, 8), "metadata": {"rating": 5}}
        (added,) = client.add("ann", "hello", **how, idempotency_key="once")
    (seen,) = server.seen
    assert (seen.method, seen.path) == ("POST", "/v1/tenants/ann/memories")
    assert seen.headers["authorization"] == "Bearer ut_k" and seen.headers["idempotency-key"] == "once"
    assert json.loads(seen.body) == {
        "messages": [{"role": "user", "content": "hello"}],
        "session_id": "s2",
        "timestamp": "2026-05-08T00:00:00",
        "metadata": {"rating": 5},
    }
    assert (added.id, added.event, added.seq) == ("a1", "ADD", 0)


def test_a_listing_s_query_holds_kinds_filters_and_cursor(kind: str) -> None:
    pages = [{"results": [MEMORY], "next": "c/1"}, {"results": [], "next": None}]
    with scene(kind, *map(Reply.of, pages)) as (server, client):
        found = client.get_all(
            "ann", kinds=["turn", "fact"], filters={"topic": ["a&b", "ü"], "n": {"$gte": 5}}
        )
    assert [memory.id for memory in found] == ["1"]
    queries = [httpx2.URL(server.url + seen.path).params.multi_items() for seen in server.seen]
    filters = ("filters", '{"topic": ["a&b", "ü"], "n": {"$gte": 5}}')
    common = [("kind", "turn"), ("kind", "fact"), filters, ("limit", "100")]
    assert queries == [common, [*common, ("after", "c/1")]]


def test_each_of_many_has_a_key_of_its_own(kind: str) -> None:
    done = {"items": [{"status": 200, "results": ADDED["results"]}, {"status": 422, "detail": "Empty."}]}
    with scene(kind, problem(503), Reply.of(done)) as (server, client):
        good, bad = client.add_many(
            "ann", [{"messages": "hello"}, {"messages": [], "idempotency_key": "mine"}]
        )
        first, again = (json.loads(seen.body)["items"] for seen in server.seen)
        assert "idempotency-key" not in server.seen[0].headers
    assert first == again
    assert first[0]["messages"] == [{"role": "user", "content": "hello"}] and first[0]["idempotency_key"]
    assert first[1] == {"messages": [], "idempotency_key": "mine"}
    assert (good.status, good.results[0].id, bad.status, bad.detail) == (200, "a1", 422, "Empty.")


# --- what is tried again ---


@pytest.mark.parametrize(
    "trouble",
    [
        problem(429, "rate"),
        problem(503, "shard"),
        problem(409, "under-way"),
        Reply(cut=-1),
        Reply.of(ADDED | {"cut": "x" * 1000}),
    ],
    ids=["429", "503", "under way", "no answer", "cut in the body"],
)
def test_a_changing_call_is_made_again_under_one_key(kind: str, trouble: Reply) -> None:
    if trouble.status == 200:
        trouble.cut = trouble.cut or 100
    with scene(kind, trouble, trouble, Reply.of(ADDED)) as (server, client):
        (added,) = client.add("ann", "hello")
        client.add("ann", "hello")
    assert added.id == "a1"
    first, *others = [seen.headers["idempotency-key"] for seen in server.seen[:3]]
    assert others == [first, first]
    assert server.seen[3].headers["idempotency-key"] != first, "another call is not the same"


@pytest.mark.parametrize("slug", ["llm-reply", "llm-broke-off", "no-llm"])
def test_an_answer_that_would_fail_again_or_cost_again_is_tried_once(kind: str, slug: str) -> None:
    with scene(kind, problem(503, slug)) as (server, client):
        with pytest.raises(Unavailable):
            client.answer("ann", "When?")
        assert len(server.seen) == 1


def test_a_wait_beyond_the_patience_is_the_caller_s(kind: str) -> None:
    slow = Reply(429, problem(429, "rate").body, {"retry-after": "3600"})
    with scene(kind, slow) as (server, client):
        with pytest.raises(RateLimited) as raised:
            client.search("ann", "x")
        assert raised.value.retry_after_s == 3600 and len(server.seen) == 1


def test_nobody_there(kind: str) -> None:
    with scripted() as server:
        url = server.url
    with (
        driven(kind, url, retries=Retries(patience_s=0)) as client,
        pytest.raises(Unreachable, match="Check the URL and that the service runs"),
    ):
        client.search("ann", "x")


def test_no_answer_in_time_is_not_tried_again(kind: str) -> None:
    with scene(kind, timeout_s=0.5) as (server, client):
        with pytest.raises(TimedOut, match="it may have done what was asked"):
            client.add("ann", "hello")
        assert len(server.seen) <= 1  # it may still be on its way into `seen`


def test_waits_double_and_are_no_shorter_than_asked_for() -> None:
    clock = iter(range(100))
    waits = Retries(patience_s=60, first_s=1, longest_s=4).begin(lambda: next(clock))
    busy = Unavailable("busy")
    taken = [waits.after(busy) or 0 for _ in range(4)]
    assert all(top / 2 <= wait <= top for wait, top in zip(taken, [1, 2, 4, 4], strict=True))
    assert waits.after(Unavailable("busy", retry_after_s=20)) == 20
    assert waits.after(Unavailable("busy", retry_after_s=60)) is None
    assert waits.after(NotFound("gone")) is None


# --- what is made of answers ---


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, BadRequest),
        (401, AuthError),
        (403, Forbidden),
        (404, NotFound),
        (409, Conflict),
        (413, TooLarge),
        (422, BadRequest),
        (429, RateLimited),
        (500, ServerError),
        (502, ServerError),
        (503, Unavailable),
    ],
)
def test_each_problem_has_its_error_and_is_retried_only_if_it_may_pass(
    kind: str, status: int, error: type[ServiceError]
) -> None:
    wrong = problem(status, "slug", errors=[{"field": "query", "detail": "is empty"}])
    with (
        scene(kind, wrong, retries=Retries(patience_s=0)) as (_, client),
        pytest.raises(ServiceError) as raised,
    ):
        client.add("ann", "hello")
    with scene(kind, wrong, Reply.of(ADDED)) as (server, client):
        passes = status in (429, 503)
        with nullcontext() if passes else pytest.raises(error):
            client.add("ann", "hello")
        assert len(server.seen) == 1 + passes
    assert type(raised.value) is error
    assert str(raised.value) == "Do otherwise. (query: is empty)"
    assert (raised.value.status, raised.value.kind) == (status, "urn:undertow:error:slug")
    assert raised.value.fields == (FieldProblem("query", "is empty"),)


def test_the_last_of_several_problems_is_raised(kind: str) -> None:
    """The third asks for a wait beyond the patience."""
    last = Reply(503, problem(503, "last").body, {"retry-after": "3600"})
    with scene(kind, problem(503, "first"), problem(429, "second"), last) as (server, client):
        with pytest.raises(Unavailable) as raised:
            client.add("ann", "hello")
        assert raised.value.kind == "urn:undertow:error:last" and len(server.seen) == 3


def test_a_field_that_the_detail_names_is_told_once(kind: str) -> None:
    wrong = [{"field": "Do otherwise", "detail": "x"}]
    body = json.dumps({"type": "about:blank", "status": 422, "detail": "Do otherwise: x", "errors": wrong})
    reply = Reply(422, body.encode(), {"content-type": "application/problem+json"})
    with scene(kind, reply) as (_, client), pytest.raises(BadRequest, match=r"^Do otherwise: x$"):
        client.search("ann", "x")


def test_a_proxy_s_page_is_no_answer(kind: str) -> None:
    page = b"<html>Welcome to the cafe's network</html>"
    with scene(kind, Reply(200, page), Reply(502, page)) as (_, client):
        with pytest.raises(UnexpectedAnswer, match="Check the URL"):
            client.search("ann", "x")
        with pytest.raises(ServerError, match="answered 502: <html>Welcome"):
            client.search("ann", "x")


def test_a_redirect_is_not_followed_with_the_key(kind: str) -> None:
    with scripted(Reply.of(FOUND)) as other:
        away = Reply(307, b"", {"location": other.url})
        with (
            scene(kind, away, key="ut_k") as (_, client),
            pytest.raises(BadRequest, match="answered 307"),
        ):
            client.search("ann", "x")
        assert other.seen == []


def test_fields_of_a_newer_service_are_kept(kind: str) -> None:
    with scene(kind, Reply.of(MEMORY | {"mood": "calm"})) as (_, client):
        assert client.get("ann", "1").model_extra == {"mood": "calm"}


# --- streams ---


def events(*pairs: tuple[str, Any]) -> Reply:
    body = "".join(f"event: {name}\ndata: {json.dumps(data)}\n\n" for name, data in pairs)
    return Reply(200, body.encode(), {"content-type": "text/event-stream; charset=utf-8"})


def test_an_answer_comes_in_pieces_then_whole(kind: str) -> None:
    done = {"answer": "In May.", "memories": [], "usage": {"calls": 1}}
    reply = events(("delta", {"text": "In "}), ("delta", {"text": "May."}), ("done", done))
    with scene(kind, reply) as (server, client):
        *pieces, answer = client.answer_stream("ann", "When?")
    assert pieces == ["In ", "May."]
    assert isinstance(answer, Answer) and answer.answer == "In May."
    assert json.loads(server.seen[0].body)["stream"] is True


LOST = {"type": "urn:undertow:error:llm", "status": 503, "detail": "The LLM is gone. Ask again."}


@pytest.mark.parametrize(("more", "error"), [([("error", LOST)], Unavailable), ([], ServerError)])
def test_an_error_within_a_stream_or_its_early_end_is_raised(
    kind: str, more: list[tuple[str, Any]], error: type[ServiceError]
) -> None:
    with scene(kind, events(("delta", {"text": "In "}), *more)) as (server, client):
        with pytest.raises(error, match="Ask again"):
            client.answer_stream("ann", "When?")
        assert len(server.seen) == 1, "a stream that has begun is not made again"


def test_an_export_that_ends_early_is_an_error(kind: str) -> None:
    whole, begun = b'{"kind": "turn"}\n{"kind": "end"}\n', b'{"kind": "turn"}\n'
    with scene(kind, Reply(200, whole), Reply(200, begun), Reply(200, begun * 100, cut=200)) as (_, client):
        assert [record["kind"] for record in client.export("ann")] == ["turn", "end"]
        with pytest.raises(ServerError, match="Ask for it again"):
            client.export("ann")
        with pytest.raises(Unreachable):
            client.export("ann")


# --- the client itself ---


@pytest.mark.parametrize(
    "url", ["", "localhost:8080", "ftp://host", "http://", "http://h/?a=b", "http://[::1"]
)
def test_a_wrong_url_is_told_at_once(kind: str, url: str) -> None:
    with pytest.raises(ValueError, match="such as http://localhost:8080"):
        {"sync": Client, "async": AsyncClient}[kind](url)


@pytest.mark.parametrize("key", ["", "ut secret", "ut_secret\n", "ut_sécret"])
def test_a_wrong_key_is_told_at_once_and_not_quoted(kind: str, key: str) -> None:
    with pytest.raises(ValueError, match="as it was made") as raised:
        {"sync": Client, "async": AsyncClient}[kind]("http://h", key)
    assert "cret" not in str(raised.value)


def test_the_key_is_in_no_repr(kind: str) -> None:
    client = {"sync": Client, "async": AsyncClient}[kind]("http://h", "ut_secret")
    assert repr(client).endswith("Client('http://h')")


def test_a_transport_that_was_given_stays_open(kind: str) -> None:
    http = {"sync": httpx2.Client, "async": httpx2.AsyncClient}[kind]()
    with driven(kind, "http://h", http=http):
        pass
    assert not http.is_closed


def test_async_calls_run_side_by_side() -> None:
    met = asyncio.Barrier(8)

    async def answer(request: httpx2.Request) -> httpx2.Response:
        await met.wait()  # passed once all eight are under way
        return httpx2.Response(200, json=FOUND)

    async def search_all() -> None:
        async with (
            httpx2.AsyncClient(transport=httpx2.MockTransport(answer)) as http,
            AsyncClient("http://h", http=http) as client,
        ):
            await asyncio.gather(*[client.search("ann", "x") for _ in range(8)])

    asyncio.run(search_all())


def test_the_sync_client_is_what_the_async_one_makes(tmp_path: Path) -> None:
    generate.generate(tmp_path)
    made, kept = (
        {path.name: path.read_text() for path in folder.glob("*.py")}
        for folder in (tmp_path, generate.TARGET)
    )
    assert made == kept, "run: python -P serving/client/generate.py"


def test_the_client_loads_nothing_of_the_engine(kind: str) -> None:
    name = {"sync": "Client", "async": "AsyncClient"}[kind]
    heavy = ["torch", "lance", "pyarrow", "numpy", "faiss", "transformers", "ray", "fastapi", "mcp", "openai"]
    code = f"import sys, undertow; undertow.{name}; print([m for m in {heavy} if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
