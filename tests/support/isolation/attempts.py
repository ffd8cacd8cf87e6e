"""What tenants try, to learn of others or to change what is theirs: the answers tell nothing."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import httpx2

from ..service.http import is_problem
from .tenants import ALL, Tenants

NOBODYS = "0" * 32
REQUESTS: tuple[tuple[str, str, Any], ...] = (
    ("POST", "/search", {"query": "boat"}),
    ("POST", "/memories", {"messages": [{"role": "user", "content": "hello"}]}),
    ("POST", "/answer", {"question": "boat?"}),
    ("GET", "/stats", None),
    ("GET", "/export", None),
    ("GET", "/jobs", None),
    ("POST", "/import", None),
    ("DELETE", "", None),
)
CHANGES = (("DELETE", ""), ("DELETE", "/memories"), ("POST", "/flush"), ("POST", "/import"))


def touch_what_is_anothers(tenants: Tenants, name: str, rng: Random) -> None:
    """Another tenant's memory is as unknown as one that never was, and stays as it is."""
    theirs = [*tenants.lots[_other(tenants, name, rng)].texts]
    if theirs and tenants.lots[name].exists:
        method, rest = rng.choice((("GET", ""), ("GET", "/history"), ("PUT", ""), ("DELETE", "")))
        body = {"text": "mine now"} if method == "PUT" else None
        _are_unknown(tenants, name, method, f"/memories/%s{rest}", rng.choice(theirs), body)


def ask_for_anothers_job(tenants: Tenants, name: str, rng: Random) -> None:
    if theirs := sorted(tenants.lots[_other(tenants, name, rng)].jobs):
        _are_unknown(tenants, name, "GET", "/jobs/%s", theirs[0], None)


def touch_anothers_webhook(tenants: Tenants, name: str, rng: Random) -> None:
    other, asked = _other(tenants, name, rng), {"url": "https://192.0.2.1/"}
    theirs = tenants.have(other, "POST", path="/v1/webhooks", json=asked).json()["id"]
    assert tenants.have(name, "GET", path="/v1/webhooks").json()["results"] == []
    told = []
    for hook in (theirs, NOBODYS):
        refused = tenants.ask(name, "DELETE", path=f"/v1/webhooks/{hook}", sent=hook)
        told.append(is_problem(refused, 404))
    assert told[0] == told[1]
    tenants.have(other, "DELETE", path=f"/v1/webhooks/{theirs}")


def _other(tenants: Tenants, name: str, rng: Random) -> str:
    return rng.choice([other for other in tenants.names if other != name])


def _are_unknown(tenants: Tenants, name: str, method: str, rest: str, theirs: str, body: Any) -> None:
    """What is another's and what is nobody's get the same problem; that it repeats the id tells nothing."""
    said = []
    for asked in (theirs, NOBODYS):
        response = tenants.ask(name, method, rest % asked, json=body, sent=asked)
        is_problem(response, 404)
        said.append(response.text.replace(asked, "ID"))
    assert said[0] == said[1], "the answer tells that it is somebody's"


def act_for_another(tenants: Tenants, name: str, rng: Random) -> None:
    """A key that is bound to one tenant gets one answer for all others, whether they exist or not."""
    method, rest, body = rng.choice(REQUESTS)
    told = []
    for about in (_other(tenants, name, rng), f"{tenants.run}nobody"):
        refused = tenants.send(tenants.keys[name], about, method, rest, of=name, json=body)
        told.append(is_problem(refused, 403))
        _tells_nothing(tenants, name, refused)
    assert told[0] == told[1]


def search_another_by_mem0(tenants: Tenants, name: str, rng: Random) -> None:
    told = []
    for about in (_other(tenants, name, rng), f"{tenants.run}nobody"):
        path, body = "/search", {"query": "boat", "user_id": about}
        refused = tenants.send(tenants.keys[name], about, "POST", "", of=name, path=path, json=body)
        assert refused.status_code == 403
        _tells_nothing(tenants, name, refused)
        told.append(refused.json())
    assert told[0] == told[1]


def act_beyond_the_scope(tenants: Tenants, name: str, rng: Random) -> None:
    """A key for reading changes nothing, and one for a branch reaches no further."""
    mine = tenants.names[0]
    is_problem(tenants.ask(mine, *rng.choice(CHANGES), by=tenants.reader), 403)
    outside = rng.choice(tenants.names[2:])
    method, rest, body = rng.choice(REQUESTS)
    refused = tenants.send(tenants.branch, outside, method, rest, of=mine, json=body)
    is_problem(refused, 403)
    _tells_nothing(tenants, mine, refused)


def _tells_nothing(tenants: Tenants, name: str, response: httpx2.Response) -> None:
    tenants.secrets.check(response.text + json.dumps(dict(response.headers)), name)


def repeat_for_another(tenants: Tenants, name: str, rng: Random) -> None:
    """What a key has had done for one tenant under an Idempotency-Key is not answered so for another."""
    shared, lots = tenants.shared_key(name), tenants.lots
    used = {one.once for one in lots[name].kept}
    kept = [one for other in tenants.names if other != name for one in lots[other].kept]
    of_memories = [one for one in kept if one.by == shared and one.rest != "/flush" and one.once not in used]
    if of_memories:
        is_problem(tenants.repeat(name, rng.choice(of_memories)), 404)


def go_on_where_anothers_page_ended(tenants: Tenants, name: str, rng: Random) -> None:
    """A cursor of another's list leads to nothing of theirs."""
    other = _other(tenants, name, rng)
    if tenants.lots[name].exists and len(tenants.lots[other].texts) > 1:
        page = tenants.have(other, "GET", "/memories", params={"limit": 1}).json()
        params = {"limit": ALL, "kind": "turn", "after": page["next"]}
        found = tenants.have(name, "GET", "/memories", params=params).json()["results"]
        assert {memory["id"] for memory in found} <= tenants.lots[name].texts.keys()
