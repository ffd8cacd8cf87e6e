"""A small tenant next to a huge one gets its k results, whatever filters it searches with; so does the huge
one for what is rare in it. Over HTTP, by an exact search and through an index of vectors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Message, Turn
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.encoders.hashing import HashingEncoder

from ...support.cluster.in_process import settings
from ...support.faults.harness import TOPICS
from ...support.service.http import Running, at, serving

HUGE, SMALL = 20_000, 120
RARE = 500  # of so many of the huge tenant's turns one is marked
# episodes do not grow together, so that there are some of any time
DISTINCT = {"theta_merge": 1.0}
QUERY = "boat and tide and garden and bean"
FILTERS: list[dict[str, Any]] = [
    {},
    {"filters": {"topic": "work"}},
    {"since": "2026-04-03", "until": "2026-04-17"},
    {"filters": {"topic": ["work", "home"]}, "since": "2026-04-03", "until": "2026-04-17"},
]


def without_llm(_: Settings) -> None:
    """Nothing is decided while the test asks."""


def turn(tenant: str, n: int, topic: str, *, own: str) -> Turn:
    """All say what is asked for, so that whoever ranked all tenants together would drown the small one."""
    words = TOPICS[(n % 2) * 2].split()
    said = " ".join([*words[n % 5 : n % 5 + 5], own])
    stamp = f"2026-04-{1 + n % 28:02d}T10:00:00"
    return Turn(tenant, (Message("user", said),), f"{tenant} {n}", "s", stamp, {"topic": topic})


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small one's turns are consolidated, the huge one's stored."""
    folder = tmp_path_factory.mktemp("store")
    topics = ("work", "home", "garden")
    with Engine(folder, settings(**DISTINCT), HashingEncoder(384), llm=MockLLM(MockReplies(1))) as engine:
        engine.add_batch([turn("small", n, topics[n // 2 % 3], own=f"n{n}") for n in range(SMALL)])
        assert engine.drain()
    with Engine(folder, settings(**DISTINCT, batch_turns=None), HashingEncoder(384), llm=None) as engine:
        for start in range(0, HUGE, 4_000):
            numbers = range(start, start + 4_000)
            engine.add_batch([turn("huge", n, "rare" if n % RARE == 0 else "work", own="") for n in numbers])
    return folder


@pytest.fixture(scope="module", params=[False, True], ids=["exact", "index"])
def indexed(request: pytest.FixtureRequest) -> bool:
    """Whether the huge one is searched through an index."""
    return bool(request.param)


@pytest.fixture(scope="module")
def running(store: Path, indexed: bool) -> Iterator[Running]:
    engine = {"ivf_rows": 5_000 if indexed else HUGE, **DISTINCT}
    with serving(store, parts=EngineParts(llm=without_llm), engine=engine) as service:
        yield service


@pytest.fixture(scope="module")
def client(running: Running) -> httpx2.Client:
    return running.client()


def ask(client: httpx2.Client, tenant: str, **asked: Any) -> tuple[list[dict[str, Any]], float]:
    response = client.post(at(tenant, "/search"), json={"query": QUERY, **asked})
    assert response.status_code == 200, response.text
    return response.json()["results"], response.json()["recall"]


def listed(client: httpx2.Client, kind: str, asked: dict[str, Any]) -> set[str]:
    """What of the small tenant passes the filters."""
    params: dict[str, Any] = {"kind": kind, "limit": 1000}
    params |= {f"filter.{key}": value for key, value in asked.get("filters", {}).items()}
    params |= {end: asked[end] for end in ("since", "until") if end in asked}
    page = client.get(at("small", "/memories"), params=params).json()
    assert page["next"] is None
    return {memory["id"] for memory in page["results"]}


@pytest.mark.parametrize("asked", FILTERS, ids=["all", "metadata", "time", "both"])
@pytest.mark.parametrize("kind", ["turn", "episode", "fact"])
def test_a_small_tenant_next_to_a_huge_one_gets_its_k_results(
    client: httpx2.Client, kind: str, asked: dict[str, Any]
) -> None:
    ask(client, "huge")
    there = listed(client, kind, asked)
    assert len(there) >= 3
    for k in (1, 3, len(there), len(there) + 5):
        found, recall = ask(client, "small", kinds=[kind], top_k=k, **asked)
        ids = [memory["id"] for memory in found]
        assert len(set(ids)) == len(ids) == min(k, len(there))
        assert set(ids) <= there and {memory["kind"] for memory in found} == {kind}
        assert recall == 1.0, "the small one is searched exactly"


def test_a_huge_tenant_gets_k_results_of_a_rare_topic(
    running: Running, indexed: bool, client: httpx2.Client
) -> None:
    found, recall = ask(client, "huge", top_k=10)
    assert len(found) == 10
    assert 0.5 < recall <= 1.0 if indexed else recall == 1.0
    rare = {"filters": {"topic": "rare"}}
    for asked in (rare, rare | {"since": "2026-04-01", "until": "2026-04-28"}):
        found, recall = ask(client, "huge", kinds=["turn"], top_k=30, **asked)
        assert sorted(seq % RARE for memory in found for seq in memory["source_seqs"]) == [0] * 30
        assert recall == 1.0, "filtered, it is searched exactly"
    shard = running.service.memories._router._local._shard  # type: ignore[attr-defined]
    assert set(shard._supervisor.engine.retrieval.indexes()) == ({"huge"} if indexed else set())
