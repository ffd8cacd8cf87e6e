"""Frames between a service and its workers: whatever pieces they come in, with tables and errors."""

from __future__ import annotations

import asyncio
import pickle
import socket
import struct
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest

from undertow.engine.base.model import UndertowError
from undertow.engine.base.results import Hit, SearchResult
from undertow.engine.cluster.processes.transport import _LENGTH, ITERATIONS, Connection, dumps, pack_error
from undertow.engine.cluster.routing.errors import ShardDown
from undertow.engine.cluster.wire import pack

from ...support.engine import turn_of

pytestmark = pytest.mark.anyio


class End:
    """One end, and what came to it."""

    def __init__(self) -> None:
        self.frames: list[Any] = []
        self.ended = asyncio.Event()
        self.connection = Connection(self.frames.append, self.ended.set)

    async def has(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.frames) < count:
                await asyncio.sleep(0.001)


async def test_frames_come_in_order_whatever_their_size_and_the_end_is_noticed() -> None:
    ours, theirs = socket.socketpair()
    one, other = End(), End()
    await one.connection.open(ours)
    await other.connection.open(theirs)
    frames = [n * b"x" for n in (0, 1, 3_000_000, 7)] + list(range(50))
    for frame in frames:
        one.connection.send(frame)
        other.connection.send([frame])
    one.connection.close()
    await other.has(len(frames))
    assert other.frames == frames
    await other.ended.wait()
    other.connection.send("late")  # is no error


async def test_frames_that_gather_travel_together_and_others_pass_them() -> None:
    ours, theirs = socket.socketpair()
    one, other = End(), End()
    await one.connection.open(ours)
    await other.connection.open(theirs)
    transport = one.connection._transport
    assert transport is not None
    counted = Mock(wraps=transport)
    one.connection._transport = counted
    for n in range(ITERATIONS // 2):
        one.connection.send(n, gathers=True)
        await asyncio.sleep(0)
    one.connection.send("at once")
    await other.has(1 + ITERATIONS // 2)
    assert other.frames == ["at once", *range(ITERATIONS // 2)]
    assert counted.write.call_count == 2
    one.connection.send("last", gathers=True)
    one.connection.close()
    await other.ended.wait()
    assert other.frames[-1] == "last", "what gathers is sent before the end"


@pytest.mark.parametrize("size", [1, 3, 9, 100])
async def test_a_frame_may_come_in_pieces(size: int) -> None:
    ours, theirs = socket.socketpair()
    end = End()
    await end.connection.open(theirs)
    frames = ["a", ("b", 200 * "b"), 3]
    data = b"".join(struct.pack("<Q", len(packed)) + packed for packed in map(dumps, frames))
    with ours:
        for at in range(0, len(data), size):
            ours.send(data[at : at + size])
            await asyncio.sleep(0)
        await end.has(3)
    assert end.frames == frames
    await end.ended.wait()


def test_a_table_travels_alone_without_what_it_was_cut_from() -> None:
    whole = pack([turn_of("ann", n, f"word{n}") for n in range(1_000)])
    packed = dumps(("add", whole.slice(10, 2)))
    assert pickle.loads(packed) == ("add", whole.slice(10, 2))
    assert len(packed) < 5_000
    assert isinstance(pickle.loads(dumps(whole)), pa.Table)


def test_results_are_the_same_on_the_other_side() -> None:
    hit = Hit("id", "turn", "a boat", 0.5, None, (1, 2))
    result = SearchResult((), (hit,), (hit, hit), quoted=frozenset({3}))
    assert pickle.loads(dumps(result)) == result


class Unlucky(UndertowError):
    """Cannot be made again from its text."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def test_an_error_travels_and_one_that_cannot_names_its_type() -> None:
    down = pickle.loads(pack_error(ShardDown("s1", 3.0, "why")))
    assert isinstance(down, ShardDown) and down.shard == "s1"
    lost = pickle.loads(pack_error(Unlucky(1, 2)))
    assert type(lost) is UndertowError
    assert "Unlucky" in str(lost)


async def test_a_large_frame_is_not_copied_with_each_of_its_pieces() -> None:
    end = End()
    pickled = dumps(8_000_000 * b"x")
    frame = _LENGTH.pack(len(pickled)) + pickled
    end.connection.data_received(frame[:65_536])
    held = end.connection._rest
    for at in range(65_536, len(frame), 65_536):
        end.connection.data_received(frame[at : at + 65_536])
        assert end.connection._rest is held
    assert end.frames == [8_000_000 * b"x"]
