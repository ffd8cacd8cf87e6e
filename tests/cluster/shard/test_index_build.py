"""The indexes of a large tenant are built in slices: the same in the end, and nobody else waits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.queries import AnswerQuery, SearchQuery
from undertow.engine.base.results import SearchResult
from undertow.engine.cluster.shard.api.index_build import AfterIndexBuild, IndexBuildQueue
from undertow.engine.cluster.shard.call_queue import CallStamp
from undertow.engine.cluster.shard.shard import Shard
from undertow.engine.cluster.shard.supervisor import EngineParts, ShardSupervisor
from undertow.engine.cluster.wire import pack
from undertow.engine.search import keyword_index, ranking
from undertow.engine.search.ranking import Ranker
from undertow.engine.tenants.registry import UnknownTenant

from ...engine.search.test_hybrid_search import QUERIES, turns
from ...support.cluster.shard import ask
from ...support.engine import NEVER, open_engine
from .conftest import Start
from .test_reads_beside_steps import Held

SOON_S = 30.0
SLICE = 8
LARGE = 25 * SLICE


@pytest.fixture(autouse=True)
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyword_index, "SLICE_ROWS", SLICE)
    monkeypatch.setattr(ranking, "FILTER_ROWS", SLICE)


Asked = Callable[[Engine], SearchResult | None]


def asked(preparing: IndexBuildQueue, tenant: str, query: str = QUERIES[0], **filters: Any) -> Asked:
    """A search that is asked again and again: None until it has found something."""
    search = SearchQuery(tenant, query, **filters)
    prepared = AfterIndexBuild(preparing, search, lambda _: None, lambda engine: engine.call(search))

    def ask(engine: Engine) -> SearchResult | None:
        found = prepared(engine)
        return found if isinstance(found, SearchResult) else None

    return ask


def rounds(engine: Engine, *searches: Asked) -> list[int]:
    """Each is asked once in a round, until it has found something: how many rounds that took."""
    took = [0] * len(searches)
    waiting = list(enumerate(searches))
    while waiting:
        for n, _ in waiting:
            took[n] += 1
        waiting = [(n, search) for n, search in waiting if search(engine) is None]
        assert max(took) <= LARGE
    return took


def everything(engine: Engine, tenant: str) -> list[SearchResult]:
    return [engine.search(tenant, query, k_sub=50) for query in QUERIES]


@pytest.mark.parametrize("seed", range(2))
def test_an_index_made_in_slices_is_the_index_made_at_once(tmp_path: Path, seed: int) -> None:
    """To the last bit, while turns come and go between the slices, with episodes and facts."""
    llm = MockLLM(MockReplies(seed))
    with open_engine(tmp_path, llm, theta_sim=0.5, theta_merge=0.9, theta_count=3) as engine:
        said = turns("ann", LARGE)
        receipts = engine.add_batch(said[: LARGE // 2])
        assert engine.drain()
        assert {memory.kind for memory in engine.get_all("ann")} == {"episode", "fact"}
        search, slices = asked(IndexBuildQueue(), "ann"), 0
        while (found := search(engine)) is None:
            slices += 1
            if slices % 3 == 0:
                engine.add_batch(said[LARGE // 2 + slices : LARGE // 2 + slices + 3])
                engine.delete(receipts[slices * (1 + seed)].id or "")
        assert slices >= LARGE // 2 // SLICE - 2
        assert found == engine.search("ann", QUERIES[0])
        engine.add_batch(said)
        engine.drain()
        sliced = everything(engine, "ann")
        engine.ranker._keyword_indexes.clear()
        assert everything(engine, "ann") == sliced


def test_one_slice_is_made_in_a_round_whoever_waits(tmp_path: Path) -> None:
    with open_engine(tmp_path, **NEVER) as engine:
        for tenant in ("ann", "bob"):
            engine.add_batch(turns(tenant, LARGE))
        engine.add_batch(turns("cyd", SLICE))
        preparing = IndexBuildQueue()
        searches = [asked(preparing, tenant) for tenant in ("ann", "ann", "bob", "cyd")]
        first, second, other, small = rounds(engine, *searches)
        assert small == 1
        assert first == second == LARGE // SLICE
        assert other >= 2 * LARGE // SLICE - 1
        assert preparing.holder is None
        assert asked(preparing, "ann", QUERIES[1])(engine) is not None, "from now on it is there at once"


def test_filters_are_prepared_in_slices_too(tmp_path: Path) -> None:
    with open_engine(tmp_path, **NEVER) as engine:
        said = turns("ann", LARGE)
        dated = [
            replace(turn, timestamp=f"2026-05-{n % 28 + 1:02d}T08:00:00Z", metadata={"n": n % 5, "m": n % 3})
            for n, turn in enumerate(said)
        ]
        engine.add_batch(dated)
        filters: dict[str, Any] = {"where": {"n": [1, 2], "m": 0}, "since": "2026-05-10"}
        assert rounds(engine, asked(IndexBuildQueue(), "ann")) == [LARGE // SLICE]
        search, took = asked(IndexBuildQueue(), "ann", **filters), 1
        while (found := search(engine)) is None:
            took += 1
            assert (
                max(map(len, engine.ranker._metadata_of(engine.tenants.get("ann"))._columns.values())) < LARGE
            )
        assert took >= 2 * LARGE // SLICE - 2
        assert found.turns
        for kept in (engine.ranker._metadata, engine.ranker._times):
            kept.clear()
        assert engine.search("ann", QUERIES[0], **filters) == found
        assert asked(IndexBuildQueue(), "ann", **filters)(engine) == found, "it is indexed now"


def test_turns_that_keep_coming_do_not_put_the_end_off(tmp_path: Path) -> None:
    said = turns("ann", 3 * LARGE)
    with open_engine(tmp_path, **NEVER) as engine:
        engine.add_batch(said[:LARGE])
        search, come = asked(IndexBuildQueue(), "ann"), LARGE
        while search(engine) is None:
            engine.add_batch(said[come : come + 2 * SLICE])
            come += 2 * SLICE
            assert come < len(said)
        engine.add_batch(said[come:])
        assert asked(IndexBuildQueue(), "ann")(engine) is None, "what has come since a search is sliced too"


def test_an_eviction_or_an_erasure_between_slices(tmp_path: Path) -> None:
    with open_engine(tmp_path, **NEVER) as engine:
        engine.add_batch(turns("ann", LARGE))
        engine.add_batch(turns("bob", LARGE))
        assert engine.drain()
        expected, preparing = engine.search("ann", QUERIES[0]), IndexBuildQueue()
        engine.tenants.evict("ann")
        search = asked(preparing, "ann")
        assert search(engine) is None and search(engine) is None
        engine.tenants.evict("ann")
        assert search(engine) == expected, "it is not begun again and again"
        waiting, next_one = asked(preparing, "bob"), asked(preparing, "bob")
        assert waiting(engine) is None and next_one(engine) is None
        engine.erase("bob")
        for search in (waiting, next_one):
            with pytest.raises(UnknownTenant):
                search(engine)
        assert preparing.holder is None, "nobody waits for a search that has failed"


def test_an_engine_that_was_opened_again_is_prepared_slice_by_slice_too(tmp_path: Path) -> None:
    said = turns("ann", LARGE)
    with open_engine(tmp_path, **NEVER) as engine:
        engine.add_batch(said)
        search = asked(IndexBuildQueue(), "ann")
        for _ in range(LARGE // SLICE // 2):
            assert search(engine) is None
    with open_engine(tmp_path, **NEVER) as engine:
        assert rounds(engine, search) == [LARGE // SLICE]


def without_llm(_: Settings) -> None: ...


@pytest.fixture
def shard(start: Start) -> Shard:
    return start(EngineParts(llm=without_llm), **NEVER)


def test_others_are_answered_while_a_large_tenants_words_are_taken_in(shard: Shard) -> None:
    token = shard.hello("client", 1).result(SOON_S).token
    for n, (tenant, count) in enumerate((("large", LARGE), ("small", SLICE))):
        shard.add(pack(turns(tenant, count)), CallStamp("client", token, n, 1)).result(SOON_S)
    order: list[str] = []
    futures: dict[str, Any] = {"large": shard.ask(SearchQuery("large", QUERIES[0]))}
    futures["answer"] = shard.ask(AnswerQuery("large", QUERIES[0]))
    for n in range(3):
        futures[f"small {n}"] = shard.ask(SearchQuery("small", QUERIES[0]))
    for name, future in futures.items():
        future.add_done_callback(lambda _, name=name: order.append(name))
    assert futures["large"].result(SOON_S).turns
    with pytest.raises(Exception, match="needs an LLM server"):
        futures["answer"].result(SOON_S)
    assert order[:3] == ["small 0", "small 1", "small 2"]
    assert ask(shard, SearchQuery("large", QUERIES[0])) == futures["large"].result()


def test_who_is_called_off_while_words_are_taken_in_holds_nobody_up_and_asks_no_llm(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = MockLLM()
    held = Held(monkeypatch, Ranker, "prepare")
    shard = start(EngineParts(llm=lambda _: llm), **NEVER)
    token = shard.hello("client", 1).result(SOON_S).token
    shard.add(pack(turns("ann", LARGE)), CallStamp("client", token, 0, 1)).result(SOON_S)
    answer, search = shard.ask(AnswerQuery("ann", QUERIES[0])), shard.ask(SearchQuery("ann", QUERIES[0]))
    assert held.begun.wait(SOON_S)
    assert answer.cancel() and search.cancel()
    held.go.set()
    assert ask(shard, SearchQuery("ann", QUERIES[1])).turns
    assert not llm.calls
    assert ask(shard, AnswerQuery("ann", QUERIES[0])).text
    assert llm.calls.total() == 1


@pytest.mark.parametrize("late", [False, True], ids=["at once", "while its caller is slow"])
def test_a_search_whose_engine_could_not_be_opened_again_holds_nobody_up(
    shard: Shard, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """It has ended in the midst of its slices, without being asked again."""
    token = shard.hello("client", 1).result(SOON_S).token
    for n, tenant in enumerate(("ann", "bob")):
        shard.add(pack(turns(tenant, LARGE)), CallStamp("client", token, n, 1)).result(SOON_S)
    opens = iter(range(10 * LARGE))
    opened, take_in, promised = ShardSupervisor.open, Ranker.prepare, AfterIndexBuild.promised
    if late:  # all is over before it has its future
        monkeypatch.setattr(AfterIndexBuild, "promised", lambda b, a: wait([a]) and promised(b, a))

    def fail_once(supervisor: ShardSupervisor) -> Engine:
        if next(opens) == 3:
            raise OSError("the disk is away")
        return opened(supervisor)

    def prepare(*asked: Any, **more: Any) -> int:
        monkeypatch.setattr(ShardSupervisor, "open", fail_once)  # from the first slice on
        return take_in(*asked, **more)

    monkeypatch.setattr(Ranker, "prepare", prepare)
    with pytest.raises(OSError, match="the disk is away"):
        ask(shard, SearchQuery("ann", QUERIES[0]))
    monkeypatch.undo()
    assert ask(shard, SearchQuery("bob", QUERIES[0])).turns
    assert ask(shard, SearchQuery("ann", QUERIES[0])).turns
