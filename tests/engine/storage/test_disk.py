"""A disk that is full or read-only: a clear error, no acknowledgement of what is not stored."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from undertow.bench.mock.llm import MockReplies
from undertow.bench.mock.server import MockServer
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.storage.journal import Journal
from undertow.engine.storage.store_info import StoreError

from ...support.cli import Ran, run
from ...support.faults.harness import (
    RATES,
    THETA,
    Driver,
    assert_prefix_stored,
    assert_same_state,
    end_state,
    reports,
    stored_texts,
    turns_of,
    write_log,
)
from ...support.faults.spoilt_llm import served

TENANTS = ("ann", "bob")
SETTINGS = {**THETA, "encoder": "hash:384", "batch_turns": 8}


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log.jsonl", TENANTS, 22)


class Disk:
    """A file system of a few megabytes in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def remount(self, options: str) -> None:
        subprocess.run(["mount", "-o", f"remount,{options}", str(self.folder)], check=True)

    def fill(self) -> Path:
        """Take all the space that is left."""
        ballast = self.folder / "ballast"
        with ballast.open("wb", buffering=0) as file:
            try:
                while file.write(b"\x00" * 4096):
                    pass
            except OSError:
                return ballast
        raise AssertionError("the disk has no end")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=112k", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("a file system of limited size needs the right to mount a tmpfs (root)")
    try:
        yield Disk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def one_line(done: Ran) -> str:
    """What the program says of a failure: no traceback."""
    assert "Traceback" not in done.err
    return " ".join(done.err.split())


# ---- full


def test_what_the_disk_did_not_take_is_not_acknowledged(tmp_path: Path, driver: Driver) -> None:
    """A limit on file sizes, as any user can meet it. The program goes on after the error, in vain."""
    store = tmp_path / "store"
    texts = ["a short text", "another", secrets.token_hex(60_000), "a third", "a fourth"]
    task: dict[str, Any] = {"task": "add_each", "store": store, "texts": texts, "settings": SETTINGS}
    outcome = driver.run(**task, file_size_limit_bytes=40_000)
    assert outcome.status == 0
    told = {n: [line for line in outcome.lines if line["text"] == n] for n in range(len(texts))}
    assert all(line["receipts"] == 1 for n in (0, 1) for line in told[n])
    for n in (2, 3, 4):
        assert [line["kind"] for line in told[n]] == ["JournalError"] * 2
    assert "free space" in told[2][0]["error"] and "File too large" in told[2][0]["error"]
    assert "opened again" in told[3][0]["error"] and "free space" in told[3][0]["error"]
    spoken = [f"user: {text}" for text in texts]
    assert stored_texts(store, "turn") == {"t": spoken[:2]}

    outcome = driver.run(**task)
    assert outcome.status == 0 and all("error" not in line for line in outcome.lines)
    assert stored_texts(store, "turn") == {"t": spoken}


def test_a_run_into_a_full_disk_resumes_to_the_same_state(
    disk: Disk, log: Path, tmp_path: Path, driver: Driver
) -> None:
    with served(MockServer(MockReplies(**RATES))) as url:
        task: dict[str, Any] = {"task": "ingest", "log": log, "settings": {**SETTINGS, "llm_url": url}}
        assert driver.run(store=tmp_path / "elsewhere", **task).status == 0
        store = disk.folder / "store"
        outcome = driver.run(store=store, **task)
        assert outcome.status == 1 and outcome.last("kind") == "JournalError"
        assert "No space left on device" in outcome.last("error")
        assert "free space or fix the disk, then run again" in outcome.last("error")
        assert outcome.last("acked")
        assert_prefix_stored(store, turns_of(log), outcome.last("acked"))
        again = driver.run(store=store, **task)
        assert again.status == 1, "it is still full"
        assert "space" in again.last("error")
        assert_prefix_stored(store, turns_of(log), outcome.last("acked"))
        disk.remount("size=64m")
        outcome = driver.run(store=store, **task)
        assert outcome.status == 0 and outcome.last("settled")
        assert_same_state(end_state(store), end_state(tmp_path / "elsewhere"))


def test_the_program_on_a_full_disk(disk: Disk, log: Path) -> None:
    store = disk.folder / "store"
    ballast = disk.fill()
    ingest = ("ingest", log, "--store", store, "--encoder", "hash:384", "--llm", "off", "--json")
    done = run(*ingest)
    assert done.code == 1 and done.out == ""
    assert "space" in one_line(done)
    ballast.unlink()
    disk.remount("size=64m")
    done = run(*ingest)
    assert done.code == 0, done.err
    assert done.doc["turns"] == 2 * 22


def test_reading_goes_on_while_the_disk_is_full(disk: Disk) -> None:
    disk.remount("size=16m")
    store = disk.folder / "store"
    settings = Settings(device="cpu")
    with Engine(store, settings, HashingEncoder(384)) as engine:
        engine.add("ann", [{"role": "user", "content": "the boat has a new sail"}])
        disk.fill()
        with Engine(store, settings, HashingEncoder(384), writable=False) as reader:
            assert len(reader.search("ann", "boat").turns) == 1
        assert len(engine.search("ann", "boat").turns) == 1
    disk.fill()  # an engine's mapped texts are gone with it
    with pytest.raises(StoreError, match=r"[Ss]pace|disk full"), Engine(store, settings, HashingEncoder(384)):
        pass
    with Engine(store, settings, HashingEncoder(384), writable=False) as reader:
        assert len(reader.search("ann", "boat").turns) == 1, "a failed opening leaves the store readable"


# ---- read-only


@pytest.fixture
def read_only(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A store with one turn, which nobody may write."""
    disk: Disk | None = request.getfixturevalue("disk") if os.geteuid() == 0 else None
    store = (tmp_path if disk is None else disk.folder) / "store"
    with Engine(store, Settings(device="cpu"), HashingEncoder(384)) as engine:
        engine.add("ann", [{"role": "user", "content": "the boat has a new sail"}])
    if disk is not None:  # rights do not bind root
        disk.remount("ro")
        yield store
        return
    folders = [store, *(p for p in store.rglob("*") if p.is_dir())]
    files = [p for p in store.rglob("*") if p.is_file()]
    for path in (*files, *folders):
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield store
    for path in folders:
        path.chmod(0o755)


def test_a_read_only_store_can_be_read_and_says_why_it_cannot_be_written(read_only: Path, log: Path) -> None:
    done = run("ingest", log, "--store", read_only, "--encoder", "hash:384", "--llm", "off", "--json")
    assert done.code == 1 and done.out == ""
    assert str(read_only) in one_line(done) and "read-only" in one_line(done)
    done = run("export", "--store", read_only, "--tenant", "ann")
    assert done.code == 0, done.err
    assert [line["kind"] for line in done.lines].count("turn") == 1
    with Engine(read_only, Settings(device="cpu"), HashingEncoder(384), writable=False) as engine:
        assert len(engine.search("ann", "boat").turns) == 1
    with reports(read_only) as of:
        assert of.tenant_sizes() == [{"tenant": "ann", "turns": 1}]


@pytest.mark.parametrize("inside", [False, True])
def test_a_file_where_the_store_should_be(inside: bool, tmp_path: Path, log: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("not a store")
    store = file / "store" if inside else file
    with pytest.raises(StoreError, match=r"cannot create a store in .*notes\.txt"):
        Journal.create(store, 8, {})
    done = run("ingest", log, "--store", store, "--encoder", "hash:384", "--llm", "off", "--json")
    assert done.code == 1 and done.out == ""
    assert "notes.txt" in one_line(done)
    assert file.read_text() == "not a store"
