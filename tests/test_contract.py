"""One contract for all implementations of MemoryApi: engine, in-process router, Ray cluster, HTTP clients.

Every scenario checks what it can on its own and returns what it saw. Ids hang on names and order alone, and
the mock LLM's replies on its prompts, so that all implementations must return what an engine returns.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from undertow.bench.mock.server import spawn_server
from undertow.engine.api.transfer.import_ import TenantExists
from undertow.engine.base import queries
from undertow.engine.base.memory_api import MemoryApi
from undertow.engine.base.model import InputError, Turn, UnknownMemory
from undertow.engine.base.results import Page, Report
from undertow.engine.cluster.in_process import InProcess
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.readers.vectors import ENCODER_KEY
from undertow.engine.tenants.registry import UnknownTenant

from .support.api.contract import HANDLERS, IMPLEMENTATIONS, HttpApi, implementation
from .support.engine import turn_of
from .support.faults.harness import RATES, turns_of, write_log

Scenario = Callable[[MemoryApi, str, list[Turn]], Any]
QUERY = "the harbour and the boat"
TURNS = 24


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with spawn_server(latency_ms=1, jitter_ms=1, **RATES) as url:
        yield url


@pytest.fixture(scope="module", params=IMPLEMENTATIONS)
def api(
    request: pytest.FixtureRequest, server: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[MemoryApi]:
    if request.param == "ray":
        request.getfixturevalue("ray_address")
    with implementation(request.param, tmp_path_factory.mktemp(request.param), server) as opened:
        yield opened


@pytest.fixture(scope="module")
def expected(server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Scenario], Any]]:
    """What an engine returns for a scenario."""
    seen: dict[Scenario, Any] = {}
    with implementation("engine", tmp_path_factory.mktemp("expected"), server) as engine:

        def of(scenario: Scenario) -> Any:
            if scenario not in seen:
                seen[scenario] = run(scenario, engine, tmp_path_factory.mktemp("log"))
            return seen[scenario]

        yield of


def run(scenario: Scenario, api: MemoryApi, folder: Path) -> Any:
    tenant = scenario.__name__
    turns = turns_of(write_log(folder / "log.jsonl", [tenant], TURNS))[tenant]
    return scenario(api, tenant, turns)


def filled(api: MemoryApi, turns: Sequence[Turn]) -> list[str]:
    """Add turns and have them decided; the ids of the turns."""
    receipts = api.add_batch(turns)
    assert api.flush(turns[0].tenant)
    assert [receipt.seq for receipt in receipts] == list(range(len(turns)))
    return [receipt.id or "" for receipt in receipts]


def all_of(api: MemoryApi, tenant: str, **filters: Any) -> list[Report]:
    """Every page of `list`, five memories each."""
    found: list[Report] = []
    page: Page | None = None
    while page is None or page.after is not None:
        page = api.list(tenant, limit=5, after=page.after if page else None, **filters)
        assert len(page.items) <= 5
        found += page.items
    return found


def plain(found: Any) -> list[Any]:
    """A search's hits without what HTTP does not tell."""
    return [[asdict(hit) for hit in tier] for tier in (found.episodes, found.facts, found.turns)]


# ---- scenarios


def adding_and_searching(api: MemoryApi, tenant: str, turns: list[Turn]) -> Any:
    receipts = api.add_batch(turns)
    again = api.add_batch(turns[:2])
    assert [r.duplicate for r in (*receipts, *again)] == [False] * TURNS + [True] * 2
    assert api.flush(tenant)
    found = api.search(tenant, QUERY, k_sub=4, k_epi=2, k_sem=3)
    assert (len(found.turns), len(found.episodes), len(found.facts)) == (4, 2, 3)
    scores = [hit.score for hit in found.turns]
    assert scores == sorted(scores, reverse=True)
    early = api.search(tenant, QUERY, k_sub=50, k_epi=0, k_sem=0, until="2026-03-01T05:00:00")
    assert len(early.turns) == 6
    assert not early.episodes
    explained = api.search(tenant, QUERY, until="2026-03-01T05:00:00", explain=True).explanation
    assert explained is not None
    assert {reason for _, reason in explained.left_out} >= {"time"}
    return receipts, plain(found), plain(early), explained


def filtering_by_metadata(api: MemoryApi, tenant: str, turns: list[Turn]) -> Any:
    marked = [
        Turn(t.tenant, t.messages, t.dedupe_key, t.session_id, t.timestamp, {"n": n})
        for n, t in enumerate(turns)
    ]
    filled(api, marked)
    found = api.search(tenant, QUERY, k_sub=50, k_epi=0, k_sem=0, where={"n": [1, 5]})
    assert {hit.source_seqs for hit in found.turns} == {(1,), (5,)}
    listed = all_of(api, tenant, kinds=["turn"], where={"n": 5})
    assert [report["metadata"] for report in listed] == [{"n": 5}]
    assert not api.search(tenant, QUERY, where={"n": 99}).ranked()
    late = api.search(tenant, QUERY, k_sub=50, k_epi=0, k_sem=0, where={"n": {"$gt": 20, "$ne": 22}})
    assert {hit.source_seqs for hit in late.turns} == {(21,), (23,)}
    few = all_of(api, tenant, kinds=["turn"], where={"n": {"$lt": 2}, "m": {"$ne": "x"}})
    assert [report["metadata"]["n"] for report in few] == [0, 1]
    return plain(found), listed, plain(late), few


def adding_a_table(api: MemoryApi, tenant: str, turns: list[Turn]) -> Any:
    """Plain and odd rows of several tenants, one known already, one with a vector; and a refused row."""
    if isinstance(api, HttpApi | InProcess):
        pytest.skip("the service takes no tables")
    add, names = cast(Any, api).add_table, [f"{tenant} {n % 3}" for n in range(60)]
    messages: list[list[dict[str, Any]]] = [
        [{"role": "user", "content": f"word{n}"}, {"role": "assistant", "content": "I see."}]
        for n in range(60)
    ]
    messages[9][1] |= {"content": None, "tool_calls": [{"function": {"name": "f"}}]}
    messages[11] += messages[12]
    vector = [1.0, *[0.0] * 383]
    vectors = pa.array([vector if n == 5 else None for n in range(60)], pa.list_(pa.float32()))
    keys = ["again" if n in (20, 23) else None for n in range(60)]
    table = pa.table(
        {"tenant": names, "messages": messages, "vectors": vectors, "idempotency_key": keys}
    ).replace_schema_metadata({ENCODER_KEY: HashingEncoder(384).fingerprint.digest})
    reports = [add(table, source="chats") for _ in range(2)]
    assert [(report.turns, report.new_turns) for report in reports] == [(61, 60), (61, 0)]
    with pytest.raises(InputError, match="add_table:2: field 'tenant'"):
        add(pa.table({"tenant": [tenant, None], "messages": messages[:2]}))
    with pytest.raises(InputError, match="holds vectors of the encoder other"):
        add(table.replace_schema_metadata({ENCODER_KEY: "other"}))
    exported = [r for name in names[:3] for r in api.export_page(name, vectors=True).items]
    stored = [record for record in exported if record["kind"] == "turn"]
    assert len(stored) == 60
    return reports, stored


def reading(api: MemoryApi, tenant: str, turns: list[Turn]) -> Any:
    ids = filled(api, turns)
    everything = all_of(api, tenant)
    assert [report["id"] for report in everything if report["kind"] == "turn"] == ids
    dated = all_of(api, tenant, kinds=["turn"], since="2026-03-01T02:00:00", until="2026-03-01T05:00:00")
    assert [report["id"] for report in dated] == ids[2:6]
    facts = [report for report in everything if report["kind"] == "fact"]
    assert all_of(api, tenant, kinds=["fact"]) == facts != []
    fact = facts[-1]
    assert api.get(fact["id"], tenant=tenant) == fact
    assert api.get(ids[3], tenant=tenant)["seq"] == 3
    assert api.history(fact["id"], tenant=tenant)[-1]["text"] == fact["text"]
    explained = api.explain(tenant)
    assert [report["seq"] for report in explained[:TURNS]] == list(range(TURNS))
    assert api.explain(tenant, limit=5) == explained[:5]
    assert api.explain(tenant, limit=7, after_seq=11) == explained[12:19]
    counts = api.tenant_stats(tenant)
    assert (counts["turns"], counts["facts"]) == (TURNS, len(facts))
    usage = api.usage(tenant)
    assert usage["episode"]["calls"] > 0
    assert api.policy(tenant) == {"tenant": tenant, "policy": "recmem", "generation": 1, "change": None}
    return everything, explained, counts, {operation: used["calls"] for operation, used in usage.items()}


def answering(api: MemoryApi, tenant: str, turns: list[Turn]) -> Any:
    filled(api, turns)
    answer = api.answer(tenant, "What of the harbour?", as_of="2026-03-05")
    assert answer.text
    assert answer.usage.calls == 1
    assert api.usage(tenant)["answer"]["calls"] == 1
    return answer.text, sorted(hit.id for hit in answer.found.ranked())


def updating_and_deleting(api: MemoryApi, tenant: str, turns: list[Turn]) -> Any:
    ids = filled(api, turns)
    episode = all_of(api, tenant, kinds=["episode"])[0]["id"]
    assert api.update(episode, "The boat is green.", tenant=tenant).id == episode
    assert api.flush(tenant)
    versions = api.history(episode, tenant=tenant)
    assert versions[-1]["text"] == api.get(episode, tenant=tenant)["text"] == "The boat is green."
    assert len(versions) > 1
    new = api.update(ids[2], "I sold the violin.", tenant=tenant)
    assert (new.kind, new.id in ids) == ("turn", False)
    assert api.search(tenant, "I sold the violin.", k_sub=1, k_epi=0, k_sem=0).turns[0].id == new.id
    assert api.delete(ids[5], tenant=tenant) == "turn"
    for gone in (ids[2], ids[5]):
        for act in (api.get, api.history, api.delete):
            with pytest.raises(UnknownMemory):
                act(gone, tenant=tenant)
    fact = all_of(api, tenant, kinds=["fact"])[0]["id"]
    assert api.delete(fact, tenant=tenant) == "fact"
    assert fact not in [report["id"] for report in all_of(api, tenant)]
    assert api.flush(tenant)
    ended = api.history(fact, tenant=tenant)
    assert [version["deleted"] for version in ended[-2:]] == [False, True], "its history alone is left"
    with pytest.raises(UnknownMemory):
        api.get(fact, tenant=tenant)
    return new, versions, all_of(api, tenant), ended


def exporting_and_importing(api: MemoryApi, tenant: str, turns: list[Turn]) -> Any:
    filled(api, turns)
    copy = f"copy of {tenant}"
    records = _export(api, tenant)
    report = api.import_(copy, records)
    assert report.turns == TURNS
    assert api.flush(copy)
    assert [r["text"] for r in all_of(api, copy)] == [r["text"] for r in all_of(api, tenant)]
    with pytest.raises(TenantExists):
        api.import_(copy, records)
    with pytest.raises(InputError):
        api.import_(f"torn {tenant}", records[:-1])
    with pytest.raises(UnknownTenant):
        api.tenant_stats(f"torn {tenant}")
    return report, all_of(api, copy), sorted(record["kind"] for record in records)


def _export(api: MemoryApi, tenant: str) -> list[Report]:
    page = api.export_page(tenant, limit=7)
    records = [*page.items]
    while page.after is not None:
        page = api.export_page(tenant, limit=7, after=page.after)
        records += page.items
    assert records[-1]["kind"] == "end"
    return records


def erasing(api: MemoryApi, tenant: str, turns: list[Turn]) -> Any:
    filled(api, turns)
    certificate = api.erase(tenant, now=True)
    assert certificate is not None
    assert certificate.turns_removed == TURNS
    for ask in (api.tenant_stats, api.policy, api.flush, api.explain):
        with pytest.raises(UnknownTenant):
            ask(tenant)
    ids = filled(api, turns[:3])  # a new life under the name
    assert api.tenant_stats(tenant)["turns"] == 3
    assert api.erase(tenant) is None
    with pytest.raises(UnknownTenant):
        api.search(tenant, QUERY)
    again = api.erase(tenant, now=True)
    assert again is not None
    assert (again.tenant_key, again.turns_removed) == (certificate.tenant_key, 3)
    return certificate.facts_removed, certificate.episodes_removed, ids


def changing_the_policy(api: MemoryApi, tenant: str, turns: list[Turn]) -> Any:
    filled(api, turns)
    with pytest.raises(InputError):
        api.set_policy(tenant, "nonsense")
    assert api.set_policy(tenant, "eager")["change"]["policy"] == "eager"
    assert api.flush(tenant)
    assert api.policy(tenant) == {"tenant": tenant, "policy": "eager", "generation": 2, "change": None}
    listed = all_of(api, tenant)
    assert {report["kind"] for report in listed} == {"turn", "fact"}
    return listed


def refusing(api: MemoryApi, tenant: str, turns: list[Turn]) -> Any:
    """Each call refuses what it cannot take, with the same kind of error, and nothing changes."""
    (first, *_) = filled(api, turns[:2])
    (other,) = filled(api, [Turn(f"other {tenant}", turns[0].messages, "k")])
    for ask in (
        lambda: api.search("nobody", QUERY),
        lambda: api.answer("nobody", QUERY),
        lambda: api.list("nobody"),
        lambda: api.export_page("nobody"),
        lambda: api.explain("nobody"),
        lambda: api.policy("nobody"),
        lambda: api.tenant_stats("nobody"),
        lambda: api.usage("nobody"),
        lambda: api.flush("nobody"),
    ):
        with pytest.raises(UnknownTenant):
            ask()
    for memory in ("nothing", other):
        for act in (api.get, api.history, api.delete):
            with pytest.raises(UnknownMemory):
                act(memory, tenant=tenant)
        with pytest.raises(UnknownMemory):
            api.update(memory, "x", tenant=tenant)
    wrong: dict[str, Callable[[], object]] = {
        "limit": lambda: api.list(tenant, limit=0),
        "since": lambda: api.list(tenant, since="yesterday"),
        "cursor": lambda: api.list(tenant, after="no cursor"),
        "kinds": lambda: api.list(tenant, kinds=["poem"]),
        "until": lambda: api.search(tenant, QUERY, until="yesterday"),
        "as_of": lambda: api.answer(tenant, QUERY, as_of="yesterday"),
        "text": lambda: api.update(first, "", tenant=tenant),
        "where": lambda: api.search(tenant, QUERY, where={"topic": {"is": "boat"}}),
        "k": lambda: api.search(tenant, QUERY, k_sub=-1, k_epi=0, k_sem=0),
        "records": lambda: api.import_(f"bad {tenant}", [{"kind": "turn"}]),
    }
    assert {name for name, call in wrong.items() if not _is_refused(call)} == set()
    assert api.get(first, tenant=tenant)["seq"] == 0
    return all_of(api, tenant)


def _is_refused(call: Callable[[], object]) -> bool:
    try:
        call()
    except ValueError:
        return True
    return False


def the_whole_store(api: MemoryApi, tenant: str, turns: list[Turn]) -> Any:
    names = [f"{tenant} {letter}" for letter in "abc"]
    for name in names:
        filled(api, [Turn(name, t.messages, t.dedupe_key, t.session_id, t.timestamp) for t in turns[:2]])
    assert api.tenant_names(tenant) == names
    assert api.tenant_names(tenant, limit=1, after=names[0]) == names[1:2]
    counts = api.stats()
    assert counts["tenants"] >= 3
    assert counts["turns"] >= 6
    spent = api.usage().get("episode", {"calls": 0})["calls"]
    assert spent >= sum(api.usage(n).get("episode", {"calls": 0})["calls"] for n in names)
    assert api.replay_jobs() == counts["dead_letters"]
    return sorted(counts)


SCENARIOS: tuple[Scenario, ...] = (
    adding_and_searching,
    adding_a_table,
    filtering_by_metadata,
    reading,
    answering,
    updating_and_deleting,
    exporting_and_importing,
    erasing,
    changing_the_policy,
    refusing,
    the_whole_store,
)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_every_implementation_returns_what_an_engine_returns(
    scenario: Scenario, api: MemoryApi, expected: Callable[[Scenario], Any], tmp_path: Path
) -> None:
    assert run(scenario, api, tmp_path) == expected(scenario)


def test_a_memory_is_found_without_naming_its_tenant(api: MemoryApi) -> None:
    if isinstance(api, HttpApi):
        pytest.skip("over HTTP every path names a tenant")
    (first, second) = filled(api, [turn_of("unnamed", n, f"word{n}") for n in range(2)])
    assert api.get(first)["tenant"] == "unnamed"
    keys = [turn_of("unnamed", 0, "word0").dedupe_key, "no such key"]
    assert {key: report["id"] for key, report in api.turns_by_key("unnamed", keys).items()} == {
        keys[0]: first
    }
    assert api.get_all("unnamed") == []
    assert api.update(first, "other words").kind == "turn"
    assert api.delete(second) == "turn"
    for act in (api.get, api.history, api.delete):
        with pytest.raises(UnknownMemory):
            act(second)
    assert api.drain()


def test_every_call_is_served_over_http_or_listed() -> None:
    """The service offers each call, but for those that are its own affair."""
    calls = {
        kind
        for kind in vars(queries).values()
        if isinstance(kind, type) and issubclass(kind, queries.ApiCall) and "name" in vars(kind)
    }
    own = {queries.MemoriesQuery, queries.TurnsByKeyQuery, queries.DrainCommand, queries.EventsQuery}
    assert calls - set(HANDLERS) == own


LIGHT = """
import sys
import undertow.engine.base.memory_api, undertow.engine.base.queries, undertow.engine.base.results
heavy = {"torch", "lance", "numba", "numpy", "pyarrow", "transformers", "ray"} & set(sys.modules)
sys.exit(f"loaded: {heavy}" if heavy else 0)
"""


def test_the_calls_as_data_load_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
