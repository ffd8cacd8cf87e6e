"""A store on S3, against a server on this machine; the tests in journal/ run in a bucket too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest

from undertow.engine.api.engine import Engine
from undertow.engine.api.transfer.reindex import reindex
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Message, Turn
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.storage import lance_log
from undertow.engine.storage.journal import Journal
from undertow.engine.storage.location import Location, StoreError
from undertow.engine.storage.store_info import read_info

from ...support.cli import run
from ...support.engine import bytes_hold
from ...support.faults.harness import end_state, write_log
from ...support.storage.journal import DIM, row, stored, texts
from ...support.storage.location_contract import assert_is_a_place

SETTINGS = Settings(device="cpu", llm_url=None, batch_turns=64)


@pytest.fixture
def location(s3: dict[str, str]) -> Location:
    return Location.of(f"s3://memories/{uuid4().hex}/store")


@pytest.fixture
def store(location: Location) -> Location:
    Journal.create(location, DIM, {"model": "none"})
    return location


def turns(tenant: str, count: int, word: str = "boat") -> list[Turn]:
    return [Turn(tenant, (Message("user", f"the {word} number {n}"),), f"{tenant} {n}") for n in range(count)]


# ---- places


def test_a_prefix_of_a_bucket_is_a_place(location: Location) -> None:
    assert_is_a_place(location)
    assert_is_a_place(Location.of("s3://whole"))


def test_a_bucket_that_is_not_there_is_told(s3: dict[str, str]) -> None:
    with pytest.raises(StoreError, match=r"s3://nowhere/store.*Check the bucket, the AWS_\* variables"):
        Location.of("s3://nowhere/store").write("a", b"")
    with pytest.raises(StoreError, match=r"cannot create a store in s3://nowhere/store"):
        Journal.create("s3://nowhere/store", DIM, {})
    with pytest.raises(StoreError, match="not an Undertow store"):
        Journal.open("s3://memories/nothing", writable=True)


# ---- the journal


def test_purge_leaves_no_byte_and_spares_appends_under_way(
    store: Location, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(store, writable=True)
    journal.append([row("zq7w-violin", tenant="ann"), row("b2mx-harbour", tenant="bob")])
    journal.delete(["ann"], before_lsn=journal.next_lsn)
    store.write("journal.lance/data/cut-off.lance", b"an append that may be under way")
    assert bytes_hold(store, "zq7w-violin")
    assert journal.purge() is False, "nobody can be sure to be alone with a bucket"
    assert not bytes_hold(store, "zq7w-violin") and bytes_hold(store, "b2mx-harbour")
    assert bytes_hold(store, "under way")
    monkeypatch.setattr(lance_log, "READER_GRACE", timedelta(seconds=-60))
    journal.purge()
    assert not bytes_hold(store, "under way")
    assert texts(journal) == ["b2mx-harbour"]


WRITER = """
import sys
from undertow.engine.storage.journal import Journal, Row
journal = Journal.open(sys.argv[1], writable=True)
for n in range(10_000):
    journal.append([Row("turn", "ann", "ann", n, str(n).encode())])
    print(n, flush=True)
"""


def test_a_killed_writer_loses_nothing_acknowledged(store: Location) -> None:
    writer = subprocess.Popen([sys.executable, "-c", WRITER, str(store)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    told = [writer.stdout.readline() for _ in range(5)]
    os.kill(writer.pid, signal.SIGKILL)
    told += writer.stdout.readlines()
    writer.wait()
    journal = Journal.open(store, writable=True)
    seqs = [r.seq for r in journal.read()]
    assert seqs == list(range(len(seqs))) and len(seqs) >= len(told)
    journal.append([row("next")])
    assert stored(store)[-1] == "next"


# ---- the engine and the program


def test_an_engine_on_s3_end_to_end(location: Location) -> None:
    encoder = HashingEncoder(384)
    with Engine(str(location), SETTINGS, encoder) as engine:
        engine.add_batch([*turns("ann", 20), *turns("bob", 20, "zq7w-violin")])
        engine.drain()
    with Engine(location, SETTINGS, encoder) as engine:
        engine.resume()
        engine.add_batch(turns("ann", 25))
        assert engine.stats()["turns"] == 45
        assert len(engine.search("ann", "the boat number 3").turns) > 0
        with Engine(location, SETTINGS, encoder, writable=False) as reader:
            assert "number 3" in reader.search("ann", "the boat number 3").turns[0].memory
        assert bytes_hold(location, "zq7w-violin")
        certificate = engine.erase("bob", now=True)
        assert certificate is not None and certificate.turns_removed == 20
        assert any("bucket" in line for line in certificate.out_of_reach)
    assert not bytes_hold(location, "zq7w-violin") and not bytes_hold(location, "bob")
    with Engine(location, SETTINGS, encoder, writable=False) as reader:
        assert reader.stats()["turns"] == 25


def test_a_reindex_on_s3(location: Location) -> None:
    with Engine(location, SETTINGS, HashingEncoder(384)) as engine:
        engine.add_batch(turns("ann", 30))
        engine.drain()
    assert reindex(location, HashingEncoder(64)) == 30
    assert reindex(location, HashingEncoder(64)) == 0
    assert [n for n in location.children() if n.startswith("journal")] == [read_info(location).journal]
    with Engine(location, SETTINGS, HashingEncoder(64)) as engine:
        engine.add_batch(turns("ann", 31))
        assert engine.stats()["turns"] == 31


def test_the_program_works_on_s3_as_on_a_folder(location: Location, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", ["ann", "bob"], 12)
    for where in (str(location), str(tmp_path / "store")):
        done = run("ingest", log, "--store", where, "--encoder", "hash:384", "--llm", "off", "--json")
        assert done.code == 0, done.err
        assert done.doc["turns"] == 24
    found = run(
        "search", "boat", "--tenant", "ann", "--store", str(location), "--encoder", "hash:384", "--json"
    )
    assert found.code == 0, found.err
    assert end_state(location) == end_state(tmp_path / "store")
    wrong = run("stats", "--store", "gs://memories/x")
    assert wrong.code == 2 and "s3://BUCKET/PREFIX" in wrong.err
