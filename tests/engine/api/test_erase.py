"""Erasing a tenant: no byte of it stays, no one else notices, and its name may begin anew."""

from __future__ import annotations

import base64
import json
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, get_args

import lance
import pyarrow as pa
import pytest
from lance.file import LanceFileReader

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.bench.mock.server import MockServer
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Message, PolicyName, Turn, UndertowError
from undertow.engine.base.results import Certificate
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.llm.client import LLMClient
from undertow.engine.storage import journal as journal_module
from undertow.engine.storage.row_codec import memory_of
from undertow.engine.storage.store_info import read_info
from undertow.engine.tenants.registry import UnknownTenant

from ...support.engine import DeafLLM, HeldLLM, rows_of
from ...support.faults.harness import (
    KINDS,
    THETA,
    TOPICS,
    WINDOWS,
    Driver,
    State,
    assert_same_state,
    end_state,
    reports,
    shared_driver,
)
from ...support.faults.spoilt_llm import served

REPLIES = MockReplies(1, 0.3, 0.1, malformed_rate=0.1, malformed_sticky=True)
# to what one asks of it, in every prompt
OBLIGING = MockReplies(1)
OTHERS = ("bob", "cleo")
# of each tenant in a store of the policy
TURNS: dict[PolicyName, int] = {"recmem": 30, "eager": 9, "nemori": 12, "himem": 12}
SETTINGS: dict[str, Any] = {**THETA, **WINDOWS, "encoder": "hash:384"}
QUERY = "boat and tide and garden"


@dataclass(frozen=True)
class Marked:
    """A tenant whose every word, name and label holds `word`."""

    word: str

    @property
    def name(self) -> str:
        return f"{self.word} tenant"


@pytest.fixture(scope="module")
def marked() -> Marked:
    # not in any other byte of the store but by its own doing; the accent has several spellings
    return Marked(f"é{secrets.token_hex(8)}")


def turns_of_topics(tenant: str, count: int, word: str = "", *, words: str = "") -> list[Turn]:
    turns = []
    for n in range(count):
        topic = TOPICS[n % 3].split()
        said = [*topic[n % 4 : n % 4 + 5], word, words, f"n{n}"]
        messages = (
            Message("user", " ".join(filter(None, said)), name=f"Ada {word}".strip()),
            Message("assistant", f"{topic[0]} {topic[1]} {word}"),
        )
        metadata = {"channel": word, word or "k": {"deep": [word]}}
        stamp = f"2026-04-{1 + n // 24:02d}T{n % 24:02d}:00:00"
        session = f"session {n // 4} {word}"
        turns.append(Turn(tenant, messages, f"{word} key {n}", session, stamp, metadata))
    return turns


def opened(store: Path, llm: LLMClient | None = None, policy: PolicyName = "recmem") -> Engine:
    settings = Settings(device="cpu", policy=policy, **SETTINGS)
    return Engine(store, settings, HashingEncoder(384), llm=llm)


@pytest.fixture(scope="module")
def built(marked: Marked, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[PolicyName], Path]]:
    """Three tenants, one of them marked, with several versions and compactions behind them."""

    @cache
    def of(policy: PolicyName) -> Path:
        store = tmp_path_factory.mktemp("built") / "store"
        count = TURNS[policy]
        # that RecMem alone has parked jobs in it: of a window's many calls one is unusable too often
        llm = MockLLM(REPLIES if policy == "recmem" else OBLIGING)
        with opened(store, llm, policy) as engine:
            for n in range(0, count, count // 3):
                for name in (*OTHERS, marked.name):
                    word = marked.word if name == marked.name else ""
                    engine.add_batch(turns_of_topics(name, count, word)[n : n + count // 3])
                    engine.step()
            assert engine.drain()
        assert KINDS[policy] <= end_state(store).kinds()
        return store

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_module, "COMMITS_PER_COMPACTION", 9)
        yield of


@pytest.fixture
def policy() -> PolicyName:
    """Of most tests' store; some are parametrised with it."""
    return "recmem"


@pytest.fixture
def store(policy: PolicyName, built: Callable[[PolicyName], Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(built(policy), tmp_path / "store"))


# ---- looking for traces


def spellings(word: str) -> list[bytes]:
    escaped = json.dumps(word)[1:-1]
    plain = [word.encode(), word.encode("latin-1"), escaped.encode(), word[1:].encode()]
    wide = [text.encode(code) for text in (word, escaped) for code in ("utf-16-le", "utf-16-be", "utf-32-le")]
    return [*plain, *wide, word[1:].encode().hex().encode(), word[1:].upper().encode()]


def files_with(store: Path, needles: Sequence[bytes]) -> list[str]:
    """Files that hold any of the byte strings as they are, or in their own name."""
    found = []
    for path in sorted(p for p in store.rglob("*") if p.is_file()):
        data = path.read_bytes() + b"\x00" + str(path.relative_to(store)).encode()
        if any(needle in data for needle in needles):
            found.append(str(path.relative_to(store)))
    return found


def decoded(store: Path) -> dict[str, pa.Table]:
    """Every Lance file that lies in the store, referenced or not, whatever its compression."""
    files = [p for p in store.rglob("*.lance") if p.is_file()]
    return {str(p.relative_to(store)): LanceFileReader(str(p)).read_all().to_table() for p in files}


def values_with(store: Path, needles: Sequence[bytes]) -> set[tuple[str, str]]:
    """(file, column) of every decoded value that holds any of the byte strings."""
    found = set()
    for name, table in decoded(store).items():
        for column in table.column_names:
            for value in table[column].to_pylist():
                data = value if isinstance(value, bytes) else str(value).encode()
                if any(needle in data for needle in needles):
                    found.add((name, column))
    return found


def vectors_of(store: Path, tenant: str) -> list[bytes]:
    with reports(store) as of:
        key = of.tenants.existing(tenant).key
    table = lance.dataset(str(store / "journal.lance")).to_table(filter=f"tenant_key = '{key}'")
    return sorted({v for v in table["vector"].to_pylist() if v is not None and any(v)})


def versions_with(store: Path, needles: Sequence[bytes]) -> list[int]:
    """Versions that can still be opened and whose rows hold any of the byte strings."""
    uri = str(store / "journal.lance")
    found = []
    for version in lance.dataset(uri).versions():
        rows = lance.dataset(uri, version=version["version"]).to_table().to_pylist()
        if any(needle in repr_bytes(rows) for needle in needles):
            found.append(version["version"])
    return found


def repr_bytes(rows: list[dict[str, Any]]) -> bytes:
    return b"\x00".join(v if isinstance(v, bytes) else str(v).encode() for row in rows for v in row.values())


def assert_no_trace(store: Path, marked: Marked, vectors: Sequence[bytes]) -> None:
    needles = spellings(marked.word)
    assert files_with(store, needles) == []
    assert values_with(store, needles) == set()
    assert versions_with(store, needles) == []
    base64s = [base64.b64encode(marked.word.encode()[i:])[2:-4] for i in range(3)]
    assert files_with(store, base64s) == []
    assert files_with(store, vectors) == [], "nor of its vectors, which tell what was said"
    assert values_with(store, vectors) == set()


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


def test_without_now_it_is_gone_at_once_and_its_bytes_with_the_next_purge(
    store: Path, marked: Marked
) -> None:
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
        certificates = engine.purge()
        assert len(certificates) == (0 if purged else 1)
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


@pytest.fixture(scope="module")
def driver() -> Driver:
    return shared_driver()


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
    outcome = driver.run(
        task="erase",
        store=store,
        tenant=marked.name,
        settings={**SETTINGS, "policy": policy},
        kill={"method": method, "n": n, "after": after},
    )
    assert outcome.status == -signal.SIGKILL and not outcome.lines
    with opened(store, policy=policy) as engine:
        assert_gone(engine, store, marked, ids)
        (certificate,) = engine.purge().values()
        assert (certificate.turns_removed, certificate.rows_removed) == (TURNS[policy], rows)
    assert_no_trace(store, marked, vectors)
    assert others(end_state(store)) == others(before)


def test_a_kill_before_the_tombstone_erases_nothing(store: Path, marked: Marked, driver: Driver) -> None:
    before = end_state(store)
    outcome = driver.run(
        task="erase",
        store=store,
        tenant=marked.name,
        settings=SETTINGS,
        kill={"method": "append", "n": 1, "after": False},
    )
    assert outcome.status == -signal.SIGKILL
    assert end_state(store) == before


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


BEGUN, DECIDED = ("append_copies", 2, True), ("delete_rows", 2, False)


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
