"""`undertow consume flight`, with pyarrow's own client."""

from __future__ import annotations

import random
import re
import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.flight as flight
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.model import UndertowError
from undertow.engine.base.results import TableReport
from undertow.engine.cluster.routing.errors import ShardDown
from undertow.engine.encoders.factory import make_encoder
from undertow.engine.tenants.registry import ArenaFull
from undertow.serving.auth.authenticator import Authenticator
from undertow.serving.auth.key_file import KeyFile
from undertow.serving.auth.principal import KeyLimits, Scope, TenantScope
from undertow.serving.streams import flight as ours
from undertow.serving.streams.flight import FlightServer

from ...support.cli import run
from ...support.cluster.processes import Command
from ...support.service.streams import ingested, stored, stream_of, turns_in

READY = re.compile(r"Ready on (grpc\S*),")


def put(url: str, table: pa.Table, *path: str, rows: int = 100, key: str = "", **tls: Any) -> list[Any]:
    """Send a table in batches of `rows`; the answers, one a batch."""
    headers = [(b"authorization", f"Bearer {key}".encode())] if key else []
    options = flight.FlightCallOptions(headers=headers, timeout=60)
    with flight.connect(url, **tls) as client:
        descriptor = flight.FlightDescriptor.for_path(*path)
        writer, answers = client.do_put(descriptor, table.schema, options)
        with writer:
            writer.write_table(table, max_chunksize=rows)
            writer.done_writing()
            found = []
            while (answer := answers.read()) is not None:
                found.append(orjson.loads(answer.to_pybytes()))
        return found


def table_of(lines: Sequence[Any]) -> pa.Table:
    return pa.Table.from_pylist(list(lines))


def serving(folder: Path, store: Path) -> Command:
    place = ("--port", "0", "--store", store, "--llm", "off")
    return Command(folder, "consume", "flight", *place, UNDERTOW_BATCH_TURNS="8", UNDERTOW_DURABILITY="fsync")


def address(command: Command) -> str:
    command.wait_until(lambda: READY.search(command.err) is not None)
    found = READY.search(command.err)
    assert found
    return found[1]


def test_a_killed_server_has_lost_and_doubled_nothing_once_the_call_is_repeated(tmp_path: Path) -> None:
    lines, store, rng = stream_of(500), tmp_path / "s", random.Random(1)
    table, expected = table_of(lines), ingested(tmp_path, lines)
    for n in range(2):
        with ThreadPoolExecutor(1) as sending, serving(tmp_path / f"killed-{n}", store) as running:
            sent, before = sending.submit(put, address(running), table, "crm", "monday"), turns_in(store)
            running.wait_until(lambda before=before: turns_in(store) > before)  # type: ignore[misc]
            time.sleep(rng.uniform(0, 0.05))
            running.kill()
            with pytest.raises(flight.FlightError):
                sent.result()
    assert 0 < turns_in(store) < len(lines)
    with serving(tmp_path / "last", store) as running:
        answers = put(address(running), table, "crm", "monday")
        assert [answer["turns"] for answer in answers] == [100] * 15
        assert 0 < sum(answer["new_turns"] for answer in answers) < len(lines)
        assert sum(answer["new_turns"] for answer in put(address(running), table, "crm", "monday")) == 0
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(120) == 0, running.err
    assert stored(store) == expected


class FullStore:
    """An engine whose arena is full as often as `full` says."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.full, self.store_encoder = engine, 0, engine.store_encoder
        self.error: UndertowError = ArenaFull("the arena has no room.")

    def add_turns(self, tables: Iterable[pa.Table]) -> TableReport:
        if self.full:
            self.full -= 1
            raise self.error
        return self.engine.add_turns(tables)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FullStore]:
    settings = Settings(encoder="hash:384", llm_url=None)
    with Engine(tmp_path / "s", settings, make_encoder(settings)) as engine:
        yield FullStore(engine)


@contextmanager
def listening(store: FullStore, keys: Authenticator | None = None, **more: Any) -> Iterator[str]:
    scheme = "grpc+tls" if "certificate" in more else "grpc"
    server = FlightServer(f"{scheme}://localhost:0", store, keys, max_message_bytes=1_000, **more)
    try:
        yield f"{scheme}://localhost:{server.port}"
    finally:
        server.stop()


def test_bad_input_names_row_field_and_cure_and_a_full_store_asks_for_patience(
    store: FullStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = stream_of(2)
    bad = {**good[1], "messages": [{"role": "user", "content": "x" * 1_001}]}
    with listening(store) as url:
        with pytest.raises(flight.FlightServerError, match=r"add_table:2: .*messages.*1,000") as refusal:
            put(url, table_of([good[0], bad]))
        assert "Traceback" not in str(refusal.value)
        with pytest.raises(flight.FlightServerError, match=r"column messages is missing.*Name the columns"):
            put(url, table_of([{"tenant": "ada"}]))
        store.full = 1
        with pytest.raises(flight.FlightUnavailableError, match=r"no room.*again later"):
            put(url, table_of(good), "place")
        store.full, store.error = 1, ShardDown("s1", 1.0, "it does not answer")
        with pytest.raises(flight.FlightUnavailableError, match=r"shard s1.*again later"):
            put(url, table_of(good), "place")
        assert [a["new_turns"] for a in put(url, table_of(good), "place", rows=2)] == [2, 2, 2]
        monkeypatch.setattr(ours, "MOST_BATCH_BYTES", 100)
        with pytest.raises(flight.FlightServerError, match=r"Send smaller record batches"):
            put(url, table_of(good))
        monkeypatch.undo()
        monkeypatch.setattr(store, "add_turns", None)
        with pytest.raises(flight.FlightInternalError, match="server's log") as refusal:
            put(url, table_of(good))
        assert "Traceback" not in str(refusal.value)
        monkeypatch.undo()
        # without a path, each call is of new rows
        assert [a["new_turns"] for a in put(url, table_of(good))] == [6]


def test_a_key_writes_to_its_own_tenants_only_at_its_rate(store: FullStore, tmp_path: Path) -> None:
    file = KeyFile(tmp_path / "keys.json")
    ada = TenantScope(tenants=("ada",))
    writer, reader, slow = (
        file.create(ada, scopes, limits=limits).text
        for scopes, limits in (
            ({Scope.WRITE}, KeyLimits()),
            ({Scope.READ}, KeyLimits()),
            ({Scope.WRITE}, KeyLimits(requests_per_s=0.001)),
        )
    )
    lines = stream_of(3)
    own = table_of([line for line in lines if line["tenant"] == "ada"])
    with closing(Authenticator(tmp_path / "keys.json")) as keys, listening(store, keys) as url:
        for key in ("", "nonsense", writer[:-1] + ("a" if writer[-1] != "a" else "b")):
            with pytest.raises(flight.FlightUnauthenticatedError):
                put(url, own, key=key)
        for key, table in ((writer, table_of(lines)), (reader, own)):
            with pytest.raises(flight.FlightUnauthorizedError, match="scope write"):
                put(url, table, key=key)
        assert store.engine.tenants.names() == []
        assert [a["new_turns"] for a in put(url, own, key=writer)] == [3]
        with flight.connect(url) as client:
            options = flight.FlightCallOptions(headers=[(b"authorization", f"Bearer {writer}".encode())])
            descriptor = flight.FlightDescriptor.for_path()
            calls = [client.do_put(descriptor, own.schema, options) for _ in range(16)]
            for open_call, answers in calls:
                open_call.write_table(own)
                assert orjson.loads(answers.read().to_pybytes())["new_turns"] == 3
            with pytest.raises(flight.FlightUnavailableError, match="16 calls of this key"):
                put(url, own, key=writer)
            assert [a["new_turns"] for a in put(url, own, key=slow)] == [3], "calls of others go on"
            with pytest.raises(flight.FlightUnavailableError, match="rate"):
                put(url, own, key=slow)
            file.revoke(writer.split("_")[1])
            with pytest.raises(flight.FlightUnauthenticatedError):
                open_call.write_table(own)
                assert answers.read() is None
                open_call.close()
        with pytest.raises(flight.FlightUnauthenticatedError):
            put(url, own, key=writer)
    assert store.engine.tenants.names() == ["ada"]


def test_sigterm_waits_for_no_silent_client(tmp_path: Path) -> None:
    table = table_of(stream_of(1))
    with serving(tmp_path / "c", tmp_path / "s") as running, flight.connect(address(running)) as client:
        writer, answers = client.do_put(flight.FlightDescriptor.for_path(), table.schema)
        writer.write_table(table)
        assert orjson.loads(answers.read().to_pybytes())["new_turns"] == 3
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(120) == 0, running.err
    assert turns_in(tmp_path / "s") == 3


def test_tls_and_where_no_key_is_needed(store: FullStore, tmp_path: Path) -> None:
    chain, key = certificate()
    with listening(store, certificate=(chain, key)) as url:
        assert put(url, table_of(stream_of(1)), tls_root_certs=chain)[0]["new_turns"] == 3
        with pytest.raises(flight.FlightError):
            put(url.replace("grpc+tls", "grpc"), table_of(stream_of(1)))
    open_to_all = run("consume", "flight", "--host", "0.0.0.0", "--store", tmp_path / "t")
    assert (open_to_all.code, "loopback" in open_to_all.err, (tmp_path / "t").exists()) == (2, True, False)


def certificate() -> tuple[bytes, bytes]:
    """A certificate of localhost that signs itself, and its key, PEM."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name.from_rfc4514_string("CN=localhost")
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return made.public_bytes(serialization.Encoding.PEM), key.private_bytes(*form)
