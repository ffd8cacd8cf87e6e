"""Frames between a service and its workers, over a pair of connected sockets.

A frame is a length of 8 bytes and a pickle. The sockets have no address: a worker inherits its end from the
process that starts it. So both ends are the same program and user, and a pickle is no risk.
"""

from __future__ import annotations

import asyncio
import copyreg
import io
import pickle
import socket
import struct
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, cast

import pyarrow as pa

from undertow.engine.base.model import UndertowError
from undertow.engine.base.results import Answer, Hit, Receipt, SearchResult
from undertow.engine.cluster.shard.call_queue import CallStamp
from undertow.engine.cluster.wire import from_buffer, to_buffer

# For so many iterations of the event loop a frame that gathers waits for more. A busy loop takes up many
# requests meanwhile, an idle one is soon through.
ITERATIONS = 12

_LENGTH = struct.Struct("<Q")
# of frequent frames: pickled by their fields, as a dataclass with slots takes a slow way of its own
_PLAIN = (Answer, CallStamp, Hit, Receipt, SearchResult)


def _by_fields(kind: type[Any]) -> Callable[[Any], tuple[type[Any], tuple[Any, ...]]]:
    values_of = attrgetter(*(field.name for field in fields(kind)))
    return lambda value: (kind, values_of(value))


def _table(stream: bytes) -> pa.Table:
    return from_buffer(pa.py_buffer(stream))


class _Pickler(pickle.Pickler):
    """Tables travel as Arrow streams."""

    dispatch_table = copyreg.dispatch_table | {
        pa.Table: lambda table: (_table, (to_buffer(table).to_pybytes(),)),
        **{kind: _by_fields(kind) for kind in _PLAIN},
    }


def dumps(value: object) -> bytes:
    """A pickle of a frame. TypeError, AttributeError, pickle.PicklingError: it holds what cannot travel."""
    out = io.BytesIO()
    _Pickler(out, 5).dump(value)
    return out.getvalue()


def pack_error(error: BaseException) -> bytes:
    """An error as bytes of their own, so that one that cannot travel spoils no frame."""
    try:
        packed = dumps(error)
        pickle.loads(packed)
    except Exception:  # noqa: BLE001 - an exception may fail to pickle in any way
        return dumps(UndertowError(f"a worker failed: {type(error).__name__}. Its log says where."))
    return packed


class Connection(asyncio.Protocol):
    """One end of a pair of sockets. Used on its event loop alone."""

    def __init__(self, on_frame: Callable[[Any], None], on_end: Callable[[], None]) -> None:
        """`on_frame` gets each frame of the other end, `on_end` is called once when the sockets end."""
        self._on_frame = on_frame
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._rest = bytearray()
        self._unsent: list[bytes] = []
        self._gathered: list[bytes] = []

    async def open(self, end: socket.socket) -> None:
        """Begin with one of the sockets, which this closes."""
        end.setblocking(False)
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def send(self, frame: object, *, gathers: bool = False) -> None:
        """Send a frame; nothing is sent once the sockets have ended. For what it raises see `dumps`.

        Frames of one round of the event loop are sent together, which saves system calls at both ends.
        `gathers`: it waits for more such frames, and others pass it.
        """
        data = dumps(frame)
        unsent = self._gathered if gathers else self._unsent
        if not unsent:
            asyncio.get_running_loop().call_soon(self._flush, unsent, ITERATIONS if gathers else 0)
        unsent += (_LENGTH.pack(len(data)), data)

    def _flush(self, unsent: list[bytes], iterations: int = 0) -> None:
        if iterations:
            asyncio.get_running_loop().call_soon(self._flush, unsent, iterations - 1)
            return
        data, unsent[:] = unsent[:], []
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(b"".join(data))

    def close(self) -> None:
        """End the sockets once everything was sent."""
        self._flush(self._gathered)
        self._flush(self._unsent)
        if self._transport is not None:
            self._transport.close()

    # ---- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()

    def data_received(self, data: bytes) -> None:
        if self._rest:
            self._rest += data
        received = self._rest or data
        at, size = 0, len(received)
        with memoryview(received) as view:
            while size - at >= _LENGTH.size:
                begin = at + _LENGTH.size
                end = begin + _LENGTH.unpack_from(view, at)[0]
                if end > size:
                    break
                frame = pickle.loads(view[begin:end])
                at = end
                self._on_frame(frame)
        if received is data:
            self._rest = bytearray(data[at:])
        elif at:  # else a large frame would be copied with each piece of it
            del self._rest[:at]
