"""No response of the service ever holds what is another tenant's: its text, its ids, its count or its scores.

A state machine drives random requests of several tenants and keys over HTTP, against a simple model: what
each tenant has said. Each turn has a word that tells whose it is, and so does each id.

    ISOLATION_STEPS=100000 pytest -m soak tests/test_isolation.py
"""

from __future__ import annotations

import itertools
import json
import os
import re
import secrets
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import HealthCheck, Phase
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from undertow.serving.principal import Scope

from .http_harness import Running, at, is_problem, serving

STEPS = 2_000
SOAK_STEPS = 100_000
STEPS_A_RUN = 100
TOPICS = ("harbour boat sail mast", "bread flour oven yeast", "violin bow string concert")
# names that are alike, that hold a separator, that must be escaped, that are a prefix of another
NAMES = ("acme/ann", "acme/bob", "acme", "ann", "Ann ?#%2F", "änn")
# of a search over a tenant's turns; each has fewer
ALL = 1_000


def mark(tenant: str, n: int) -> str:
    """A word that only this tenant says."""
    return f"q{tenant.encode().hex()}x{n}z"


MARK = re.compile(r"q((?:[0-9a-f]{2})+)x[0-9]+z")


@dataclass
class Lot:
    """What the model knows of one tenant: the words that it has said, by the id of the turn."""

    texts: dict[str, str] = field(default_factory=dict)
    # ids that were its own at any time, of turns and of what was made of them
    ids: set[str] = field(default_factory=set)
    exists: bool = False
    # whether it lived before: to erase it once more gives the certificate of that
    erased: bool = False
    # searches since its last change, with what they found
    found: dict[str, Any] = field(default_factory=dict)


class Isolation(RuleBasedStateMachine):
    """Tenants of one service that know nothing of each other."""

    service: Running
    steps = 0
    runs = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        # the service goes on from run to run: what earlier ones left there are neighbours too
        self.run = f"{next(Isolation.runs)}-{secrets.token_hex(3)}-"
        self.lots: defaultdict[str, Lot] = defaultdict(Lot)
        self.numbers = itertools.count()
        self.owner_of: dict[str, str] = {}

    @initialize()
    def keys(self) -> None:
        """Each tenant has a key of its own; one is for all whose names begin alike."""
        self.names = [f"{self.run}{name}" for name in NAMES]
        self.clients: dict[str, httpx2.Client] = {}
        for name in self.names:
            self.give_key(name)
        self.branch = self.service.client(prefix=f"{self.run}acme/")

    def give_key(self, tenant: str) -> None:
        self.clients[tenant] = self.service.client(tenants=(tenant,))
        if tenant == self.names[0]:
            self.reader = self.service.client(Scope.READ, tenants=(tenant,))

    # ---- what every response goes through

    def ask(self, tenant: str, method: str, rest: str, *, by: httpx2.Client | None = None, **how: Any) -> Any:
        """A request about a tenant. Its response holds no words and no ids of anyone else."""
        response = (by or self.clients[tenant]).request(method, at(tenant, rest), **how)
        assert response.status_code < 500, response.text
        self.check(tenant, response)
        return response

    def check(self, tenant: str, response: httpx2.Response) -> None:
        told = response.text + json.dumps(dict(response.headers))
        strangers = {bytes.fromhex(word).decode() for word in MARK.findall(told)} - {tenant}
        assert not strangers, f"{tenant!r} was told of {strangers}: {told[:500]}"
        for name in re.findall(r"\b[0-9a-f]{32}\b", told):
            owner = self.owner_of.get(name, tenant)
            assert owner == tenant, f"{tenant!r} was told an id of {owner!r}'s: {told[:500]}"

    def own(self, tenant: str, *ids: str) -> None:
        self.lots[tenant].ids.update(ids)
        self.owner_of.update(dict.fromkeys(ids, tenant))

    def changed(self, tenant: str) -> Lot:
        lot = self.lots[tenant]
        lot.found.clear()
        return lot

    # ---- what tenants do

    @rule(data=st.data(), topic=st.sampled_from(TOPICS), count=st.integers(1, 4), many=st.booleans())
    def add(self, data: st.DataObject, topic: str, count: int, many: bool) -> None:
        tenant = data.draw(st.sampled_from(self.names))
        lot, words = self.changed(tenant), topic.split()
        texts = [f"{' '.join(words)} {mark(tenant, next(self.numbers))}" for _ in range(count)]
        messages = [[{"role": "user", "content": text}] for text in texts]
        if many:
            body: dict[str, Any] = {"items": [{"messages": said} for said in messages]}
            answer = self.ask(tenant, "POST", "/memories", json=body).json()
            results = [result for item in answer["items"] for result in item["results"]]
        else:
            body = {"messages": [message for said in messages for message in said]}
            results = self.ask(tenant, "POST", "/memories", json=body).json()["results"]
        assert [result["memory"] for result in results] == [f"user: {text}" for text in texts]
        lot.exists = True
        lot.texts.update({result["id"]: f"user: {text}" for result, text in zip(results, texts, strict=True)})
        self.own(tenant, *(result["id"] for result in results))

    @rule(data=st.data(), query=st.sampled_from((*TOPICS, "boat", "an oven for bread")))
    def search(self, data: st.DataObject, query: str) -> None:
        """All turns of the tenant and no other's; the same as before unless it has changed itself."""
        tenant = data.draw(st.sampled_from(self.names))
        lot = self.lots[tenant]
        asked = {"query": query, "top_k": ALL, "kinds": ["turn"]}
        response = self.ask(tenant, "POST", "/search", json=asked)
        if not lot.exists:
            is_problem(response, 404)
            return
        results = response.json()["results"]
        assert {result["id"]: result["memory"] for result in results} == lot.texts
        before = lot.found.setdefault(query, results)
        assert results == before, "somebody else moved a score"

    @rule(data=st.data(), query=st.sampled_from(TOPICS))
    def search_all_kinds(self, data: st.DataObject, query: str) -> None:
        tenant = data.draw(st.sampled_from(self.names))
        response = self.ask(tenant, "POST", "/search", json={"query": query})
        if response.status_code == 200:
            self.own(tenant, *(result["id"] for result in response.json()["results"]))

    @rule(data=st.data())
    def update(self, data: st.DataObject) -> None:
        tenant = data.draw(st.sampled_from(self.names))
        lot = self.lots[tenant]
        if not lot.texts:
            return
        memory_id = data.draw(st.sampled_from(sorted(lot.texts)))
        text = f"kite wind beach {mark(tenant, next(self.numbers))}"
        changed = self.ask(tenant, "PUT", f"/memories/{memory_id}", json={"text": text}).json()
        self.changed(tenant)
        del lot.texts[memory_id]
        lot.texts[changed["id"]] = f"user: {text}"
        self.own(tenant, changed["id"])

    @rule(data=st.data())
    def delete(self, data: st.DataObject) -> None:
        tenant = data.draw(st.sampled_from(self.names))
        lot = self.lots[tenant]
        if not lot.texts:
            return
        memory_id = data.draw(st.sampled_from(sorted(lot.texts)))
        assert self.ask(tenant, "DELETE", f"/memories/{memory_id}").json()["kind"] == "turn"
        self.changed(tenant)
        del lot.texts[memory_id]
        is_problem(self.ask(tenant, "GET", f"/memories/{memory_id}"), 404)

    @rule(data=st.data())
    def get_own(self, data: st.DataObject) -> None:
        tenant = data.draw(st.sampled_from(self.names))
        lot = self.lots[tenant]
        if lot.texts:
            memory_id = data.draw(st.sampled_from(sorted(lot.texts)))
            assert self.ask(tenant, "GET", f"/memories/{memory_id}").json()["memory"] == lot.texts[memory_id]

    @rule(data=st.data())
    def look(self, data: st.DataObject) -> None:
        """Lists, figures and exports are of the tenant's own turns."""
        tenant = data.draw(st.sampled_from(self.names))
        lot = self.lots[tenant]
        listed = self.ask(tenant, "GET", "/memories", params={"limit": ALL})
        if not lot.exists:
            is_problem(listed, 404)
            is_problem(self.ask(tenant, "GET", "/stats"), 404)
            is_problem(self.ask(tenant, "GET", "/export"), 404)
            return
        memories = listed.json()["results"]
        assert {m["id"]: m["memory"] for m in memories if m["kind"] == "turn"} == lot.texts
        assert self.ask(tenant, "GET", "/stats").json()["turns"] == len(lot.texts)
        exported = [json.loads(line) for line in self.ask(tenant, "GET", "/export").text.splitlines()]
        assert {r["id"]: r["text"] for r in exported if r.get("kind") == "turn"} == lot.texts
        self.own(tenant, *(m["id"] for m in memories))
        for memory in memories[-3:]:
            self.ask(tenant, "GET", f"/memories/{memory['id']}/history")
        self.ask(tenant, "GET", "/explain")
        self.ask(tenant, "GET", "/usage")

    @rule(data=st.data())
    def flush(self, data: st.DataObject) -> None:
        tenant = data.draw(st.sampled_from(self.names))
        response = self.ask(tenant, "POST", "/flush")
        assert response.status_code == (200 if self.lots[tenant].exists else 404)

    @rule(data=st.data(), now=st.booleans())
    def erase(self, data: st.DataObject, now: bool) -> None:
        tenant = data.draw(st.sampled_from(self.names))
        lot = self.lots[tenant]
        response = self.ask(tenant, "DELETE", "" if now else "/memories")
        if not (lot.exists or (now and lot.erased)):
            is_problem(response, 404)
            return
        assert response.status_code == 200
        if now:
            assert response.json()["turns_removed"] >= len(lot.texts)
        self.lots[tenant] = Lot(ids=lot.ids, erased=True)
        if now:  # keys that name no other tenant went with it
            is_problem(self.clients[tenant].get(at(tenant, "/stats")), 401)
            self.give_key(tenant)
        is_problem(self.ask(tenant, "POST", "/search", json={"query": "boat"}), 404)

    # ---- what tenants try

    @rule(data=st.data(), act=st.sampled_from(("GET", "PUT", "DELETE", "history")))
    def touch_what_is_anothers(self, data: st.DataObject, act: str) -> None:
        """Another tenant's memory is as unknown as one that never was, and stays as it is."""
        tenant, other = data.draw(st.permutations(self.names))[:2]
        ids = sorted(self.lots[other].texts)
        if not ids or not self.lots[tenant].exists:
            return
        memory_id = data.draw(st.sampled_from(ids))
        method, rest = ("GET", "/history") if act == "history" else (act, "")
        body: dict[str, Any] = {"json": {"text": "mine now"}} if act == "PUT" else {}
        said = []
        for asked in (memory_id, "0" * 32):
            # not through `check`: that the id which was asked for is repeated tells nothing
            response = self.clients[tenant].request(method, at(tenant, f"/memories/{asked}{rest}"), **body)
            is_problem(response, 404)
            said.append(response.text.replace(asked, "ID"))
        assert said[0] == said[1], "the answer tells that the memory is somebody's"

    @rule(data=st.data(), act=st.sampled_from(("search", "add", "stats", "export", "erase")))
    def act_for_another(self, data: st.DataObject, act: str) -> None:
        """A key that is bound to one tenant gets one answer for all others, whether they exist or not."""
        tenant, other = data.draw(st.permutations(self.names))[:2]
        requests: dict[str, tuple[str, str, dict[str, Any]]] = {
            "search": ("POST", "/search", {"json": {"query": "boat"}}),
            "add": ("POST", "/memories", {"json": {"messages": [{"role": "user", "content": "hello"}]}}),
            "stats": ("GET", "/stats", {}),
            "export": ("GET", "/export", {}),
            "erase": ("DELETE", "", {}),
        }
        method, rest, body = requests[act]
        client = self.clients[tenant]
        told = []
        for name in (other, f"{self.run}nobody"):
            response = client.request(method, at(name, rest), **body)
            is_problem(response, 403)
            told.append(response.text)
        assert told[0] == told[1]

    @rule(data=st.data())
    def act_beyond_the_scope(self, data: st.DataObject) -> None:
        """A key for reading changes nothing, and one for a branch reaches no further."""
        mine, method, rest = (
            self.names[0],
            *data.draw(
                st.sampled_from(
                    (("DELETE", ""), ("DELETE", "/memories"), ("POST", "/flush"), ("POST", "/import"))
                )
            ),
        )
        is_problem(self.ask(mine, method, rest, by=self.reader), 403)
        outside = data.draw(st.sampled_from(self.names[2:]))
        is_problem(self.branch.post(at(outside, "/search"), json={"query": "boat"}), 403)

    @rule()
    def list_a_branch(self) -> None:
        """Who may see the names of a branch sees those alone."""
        response = self.branch.get("/v1/tenants", params={"limit": ALL})
        assert response.status_code == 200, response.text
        assert set(response.json()["results"]) == {n for n in self.names[:2] if self.lots[n].exists}

    @invariant()
    def count(self) -> None:
        Isolation.steps += 1


def drive(service: Running, steps: int, *, anew: bool = False) -> None:
    """Runs of the machine until so many steps were taken; the same ones each time, unless `anew`."""
    Isolation.service = service
    Isolation.steps = 0
    while Isolation.steps < steps:
        runs = -(-(steps - Isolation.steps) // STEPS_A_RUN)
        run_state_machine_as_test(
            Isolation,
            settings=hypothesis_settings(
                max_examples=min(runs, 100),
                stateful_step_count=STEPS_A_RUN,
                deadline=None,
                derandomize=not anew,
                database=None,
                phases=(Phase.generate,),
                suppress_health_check=list(HealthCheck),
            ),
        )


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Running]:
    # no tenant stands in another's way here: that is for other tests
    with serving(tmp_path, engine={"theta_count": 2}) as running:
        yield running


def test_no_tenant_learns_of_another(service: Running) -> None:
    drive(service, STEPS)


@pytest.mark.soak
@pytest.mark.timeout(14_400)
def test_no_tenant_learns_of_another_in_a_long_run(service: Running) -> None:
    drive(service, int(os.environ.get("ISOLATION_STEPS", SOAK_STEPS)), anew=True)
