"""Addresses of LLM servers; those that actors on Ray keep are found by name, and again where they move."""

import sys
from collections import Counter
from concurrent.futures import Future
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from undertow.bench.mock.server import spawn_server
from undertow.engine.base.config import Settings
from undertow.engine.llm import discovery as llm_address
from undertow.engine.llm.client import OpenAILLM, ServerRefused
from undertow.engine.llm.discovery import NamedActor, NoCluster, NoServer, server_addresses
from undertow.serving.vllm.local_server import free_port

from ..support.llm_servers import (
    Counting,
    at_once,
    client,
    merge,
    odd_server,
    results,
    server_stats,
    wait_until,
)


class Book:
    """Where the named servers are now, in place of their actors; what stands for no URL is raised."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.urls: dict[str, str | Exception] = {}
        self.asked = Counter[str]()
        monkeypatch.setattr(NamedActor, "url", lambda actor: self._url(actor.address))

    def _url(self, address: str) -> str:
        self.asked[address] += 1
        if isinstance(found := self.urls[address], Exception):
            raise found
        return found


@pytest.fixture
def book(monkeypatch: pytest.MonkeyPatch) -> Book:
    return Book(monkeypatch)


def test_a_server_that_comes_back_at_another_url_is_found_there(book: Book) -> None:
    with client("ray:vllm-0", llm_in_flight=8) as llm:
        with spawn_server() as first:
            book.urls["ray:vllm-0"] = first
            results([llm.submit(merge(n), tenant="t") for n in range(40)])
            assert llm.healthy().text.startswith(f"ray:vllm-0 ({first}) serves ")
            assert book.asked["ray:vllm-0"] < 5, "not for every request, while it answers"
        futures = [llm.submit(merge(100 + n), tenant="t") for n in range(20)]
        wait_until(lambda: (llm.unreachable_s or 0) > 0.2)
        assert first in (llm.last_error or "") and not any(future.done() for future in futures)
        with spawn_server() as second:
            book.urls["ray:vllm-0"] = second
            results(futures)
            assert llm.unreachable_s is None
            assert sum(server_stats(second)["calls"].values()) == 20


def test_one_of_several_moves_and_the_others_are_where_they_were(book: Book) -> None:
    with spawn_server() as steady, client(f"ray:vllm-0,{steady}", llm_in_flight=4) as llm:
        with spawn_server() as first:
            book.urls["ray:vllm-0"] = first
            results([llm.submit(merge(n), tenant="t") for n in range(40)])
        with spawn_server() as second:
            book.urls["ray:vllm-0"] = second
            numbers = iter(range(1_000, 100_000))

            def moved() -> bool:
                results([llm.submit(merge(next(numbers)), tenant="t") for _ in range(16)])
                return bool(sum(server_stats(second)["calls"].values()) > 10)

            wait_until(moved)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("others", [0, 1])
def test_requests_are_called_back_from_where_a_server_was(book: Book, others: int) -> None:
    """Its node went without a word: what is under way there would wait for the timeout."""
    stuck, good = Counting(wait_s=300), at_once()
    with ExitStack() as stack:
        first = stack.enter_context(odd_server(stuck))
        rest = [stack.enter_context(odd_server(at_once())) for _ in range(others)]
        second = stack.enter_context(odd_server(good))
        stack.callback(stuck.go.set)
        book.urls["ray:vllm-0"] = first
        with client(",".join(["ray:vllm-0", *rest]), llm_model="a", llm_timeout_s=600.0) as llm:
            futures = [llm.submit(merge(n), tenant="t") for n in range(8)]
            wait_until(lambda: len(stuck) > 0)
            book.urls["ray:vllm-0"] = second
            results(futures)
            assert llm.unreachable_s is None
            assert len(good) or others, "what is called back may go to another"


def test_a_server_whose_actor_is_silent_is_tried_where_it_was(book: Book) -> None:
    """The cluster's head is away: nobody knows the names, the servers are where they were."""
    port = free_port()
    with client("ray:vllm-0", llm_in_flight=4) as llm:
        with spawn_server(port=port) as url:
            book.urls["ray:vllm-0"] = url
            results([llm.submit(merge(n), tenant="t") for n in range(8)])
        book.urls["ray:vllm-0"] = NoServer("nobody knows")
        futures = [llm.submit(merge(100 + n), tenant="t") for n in range(20)]
        wait_until(lambda: book.asked["ray:vllm-0"] > 2)
        with spawn_server(port=port):
            results(futures)


def test_requests_wait_for_an_actor_that_is_not_there_yet(book: Book) -> None:
    book.urls["ray:vllm-0"] = NoServer("Ray has no actor of this name")
    with client("ray:vllm-0", llm_in_flight=4) as llm, spawn_server() as url:
        futures = [llm.submit(merge(n), tenant="t") for n in range(20)]
        wait_until(lambda: (llm.unreachable_s or 0) > 0.2)
        assert llm.last_error == "Ray has no actor of this name"
        assert llm.healthy() == (False, "Ray has no actor of this name")
        assert not any(future.done() for future in futures)
        book.urls["ray:vllm-0"] = url
        results(futures)


def test_without_a_cluster_a_name_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    for ray in (None, SimpleNamespace(is_initialized=lambda: False)):
        monkeypatch.setitem(sys.modules, "ray", ray)
        with client("ray:vllm-0") as llm:
            refusal = llm.submit(merge(), tenant="t").exception(30)
            assert isinstance(refusal, ServerRefused)
            assert (
                "ray:vllm-0" in str(refusal) and "no Ray cluster" in str(refusal) and "--ray" in str(refusal)
            )
            assert llm.healthy() == (False, str(refusal))


class FakeRay:
    """A cluster with one actor, whose answers the test gives."""

    def __init__(self) -> None:
        self.questions: list[Future[str]] = []

    def is_initialized(self) -> bool:
        return True

    def get_actor(self, name: str, namespace: str) -> Any:
        if (name, namespace) != ("vllm-0", llm_address.NAMESPACE):
            raise ValueError("Failed to look up actor")
        return SimpleNamespace(url=SimpleNamespace(remote=self._ask))

    def _ask(self) -> Any:
        self.questions.append(Future())
        return SimpleNamespace(future=lambda: self.questions[-1])


def test_an_actor_without_a_place_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ray, actor = FakeRay(), NamedActor("ray:vllm-0")
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(llm_address, "_PATIENCE_S", 0.0)
    for _ in range(5):
        with pytest.raises(NoServer, match=r"ray:vllm-0 is silent.*ray_actor status"):
            actor.url()
    (question,) = ray.questions
    question.set_result("http://there:1/v1")
    assert actor.url() == "http://there:1/v1"
    for trouble, said in ((RuntimeError("it died\nlong ago"), r"it died\. `"), (TimeoutError(), "is silent")):
        with pytest.raises(NoServer, match="is silent"):
            actor.url()
        ray.questions[-1].set_exception(trouble)
        with pytest.raises(NoServer, match=said):
            actor.url()
    with pytest.raises(NoServer, match="is silent"):
        actor.url()
    ray.questions[-1].set_result("")
    with pytest.raises(NoServer, match="not up; its actor starts it"):
        actor.url()
    assert len(ray.questions) == 4
    with pytest.raises(NoServer, match="no actor of this name: ray:vllm-1"):
        NamedActor("ray:vllm-1").url()
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(NoCluster):
        actor.url()


# ---- addresses


@pytest.mark.parametrize(
    ("text", "addresses"),
    [
        ("http://a:1/v1", ("http://a:1/v1",)),
        ("http://a:1, https://b/llm/ ,", ("http://a:1/v1", "https://b/llm")),
        ("http://a:1,http://a:1/v1/,http://b:1", ("http://a:1/v1", "http://b:1/v1")),
        ("ray:vllm-0, ray:vllm-1,ray:vllm-0,http://a:1", ("ray:vllm-0", "ray:vllm-1", "http://a:1/v1")),
    ],
)
def test_addresses_by_commas_each_once(text: str, addresses: tuple[str, ...]) -> None:
    assert server_addresses(text) == addresses


@pytest.mark.parametrize(
    "text",
    ["http://a:1,b:2", "http://a:1 http://b:2 ,ftp://c", ",", " , ", "ray:", "ray://head:10001", "ray:a b"],
)
def test_one_bad_address_is_named(text: str) -> None:
    with pytest.raises(ValueError, match=r"llm_url.*ray:vllm-0"):
        OpenAILLM(Settings(llm_url=text))


@pytest.mark.parametrize(("text", "count"), [(None, 1), ("http://a:1", 1), ("http://a:1, http://b:2,", 2)])
def test_the_engine_keeps_work_ready_for_every_server(text: str | None, count: int) -> None:
    assert Settings(llm_url=text, llm_in_flight=7).llm_requests == 7 * count
