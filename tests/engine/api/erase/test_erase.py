"""Erasing a tenant: no byte of it stays, no one else notices, and its name may begin anew."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lance
import pytest

from undertow.bench.mock.llm import MockLLM
from undertow.engine.api.engine import Engine
from undertow.engine.api.erasure import certify, remove_bytes
from undertow.engine.base.model import PolicyName, Turn, UndertowError
from undertow.engine.base.results import Certificate
from undertow.engine.search import analyzer
from undertow.engine.storage.row_codec import memory_of
from undertow.engine.storage.store_info import read_info
from undertow.engine.tenants.registry import UnknownTenant

from ....support.api.erasure import (
    OBLIGING,
    OTHERS,
    REPLIES,
    SETTINGS,
    TURNS,
    Marked,
    assert_no_trace,
    files_with,
    opened,
    spellings,
    turns_of_topics,
    values_with,
    versions_with,
)
from ....support.cli import run
from ....support.engine import rows_of
from ....support.faults.harness import Driver, State, end_state, reports

QUERY = "boat and tide and garden"


# ---- looking for traces


def vectors_of(store: Path, tenant: str) -> list[bytes]:
    with reports(store) as of:
        key = of.tenants.existing(tenant).key
    table = lance.dataset(str(store / "journal.lance")).to_table(filter=f"tenant_key = '{key}'")
    return sorted({v for v in table["vector"].to_pylist() if v is not None and any(v)})


def test_the_search_for_traces_finds_them_where_nothing_was_erased(store: Path, marked: Marked) -> None:
    needles, vectors = spellings(marked.word), vectors_of(store, marked.name)
    assert len(vectors) > 30
    assert files_with(store, needles)
    assert {"tenant", "payload"} <= {column for _, column in values_with(store, needles)}
    assert {column for _, column in values_with(store, vectors)} == {"vector"}
    assert len(versions_with(store, needles)) > 1, "old versions hold it too"
    kinds = {
        row["kind"]
        for row in lance.dataset(str(store / "journal.lance")).to_table().to_pylist()
        if marked.word.encode() in row["payload"]
    }
    assert {"turn", "episode", "fact"} <= kinds


# ---- erase --now


def others(state: State) -> dict[str, list[str]]:
    return {name: state.exports[name] for name in OTHERS}


def searches(engine: Engine) -> list[Any]:
    return [engine.search(name, QUERY) for name in OTHERS]


def count_rows(store: Path, tenant: str) -> int:
    key = read_info(store).tenant_key(tenant)
    return int(lance.dataset(str(store / "journal.lance")).count_rows(filter=f"tenant_key = '{key}'"))


def assert_gone(engine: Engine, store: Path, marked: Marked, ids: Sequence[str]) -> None:
    """No call and no report knows the tenant."""
    assert engine.tenants.names() == sorted(OTHERS)
    for call in (
        lambda: engine.search(marked.name, QUERY),
        lambda: engine.get_all(marked.name),
        lambda: engine.flush(marked.name),
        lambda: engine.erase(marked.name),
        lambda: engine.delete(ids[0]),
    ):
        with pytest.raises(UndertowError):
            call()
    with reports(store) as of:
        assert [r["tenant"] for r in of.tenant_sizes()] == sorted(OTHERS)
        assert all(job["tenant"] in OTHERS for job in of.jobs())
        for ask in (of.turns, of.explain, of.export, lambda name: of.memories(name, "episode")):
            with pytest.raises(UnknownTenant):
                ask(marked.name)
        for memory_id in ids:
            with pytest.raises(UndertowError):
                of.history(memory_id)


def ids_of(store: Path, tenant: str) -> list[str]:
    with reports(store) as of:
        return [r["id"] for r in of.export(tenant) if r["kind"] in ("turn", "episode", "fact")]


def test_erase_now_leaves_no_trace_and_touches_no_one_else(store: Path, marked: Marked) -> None:
    before, vectors, rows = end_state(store), vectors_of(store, marked.name), count_rows(store, marked.name)
    ids = ids_of(store, marked.name)
    with opened(store) as engine:
        found, figures = searches(engine), engine.stats()
        episodes = len(engine.tenants.existing(marked.name).current("episode"))
        facts = len(engine.tenants.existing(marked.name).current("fact"))
        certificate = engine.erase(marked.name, now=True)
        assert analyzer._kept_term.cache_info().currsize == 0, "words of searches and texts"
        assert isinstance(certificate, Certificate)
        assert certificate.tenant_key == read_info(store).tenant_key(marked.name)
        assert (certificate.turns_removed, certificate.rows_removed) == (30, rows)
        assert (certificate.episodes_removed, certificate.facts_removed) == (episodes, facts)
        assert episodes and facts and rows > 60
        assert certificate.erased_at <= certificate.purged_at
        assert marked.word not in str(certificate)
        assert engine.stats()["turns"] == figures["turns"] - 30
        assert searches(engine) == found
        assert_gone(engine, store, marked, ids)
    assert_no_trace(store, marked, vectors)
    assert others(end_state(store)) == others(before)
    assert end_state(store).exports.keys() == set(OTHERS)
    with opened(store) as engine:
        assert searches(engine) == found
        assert_gone(engine, store, marked, ids)
        assert engine.purge() == {}, "it has been certified already"


def test_the_program_erases_as_the_engine_does(store: Path, marked: Marked) -> None:
    before, vectors, rows = end_state(store), vectors_of(store, marked.name), count_rows(store, marked.name)
    command = [sys.executable, "-B", "-m", "undertow.serving.cli", "erase", "--tenant", marked.name]
    command += ["--store", str(store), "--now", "--yes", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    certificate = json.loads(done.stdout)
    assert (certificate["turns_removed"], certificate["rows_removed"]) == (30, rows)
    assert_no_trace(store, marked, vectors)
    assert others(end_state(store)) == others(before)
    again = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert again.returncode == 1 and "no tenant" in again.stderr


# ---- erased, not yet purged


def test_without_now_it_is_gone_at_once_and_its_bytes_at_the_next_purge(store: Path, marked: Marked) -> None:
    before, vectors, rows = end_state(store), vectors_of(store, marked.name), count_rows(store, marked.name)
    ids = ids_of(store, marked.name)
    with opened(store) as engine:
        found = searches(engine)
        assert engine.erase(marked.name) is None
        assert_gone(engine, store, marked, ids)
        assert searches(engine) == found
    assert values_with(store, spellings(marked.word)), "the bytes are still there"
    with opened(store) as engine:
        assert_gone(engine, store, marked, ids)
        assert engine.resume() == 0
        (certificate,) = engine.purge().values()
        assert (certificate.turns_removed, certificate.rows_removed) == (30, rows)
    assert_no_trace(store, marked, vectors)
    assert others(end_state(store)) == others(before)


@pytest.mark.parametrize("by_program", [True, False])
def test_turns_that_were_parked_since_the_erasure_go_with_its_certificate(
    by_program: bool, store: Path, marked: Marked
) -> None:
    with opened(store) as engine:
        engine.erase(marked.name)
        parked = store / "parked" / "s1" / engine.journal.info.tenant_key(marked.name) / "1.arrow"
    parked.parent.mkdir(parents=True)
    parked.write_bytes(b"her words")
    if by_program:
        done = run("erase", "--tenant", marked.name, "--store", store, "--now", "--yes", "--json")
        assert (done.code, done.doc["turns_removed"]) == (0, 30), done.err
    else:
        with opened(store) as engine:
            assert engine.erase(marked.name, now=True) is not None
    assert not parked.exists()


@pytest.mark.parametrize("purged", [True, False])
def test_the_name_begins_anew_and_sees_nothing_of_its_old_life(
    purged: bool, store: Path, marked: Marked
) -> None:
    vectors, old_ids = vectors_of(store, marked.name), ids_of(store, marked.name)
    anew = turns_of_topics(marked.name, 30, words="anew")
    keys_of_old = [Turn(t.tenant, t.messages, f"{marked.word} key {n}") for n, t in enumerate(anew)]
    with opened(store, MockLLM(REPLIES)) as engine:
        engine.erase(marked.name, now=purged)
        receipts = engine.add_batch(keys_of_old)
        assert [r.seq for r in receipts] == list(range(30))
        assert not any(r.duplicate for r in receipts), "what was sent in the old life may be sent again"
        assert not {r.id for r in receipts} & set(old_ids)
        assert engine.drain()
        live = engine.search(marked.name, QUERY)
        assert engine.get_all(marked.name)
    with opened(store) as engine:
        assert engine.search(marked.name, QUERY) == live
        texts = [hit.memory for hit in (*live.episodes, *live.facts)]
        assert all(marked.word not in text for text in texts)
        assert not set(old_ids) & set(ids_of(store, marked.name))
        assert len(engine.purge()) == (0 if purged else 1)
        assert engine.search(marked.name, QUERY) == live
    assert files_with(store, vectors) == []
    with reports(store) as of:
        assert len(of.turns(marked.name)) == 30
        assert marked.word not in "".join(turn["text"] for turn in of.turns(marked.name))


def test_two_lives_erased_before_one_purge_are_both_on_the_certificate(store: Path, marked: Marked) -> None:
    rows = count_rows(store, marked.name)
    with opened(store) as engine:
        engine.erase(marked.name)
        engine.add_batch(turns_of_topics(marked.name, 5, marked.word))
        certificate = engine.erase(marked.name, now=True)
    assert certificate is not None
    assert certificate.turns_removed == 35
    assert certificate.rows_removed > rows + 5
    assert_no_trace(store, marked, [])


def test_a_tenant_erased_again_while_its_bytes_are_removed_waits_for_the_next_purge(
    store: Path, marked: Marked
) -> None:
    with opened(store) as engine:
        engine.erase(marked.name)
        removal = remove_bytes(engine.journal, engine.tenants)
        engine.add_batch(turns_of_topics(marked.name, 5, marked.word))
        engine.erase(marked.name)
        assert certify(engine.tenants, removal) == {}
        (certificate,) = engine.purge().values()
        assert certificate.turns_removed == 35
    assert_no_trace(store, marked, [])


def test_a_deletion_of_an_erased_life_takes_no_version_from_the_next(tmp_path: Path) -> None:
    turns = turns_of_topics("ann", 24)

    def versions_of_second_life(store: Path) -> list[tuple[int, int, str]]:
        with opened(store, MockLLM(OBLIGING)) as engine:
            engine.add_batch(turns)
            assert engine.drain()
        with opened(store) as engine:
            engine.resume()
        rows = [memory_of(row) for row in rows_of(store, "episode")]
        return [(row.made_at_seq, row.version, row.text) for row in rows]

    alone = versions_of_second_life(tmp_path / "alone")
    merged_at = min(seq for seq, version, _ in alone if version > 1)
    with opened(tmp_path / "store") as engine:
        receipts = engine.add_batch(turns[:merged_at])
        assert receipts[0].id is not None
        engine.delete(receipts[0].id)  # its record has the number that is a merge in the next life
        engine.erase("ann")
    assert versions_of_second_life(tmp_path / "store") == alone


def killed(driver: Driver, store: Path, marked: Marked, policy: PolicyName, **kill: object) -> None:
    """Erase the tenant in a process that is killed at a call of the journal."""
    settings = {**SETTINGS, "policy": policy}
    outcome = driver.run(task="erase", store=store, tenant=marked.name, settings=settings, kill=kill)
    assert outcome.status == -signal.SIGKILL and not outcome.lines


@pytest.mark.parametrize(
    ("method", "n", "after", "policy"),
    [
        ("delete", 1, False, "recmem"),  # right after the tombstone
        ("delete", 1, True, "recmem"),
        ("check_in_force", 1, True, "recmem"),
        ("purge", 1, True, "recmem"),
        ("delete", 1, False, "eager"),
        ("check_in_force", 1, True, "nemori"),
        ("purge", 1, True, "himem"),
    ],
)
def test_a_kill_between_tombstone_and_certificate(
    method: str, n: int, after: bool, policy: PolicyName, store: Path, marked: Marked, driver: Driver
) -> None:
    before, vectors, rows = end_state(store), vectors_of(store, marked.name), count_rows(store, marked.name)
    ids = ids_of(store, marked.name)
    killed(driver, store, marked, policy, method=method, n=n, after=after)
    with opened(store, policy=policy) as engine:
        assert_gone(engine, store, marked, ids)
        (certificate,) = engine.purge().values()
        assert (certificate.turns_removed, certificate.rows_removed) == (TURNS[policy], rows)
    assert_no_trace(store, marked, vectors)
    assert others(end_state(store)) == others(before)


def test_a_kill_before_the_tombstone_erases_nothing(store: Path, marked: Marked, driver: Driver) -> None:
    before = end_state(store)
    killed(driver, store, marked, "recmem", method="append", n=1, after=False)
    assert end_state(store) == before
