"""Tenants of one service over HTTP, each with what it should have there: a simple model of what they do.

Every response goes through `Tenants.ask`, which looks for what is somebody else's. What tenants do stands in
acts.py and moves.py, what they try in attempts.py: functions of the tenants, of a tenant's name, and of a
`Random` of their own, so that several can be done side by side.
"""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx2

from undertow.serving.auth.key_file import KeyFile
from undertow.serving.auth.principal import Scope

from ..llm_servers import wait_until
from ..service.http import Running, at
from .secrets import Secrets, hash_of, mark

TOPICS = ("harbour boat sail mast", "bread flour oven yeast", "violin bow string concert")
# names that are alike, that hold a separator, that must be escaped, that are a prefix of another
NAMES = ("acme/ann", "acme/bob", "acme", "ann", "Ann ?#%2F", "änn")
# of a page or a search; each tenant has fewer
ALL = 1_000
AS_JOB = {"Prefer": "respond-async"}


@dataclass(frozen=True)
class Export:
    """What a tenant had at some time, as it was told it."""

    body: str
    texts: tuple[str, ...]
    added: dict[tuple[str, str], list[str]]


@dataclass(frozen=True)
class Kept:
    """A request that has succeeded under an Idempotency-Key, and the answer that its repetition is given."""

    by: str
    method: str
    rest: str
    once: str
    body: Any
    content: bytes


@dataclass
class Lot:
    """What the model knows of one tenant."""

    # what it has said, as it is shown, by the id of the turn
    texts: dict[str, str] = field(default_factory=dict)
    exists: bool = False
    # whether it lived before: to erase it once more gives the certificate of that
    erased: bool = False
    # what it was shown since its last change
    found: dict[Any, Any] = field(default_factory=dict)
    # whether nothing is left to be decided, so that its episodes and facts stay as they are
    settled: bool = False
    # texts by the id of the API key that added them and its Idempotency-Key
    added: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    kept: list[Kept] = field(default_factory=list)
    jobs: set[str] = field(default_factory=set)
    # those of them that erase: they outlive each other
    erasures: set[str] = field(default_factory=set)
    answer_calls: int = 0

    def changed(self) -> None:
        self.found.clear()
        self.settled = False


class Tenants:
    """Some tenants with their keys: one for each, one for reading, one for a branch, and the operator's."""

    def __init__(self, service: Running, http: httpx2.Client, operator: str, run: str) -> None:
        """`run`: how the names of these tenants begin, and no others of this service."""
        self.run = run
        self.names = [f"{run}{name}" for name in NAMES]
        self.lots = {name: Lot() for name in self.names}
        self.exports: dict[str, Export] = {}
        # how many turns each has ever had
        self.turns_ever = dict.fromkeys(self.names, 0)
        self.secrets = Secrets(run, self.names)
        # by id of a request and of its trace: who sent it, about whom
        self.asked: dict[str, tuple[str, str]] = {}
        self.operator = operator
        self.branch_prefix = f"{run}acme/"
        self.branch = service.key(prefix=self.branch_prefix)
        self.reader = ""
        self.keys: dict[str, str] = {}
        self._service = service
        self._http = http
        self._numbers: defaultdict[str, itertools.count[int]] = defaultdict(itertools.count)
        for name in self.names:
            self.secrets.own(name, service.service.memories.tenant_key(name))
            self.give_key(name)

    # ---- keys

    @property
    def key_file(self) -> KeyFile:
        return KeyFile(self._service.folder / "keys.json")

    def give_key(self, name: str) -> None:
        """Its own; the first tenant has one for reading too."""
        self.keys[name] = self._service.key(tenants=(name,))
        if name == self.names[0]:
            self.reader = self._service.key(Scope.READ, tenants=(name,))

    def drop_keys(self) -> None:
        """Those for one tenant alone, as nothing more is asked: each key makes every change of one slower."""
        self.key_file.forget(lambda name: name.startswith(self.run))

    def some_key(self, name: str, rng: Random) -> str:
        """The tenant's own key, or one that is for others too."""
        return rng.choice((self.keys[name], self.shared_key(name)))

    def shared_key(self, name: str) -> str:
        return self.branch if name.startswith(self.branch_prefix) else self.operator

    def holds(self, name: str, key: str) -> bool:
        """Whether a key is for this tenant, still."""
        return key in (self.keys[name], self.shared_key(name))

    # ---- what every response goes through

    def send(self, key: str, name: str, method: str, rest: str, *, of: str, **how: Any) -> httpx2.Response:
        """A request with a key about a tenant, which bears an id and a trace of its sender's, `of`.

        `path`, among `how`: of a route that does not name the tenant in its path.
        """
        n = next(self._numbers[f"requests of {of}"])
        request_id = f"{of.encode().hex()}-{n}"
        trace_id = hash_of(f"{self.run}{request_id}")
        self.secrets.own(of, trace_id)
        self.asked[request_id] = self.asked[trace_id] = (of, name)
        headers = {
            "Authorization": f"Bearer {key}",
            "X-Request-Id": request_id,
            "traceparent": f"00-{trace_id}-{trace_id[:16]}-01",
            **how.pop("headers", {}),
        }
        path = how.pop("path", None) or at(name, rest)
        response = self._http.request(method, path, headers=headers, **how)
        assert response.status_code < 500, response.text
        assert response.headers["x-request-id"] == request_id, "this is the answer to another request"
        return response

    def ask(
        self, name: str, method: str, rest: str = "", *, by: str | None = None, sent: str = "", **how: Any
    ) -> httpx2.Response:
        """A request about a tenant, whose response holds nothing of others. `sent`: what it may repeat."""
        response = self.send(by or self.keys[name], name, method, rest, of=name, **how)
        self.secrets.learn(name, response.text + json.dumps(dict(response.headers)), sent=sent)
        return response

    def have(self, name: str, method: str, rest: str = "", **how: Any) -> httpx2.Response:
        """As `ask`, of what must succeed."""
        response = self.ask(name, method, rest, **how)
        assert response.status_code == 200, response.text
        return response

    # ---- what several acts do

    def text(self, name: str, rng: Random) -> str:
        """Words that nobody else says."""
        said = mark(name, next(self._numbers[name]))
        self.secrets.words[name].add(said)
        return f"{rng.choice(TOPICS)} {said}"

    def once(self, name: str, rng: Random, method: str, rest: str, body: Any = None) -> httpx2.Response:
        """A request that succeeds, under an Idempotency-Key or without one."""
        by = self.some_key(name, rng)
        if rng.random() < 0.5:
            return self.have(name, method, rest, by=by, json=body)
        once = f"{method} {len(self.lots[name].kept)}"  # as other tenants say, too
        response = self.have(name, method, rest, by=by, json=body, headers={"Idempotency-Key": once})
        self.lots[name].kept.append(Kept(by, method, rest, once, body, response.content))
        return response

    def repeat(self, name: str, kept: Kept, **headers: str) -> httpx2.Response:
        """A request again, about this tenant; `headers`: what is another in it."""
        headers |= {"Idempotency-Key": kept.once}
        return self.ask(
            name, kept.method, kept.rest, by=kept.by, json=kept.body, headers=headers, sent=kept.rest
        )

    def job(self, name: str, method: str, rest: str, **how: Any) -> str:
        """The id of a job that was accepted."""
        response = self.ask(name, method, rest, headers=AS_JOB, **how)
        assert response.status_code == 202, response.text
        job: str = response.json()["id"]
        assert response.headers["location"] == at(name, f"/jobs/{job}")
        self.lots[name].jobs.add(job)
        return job

    def ended(self, name: str, job: str) -> dict[str, Any]:
        """A job, once it has ended. Asked for by the operator: an erasure takes the tenant's key along."""
        seen: dict[str, Any] = {}

        def has_ended() -> bool:
            seen.update(self.have(name, "GET", f"/jobs/{job}", by=self.operator).json())
            return seen["status"] in ("done", "failed")

        wait_until(has_ended)
        return seen


Act = Callable[[Tenants, str, Random], None]


def key_id(key: str) -> str:
    return key.split("_")[1]
