"""Arrow Flight: clients send record batches of turns, and each batch is answered once it is durable."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Lock, Semaphore, Thread
from typing import Any, Protocol

import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.flight as flight

from undertow.engine.base.model import InputError, UndertowError
from undertow.engine.base.results import TableReport
from undertow.engine.cluster.routing.errors import ShardDown
from undertow.engine.readers import StoreEncoder, turns_of_rows
from undertow.serving.auth.authenticator import Authenticator, KeyRefused
from undertow.serving.auth.limits import RequestRates
from undertow.serving.auth.principal import Principal, Scope
from undertow.serving.streams.consumer import STORE_IS_FULL

log = logging.getLogger(__name__)

MOST_BATCH_BYTES = 64 << 20
MOST_CALLS, MOST_CALLS_OF_A_KEY = 64, 16
STOP_S = 5.0
BEARER = "Bearer "
KEY = "key"


class TurnStore(Protocol):
    """An Engine or a Cluster."""

    @property
    def store_encoder(self) -> StoreEncoder: ...
    def add_turns(self, tables: Iterable[pa.Table]) -> TableReport: ...


class FlightServer(flight.FlightServerBase):  # type: ignore[misc]
    """Stores the record batches that clients send with `do_put`. It listens once it is made."""

    def __init__(
        self,
        location: str,
        store: TurnStore,
        keys: Authenticator | None,
        *,
        max_message_bytes: int,
        threads: int = 1,
        certificate: tuple[bytes, bytes] | None = None,
    ) -> None:
        """`keys`: the API keys that are accepted; None: no key is needed.

        `threads`: how many may use the store at a time. `certificate`: chain and key, PEM. UndertowError: it
        cannot listen at `location`.
        """
        self.storing = ThreadPoolExecutor(threads, "storing")
        self._store, self._max_message_bytes = store, max_message_bytes
        self._free = Semaphore(MOST_CALLS)
        self._stopping = False
        try:
            super().__init__(
                location,
                middleware={} if keys is None else {KEY: _KeyCheck(keys)},
                tls_certificates=[certificate] if certificate else None,
            )
        except (OSError, pa.ArrowException) as error:
            raise UndertowError(f"cannot listen at {location}: {error}") from None

    def stop(self) -> bool:
        """Finish the batches under way, and refuse later ones. False: an idle client keeps its call open.

        The process then has to end by `os._exit`: gRPC would wait for that client.
        """
        self._stopping = True
        ending = Thread(target=self.shutdown, daemon=True)
        ending.start()
        ending.join(STOP_S)
        self.storing.shutdown()
        return not ending.is_alive()

    def do_put(
        self,
        context: flight.ServerCallContext,
        descriptor: flight.FlightDescriptor,
        reader: flight.MetadataRecordBatchReader,
        writer: flight.FlightMetadataWriter,
    ) -> None:
        """Store the turns of record batches with the columns of the `messages` format, in their order.

        Each batch is answered by JSON metadata, {"turns", "new_turns", "parked_turns"}, when it is durable.
        The path of the descriptor, if it has one, says where the rows are from: sent again under it, rows
        without idempotency key are duplicates. A client with fewer answers than batches repeats the call.
        """
        key: _Key | None = context.get_middleware(KEY)
        place = "/".join(part.decode(errors="replace") for part in descriptor.path or ())
        with self._one_call(), _told():
            encoder = self._store.store_encoder
            for turns in turns_of_rows(_bounded(reader), place or None, self._max_message_bytes, encoder):
                if self._stopping:
                    raise flight.FlightUnavailableError("the server stops. Send the rest again later.")
                if key is not None:
                    key.check(pc.unique(turns.column("tenant")).to_pylist())
                done = self.storing.submit(self._store.add_turns, [turns]).result()
                writer.write(orjson.dumps(done))

    @contextmanager
    def _one_call(self) -> Iterator[None]:
        if not self._free.acquire(blocking=False):
            raise flight.FlightUnavailableError(f"{MOST_CALLS} calls are under way. Try again later.")
        try:
            yield
        finally:
            self._free.release()


def _bounded(reader: flight.MetadataRecordBatchReader) -> pa.RecordBatchReader:
    def batches() -> Iterator[pa.RecordBatch]:
        for chunk in reader:
            if chunk.data.nbytes > MOST_BATCH_BYTES:
                reason = f"has {chunk.data.nbytes:,} bytes, and {MOST_BATCH_BYTES:,} are accepted"
                raise InputError.of("do_put", "record batch", reason, "Send smaller record batches.")
            yield chunk.data

    return pa.RecordBatchReader.from_batches(reader.schema, batches())


@contextmanager
def _told() -> Iterator[None]:
    """Errors in the classes of Flight. Any other would reach the client with its traceback."""
    try:
        yield
    except flight.FlightError:
        raise
    except (*STORE_IS_FULL, ShardDown) as error:
        raise flight.FlightUnavailableError(f"{error} Send the rest again later.") from None
    except UndertowError as error:
        raise flight.FlightServerError(str(error)) from None
    except Exception as error:
        log.exception("a call failed")
        raise flight.FlightInternalError("the call failed; the server's log says why.") from error


class _Key(flight.ServerMiddleware):  # type: ignore[misc]
    """The key that a call came with. It is checked for each batch, as a call may outlive it."""

    def __init__(self, check: _KeyCheck, text: str) -> None:
        self._check, self._text = check, text
        self._id = check.holder(text).key_id
        check.begin(self._id)

    def check(self, tenants: list[str]) -> None:
        """Count a batch of these tenants, or refuse it."""
        holder = self._check.holder(self._text)
        if not all(holder.may(Scope.WRITE, tenant) for tenant in tenants):
            raise flight.FlightUnauthorizedError(
                "this key may not write to every tenant of the batch, and nothing of it was stored. "
                "Ask for a key with the scope write for them."
            )
        if wait_s := self._check.rates.take(holder):
            raise flight.FlightUnavailableError(f"this key's rate is used up. Try again in {wait_s:.1f} s.")

    def call_completed(self, exception: Exception | None) -> None:
        self._check.end(self._id)


class _KeyCheck(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses calls without a key that may write, and too many of one key."""

    def __init__(self, keys: Authenticator) -> None:
        self._keys, self.rates = keys, RequestRates()
        self._calls, self._counting = Counter[str](), Lock()

    def start_call(self, info: flight.CallInfo, headers: dict[str, list[Any]]) -> _Key:
        (given, *_) = headers.get("authorization") or [""]
        if not isinstance(given, str) or not given.startswith(BEARER):
            raise flight.FlightUnauthenticatedError("send the header `authorization: Bearer KEY`.")
        return _Key(self, given.removeprefix(BEARER))

    def holder(self, text: str) -> Principal:
        """Who has this key now, which must be one that may write."""
        try:
            holder = self._keys.check(text)
        except KeyRefused as refusal:
            raise flight.FlightUnauthenticatedError(str(refusal)) from None
        if Scope.WRITE not in holder.scopes:
            raise flight.FlightUnauthorizedError("this key lacks the scope write. Ask for a key that has it.")
        return holder

    def begin(self, key_id: str) -> None:
        with self._counting:
            if self._calls[key_id] >= MOST_CALLS_OF_A_KEY:
                raise flight.FlightUnavailableError(f"{MOST_CALLS_OF_A_KEY} calls of this key are under way.")
            self._calls[key_id] += 1

    def end(self, key_id: str) -> None:
        with self._counting:
            self._calls[key_id] -= 1
