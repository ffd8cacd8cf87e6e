"""What tenants do to their memories, each against what the model knows of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

from undertow.serving.http.routes.mem0.entities import parted

from ..service.http import at, is_problem
from .secrets import mark
from .tenants import ALL, TOPICS, Export, Lot, Tenants, key_id

# few, so that tenants use the same ones
REPEATABLE = ("once", "twice")


# ---- adding, and changing what is there


def add(tenants: Tenants, name: str, rng: Random) -> None:
    """New turns; under an Idempotency-Key that this key has used for this tenant, the same or others."""
    lot, by = tenants.lots[name], tenants.some_key(name, rng)
    once = rng.choice((None, *REPEATABLE))
    texts = None if once is None else lot.added.get((key_id(by), once))
    if once is None or texts is None:
        _add_new(tenants, name, rng, by, once)
    elif rng.random() < 0.7:
        _add_again(tenants, name, by, once, texts)
    elif f"user: {texts[0]}" in lot.texts.values():
        headers, other = {"Idempotency-Key": once}, _messages([tenants.text(name, rng)])
        refused = tenants.ask(name, "POST", "/memories", by=by, json=other, headers=headers)
        is_problem(refused, 422, "idempotency-key-reused")


def _add_new(tenants: Tenants, name: str, rng: Random, by: str, once: str | None) -> None:
    lot, texts = tenants.lots[name], [tenants.text(name, rng) for _ in range(rng.randint(1, 3))]
    if once is None and rng.random() < 0.5:
        items = {"items": [_messages([text]) for text in texts]}
        told = tenants.have(name, "POST", "/memories", by=by, json=items).json()["items"]
        results = [result for item in told for result in item["results"]]
    else:
        results = _added(tenants, name, by, once, texts)
    assert [(result["memory"], result["event"]) for result in results] == [
        (f"user: {text}", "ADD") for text in texts
    ]
    lot.changed()
    lot.exists = True
    lot.texts.update({result["id"]: result["memory"] for result in results})
    tenants.turns_ever[name] += len(texts)
    if once is not None:
        lot.added[key_id(by), once] = texts


def _add_again(tenants: Tenants, name: str, by: str, once: str, texts: list[str]) -> None:
    """Nothing is stored, whatever has become of the first ones; those that are there are told."""
    there = {text: memory_id for memory_id, text in tenants.lots[name].texts.items()}
    for text, result in zip(texts, _added(tenants, name, by, once, texts), strict=True):
        assert (result["memory"], result["event"]) == (f"user: {text}", "DUPLICATE")
        assert result["id"] == there.get(result["memory"], result["id"])


def _added(tenants: Tenants, name: str, by: str, once: str | None, texts: list[str]) -> list[Any]:
    headers = {} if once is None else {"Idempotency-Key": once}
    sent = " ".join(texts)
    response = tenants.have(
        name, "POST", "/memories", by=by, json=_messages(texts), headers=headers, sent=sent
    )
    results: list[Any] = response.json()["results"]
    return results


def _messages(texts: list[str]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in texts]}


def update(tenants: Tenants, name: str, rng: Random) -> None:
    lot = tenants.lots[name]
    if not lot.texts:
        return
    memory_id, text = rng.choice([*lot.texts]), tenants.text(name, rng)
    changed = tenants.once(name, rng, "PUT", f"/memories/{memory_id}", {"text": text}).json()
    lot.changed()
    del lot.texts[memory_id]
    lot.texts[changed["id"]] = f"user: {text}"
    tenants.turns_ever[name] += 1


def delete(tenants: Tenants, name: str, rng: Random) -> None:
    lot = tenants.lots[name]
    if not lot.texts:
        return
    memory_id = rng.choice([*lot.texts])
    assert tenants.once(name, rng, "DELETE", f"/memories/{memory_id}").json()["kind"] == "turn"
    lot.changed()
    del lot.texts[memory_id]
    is_problem(tenants.ask(name, "GET", f"/memories/{memory_id}"), 404)


def repeat(tenants: Tenants, name: str, rng: Random) -> None:
    """What was answered under an Idempotency-Key is answered so again, to the same request alone."""
    if kept := [one for one in tenants.lots[name].kept if tenants.holds(name, one.by)]:
        one = rng.choice(kept)
        assert tenants.repeat(name, one).content == one.content
        is_problem(tenants.repeat(name, one, Prefer="another"), 422, "idempotency-key-reused")


def flush(tenants: Tenants, name: str, rng: Random) -> None:
    lot = tenants.lots[name]
    if not lot.exists:
        is_problem(tenants.ask(name, "POST", "/flush"), 404)
    elif tenants.once(name, rng, "POST", "/flush").json()["decided"] and not lot.settled:
        lot.found.clear()
        lot.settled = True


def flush_later(tenants: Tenants, name: str, rng: Random) -> None:
    """A job that nobody waits for, and its state, whatever that is by now."""
    job = tenants.job(name, "POST", "/flush", by=tenants.some_key(name, rng))
    shown = tenants.have(name, "GET", f"/jobs/{job}").json()
    assert (shown["id"], shown["operation"]) == (job, "flush")


# ---- looking


def search(tenants: Tenants, name: str, rng: Random) -> None:
    """All turns of the tenant and no other's; the same as before unless it has changed itself."""
    lot, by = tenants.lots[name], tenants.some_key(name, rng)
    other = rng.choice([other for other in tenants.names if other != name])
    query = rng.choice((*TOPICS, "an oven for bread", f"boat {mark(other, 0)}"))
    asked = {"query": query, "top_k": ALL, "kinds": ["turn"]}
    if not lot.exists:
        is_problem(tenants.ask(name, "POST", "/search", by=by, json=asked), 404)
        return
    turns = tenants.have(name, "POST", "/search", by=by, json=asked).json()["results"]
    assert {turn["id"]: turn["memory"] for turn in turns} == lot.texts
    _is_as_before(lot, query, turns)
    if lot.settled:
        everything = tenants.have(name, "POST", "/search", by=by, json={"query": query}).json()
        _is_as_before(lot, ("all kinds", query), everything)


def _is_as_before(lot: Lot, what: Any, shown: Any) -> None:
    assert shown == lot.found.setdefault(what, shown), "somebody else has changed this, or moved a score"


def search_explained(tenants: Tenants, name: str, rng: Random) -> None:
    """The parts of scores, and what was left out, are of what is the tenant's own."""
    lot = tenants.lots[name]
    if not lot.exists:
        return
    asked = {"query": rng.choice(TOPICS), "top_k": rng.randint(1, 3), "explain": True}
    told = tenants.have(name, "POST", "/search", by=tenants.some_key(name, rng), json=asked).json()
    how = told["explanation"]
    hits = [*told["results"], *how["left_out"]]
    assert how["turns"] == len(lot.texts)
    assert how["scores"].keys() == {hit["id"] for hit in hits}
    assert {hit["id"]: hit["memory"] for hit in hits if hit["kind"] == "turn"}.items() <= lot.texts.items()


def search_by_mem0(tenants: Tenants, name: str, rng: Random) -> None:
    """The routes of mem0's platform, and of its own server, show the tenant's own."""
    lot, query = tenants.lots[name], rng.choice(TOPICS)
    path, body = rng.choice(
        (
            ("/v3/memories/search/", {"query": query, "top_k": 100, "filters": {"user_id": name}}),
            ("/search", {"query": query, "top_k": 100, "user_id": name}),
        )
    )
    found = tenants.have(name, "POST", by=tenants.some_key(name, rng), path=path, json=body).json()["results"]
    turns = {parted(hit["id"]): hit["memory"] for hit in found if hit["kind"] == "turn"}
    assert turns.items() <= {(name, own): text for own, text in lot.texts.items()}.items()
    assert bool(turns) == bool(lot.texts)


def look(tenants: Tenants, name: str, rng: Random) -> None:
    """Lists, figures, jobs and exports are of what is the tenant's own."""
    lot = tenants.lots[name]
    tenants.have(name, "GET", "/events", params={"follow": False, "include_text": True})
    assert {job["id"] for job in tenants.have(name, "GET", "/jobs").json()["results"]} == lot.jobs
    if not lot.exists:
        is_problem(tenants.ask(name, "GET", rng.choice(("/memories", "/stats", "/usage", "/explain"))), 404)
        is_problem(tenants.ask(name, "GET", "/export"), 404)
        return
    _look_at_memories(tenants, name, rng)
    stats = tenants.have(name, "GET", "/stats").json()
    assert stats["turns"] == len(lot.texts)
    if lot.settled:
        _is_as_before(lot, "stats", stats)
    usage = tenants.have(name, "GET", "/usage").json()
    assert usage.get("answer", {"calls": 0})["calls"] == lot.answer_calls
    assert len(tenants.have(name, "GET", "/explain").json()["results"]) <= tenants.turns_ever[name]
    _export(tenants, name)


def _look_at_memories(tenants: Tenants, name: str, rng: Random) -> None:
    """All at once and page by page, then one of them by itself."""
    lot = tenants.lots[name]
    listed = tenants.have(name, "GET", "/memories", params={"limit": ALL}).json()["results"]
    assert {m["id"]: m["memory"] for m in listed if m["kind"] == "turn"} == lot.texts
    if lot.settled:
        assert [*_pages(tenants, name, limit=1 + len(listed) // 2)] == listed
        _is_as_before(lot, "listed", listed)
    if lot.texts:
        memory_id = rng.choice([*lot.texts])
        one = tenants.have(name, "GET", f"/memories/{memory_id}").json()
        assert one["memory"] == lot.texts[memory_id]
    if listed:
        tenants.ask(name, "GET", f"/memories/{listed[-1]['id']}/history")


def _pages(tenants: Tenants, name: str, limit: int) -> Iterator[Any]:
    after: dict[str, str] = {}
    while True:
        page = tenants.have(name, "GET", "/memories", params={"limit": limit, **after}).json()
        yield from page["results"]
        if page["next"] is None:
            return
        after = {"after": page["next"]}


def _export(tenants: Tenants, name: str) -> None:
    lot, body = tenants.lots[name], tenants.have(name, "GET", "/export").text
    records = [json.loads(line) for line in body.splitlines()]
    assert {r["id"]: r["text"] for r in records if r["kind"] == "turn"} == lot.texts
    tenants.exports[name] = Export(body, tuple(lot.texts.values()), dict(lot.added))


def look_at_pages(tenants: Tenants, name: str, rng: Random) -> None:
    """Those of the Inspector; without a session, by a key."""
    memories = [f"/memories/{memory_id}" for memory_id in tenants.lots[name].texts]
    rest = rng.choice(("", "/search?q=boat", *memories))
    if tenants.lots[name].exists:
        by, path = tenants.some_key(name, rng), f"/inspect{at(name, rest).removeprefix('/v1')}"
        tenants.have(name, "GET", by=by, path=path)


def answer(tenants: Tenants, name: str, rng: Random) -> None:
    """Of the tenant's own memories, whole or in pieces, and charged to nobody else."""
    lot = tenants.lots[name]
    asked = {"question": f"What of the {rng.choice(TOPICS)}?", "stream": rng.random() < 0.5}
    response = tenants.ask(name, "POST", "/answer", by=tenants.some_key(name, rng), json=asked)
    if not lot.exists:
        is_problem(response, 404)
        return
    told = json.loads(response.text.rpartition("event: done\ndata: ")[2])
    turns = {memory["id"]: memory["memory"] for memory in told["memories"] if memory["kind"] == "turn"}
    assert turns.items() <= lot.texts.items()
    lot.answer_calls += told["usage"]["calls"]
