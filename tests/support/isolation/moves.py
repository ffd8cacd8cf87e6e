"""How tenants come, by what somebody has exported, and how they and their keys go."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from random import Random
from typing import Any

from ..service.http import is_problem
from .secrets import MARK
from .tenants import ALL, AS_JOB, Export, Lot, Tenants, key_id

NEVER_MADE = f"ut_{'0' * 12}_{'A' * 43}"


# ---- exports taken in


def restore(tenants: Tenants, name: str, rng: Random) -> None:
    """The tenant's own export, of some time."""
    if name in tenants.exports:
        _take_in(tenants, name, tenants.exports[name], rng)


def import_anothers(tenants: Tenants, name: str, rng: Random) -> None:
    """What another tenant has handed over."""
    if handed := _exports_of([other for other in tenants.names if other != name], tenants):
        _take_in(tenants, name, rng.choice(handed), rng)


def _exports_of(names: list[str], tenants: Tenants) -> list[Export]:
    return [tenants.exports[name] for name in names if name in tenants.exports]


def _take_in(tenants: Tenants, name: str, export: Export, rng: Random) -> None:
    """Where there is nothing, all of it is the tenant's own from then on, under ids of its own."""
    if tenants.lots[name].exists and rng.random() < 0.5:
        remove(tenants, name, rng)
    lot = tenants.lots[name]
    problem = _import(tenants, name, export.body, as_job=rng.random() < 0.5)
    if lot.exists:
        assert problem == 409
        return
    assert problem is None
    tenants.secrets.words[name].update(MARK.findall(export.body))
    page = tenants.have(name, "GET", "/memories", params={"limit": ALL, "kind": "turn"}).json()
    lot.texts = {memory["id"]: memory["memory"] for memory in page["results"]}
    assert sorted(lot.texts.values()) == sorted(export.texts)
    lot.exists, lot.added = True, dict(export.added)
    tenants.turns_ever[name] += export.body.count("\n")  # a bound: deleted ones are counted too


def _import(tenants: Tenants, name: str, body: str, *, as_job: bool) -> int | None:
    """None, or the status of the problem that it ended with."""
    if as_job:
        job = tenants.ended(name, tenants.job(name, "POST", "/import", content=body.encode()))
        return None if job["status"] == "done" else int(job["error"]["status"])
    response = tenants.ask(name, "POST", "/import", content=body.encode(), sent=body)
    return None if response.status_code == 200 else response.status_code


def import_broken(tenants: Tenants, name: str, rng: Random) -> None:
    """What is no whole export is refused, and the refusal tells of nothing but what was sent."""
    if exports := _exports_of(tenants.names, tenants):
        broken = rng.choice(BREAKS)(rng.choice(exports).body, rng.choice(exports).body)
        status = _import(tenants, name, broken, as_job=False)
        assert status == 422 or (status == 409 and tenants.lots[name].exists)
        if not tenants.lots[name].exists:
            is_problem(tenants.ask(name, "GET", "/stats"), 404)


def _cut_off(body: str, _: str) -> str:
    return body[: body.rstrip("\n").rindex("\n") + 1]


def _mixed(body: str, other: str) -> str:
    """With a record of another export, or one that stands there already."""
    lines, others = body.splitlines(keepends=True), other.splitlines(keepends=True)
    return "".join([*lines[:-1], others[len(others) // 2], lines[-1]])


def _reworded(body: str, other: str) -> str:
    return body.replace("user: ", "user; ") if "user: " in body else _cut_off(body, other)


def _no_json(body: str, _: str) -> str:
    return body.replace("{", "(", 2)


BREAKS: tuple[Callable[[str, str], str], ...] = (_cut_off, _mixed, _reworded, _no_json)


# ---- an end, and keys


def remove(tenants: Tenants, name: str, rng: Random) -> None:
    """All memories deleted; or the tenant erased, at once or as a job."""
    if rng.random() < 0.5:
        lot = tenants.lots[name]
        deleted = tenants.ask(name, "DELETE", "/memories")
        assert deleted.status_code == (200 if lot.exists else 404)
        left = {"jobs": {*lot.erasures}, "erasures": lot.erasures, "kept": [] if lot.exists else lot.kept}
        _forget(tenants, name, erased=lot.erased or lot.exists, **left)
    else:
        _erase(tenants, name, as_job=rng.random() < 0.5)
    is_problem(tenants.ask(name, "POST", "/search", json={"query": "boat"}), 404)


def _erase(tenants: Tenants, name: str, *, as_job: bool) -> None:
    lot, key = tenants.lots[name], tenants.keys[name]
    if as_job:
        # its own key goes with it, and could not ask for the certificate
        is_problem(tenants.ask(name, "DELETE", headers=AS_JOB), 422)
        job = tenants.job(name, "DELETE", "", by=tenants.shared_key(name))
        certificate, erasures = tenants.ended(name, job).get("result"), {*lot.erasures, job}
    else:
        erased = tenants.ask(name, "DELETE")
        certificate, erasures = (erased.json() if erased.status_code == 200 else None), lot.erasures
    assert (certificate is not None) == (lot.exists or lot.erased)
    _forget(tenants, name, erased=lot.exists or lot.erased, jobs={*erasures}, erasures=erasures)
    if certificate is None:
        return
    assert len(lot.texts) <= certificate["turns_removed"] <= tenants.turns_ever[name]
    # a key that named no other tenant is gone too, and no answer is kept for those that did
    is_problem(tenants.send(key, name, "GET", "/stats", of=name), 401)
    tenants.give_key(name)
    for kept in [kept for kept in lot.kept if kept.by == tenants.shared_key(name)]:
        is_problem(tenants.repeat(name, kept), 404)


def _forget(tenants: Tenants, name: str, **left: Any) -> None:
    """None of the words of this life may come again."""
    tenants.lots[name] = Lot(**left)
    tenants.secrets.words[name] = set()


def change_key(tenants: Tenants, name: str, rng: Random) -> None:
    """A key that was rotated or revoked is refused as one that never was."""
    former = tenants.keys[name]
    if rng.random() < 0.5:
        tenants.keys[name] = tenants.key_file.rotate(key_id(former), timedelta(0)).text
    else:
        tenants.key_file.revoke(key_id(former))
        tenants.give_key(name)
    refused = [tenants.send(key, name, "GET", "/stats", of=name) for key in (former, NEVER_MADE)]
    assert is_problem(refused[0], 401) == is_problem(refused[1], 401)
    assert tenants.ask(name, "GET", "/stats").status_code == (200 if tenants.lots[name].exists else 404)
