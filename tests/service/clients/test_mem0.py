"""mem0's own client, unchanged, against the service: what works, and what is refused in words."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from undertow.serving.auth.principal import Scope
from undertow.serving.http.routes.mem0 import methods
from undertow.serving.http.routes.mem0.entities import entity_of, opaque, parted, tenant_of

from ...support.service.client import Driven
from ...support.service.http import Running, at, is_problem, said, serving

WORKS = {
    *("add", "get", "get_all", "search", "update", "delete", "delete_all", "history"),
    *("users", "delete_users", "reset", "batch_update", "batch_delete"),
}
NO_EXPORTS = "has no exports by a schema"
NO_PROFILES = "has no profiles"
NO_PROJECTS = "has no projects"
NO_WEBHOOKS = "has no webhooks"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "chat": ({}, "Chat is not implemented yet"),  # of the client itself
    "create_memory_export": ({"schema": "{}"}, NO_EXPORTS),
    "get_memory_export": ({"memory_export_id": "x"}, NO_EXPORTS),
    "get_summary": ({}, "has no summaries"),
    "get_profile": ({"entity_id": "ann/x"}, NO_PROFILES),
    "generate_profile": ({"entity_id": "ann"}, NO_PROFILES),
    "get_profile_settings": ({}, NO_PROFILES),
    "update_profile_settings": ({"enabled": True}, NO_PROFILES),
    "sample_profiles": ({}, NO_PROFILES),
    "get_profile_job": ({"job_id_or_status_url": "j"}, NO_PROFILES),
    "get_project": ({}, NO_PROJECTS),
    "update_project": ({"custom_instructions": "x"}, NO_PROJECTS),
    "get_webhooks": ({"project_id": "p"}, NO_WEBHOOKS),
    "create_webhook": ({"url": "u", "name": "n", "project_id": "p", "event_types": []}, NO_WEBHOOKS),
    "update_webhook": ({"webhook_id": 1, "name": "n"}, NO_WEBHOOKS),
    "delete_webhook": ({"webhook_id": 1}, NO_WEBHOOKS),
    "feedback": ({"memory_id": "m", "feedback": "POSITIVE"}, "has no feedback"),
}
PROJECT: dict[str, dict[str, Any]] = {
    "get": {},
    "create": {"name": "n"},
    "update": {"custom_instructions": "x"},
    "delete": {},
    "get_members": {},
    "add_member": {"email": "a@b.c"},
    "update_member": {"email": "a@b.c", "role": "READER"},
    "remove_member": {"email": "a@b.c"},
}
KINDS = ("sync", "async")
TABLE = (Path(__file__).parents[3] / "docs/mem0.md").read_text()


@pytest.fixture(scope="module")
def mem0(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Its package, which reads its environment when it is imported."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MEM0_TELEMETRY", "False")
        patch.setenv("MEM0_DIR", str(tmp_path_factory.mktemp("mem0")))
        yield importlib.import_module("mem0")


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


class Clients:
    """mem0's clients of the service."""

    def __init__(self, mem0: Any, running: Running, runner: asyncio.Runner) -> None:
        self._mem0, self._running, self._runner = mem0, running, runner

    def __call__(self, kind: str = "sync", *scopes: Scope, **bound: Any) -> Any:
        """One with a new key."""
        made = self.type_of(kind)(self._running.key(*scopes, **bound), host=self._running.url)
        return Driven(made, self._runner)

    def type_of(self, kind: str) -> Any:
        return self._mem0.MemoryClient if kind == "sync" else self._mem0.AsyncMemoryClient


@pytest.fixture(scope="module")
def clients(mem0: Any, running: Running, runner: asyncio.Runner) -> Clients:
    return Clients(mem0, running, runner)


def added(client: Any, text: str, **whose: Any) -> str:
    """The id of a new memory."""
    (result,) = client.add(text, **whose)["results"]
    assert result["event"] == "ADD"
    return str(result["id"])


def public(type_: Any) -> set[str]:
    return {name for name, _ in inspect.getmembers(type_, inspect.isfunction) if not name.startswith("_")}


@pytest.mark.parametrize("kind", KINDS)
def test_every_method_is_told_about(clients: Clients, kind: str) -> None:
    assert public(clients.type_of(kind)) == WORKS | REFUSED.keys()
    assert public(type(clients(kind).client.project)) == PROJECT.keys()
    assert [name for name in [*WORKS, *REFUSED] if f"`{name}`" not in TABLE] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_is_refused_names_the_difference(clients: Clients, kind: str, name: str) -> None:
    arguments, words = REFUSED[name]
    with pytest.raises(Exception, match=words):
        getattr(clients(kind), name)(**arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_projects_are_refused(clients: Clients, runner: asyncio.Runner, kind: str) -> None:
    project = Driven(clients(kind).client.project, runner)
    for name, arguments in PROJECT.items():
        with pytest.raises(Exception, match=NO_PROJECTS):
            getattr(project, name)(**arguments)


@pytest.mark.parametrize("kind", KINDS)
def test_a_life_with_every_method_that_works(clients: Clients, kind: str) -> None:
    lot = f"life-{kind}/"
    client, ann = clients(kind, prefix=lot), f"{lot}änn"
    first = added(client, "I sail a boat", user_id=ann, metadata={"n": 5}, timestamp=1_700_000_000)
    second = added(client, "I keep bees", user_id=ann, agent_id="helper", run_id="r1")
    seen = client.get(first)
    assert seen["memory"] == "user: I sail a boat" and seen["created_at"].startswith("2023-11-14T22:13:20")
    assert (seen["id"], seen["user_id"], seen["agent_id"]) == (first, ann, None)
    assert (seen["metadata"], seen["categories"], seen["kind"]) == ({"n": 5}, None, "turn")
    hit = client.search("boat", filters={"user_id": ann}, top_k=1)["results"][0]
    assert hit["id"] == first and hit["metadata"] == {"n": 5} and hit["score"] > 0.5
    (told,) = client.history(first)
    assert (told["memory_id"], told["event"], told["old_memory"]) == (first, "ADD", None)
    assert told["new_memory"] == seen["memory"]
    other = client.update(first, text="I sail two boats")["id"]
    assert client.get(other)["memory"] == "user: I sail two boats"
    changed = client.batch_update([{"memory_id": other, "text": "I row"}])["results"][0]["id"]
    client.batch_delete([{"memory_id": changed}])
    listed = client.get_all(filters={"user_id": ann})
    assert (listed["count"], [memory["id"] for memory in listed["results"]]) == (1, [second])
    assert (listed["results"][0]["agent_id"], listed["results"][0]["run_id"]) == ("helper", "r1")
    client.delete(second)
    added(client, "again", user_id=ann)
    assert client.delete_all(user_id=ann) == {"message": "Memories deleted successfully!"}
    assert client.delete_all(user_id=f"{ann}!") == {"message": "There were no memories to delete."}
    assert client.get_all(filters={"user_id": ann})["results"] == []
    added(client, "once more", user_id=ann)
    added(client, "another", user_id=f"{lot}bob")
    assert [user["name"] for user in client.users()["results"]] == [f"{lot}bob", ann]
    client.delete_users(user_id=ann)
    assert [user["name"] for user in client.users()["results"]] == [f"{lot}bob"]
    client.reset()
    assert client.users()["results"] == []


def test_both_faces_see_the_same_memories(clients: Clients, client: httpx2.Client) -> None:
    theirs, name = clients(), "both/ünï %2F"
    made = added(theirs, "from mem0", user_id=name)
    ours = client.get(at(name, "/memories")).json()["results"]
    assert [(name, memory["id"]) for memory in ours] == [parted(made)]
    client.post(at(name, "/memories"), json={"messages": said("from us")})
    assert theirs.get_all(filters={"user_id": name})["count"] == 2
    added(theirs, "an agent's", agent_id="a/1", run_id="r")
    (memory,) = client.get(at("agent:a/1", "/memories")).json()["results"]
    assert (memory["session_id"], memory["metadata"]) == ("r", {"run_id": "r"})
    (hit,) = theirs.search("agent", filters={"agent_id": "a/1", "run_id": "r"})["results"]
    assert (hit["user_id"], hit["agent_id"], hit["run_id"], hit["metadata"]) == (None, "a/1", "r", None)
    assert {"id": "agent:a/1", "type": "agent", "name": "a/1"} in theirs.users()["results"]
    assert 'route="/v3/memories/add/"' in client.get("/metrics").text


def test_an_episode_keeps_its_id_and_its_history(clients: Clients, client: httpx2.Client) -> None:
    theirs = clients()
    for _ in range(6):
        added(theirs, "the boat sails", user_id="epi", timestamp=1770000003)
    assert client.post(at("epi", "/flush")).json() == {"decided": True}
    listed = theirs.get_all(filters={"user_id": "epi"})["results"]
    (episode,) = (memory for memory in listed if memory["kind"] == "episode")
    assert (episode["user_id"], episode["metadata"]) == ("epi", None)
    assert theirs.update(episode["id"], text="a voyage")["id"] == episode["id"]
    theirs.delete(episode["id"])
    told = [(one["event"], one["old_memory"], one["new_memory"]) for one in theirs.history(episode["id"])]
    assert told[-2:] == [("UPDATE", episode["memory"], "a voyage"), ("DELETE", "a voyage", None)]


def test_an_add_is_safe_to_repeat(running: Running) -> None:
    client = running.client()
    body = {"messages": said("only once"), "user_id": "rep"}
    told = [
        client.post("/v3/memories/add/", json=body, headers={"Idempotency-Key": "k"}).json()["results"][0]
        for _ in range(2)
    ]
    assert [one["event"] for one in told] == ["ADD", "NONE"] and told[0]["id"] == told[1]["id"]


def test_filters(clients: Clients) -> None:
    client = clients()
    for n, agent in enumerate(("x", "y", "y")):
        added(client, f"number {n}", user_id="fil", agent_id=agent, metadata={"n": n})
    cases: tuple[tuple[dict[str, Any], set[int]], ...] = (
        ({"user_id": "fil"}, {0, 1, 2}),
        ({"user_id": {"in": ["fil"]}, "agent_id": "y"}, {1, 2}),
        ({"AND": [{"user_id": "fil"}, {"agent_id": {"in": ["x", "y"]}}, {"metadata": {"n": 2}}]}, {2}),
        ({"user_id": "fil", "metadata": {"n": {"in": [0, 1], "lt": 9}, "m": {"ne": 1}}}, {0, 1}),
        ({"user_id": "fil", "agent_id": "z"}, set()),
        ({"user_id": "nobody"}, set()),
    )
    for filters, found in cases:
        for told in (client.search("number", filters=filters), client.get_all(filters=filters)):
            turns = [memory for memory in told["results"] if memory["kind"] == "turn"]
            assert {memory["metadata"]["n"] for memory in turns} == found
    (hit,) = client.search("number", filters={"user_id": "fil"}, metadata={"n": 1}, top_k=1)["results"]
    assert hit["metadata"] == {"n": 1}
    assert client.search("number 1", filters={"user_id": "fil"}, threshold=1.0, top_k=1)["results"] == []


def test_a_list_comes_in_pages(clients: Clients, monkeypatch: pytest.MonkeyPatch) -> None:
    client = clients()
    texts = ("sailing", "bees and honey", "taxes of 1999", "an opera", "granite")  # make no episode
    for n, text in enumerate(texts):
        added(client, text, user_id="pag", timestamp=86_400 * n)
    pages = [client.get_all(filters={"user_id": "pag"}, page=n, page_size=2) for n in (1, 2, 3, 4)]
    assert [len(page["results"]) for page in pages] == [2, 2, 1, 0]
    assert [memory["memory"][6:] for page in pages for memory in page["results"]] == [*texts]
    assert [page["count"] for page in pages] == [5] * 4
    assert pages[0]["previous"] is None and pages[2]["next"] is None
    assert pages[1]["next"] == "/v3/memories/?page=3&page_size=2"
    dated = client.get_all(filters={"user_id": "pag"}, start_date="1970-01-02", end_date="1970-01-03")
    assert dated["count"] == 2
    monkeypatch.setattr(methods, "MOST_LISTED", 4)
    first = client.get_all(filters={"user_id": "pag"}, page_size=2)
    assert (first["count"], len(first["results"])) == (None, 2)
    with pytest.raises(Exception, match="ends beyond 4 memories"):
        client.get_all(filters={"user_id": "pag"}, page=3, page_size=2)


ADD, FIND, CHANGE = {"user_id": "ref"}, {"filters": {"user_id": "ref"}}, {"text": "x"}


@pytest.mark.parametrize(
    ("method", "arguments", "words"),
    [
        ("add", {}, "user_id: is missing|Name whose memories"),
        ("add", {**ADD, "infer": False}, "infer: turns are kept word for word"),
        ("add", {**ADD, "expiration_date": "2030-01-01"}, "do not expire"),
        ("add", {**ADD, "custom_instructions": "x"}, "custom_instructions: .*policy"),
        ("add", {**ADD, "agent_custom_instructions": "x"}, "policy"),
        ("add", {**ADD, "structured_data_schema": {}}, "policy"),
        ("add", {**ADD, "custom_categories": []}, "no categories"),
        ("add", {**ADD, "colour": "red"}, "colour: is no field here"),
        ("add", {**ADD, "agent_id": "a", "metadata": {"agent_id": "b"}}, "differs from agent_id"),
        ("add", {"user_id": "agent:x"}, "Give agent_id"),
        ("add", {"user_id": 5}, "must be text"),
        ("add", {**ADD, "filters": {"user_id": "other"}}, "one at a time"),
        ("search", {"filters": {"user_id": "*"}}, "wildcard"),
        ("get_all", {"filters": {"user_id": "ref", "agent_id": {"in": []}}}, "Name one at least"),
        ("search", {"filters": {"OR": [{"user_id": "ref"}]}}, "filters.OR: is not supported"),
        ("search", {"filters": {"NOT": {"user_id": "ref"}}}, "filters.NOT: is not supported"),
        ("search", {"filters": {"user_id": {"in": ["a", "b"]}}}, "one at a time"),
        ("search", {"filters": {"user_id": "ref", "metadata": {"n": {"contains": 1}}}}, "operator"),
        ("get_all", {"filters": {"user_id": "ref", "metadata": {"n": {"gt": True}}}}, "'n' .gt is True"),
        ("search", {"filters": {"user_id": "ref", "created_at": {"gte": "2024"}}}, "no filter here"),
        ("search", {"filters": {"AND": [{"user_id": "a"}, {"user_id": "b"}]}}, "given twice"),
        ("search", {**FIND, "rerank": True}, "rerank: .*not reranked"),
        ("search", {**FIND, "keyword_search": False}, "keyword_search: words count"),
        ("search", {**FIND, "latest_only": False}, "newest version"),
        ("search", {**FIND, "reference_date": "2024-01-01"}, "no reference date"),
        ("search", {**FIND, "fields": ["memory"]}, "every field"),
        ("search", {**FIND, "categories": ["x"]}, "no categories"),
        ("search", {**FIND, "top_k": 101}, "at most 100"),
        ("get_all", {**FIND, "latest_only": False}, "newest version"),
        ("get_all", {**FIND, "page": 0}, "whole number"),
        ("get_all", {**FIND, "page_size": 1_001}, "at most 1,000"),
        ("get_all", {}, "Name whose memories"),
        ("update", {**CHANGE, "metadata": {"a": 1}}, "metadata cannot be changed"),
        ("update", {**CHANGE, "timestamp": 1}, "time cannot be changed"),
        ("update", {"expiration_date": "2030-01-01"}, "do not expire"),
        ("delete", {"delete_linked": True}, "no linked ones"),
        ("delete_all", {}, "Name whose memories"),
        ("delete_all", {"user_id": "ref", "run_id": "x"}, "Name one entity"),
        ("delete_all", {"user_id": "*"}, "wildcard"),
        ("delete_all", {"filters": {"user_id": "ref"}}, "Pass user_id itself"),
    ],
)
def test_what_is_not_supported_is_never_ignored(
    clients: Clients, method: str, arguments: dict[str, Any], words: str
) -> None:
    client = clients()
    id_ = opaque("ref", "0" * 32)
    first = {"add": "hello", "search": "hello", "update": id_, "delete": id_}
    given = [first[method]] if method in first else []
    with pytest.raises(Exception, match=words):
        getattr(client, method)(*given, **arguments)


def test_what_means_the_same_is_accepted(clients: Clients) -> None:
    client = clients()
    added(client, "hello", user_id="same", infer=True)
    more = {"rerank": False, "keyword_search": True, "latest_only": True, "show_expired": False}
    assert len(client.search("hello", filters={"user_id": "same"}, **more)["results"]) == 1


def test_a_batch_ends_at_its_first_failure(clients: Clients) -> None:
    client = clients()
    one, two = (added(client, text, user_id="bat") for text in ("one", "two"))
    with pytest.raises(Exception, match=r"memories\[1\]: .* 1 of 3 were deleted before it"):
        client.batch_delete([{"memory_id": one}, {"memory_id": one}, {"memory_id": two}])
    assert [memory["id"] for memory in client.get_all(filters={"user_id": "bat"})["results"]] == [two]


def test_one_tenant_s_key_reaches_no_other_s_memories(clients: Clients, client: httpx2.Client) -> None:
    theirs = clients()
    id_ = added(theirs, "a secret of bob's", user_id="iso-bob")
    ann = clients(tenants=("iso-ann",))
    added(ann, "ann's own", user_id="iso-ann")
    _, own = parted(id_)
    bob = {"filters": {"user_id": "iso-bob"}}
    attempts: dict[str, dict[str, Any]] = {
        "get": {"memory_id": id_},
        "history": {"memory_id": id_},
        "update": {"memory_id": id_, "text": "x"},
        "delete": {"memory_id": id_},
        "batch_update": {"memories": [{"memory_id": id_, "text": "x"}]},
        "batch_delete": {"memories": [{"memory_id": id_}]},
        "add": {"messages": "x", "user_id": "iso-bob"},
        "search": {"query": "secret", **bob},
        "get_all": bob,
        "delete_all": {"user_id": "iso-bob"},
        "delete_users": {"user_id": "iso-bob"},
    }
    assert attempts.keys() == WORKS - {"users", "reset"}
    for method, arguments in attempts.items():
        with pytest.raises(Exception, match="lacks the scope"):
            getattr(ann, method)(**arguments)
    with pytest.raises(Exception, match="no memory with this id"):
        ann.get(opaque("iso-ann", own))
    assert [user["name"] for user in ann.users()["results"]] == ["iso-ann"]
    ann.reset()
    assert theirs.get(id_)["memory"] == "user: a secret of bob's"
    is_problem(client.get(at("iso-ann", "/memories")), 404)


def test_scopes_hold(clients: Clients) -> None:
    id_ = added(clients(), "kept", user_id="sco")
    reader = clients("sync", Scope.READ)
    assert reader.get(id_)["memory"] == "user: kept"
    for act in (
        lambda: reader.delete(id_),
        lambda: reader.add("x", user_id="sco"),
        lambda: reader.delete_all(user_id="sco"),
        reader.users,
    ):
        with pytest.raises(Exception, match="lacks the scope"):
            act()


def test_the_client_needs_a_key(mem0: Any, running: Running) -> None:
    for type_ in (mem0.MemoryClient, mem0.AsyncMemoryClient):
        with pytest.raises(ValueError, match="key"):
            type_("ut_0123456789ab_" + "x" * 43, host=running.url)


def test_a_service_without_keys_takes_any_key(mem0: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    with serving(tmp_path_factory.mktemp("open"), open_to_all=True) as running:
        client = mem0.MemoryClient("any", host=running.url)
        assert client.add("hello", user_id="ann")["results"][0]["event"] == "ADD"


def test_malformed_ids_are_unknown(running: Running) -> None:
    client = running.client()
    for text in ("x", ".", "YQ.", "YQ==.m", "Y Q.m", "_w.m", "AA.m", "YQ.%00", "ä.m", "YR.m", ".."):
        for method, rest in (("GET", ""), ("PUT", ""), ("DELETE", ""), ("GET", "history/")):
            sent = text if "%" in text else httpx2.URL("", params={"q": text}).params["q"]
            response = client.request(
                method, f"/v1/memories/{sent.replace('.', '%2E')}/{rest}", json={"text": "x"}
            )
            assert response.status_code in (404, 422), response.text
            assert response.headers["content-type"] == "application/json" and response.json()["detail"]


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(["", "*", "fuzz", "a/b", "\x00"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["AND", "OR", "in", "user_id", "agent_id", "metadata", "memory_id", "role"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
NAMES = st.text(min_size=1).filter(lambda text: "\x00" not in text)
FIELDS = ("messages", "filters", "metadata", "user_id", "agent_id", "query", "top_k", "timestamp", "memories")
BODIES = st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4) | VALUES
PATHS = ("/v3/memories/add/", "/v3/memories/search/", "/v3/memories/", "/v1/batch/", "/v1/memories/YQ.m/")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=BODIES, path=st.sampled_from(PATHS))
def test_no_body_makes_it_fail(client: httpx2.Client, body: Any, path: str) -> None:
    response = client.request("POST" if path.startswith("/v3") else "PUT", path, json=body)
    assert response.status_code < 500, response.text
    if response.status_code >= 400:
        assert response.headers["content-type"] == "application/json" and response.json()["detail"]


def test_a_query_string_is_taken_as_it_is_meant_or_not_at_all(client: httpx2.Client) -> None:
    for query in ("user_id=a&user_id=b", "user_id=%ff"):
        refused = client.delete(f"/v1/memories/?{query}")
        assert refused.status_code == 422 and "query" in refused.json()["detail"]


def test_bodies_that_are_no_objects(client: httpx2.Client) -> None:
    for content in (b"", b"{", b"[]", b'"x"', b"\xff", b'{"a": NaN}', b"[" * 5_000):
        response = client.post("/v3/memories/add/", content=content)
        assert response.status_code == 422 and "body" in response.json()["detail"]
    assert client.post("/v3/memories/add/", content=b" " * (5 << 20)).status_code == 413


def test_large_bodies_are_taken(clients: Clients) -> None:
    client, words = clients(), "word " * 8_000
    assert client.get(added(client, words, user_id="large"))["memory"] == f"user: {words}"


@given(tenant=NAMES | st.sampled_from(["agent:", "run:x", "a:b"]), memory=st.text("abc.", min_size=1))
def test_ids_and_names_come_back(tenant: str, memory: str) -> None:
    assert parted(opaque(tenant, memory)) == (tenant, memory)
    kind, name = entity_of(tenant)
    assert name in ("*", ".", "..") or tenant_of(f"{kind}_id", name) == tenant
