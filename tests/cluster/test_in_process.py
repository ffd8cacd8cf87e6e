"""A plain store in this process: one engine's memories, its lock, and what is refused."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from undertow.engine.api.engine import Engine
from undertow.engine.api.transfer.import_ import RECORDS_PER_STEP, ImportCancelled
from undertow.engine.base.model import UndertowError
from undertow.engine.base.queries import EraseCommand, ExportQuery, ImportCommand, SearchQuery, TenantsQuery
from undertow.engine.cluster.in_process import InProcess
from undertow.engine.cluster.root import SINGLE, SingleStoreRoot
from undertow.engine.cluster.shard.call_queue import CallStamp
from undertow.engine.cluster.shard.shard import Shard
from undertow.engine.cluster.shard.supervisor import EnginePanic, EngineParts
from undertow.engine.cluster.shard_map import ShardMap
from undertow.engine.cluster.wire import pack
from undertow.engine.encoders.base import Float16
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.encoders.outage import EncoderDown
from undertow.engine.storage.journal import Fenced, Journal
from undertow.engine.storage.location import StoreError
from undertow.engine.storage.store_info import StoreLocked, read_info

from ..support.cluster.in_process import PARTS, FailingEncoder, begin, mock_llm, settings
from ..support.cluster.shard import some
from ..support.engine import bytes_hold, turn_of

SOON_S = 60


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def opened(store: Path) -> Iterator[InProcess]:
    with InProcess(store, settings(), PARTS) as router:
        yield router


def engine_of(store: Path) -> Engine:
    return Engine(store, settings(), PARTS.encoder(settings()), llm=mock_llm(settings()))


def test_a_store_that_an_engine_has_made_is_served_and_given_back(store: Path) -> None:
    with engine_of(store) as engine:
        engine.add_batch(some("ann", 1, 2))
    with InProcess(store, settings(), PARTS) as router:
        assert "word2 other2" in router.search("ann", "word2", k_sub=1).turns[0].memory
        router.add_batch(some("ann", 3))
    with engine_of(store) as engine:
        assert engine.stats()["turns"] == 3


LOCKS = """
import sys
from undertow.engine.base.config import Settings
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.encoders.outage import EncoderDown
from undertow.engine.api.engine import Engine
with Engine(sys.argv[1], Settings(encoder="hash:384", device="cpu"), HashingEncoder(384)):
    print("open", flush=True)
    sys.stdin.read()
"""


def test_a_store_that_another_process_writes_is_refused_and_left_to_it(store: Path) -> None:
    command = [sys.executable, "-c", LOCKS, str(store)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        with pytest.raises(StoreLocked, match=rf"is being written by process {other.pid} "):
            InProcess(store, settings(), PARTS)
        other.communicate("")
    assert other.returncode == 0
    with InProcess(store, settings(), PARTS) as router:
        assert router.stats()["turns"] == 0


def test_it_keeps_others_out_while_it_is_open(store: Path, opened: InProcess) -> None:
    with pytest.raises(StoreLocked):
        engine_of(store)
    opened.close()
    engine_of(store).close()


def test_what_cannot_be_opened_says_so_at_once(store: Path) -> None:
    with engine_of(store):
        pass
    wider = settings().model_copy(update={"encoder": "hash:768"})
    with pytest.raises(StoreError, match="encoder"):
        InProcess(store, wider, EngineParts(llm=mock_llm))
    engine_of(store).close()  # it holds no lock


def test_a_cluster_root_is_no_plain_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"is a cluster's root, .* Give --workers N or --ray"):
        InProcess(begin(tmp_path / "root", 2), settings(), PARTS)


def test_nobody_moves_in_or_out_of_a_plain_store(opened: InProcess) -> None:
    opened.add_batch(some("ann", 1))
    other = ShardMap.new([SINGLE, "more"])
    for method, args in (("leaving", ()), ("seal", (1, ["key"])), ("adopt", (other,)), ("clear", (1,))):
        with pytest.raises(UndertowError, match="a plain store, of one shard for good"):
            opened.begin_at(SINGLE, method, *args).result(SOON_S)
    assert opened.search("ann", "word1").turns


def test_a_poison_turn_is_parked_beside_the_store_and_goes_with_its_tenant(store: Path) -> None:
    encoder = FailingEncoder(["badger"])
    with InProcess(store, settings(), EngineParts(encoder=lambda _: encoder, llm=mock_llm)) as router:
        bad = turn_of("ann", 2, "a badger came by")
        receipts = router.add_batch([*some("ann", 1), bad, *some("bob", 1)])
        assert [receipt.parked is None for receipt in receipts] == [True, False, True]
        assert router.status()[SINGLE]["reopened"] > 0  # with its own lock
        assert bytes_hold(store / "parked", "badger")
        router.erase("ann")
        assert not bytes_hold(store / "parked", "badger")
        router.add_batch([turn_of("bob", 2, "a badger here too")])
    assert bytes_hold(store / "parked", "badger")
    with engine_of(store) as engine:  # without the service
        engine.erase("bob")
    assert not bytes_hold(store / "parked", "badger")


# ---- a library's panic


class Panic(BaseException):
    """As libraries of other languages raise it: past every `except Exception`."""


class PanickingEncoder(HashingEncoder):
    """Panics as often as told."""

    def __init__(self, times: int) -> None:
        super().__init__(384)
        self.left = times

    def encode(self, texts: Sequence[str]) -> Float16:
        if self.left and any("badger" in text for text in texts):
            self.left -= 1
            raise Panic
        return super().encode(texts)


def test_a_panic_costs_one_call_and_nothing_is_lost(store: Path) -> None:
    encoder = PanickingEncoder(1)
    with InProcess(store, settings(), EngineParts(encoder=lambda _: encoder, llm=mock_llm)) as router:
        router.add_batch(some("ann", 1))
        receipts = router.add_batch([*some("ann", 2), turn_of("ann", 3, "a badger came by")])
        assert [receipt.parked for receipt in receipts] == [None, None]
        assert encoder.left == 0
        encoder.left = 1
        with pytest.raises(EnginePanic):
            router.search("ann", "badger came", k_sub=1)
        assert "a badger came by" in router.search("ann", "badger came", k_sub=1).turns[0].memory
        assert router.drain(), "an episode of the earlier turns is embedded after them"
        encoder.left = 1_000
        (receipt,) = router.add_batch([turn_of("ann", 4, "a badger each time")])
        assert receipt.parked is not None
    with engine_of(store) as engine:
        assert engine.stats()["turns"] == 3


def test_an_encoder_that_is_down_fails_calls_and_not_the_engine(store: Path) -> None:
    encoder = FailingEncoder([], partial(EncoderDown, silent_s=math.inf))
    with InProcess(store, settings(), EngineParts(encoder=lambda _: encoder, llm=mock_llm)) as router:
        router.add_batch(some("ann", 1))
        router.search("ann", "word1")
        encoder.words = [""]
        with pytest.raises(EncoderDown, match="no vector"):
            router.add_batch(some("ann", 2))
        with pytest.raises(EncoderDown, match="no vector"):
            router.search("ann", "word2")
        assert router.search("ann", "word1", k_sub=5).turns, "its vector is known"
        encoder.words = []
        assert [receipt.parked for receipt in router.add_batch(some("ann", 2))] == [None]
        assert router.status()[SINGLE]["reopened"] == 0


def test_one_that_was_fenced_off_ends_and_does_not_fight_back(store: Path, opened: InProcess) -> None:
    opened.add_batch(some("ann", 1))
    heir = Journal.open(store, writable=True, takeover=True)
    for _ in range(2):
        with pytest.raises(Fenced):
            opened.flush("ann")
    assert opened.status()[SINGLE]["state"] == "failed"
    heir.sync()
    heir.close()


def test_closed_means_closed(opened: InProcess) -> None:
    opened.close()
    with pytest.raises(UndertowError, match="were closed"):
        opened.search("ann", "word1")
    with pytest.raises(UndertowError, match="were closed"):
        opened.begin(SearchQuery("ann", "word1")).result(SOON_S)
    opened.close()  # again is nothing


def test_the_map_of_a_plain_store_is_that_of_its_journal(store: Path) -> None:
    first = SingleStoreRoot(store)
    with InProcess(store, settings(), PARTS):
        assert SingleStoreRoot(store).newest_map().tenant_key("ann") == read_info(store).tenant_key("ann")
    assert first.newest_map().hash_key != read_info(store).hash_key  # it was made by another


class HeldEncoder(HashingEncoder):
    """Embeds nothing while it is held."""

    def __init__(self) -> None:
        super().__init__(dim=32)
        self.go = threading.Event()
        self.go.set()
        self.held = threading.Event()

    def encode(self, texts: Sequence[str]) -> Float16:
        if not self.go.is_set():
            self.held.set()
            self.go.wait(SOON_S)
        return super().encode(texts)


@pytest.mark.parametrize("lived", [False, True])
def test_an_import_that_an_erasure_overtakes_brings_nothing_back(store: Path, lived: bool) -> None:
    encoder = HeldEncoder()
    shard = Shard(SingleStoreRoot(store), SINGLE, settings(), EngineParts(lambda _: encoder, mock_llm))
    try:
        stamp = CallStamp("test", shard.hello("test", 1).result(SOON_S).token, 0, 1)
        shard.add(pack(some("ann", *range(RECORDS_PER_STEP + 1))), stamp).result(SOON_S)
        records = list(shard.ask(ExportQuery("ann", limit=10_000)).result(SOON_S).items)
        if lived:
            shard.ask(ImportCommand("bob", records)).result(SOON_S)
            shard.ask(EraseCommand("bob", now=True)).result(SOON_S)
        encoder.go.clear()
        importing = shard.ask(ImportCommand("bob", records))
        assert encoder.held.wait(SOON_S)
        erasing = shard.ask(EraseCommand("bob", now=True, again=True))
        encoder.go.set()
        assert (erasing.result(SOON_S) is not None) == lived
        with pytest.raises(ImportCancelled):
            importing.result(SOON_S)
        assert shard.ask(TenantsQuery()).result(SOON_S) == ["ann"]
        assert shard.ask(ImportCommand("bob", records)).result(SOON_S).turns == RECORDS_PER_STEP + 1
    finally:
        encoder.go.set()
        shard.close()
