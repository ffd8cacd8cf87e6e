"""Deleting single turns: no byte of them is left after the purge, under any policy."""

from __future__ import annotations

import secrets
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, get_args

import lance
import pytest

from undertow.bench.mock.llm import MockLLM
from undertow.bench.mock.server import MockServer
from undertow.engine.api.engine import Engine
from undertow.engine.base.model import Message, PolicyName, Turn

from ....support.api.erasure import (
    OBLIGING,
    REPLIES,
    SETTINGS,
    Marked,
    assert_no_trace,
    files_with,
    opened,
    turns_of_topics,
    values_with,
)
from ....support.engine import DeafLLM, HeldLLM, rows_of, settle
from ....support.faults.harness import Driver, State, assert_same_state, end_state
from ....support.faults.spoilt_llm import served
from ....support.soak.rare import COMPARED

# ---- work under way


@pytest.mark.parametrize("client", [HeldLLM, DeafLLM])
def test_replies_that_come_after_the_erasure_are_dropped(
    client: type[HeldLLM], tmp_path: Path, marked: Marked
) -> None:
    """Whether or not the request could be cancelled, and though the name lives again by then."""
    llm = client(REPLIES)
    with opened(tmp_path, llm) as engine:
        for name in (marked.name, "bob"):
            engine.add_batch(turns_of_topics(name, 12, marked.word if name == marked.name else ""))
        while len(llm.held) < 2:
            engine.step()
        engine.erase(marked.name, now=True)
        engine.add_batch(turns_of_topics(marked.name, 1))
        next_lsn = engine.journal.next_lsn
        llm.held = [held for held in llm.held if held[0] == marked.name]
        assert llm.held
        llm.release()
        for _ in range(5):
            engine.step(0.01)
        assert engine.journal.next_lsn == next_lsn, "a late reply is not even logged"
        assert engine.tenants.existing(marked.name).next_seq == 1
        assert engine.get_all(marked.name) == []
    assert [r for r in rows_with_payload(tmp_path) if marked.word.encode() in r] == []


def rows_with_payload(store: Path) -> list[bytes]:
    payloads: list[bytes] = lance.dataset(str(store / "journal.lance")).to_table()["payload"].to_pylist()
    return payloads


def test_turns_that_wait_in_the_queue_go_with_the_tenant(tmp_path: Path, marked: Marked) -> None:
    with opened(tmp_path) as engine:
        engine.add_batch(turns_of_topics(marked.name, 2, marked.word))
        for turn in [*turns_of_topics(marked.name, 5, marked.word)[2:], *turns_of_topics("bob", 2)]:
            engine.scheduler.inbox.put(turn)
        engine.erase(marked.name, now=True)
        engine.step()
        assert engine.tenants.names() == ["bob"]
    assert_no_trace(tmp_path, marked, [])


# ---- a turn


@dataclass(frozen=True)
class Told:
    """A store with a turn that has a word, and what is left of it once that turn was deleted."""

    store: Path
    word: str
    turn_id: str
    left: State

    @property
    def needles(self) -> list[bytes]:
        return [self.word.encode()]


@pytest.fixture(scope="module")
def told(
    built: Callable[[PolicyName], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[PolicyName], Told]:
    """Of a tenant that speaks of one thing four times, the word in the first: it is in a memory, too."""
    word = f"q{secrets.token_hex(8)}"
    said = [f"lantern {word if n == 0 else ''} copper wick oil glass {n}" for n in range(4)]
    turns = [Turn("dora", (Message("user", text),), f"key {n}") for n, text in enumerate(said)]

    @cache
    def of(policy: PolicyName) -> Told:
        folder = tmp_path_factory.mktemp("told")
        store, left = folder / "store", folder / "left"
        shutil.copytree(built(policy), store)
        with opened(store, MockLLM(OBLIGING), policy) as engine:
            turn_id = engine.add_batch(turns)[0].id
            assert turn_id is not None and engine.flush("dora")
        assert word in repr([row.payload for row in rows_of(store, "episode", "fact")])
        shutil.copytree(store, left)
        with opened(left, MockLLM(OBLIGING), policy) as engine:
            engine.delete(turn_id)
            assert engine.drain()
        return Told(store, word, turn_id, end_state(left))

    return of


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with served(MockServer(OBLIGING)) as url:
        yield url


BEGUN, DECIDED = ("_commit", 2, True), ("delete_rows", 2, False)


@pytest.mark.rarely(policy=COMPARED)
@pytest.mark.parametrize(
    ("policy", "kill"),
    [
        ("recmem", None),
        ("recmem", ("delete_rows", 1, False)),  # right after the record
        *product(get_args(PolicyName), (BEGUN, DECIDED)),
    ],
)
def test_a_deleted_turn_leaves_no_byte_after_the_purge(
    policy: PolicyName,
    kill: tuple[str, int, bool] | None,
    told: Callable[[PolicyName], Told],
    url: str,
    tmp_path: Path,
    driver: Driver,
) -> None:
    """Its own words, and what was written from them; wherever a kill came, what is left is the same."""
    of = told(policy)
    store = Path(shutil.copytree(of.store, tmp_path / "store"))
    if kill is None:
        with opened(store, policy=policy) as engine:
            assert engine.delete(of.turn_id) == "turn"
    else:
        settings = {**SETTINGS, "policy": policy, "llm_url": url}
        task: dict[str, Any] = {"task": "delete", "memory_id": of.turn_id, "settings": settings}
        armed = dict(zip(("method", "n", "after"), kill, strict=True))
        assert driver.run(store=store, kill=armed, **task).status == -signal.SIGKILL
    assert values_with(store, of.needles)
    with opened(store, MockLLM(OBLIGING), policy) as engine:
        assert all(hit.id != of.turn_id for hit in engine.search("dora", of.word, k_sub=50).turns)
        engine.resume()
        assert engine.drain()
        engine.purge()
    assert values_with(store, of.needles) == set()
    assert files_with(store, of.needles) == []
    assert_same_state(end_state(store), of.left)


@pytest.mark.rarely(policy=COMPARED)
@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_turns_that_are_deleted_while_a_reply_is_on_its_way_leave_nothing(
    policy: PolicyName, count: int, tmp_path: Path
) -> None:
    """At every call that a tenant's first four turns make: one of the shown turns goes, or all."""
    said = [f"lantern secret{n} copper wick oil glass {n}" for n in range(4)]
    for call in range(12):
        llm, store = HeldLLM(OBLIGING), tmp_path / f"store {call}"
        with opened(store, llm, policy) as engine:
            ids = [kept.id for kept in engine.add_batch([_turn(n, text) for n, text in enumerate(said)])]
            engine.log_flush("dora")
            for _ in range(call):
                _step_until_held(engine, llm)
                llm.release(1)
            if not _step_until_held(engine, llm):
                assert call, "some call was held"
                break
            for turn_id in ids[:count]:
                assert turn_id is not None and engine.delete(turn_id) == "turn"
            settle(engine)
            engine.purge()
            left = repr([row.payload for row in rows_of(store, "turn", "episode", "fact")])
        assert not any(f"secret{n}" in left for n in range(count)), (policy, call)
    else:
        pytest.fail("more calls than expected")


def _turn(n: int, text: str) -> Turn:
    return Turn("dora", (Message("user", text),), f"key {n}", "s", f"2026-04-{n + 1:02d}")


def _step_until_held(engine: Engine, llm: HeldLLM) -> bool:
    """Step until a reply is held, or nothing is left to do."""
    while not llm.held and not engine.idle:
        engine.step(0.01)
    return bool(llm.held)
