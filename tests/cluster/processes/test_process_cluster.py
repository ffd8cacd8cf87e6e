"""Shards in processes of this machine: killed, left by callers, displaced, and closed with their service."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from undertow.bench.mock.server import spawn_server
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.model import UndertowError
from undertow.engine.base.queries import AnswerQuery, SearchQuery
from undertow.engine.base.results import Answer
from undertow.engine.cluster.processes import pool
from undertow.engine.cluster.processes.cluster import ProcessCluster, gpus_for, spread
from undertow.engine.cluster.root import make_root
from undertow.engine.cluster.routing.errors import ShardDown
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.storage.journal import Journal
from undertow.engine.storage.location import Location, StoreError
from undertow.serving.async_memories import AsyncMemories

from ...support.cluster.in_process import cluster_state, of_one_engine, settings
from ...support.engine import turn_of
from ...support.faults.harness import PARKING, RATES, assert_same_state
from ...support.llm_servers import server_stats, wait_until

SOON_S = 60


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a worker needs longer for its imports than a caller of the service is to wait."""
    monkeypatch.setenv("UNDERTOW_CLUSTER_PATIENCE_S", "90")


@pytest.fixture
def root(tmp_path: Path) -> Location:
    return Location.of(tmp_path / "root")


def pids_of(cluster: ProcessCluster) -> dict[str, int]:
    return {shard: state["pid"] for shard, state in cluster.status().items() if "pid" in state}


def workers_of(pid: int) -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process(pid).children()
    return found


def tenant_at(cluster: ProcessCluster, shard: str) -> str:
    return next(name for n in range(99) if cluster.owners([name := f"tenant-{n}"]) == [shard])


def test_workers_killed_under_load_give_what_one_engine_gives(root: Location, tmp_path: Path) -> None:
    with spawn_server(latency_ms=2, jitter_ms=2, **RATES, **PARKING) as server:
        of_server = settings(llm_url=server)
        rng, (line, expected) = random.Random(4), of_one_engine(tmp_path, of_server)
        with ProcessCluster(root, of_server, 2) as cluster:
            began_with = pids_of(cluster)
            assert (sorted(began_with), len(set(began_with.values()))) == (["s0001", "s0002"], 2)
            for start in range(0, len(line), 30):
                victim = rng.choice(sorted(began_with.values()))
                kill = threading.Timer(rng.uniform(0.0, 0.1), os.kill, (victim, signal.SIGKILL))
                if start == 30:
                    kill.start()
                receipts = cluster.add_batch(line[start : start + 30])
                if start == 30:
                    kill.join()
                assert cluster.stats()["turns"] == start + len(receipts)
            assert cluster.drain()
            assert pids_of(cluster) != began_with, "a new process took over"
    assert_same_state(cluster_state(root), expected)


def test_a_dead_worker_delays_its_own_tenants_alone_and_comes_back(
    root: Location, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNDERTOW_CLUSTER_PATIENCE_S", "10")  # the first add of a cold, busy machine takes 4
    idle = f"import pathlib, time\nwhile not pathlib.Path({str(tmp_path)!r}, 's').exists(): time.sleep(0.1)"
    with ProcessCluster(root, settings(), 2) as cluster:
        dead, alive = (tenant_at(cluster, shard) for shard in ("s0001", "s0002"))
        cluster.add_batch([turn_of(name, 0, "the boat") for name in (dead, alive)])
        with monkeypatch.context() as patch:
            patch.setattr(pool, "PROGRAM", (sys.executable, "-c", idle))
            os.kill(pids_of(cluster)["s0001"], signal.SIGKILL)
            waiting = cluster.begin(SearchQuery(dead, "boat"))
            adding = cluster.begin_add([turn_of(dead, 1, "the boat again")])
            answered_meanwhile = 0
            while not waiting.done() or not adding.done():
                assert cluster.search(alive, "boat").turns
                answered_meanwhile += not waiting.done()
                time.sleep(0.05)
            assert answered_meanwhile > 1, "the others' searches do not wait for the dead worker"
            for refused in (waiting, adding):
                with pytest.raises(ShardDown, match=r"s0001 could not be used for 1\d s"):
                    refused.result()
            states = {shard: state["state"] for shard, state in cluster.status().items()}
            assert states == {"s0001": "unreachable", "s0002": "serving"}
        (tmp_path / "s").touch()
        wait_until(lambda: cluster.status()["s0001"]["state"] == "serving")
        assert [hit.memory[:14] for hit in cluster.search(dead, "boat").turns] == ["user: the boat"]


@asynccontextmanager
async def opened(root: Location, llm: str) -> AsyncIterator[AsyncMemories]:
    """As the service opens them: its event loop does the routing."""
    loop, of_server = asyncio.get_running_loop(), settings(llm_url=llm)
    async with AsyncMemories(
        await asyncio.to_thread(lambda: ProcessCluster(root, of_server, 1, loop=loop))
    ) as memories:
        await memories.add([turn_of("ann", 0, "the boat is blue")])
        yield memories


def test_an_answer_comes_in_pieces_and_one_that_is_left_is_given_up(root: Location) -> None:
    async def work(llm: str) -> None:
        async with opened(root, llm) as memories:
            left = memories.answer_stream(AnswerQuery("ann", "which colour is the boat?"))
            assert isinstance(await anext(left), str)
            await left.aclose()
            *pieces, answer = [p async for p in memories.answer_stream(AnswerQuery("ann", "and now?"))]
            assert len(pieces) > 1
            assert isinstance(answer, Answer) and answer.text == "".join(map(str, pieces))

    def left_count() -> int:
        faults: dict[str, int] = server_stats(llm)["faults"]
        return faults.get("client left", 0)

    with spawn_server(piece_ms=100) as llm:
        asyncio.run(work(llm))
        wait_until(lambda: left_count() == 1)


class SilentServer:
    """Takes prompts and never answers; `left` is set once the caller of one has gone."""

    def __init__(self) -> None:
        self.asked, self.left = asyncio.Event(), asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            if (await reader.readuntil(b"\r\n\r\n")).startswith(b"POST"):
                self.asked.set()
                while await reader.read(65_536):
                    pass
                self.left.set()
            else:
                models = b'{"object": "list", "data": [{"id": "a", "object": "model"}]}'
                head = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: application/json\r\n"
                writer.write(head + b"Content-Length: %d\r\n\r\n" % len(models) + models)
        writer.close()


def test_a_cancelled_call_cancels_its_prompt(root: Location) -> None:
    async def work() -> None:
        silent = SilentServer()
        async with asyncio.timeout(SOON_S), await asyncio.start_server(silent, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with opened(root, f"http://127.0.0.1:{port}/v1") as memories:
                asked = asyncio.create_task(memories.call(AnswerQuery("ann", "which colour?")))
                await silent.asked.wait()
                asked.cancel()
                await silent.left.wait()
                assert (await memories.call(SearchQuery("ann", "boat"))).turns

    asyncio.run(work())


FRONT = """
import sys, time
from undertow.engine.base.config import Settings
from undertow.engine.cluster.processes.cluster import ProcessCluster
from undertow.engine.storage.location import Location

cluster = ProcessCluster(Location.of(sys.argv[1]), Settings(device="cpu", encoder="hash:384"), 1)
print("open", flush=True)
time.sleep(600)
"""


@pytest.fixture
def front(root: Location) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", FRONT, str(root)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "open\n"
            yield process
        finally:
            process.kill()


def test_a_displaced_service_does_not_fight_back_and_no_worker_outlives_a_killed_one(
    front: subprocess.Popen[str], root: Location
) -> None:
    """The last to open a root has it; the one before starts its workers again, and takes nothing back."""
    with ProcessCluster(root, Settings(device="cpu", encoder="hash:384"), 1) as cluster:
        (worker,) = workers_of(front.pid)
        worker.send_signal(signal.SIGINT)  # as a terminal sends them to the whole group
        worker.send_signal(signal.SIGTERM)
        time.sleep(0.3)
        assert worker.is_running()
        worker.kill()
        wait_until(lambda: [one.pid for one in workers_of(front.pid)] not in ([], [worker.pid]))
        (again,) = workers_of(front.pid)
        wait_until(lambda: any("lance" in lib.path.lower() for lib in again.memory_maps()))
        time.sleep(3)  # until it has tried
        pids = pids_of(cluster)
        assert [r.seq for r in cluster.add_batch([turn_of("ann", n, "x") for n in range(3)])] == [0, 1, 2]
        assert pids_of(cluster) == pids
    front.kill()
    assert not psutil.wait_procs([again], timeout=60)[1]


def test_a_fenced_worker_is_replaced_and_its_calls_are_repeated(root: Location) -> None:
    with ProcessCluster(root, settings(), 1) as cluster:
        cluster.add_batch([turn_of("ann", 0, "one")])
        pids = pids_of(cluster)
        heir = Journal.open(root / "shards/s0001", writable=True, takeover=True)
        heir.sync()
        heir.close()
        assert [receipt.seq for receipt in cluster.add_batch([turn_of("ann", 1, "two")])] == [1]
        assert pids_of(cluster) != pids
        assert cluster.stats()["turns"] == 2


def test_an_add_that_cannot_travel_fails_alone(root: Location) -> None:
    class Local(str):
        """Of a function, and so without a name that another process could import."""

    with ProcessCluster(root, settings(), 1) as cluster:
        lost = cluster.begin_add([replace(turn_of("ann", 0, "x"), session_id=Local("s"))])
        with pytest.raises(AttributeError, match="Local"):
            lost.result(SOON_S)
        (receipt,) = cluster.begin_add([turn_of("ann", 1, "y")]).result(SOON_S)
        assert receipt.seq == 0
        assert [state["sent_turns"] for state in cluster.status().values()] == [0]


def test_what_cannot_be_opened_says_so_at_once_and_leaves_no_process(root: Location) -> None:
    make_root(root, 1)
    with Engine(root / "shards/s0001", settings(), HashingEncoder(768)):
        pass
    before = set(workers_of(os.getpid()))
    with pytest.raises(StoreError, match="encoder"):
        ProcessCluster(root, settings(), 1)
    with pytest.raises(UndertowError, match="decided by theta_sim"):
        ProcessCluster(root, settings(theta_sim=0.9), 1)
    assert set(workers_of(os.getpid())) == before


def test_shards_are_spread_evenly_and_no_worker_is_without_one(root: Location) -> None:
    assert spread(["a", "b", "c"], 2) == [["a", "c"], ["b"]]
    assert spread(["a", "b"], 5) == [["a"], ["b"]]
    make_root(root, 3)
    with ProcessCluster(root, settings(), 2) as fewer:
        pids = pids_of(fewer)
        assert pids["s0001"] == pids["s0003"] != pids["s0002"]
        with pytest.raises(UndertowError, match="newer than this service"):
            fewer.ask_shard("s0004", "ping")
    with pytest.raises(UndertowError, match="was closed"):
        fewer.search("ann", "one")


def test_workers_divide_memory_and_gpus(root: Location, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("undertow.engine.base.config.usable_memory", lambda: 12 << 30)
    monkeypatch.setattr("undertow.kernels.device.CUDA_DEVICE_COUNT", 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,-1,8")
    with ProcessCluster(root, plain := Settings(encoder="hash:384"), 3) as cluster:
        named = [psutil.Process(pid).environ() for _, pid in sorted(pids_of(cluster).items())]
        assert [one["CUDA_VISIBLE_DEVICES"] for one in named] == ["5", "7", "5"]
        assert {one._config.settings.arena_bytes for one in cluster._workers._workers} == {2 << 30}
    monkeypatch.setenv("UNDERTOW_ARENA_BYTES", str(1 << 30))
    assert settings().shared_by(3).arena_bytes == 1 << 30, "it was set"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert gpus_for(plain) == ["0", "1"] and gpus_for(settings()) == []
