"""LangGraph's store: what LangGraph's own in-memory store returns, in a graph and by itself."""

from __future__ import annotations

import asyncio
from itertools import count
from typing import Any, TypedDict, cast
from unittest.mock import AsyncMock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from undertow.engine.base.model import UndertowError
from undertow.engine.base.queries import ListQuery, SearchQuery

from ...support.service.http import intercepted, serving
from ...support.service.packages import needed

needed("langgraph.store.base", "langgraph.graph")

from langgraph.graph import END, START, StateGraph
from langgraph.store.base import BaseStore, GetOp, Item, ListNamespacesOp, MatchCondition, PutOp, SearchOp
from langgraph.store.memory import InMemoryStore

from undertow.serving.adapters.langgraph import UndertowStore
from undertow.serving.client import Client, Retries

NUMBERS = count()
PARTS = st.sampled_from(["a", "ab", "a/b", ""])
SPACES = st.lists(PARTS, min_size=1, max_size=3).map(tuple)
KEYS = st.sampled_from(["k", "", "a/ü"])
VALUES = st.fixed_dictionaries(
    {"n": st.integers(-2, 2) | st.sampled_from([0.5, 2**53 + 1])},
    optional={
        "tag": st.sampled_from(["x", "xy", "", "ü"]),
        "flag": st.booleans(),
        "deep": st.fixed_dictionaries({}, optional={"n": st.integers(0, 2), "a.b": st.just("x")}),
        "odd": st.sampled_from([None, [1, "x"], {}, [{"n": 1}]]),
    },
)
RANGES = st.dictionaries(st.sampled_from(["$gt", "$gte", "$lt", "$lte", "$ne", "$eq"]), st.integers(-2, 2))
FILTERS = st.none() | st.fixed_dictionaries(
    {},
    optional={
        "n": RANGES.filter(bool) | st.integers(-2, 2),
        "tag": st.sampled_from(["x", "", {"$ne": "x"}, {"$eq": "xy"}]),
        "flag": st.booleans(),
        "deep": st.fixed_dictionaries({"n": st.integers(0, 2)}),
        "none": st.sampled_from([{"$ne": 1}, 1]),
    },
)
PATHS = st.lists(PARTS | st.just("*"), max_size=3).map(tuple)
CONDITIONS = st.lists(st.builds(MatchCondition, st.sampled_from(["prefix", "suffix"]), PATHS), max_size=2)
INDEXES = st.sampled_from([None, None, False, ["tag", "deep.n"]])
PUTS = st.builds(PutOp, SPACES, KEYS, VALUES, INDEXES, st.none())
SEARCHES = st.builds(
    SearchOp,
    SPACES | st.just(()),
    filter=FILTERS,
    limit=st.just(500),
    offset=st.just(0),
    query=st.sampled_from([None, "x", "n 1", " "]),
)
OPS = st.one_of(PUTS, st.builds(PutOp, SPACES, KEYS, st.none()), st.builds(GetOp, SPACES, KEYS), SEARCHES)
LISTS = st.builds(
    ListNamespacesOp,
    CONDITIONS.map(tuple) | st.none(),
    st.none() | st.integers(1, 3),
    limit=st.integers(0, 5),
    offset=st.integers(0, 2),
)


def plain(result: Any) -> Any:
    """A result without times and scores; what a search found in the order of place."""
    if isinstance(result, Item):
        return (result.namespace, result.key, result.value)
    return sorted(map(plain, result), key=lambda item: item[:2]) if isinstance(result, list) else result


def check_pages(store: UndertowStore, theirs: InMemoryStore) -> None:
    """Pages of a search are a search in parts, and a query sorts what is found."""
    whole = store.search((), limit=500)
    assert len(whole) == len(theirs.search((), limit=500))
    pages = [
        item for start in range(0, len(whole) + 1, 2) for item in store.search((), limit=2, offset=start)
    ]
    assert pages == whole
    ranked = store.search((), query="tag x", limit=500)
    scores = [cast(float, item.score) for item in ranked]
    assert scores == sorted(scores, reverse=True) and plain(ranked) == plain(whole)
    assert [plain(item) for item in store.search((), query="tag x", limit=2, offset=1)] == [
        plain(item) for item in ranked[1:3]
    ]


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    puts=st.lists(PUTS, min_size=4, max_size=8),
    batches=st.lists(st.lists(OPS, max_size=5), max_size=3),
    searches=st.lists(SEARCHES, min_size=4, max_size=4),
    lists=st.lists(LISTS, min_size=4, max_size=4),
    depth=st.integers(0, 3),
)
def test_it_returns_what_langgraph_s_own_store_returns(
    served: Any,
    puts: list[Any],
    batches: list[list[Any]],
    searches: list[Any],
    lists: list[ListNamespacesOp],
    depth: int,
) -> None:
    ours = UndertowStore(served, prefix=f"world{next(NUMBERS)}", depth=depth)
    theirs = InMemoryStore()
    for batch in (puts, *batches, searches):
        assert [plain(result) for result in ours.batch(batch)] == [
            plain(result) for result in theirs.batch(batch)
        ]
    check_pages(ours, theirs)
    living = InMemoryStore()  # theirs lists namespaces that are empty, too
    living.batch([PutOp(i.namespace, i.key, i.value) for i in theirs.search((), limit=500)])
    assert ours.batch(lists) == living.batch(lists)


class State(TypedDict):
    name: str
    greeting: str


def test_a_graph_remembers_in_the_store(served: Any) -> None:
    def greet(state: State, *, store: BaseStore) -> dict[str, str]:
        space = ("people", state["name"])
        known = store.get(space, "visits")
        times = (known.value["times"] if known else 0) + 1
        store.put(space, "visits", {"times": times, "text": f"{state['name']} was here"})
        often = store.search(("people",), filter={"times": {"$gt": 1}})
        return {"greeting": f"{times} {len(often)}"}

    builder = StateGraph(State)
    builder.add_node("greet", greet)
    builder.add_edge(START, "greet")
    builder.add_edge("greet", END)
    graph = builder.compile(store=UndertowStore(served, prefix="graph", depth=2))
    names = ["ann", "bob", "ann", "bob", "ann"]
    said = [graph.invoke({"name": name, "greeting": ""})["greeting"] for name in names]
    assert said == ["1 0", "1 0", "2 1", "2 2", "3 2"]


@pytest.mark.anyio
async def test_items_keep_their_birth_and_are_found_by_their_fields(served: Any) -> None:
    store = UndertowStore(served, prefix="fields", fields=["text"])
    await store.aput(("docs", "a"), "1", {"text": "the red boat", "note": "a garden"})
    first = await store.aget(("docs", "a"), "1")
    await store.aput(("docs", "a"), "1", {"text": "the blue boat", "note": "a garden"})
    await store.aput(("docs", "b"), "2", {"text": "peas and beans", "note": "the blue boat"})
    now = await store.aget(("docs", "a"), "1")
    assert first is not None and now is not None
    assert now.created_at == first.created_at and now.updated_at > first.updated_at
    best, other = await store.asearch(("docs",), query="the blue boat")
    assert (best.key, other.key) == ("1", "2") and best.score is not None and other.score is not None
    assert best.score > other.score
    begins = await store.asearch(("docs",), filter={"text": {"$prefix": "peas"}})
    assert [item.key for item in begins] == ["2"]
    await store.adelete(("docs", "a"), "1")
    await store.adelete(("docs", "a"), "never there")
    assert await store.aget(("docs", "a"), "1") is None
    assert await store.alist_namespaces() == [("docs", "b")]


@pytest.mark.anyio
async def test_concurrent_puts_leave_one_item(served: Any) -> None:
    store = UndertowStore(served, prefix="at once")
    await asyncio.gather(*(store.aput(("a",), f"k{n % 2}", {"n": n}) for n in range(12)))
    items = await store.asearch(("a",))
    assert sorted(item.key for item in items) == ["k0", "k1"]
    assert [await store.aget(("a",), item.key) for item in items] == [
        Item(**{name: getattr(item, name) for name in Item.__slots__}) for item in items
    ]


def test_tenants_are_separate_and_named_by_the_root(served: Any) -> None:
    store = UndertowStore(served, prefix="roots", depth=1)
    for root in ("a", "a/b", "a%2Fb", "ä"):
        store.put((root, "x"), "k", {"of": root})
    assert [item.value["of"] for item in store.search(("a",), query="of")] == ["a"]
    other = UndertowStore(served, prefix="roots2")
    assert other.search(()) == [] and other.list_namespaces() == [] and other.get(("a", "x"), "k") is None
    assert len(store.search(())) == 4


def test_what_cannot_be_is_refused_before_anything_is_stored(served: Any) -> None:
    store = UndertowStore(served, prefix="refused")
    good = PutOp(("a",), "good", {"n": 1})
    for bad in ({"n": float("nan")}, {"n": object()}, {"n": {1}}):
        with pytest.raises(ValueError, match="the value of 'bad' is no JSON"):
            store.batch([good, PutOp(("a",), "bad", bad)])
    with pytest.raises(ValueError, match="has a ttl"):
        store.batch([good, PutOp(("a",), "bad", {}, None, 5.0)])
    with pytest.raises(NotImplementedError):
        store.put(("a",), "bad", {}, ttl=5)
    assert store.search(()) == []
    store.batch([good])
    for wanted, words in (([1], "value/n"), ({"m": None}, "value/n/m"), ({}, "value/n")):
        with pytest.raises(ValueError, match=words):
            store.search(("a",), filter={"n": wanted})
    for wrong in ({"$gt": True}, {"$near": 1}):
        with pytest.raises((ValueError, UndertowError), match="value/n"):
            store.search(("a",), filter={"n": wrong})
    with pytest.raises(ValueError, match="limit is -1"):
        store.search(("a",), limit=-1)
    with pytest.raises(ValueError, match="no operation"):
        store.batch(cast(Any, ["get"]))


def test_a_service_that_fails_is_no_empty_answer(tmp_path: Any) -> None:
    failing, fail = (ListQuery, SearchQuery), AsyncMock(side_effect=RuntimeError("broken"))
    with (
        serving(tmp_path, wrap=lambda memories: intercepted(memories, failing, fail)) as running,
        Client(running.url, running.key(), retries=Retries(patience_s=0)) as client,
    ):
        store = UndertowStore(client)
        for act in (lambda: store.get(("a",), "k"), lambda: store.search(("a",), query="x")):
            with pytest.raises(UndertowError):
                act()
