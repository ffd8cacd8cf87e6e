"""Events of a real service: by webhooks to real receivers on loopback, and as streams."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import httpx2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from standardwebhooks import Webhook as Verifier

from undertow.engine.base.model import UndertowError
from undertow.serving.auth.key_file import KeyFile
from undertow.serving.auth.principal import Scope
from undertow.serving.client import Client
from undertow.serving.events import feed, sender, webhooks
from undertow.serving.events.sender import Sender, Undelivered, is_public
from undertow.serving.http.routes import events as routes

from ...support.llm_servers import wait_until
from ...support.service.http import SOON_S, Running, at, is_problem, said
from ...support.service.scripted_server import Reply, ScriptedServer, Seen, served
from ..http.test_serve import process

LOOPBACK = '["127.0.0.0/8"]'
BOUNDS: dict[str, Any] = {
    "webhook_networks": ["127.0.0.0/8"],
    **{"max_streams": 3, "max_key_streams": 2, "max_tenant_streams": 2, "max_tenant_requests": 2},
    **{"max_webhooks": 9, "max_key_webhooks": 2},
}
ADMIN = (Scope.ADMIN, Scope.READ, Scope.WRITE, Scope.ERASE)
Events = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(webhooks, "FIRST_RETRY_S", 0.02)
    monkeypatch.setattr(feed, "POLL_S", 0.02)


@pytest.fixture(autouse=True)
def no_webhooks(running: Running) -> Iterator[None]:
    yield
    client = running.client()
    for hook in client.get("/v1/webhooks").json()["results"]:
        assert client.delete(f"/v1/webhooks/{hook['id']}").status_code == 200


def register(client: httpx2.Client, url: str, **more: Any) -> dict[str, Any]:
    made = client.post("/v1/webhooks", json={"url": url, **more})
    assert made.status_code == 200, made.text
    document: dict[str, Any] = made.json()
    return document


def add(client: httpx2.Client, tenant: str, *texts: str) -> list[str]:
    items = [{"messages": said(text)} for text in texts]
    added = client.post(at(tenant, "/memories"), json={"items": items}).json()["items"]
    return [result["id"] for item in added for result in item["results"]]


def state_of(client: httpx2.Client, hook: Mapping[str, Any]) -> dict[str, Any]:
    (found,) = [one for one in client.get("/v1/webhooks").json()["results"] if one["id"] == hook["id"]]
    assert not found.keys() & {"secret", "at"}
    return dict(found)


def taken(server: ScriptedServer) -> list[str]:
    """The ids of the turns that a receiver was told of, in order."""
    events = [event for seen in server.seen for event in json.loads(seen.body)["data"]]
    return [e["memory_id"] for e in events if e.get("kind") == "turn"]


def streamed(client: httpx2.Client, tenant: str, last: str | None = None, **query: Any) -> Events:
    """The events that there are."""
    headers = {} if last is None else {"Last-Event-ID": last}
    response = client.get(at(tenant, "/events"), params={"follow": False, **query}, headers=headers)
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    lines = response.text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert [e["id"] for e in events] == [x.removeprefix("id: ") for x in lines if x.startswith("id: ")]
    return events


def answering(*statuses: int) -> Callable[[Seen], Reply]:
    """One status after the other, then 200."""
    left = [*statuses]
    return lambda _: Reply(left.pop(0) if left else 200, headers={"location": "/elsewhere"})


# ---- webhooks


def test_a_delivery_is_verified_by_the_library_of_the_standard(client: httpx2.Client) -> None:
    with served(answering()) as receiver:
        hook = register(client, receiver.url + "/in?x=1", include_text=True)
        ids = add(client, "signed", "the boat is blue", "the garden is large")
        wait_until(lambda: len(taken(receiver)) == 2)
        for seen in receiver.seen:
            told = Verifier(hook["secret"]).verify(seen.body, dict(seen.headers))
            assert (seen.path, told["type"]) == ("/in?x=1", "events")
            with pytest.raises(Exception, match="signature"):
                Verifier(hook["secret"]).verify(seen.body + b" ", dict(seen.headers))
    assert taken(receiver) == ids
    first = json.loads(receiver.seen[0].body)["data"][0]
    assert (first["text"], first["kind"]) == ("user: the boat is blue\nassistant: noted", "turn")
    assert first == {**streamed(client, "signed", include_text=True)[0]}


@pytest.mark.parametrize("statuses", [(500, 503, 429), (302, 307), (404,)])
def test_what_was_not_taken_is_told_again_in_order(client: httpx2.Client, statuses: tuple[int, ...]) -> None:
    with served(answering(*statuses)) as receiver, served(answering()) as other:
        register(client, receiver.url)
        register(client, other.url)
        ids = add(client, "again", *(f"the boat {n}" for n in range(5)))
        wait_until(lambda: len(receiver.seen) > len(statuses))
        assert taken(receiver)[-5:] == ids == taken(other)
        assert {seen.path for seen in receiver.seen} == {"/"}, "no redirect is followed"
        assert len({seen.headers["webhook-id"] for seen in receiver.seen[: len(statuses) + 1]}) == 1


def test_a_receiver_that_hangs_delays_no_other_and_is_told_later(
    client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "WHOLE_S", 2.0)
    hangs = threading.Event()
    with (
        served(lambda _: Reply() if hangs.is_set() else None) as slow,
        served(answering()) as quick,
    ):
        hook = register(client, slow.url)
        register(client, quick.url)
        ids = add(client, "slow", "the boat")
        wait_until(lambda: taken(quick) == ids)
        wait_until(lambda: state_of(client, hook)["error"] == "TimeoutError")
        hangs.set()
        wait_until(lambda: state_of(client, hook)["attempts"] == 0)
        assert taken(slow)[-1:] == ids


@pytest.mark.parametrize(("status", "most_s"), [(410, 1e9), (500, 0.0)])
def test_a_disabled_webhook_says_why_and_goes_on_where_it_was_left(
    client: httpx2.Client, running: Running, status: int, most_s: float
) -> None:
    running.service.webhooks.most_s = most_s
    with served(answering(status, *[status] * (status == 500))) as receiver:
        hook = register(client, receiver.url, tenants=["gone"])
        ids = add(client, "gone", "the boat")
        wait_until(lambda: state_of(client, hook)["disabled_at"] is not None)
        assert state_of(client, hook)["error"] == f"HTTP {status}"
        tried, later = len(receiver.seen), add(client, "gone", "the garden")
        assert client.post(f"/v1/webhooks/{hook['id']}/enable").json()["disabled_at"] is None
        wait_until(lambda: taken(receiver)[tried:] == [*ids, *later])


def test_a_kill_between_commit_and_delivery_loses_nothing(tmp_path: Path) -> None:
    up = threading.Event()
    env = {"UNDERTOW_SERVICE_WEBHOOK_NETWORKS": LOOPBACK}
    with served(lambda _: Reply() if up.is_set() else None) as receiver:
        with process(tmp_path, "--llm", "off", env=env) as service:
            client = service.client(key := service.key())
            register(client, receiver.url)
            ids = add(client, "ann", "the boat", "the garden")
            wait_until(lambda: bool(receiver.seen))
            assert service.end(signal.SIGKILL) == -signal.SIGKILL
        up.set()
        tried = len(receiver.seen)
        with process(tmp_path, "--llm", "off", env=env) as service:
            wait_until(lambda: len(receiver.seen) > tried)
            told = json.loads(receiver.seen[tried].body)["data"]
            assert [event["memory_id"] for event in told] == ids
            more = add(service.client(key), "ann", "the violin")
            wait_until(lambda: taken(receiver)[-1:] == more)
            assert taken(receiver)[-3:] == [*ids, *more], "and once taken, nothing is told again"
            with service.client(key).stream("GET", at("ann", "/events")) as response:
                lines = response.iter_lines()
                next(lines)
                service.popen.send_signal(signal.SIGTERM)
                assert [*lines][-1] == "", "a stream ends as the service drains, and is not cut off"
            assert service.popen.wait(SOON_S) == 0


def test_keys_have_webhooks_of_their_tenants_alone(client: httpx2.Client, running: Running) -> None:
    ann, reader = running.client(*ADMIN, tenants=("k-ann",)), running.client(Scope.READ, tenants=("k-ann",))
    group = running.client(*ADMIN, prefix="k-")
    blind = running.client(Scope.ADMIN, tenants=("k-ann",))
    with served(answering()) as receiver, served(answering()) as of_all:
        hook, wide = register(ann, receiver.url), register(client, of_all.url)
        is_problem(ann.post("/v1/webhooks", json={"url": receiver.url, "tenants": ["k-bob"]}), 403)
        for key in (reader, blind, group):
            is_problem(key.post("/v1/webhooks", json={"url": receiver.url}), 403)
        assert register(group, receiver.url, tenants=["k-ann"])["tenant_keys"] == hook["tenant_keys"]
        (seen,) = ann.get("/v1/webhooks").json()["results"]
        assert seen["id"] == hook["id"]
        for act in (ann.delete, lambda path: ann.post(path + "/enable")):
            is_problem(act(f"/v1/webhooks/{wide['id']}"), 404, "unknown-webhook")
        ids = {name: add(client, name, "the boat") for name in ("k-ann", "k-bob")}
        wait_until(lambda: len(taken(of_all)) == 2)
        wait_until(lambda: taken(receiver) == ids["k-ann"] * 2)


def test_changes_at_the_same_time_leave_one_sender_or_none(client: httpx2.Client, running: Running) -> None:
    with served(answering()) as receiver, ThreadPoolExecutor(4) as pool:
        path = f"/v1/webhooks/{register(client, receiver.url, tenants=['raced'])['id']}"
        enabled = list(pool.map(lambda _: client.post(path + "/enable").status_code, range(4)))
        assert enabled == [200] * 4
        ids = add(client, "raced", "the boat")
        wait_until(lambda: bool(receiver.seen))
        time.sleep(0.1)  # for other senders, of which there should be none
        assert taken(receiver) == ids
        assert sorted(pool.map(lambda _: client.delete(path).status_code, range(2))) == [200, 404]
        add(client, "raced", "the garden")
        time.sleep(0.1)
        assert taken(receiver) == ids
    rows = running.service.state.submit(lambda db: db.execute("select id from webhooks").fetchall()).result()
    assert rows == []


def test_a_webhook_ends_with_its_key(client: httpx2.Client, running: Running) -> None:
    key, keys = running.key(*ADMIN, prefix="end-"), KeyFile(running.folder / "keys.json")
    with served(answering()) as receiver:
        hook = register(running.client_of(key), receiver.url, tenants=["end-ann"])
        ids = add(client, "end-ann", "the boat")
        wait_until(lambda: taken(receiver) == ids)
        keys.revoke(key.split("_")[1])
        add(client, "end-ann", "the garden")
        wait_until(lambda: state_of(client, hook)["disabled_at"] is not None)
        assert state_of(client, hook)["error"] == "its key has ended"
        is_problem(client.post(f"/v1/webhooks/{hook['id']}/enable"), 409, "key-ended")
        assert taken(receiver) == ids


def test_a_key_has_its_share_of_webhooks_and_each_has_a_secret(
    client: httpx2.Client, running: Running
) -> None:
    own, asked = running.client(*ADMIN, prefix="s-"), {"url": "https://192.0.2.1/", "tenants": ["s-ann"]}
    own.headers["Idempotency-Key"] = "one"
    assert len({own.post("/v1/webhooks", json=asked).json()["secret"] for _ in "ab"}) == 2, "none is kept"
    assert "of this key" in is_problem(own.post("/v1/webhooks", json=asked), 429, "webhooks")["detail"]
    register(client, "https://192.0.2.1/")


def test_an_erasure_is_told_and_nothing_of_the_tenant_is_left(
    client: httpx2.Client, running: Running
) -> None:
    with served(answering()) as receiver:
        register(client, receiver.url, tenants=["erased-name"])
        add(client, "erased-name", "the secret boat")
        wait_until(lambda: bool(receiver.seen))
        certificate = client.delete(at("erased-name")).json()
        wait_until(lambda: len(receiver.seen) == 2)
        (told,) = json.loads(receiver.seen[-1].body)["data"]
        assert (told["type"], told["tenant"]) == ("tenant.erased", None)
        assert told["tenant_key"] == certificate["tenant_key"]
        (event,) = streamed(client, "erased-name")
        assert event == told | {"tenant": "erased-name"}
    state = running.folder / "service"
    written = b"".join(path.read_bytes() for path in state.iterdir() if path.is_file())
    assert b"whsec_" in written and b"erased-name" not in written and b"secret boat" not in written


# ---- streams


def test_a_stream_resumes_behind_an_id_with_exactly_the_rest(client: httpx2.Client) -> None:
    ids = add(client, "resumed", *(f"the boat {n}" for n in range(9)))
    client.delete(at("resumed", f"/memories/{ids[4]}"))
    client.post(at("resumed", "/flush"))
    whole = streamed(client, "resumed")
    assert {event["type"] for event in whole} >= {"memory.created", "memory.deleted"}
    for n, event in enumerate(whole):
        assert streamed(client, "resumed", event["id"]) == whole[n + 1 :]
    add(client, "stranger", "the garden")
    strange = streamed(client, "stranger")[-1]["id"]
    assert streamed(client, "resumed", strange) == whole, "of another tenant or shard: all again"
    is_problem(client.get(at("resumed", "/events"), headers={"Last-Event-ID": "7"}), 422)
    assert streamed(client, "nobody") == []


def test_a_stream_goes_on_with_what_comes_and_tells_that_it_lives(
    client: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routes, "HEARTBEAT_S", 0.1)
    with client.stream("GET", at("live", "/events")) as response:
        lines = response.iter_lines()
        assert next(line for line in lines if line) == ":"
        (memory_id,) = add(client, "live", "the boat")
        data = next(line for line in lines if line.startswith("data: "))
        assert json.loads(data.removeprefix("data: "))["memory_id"] == memory_id
        assert next(line for line in lines if line) == ":", "a heartbeat"


def test_streams_are_counted_and_need_the_right_to_read(client: httpx2.Client, running: Running) -> None:
    for key in (running.client(Scope.WRITE), running.client(Scope.READ, tenants=("other",))):
        is_problem(key.get(at("counted", "/events"), params={"follow": False}), 403)
    own, other, third = (running.client(Scope.READ) for _ in range(3))
    with own.stream("GET", at("a", "/events")), own.stream("GET", at("b", "/events")):
        assert "with this key" in is_problem(own.get(at("c", "/events")), 429, "streams")["detail"]
        with other.stream("GET", at("a", "/events")):
            assert "tenant" in is_problem(third.get(at("a", "/events")), 429, "streams")["detail"]
            assert add(client, "a", "the boat"), "streams take no request's place"
            assert "Too many streams of events" in is_problem(third.get(at("b", "/events")), 429)["detail"]
    wait_until(lambda: "undertow_event_streams 0.0" in client.get("/metrics").text)


# ---- where webhooks may go

REFUSED = (
    "127.0.0.1 10.1.2.3 172.16.0.1 192.168.1.1 169.254.169.254 100.100.100.200 168.63.129.16 0.0.0.0 "
    "224.0.0.1 240.0.0.1 255.255.255.255 192.0.0.192 192.0.2.1 198.18.0.1 192.88.99.1 ::1 :: fe80::1 "
    "::ffff:8.8.8.8 ::8.8.8.8 ::ffff:127.0.0.1 64:ff9b::a00:1 64:ff9b:1::1 2002:7f00:1:: 2001:db8::1 "
    "2001:0:4136:e378:: fe80::1%eth0 fec0::1 fc00::1 fd00:ec2::254 ff02::1 100::1 3fff::1 2001:10::1 5f00::1"
)
WRONG = (
    "http://example.com https://example.com:22 https://u:p@example.com https://example.com/#x https:// x "
    "ftp://example.com https://ex%61mple.com //example.com https://[::1"
)


def test_public_addresses_are_told_from_others() -> None:
    assert all(is_public(ip_address(a)) for a in ("8.8.8.8", "1.1.1.1", "2606:4700::1111", "2a00:1450::1"))


@pytest.mark.parametrize("url", WRONG.split())
def test_urls_that_no_webhook_can_have_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="needs https"):
        Sender(()).checked(url)


def post_to(found: list[list[str]], port: int, networks: Any = (), trust: Any = None) -> None:
    """Post to a name that resolves to one list of addresses after the other."""
    sending = Sender(networks)
    sending.trust = trust

    async def resolve(host: str) -> list[str]:
        assert host == "hook.example"
        return found.pop(0)

    sending.resolve = resolve  # type: ignore[method-assign]
    asyncio.run(sending.post(f"https://hook.example:{port}/in", "whsec_AAAA", "id", b"{}", 0))


@pytest.mark.parametrize("address", REFUSED.split())
def test_a_name_that_resolves_to_such_an_address_is_not_connected_to(address: str) -> None:
    for found in ([address], ["8.8.8.8", address]):
        with pytest.raises(Undelivered, match="no webhook may go"):
            post_to([found], 443)


@pytest.mark.parametrize("host", ["127.1", "2130706433", "0x7f000001", "localhost", "[::ffff:127.0.0.1]"])
def test_forms_of_loopback_that_a_resolver_takes_are_refused(host: str) -> None:
    with pytest.raises(Undelivered, match=r"no webhook may go|gaierror"):
        asyncio.run(Sender(()).post(f"https://{host}/", "whsec_AAAA", "id", b"{}", 0))


def test_a_name_that_hangs_takes_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    go, asked, real = threading.Event(), list[str](), socket.getaddrinfo

    def look(host: str, *more: Any, **how: Any) -> Any:
        asked.append(host)
        return go.wait(60) and [] if host == "hung.example" else real(host, *more, **how)

    monkeypatch.setattr(socket, "getaddrinfo", look)
    monkeypatch.setattr(sender, "WHOLE_S", 0.5)

    async def post_many() -> None:
        sending = Sender(())
        tries = [sending.post("https://hung.example/", "whsec_AAAA", "id", b"", 0) for _ in range(40)]
        failed = await asyncio.gather(*tries, return_exceptions=True)
        assert {str(error) for error in failed} == {"TimeoutError"}
        assert await asyncio.wait_for(sending.resolve("localhost"), 30)
        assert await sending.resolve("8.8.8.8") == ["8.8.8.8"]
        assert asked == ["hung.example", "localhost"]
        go.set()

    asyncio.run(post_many())


def certified(folder: Path, name: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """For a server with a certificate of this name, and for those who trust it."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(subject).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(now - timedelta(1)).not_valid_after(now + timedelta(1))
    made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
    pem = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    form = (serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "pem").write_bytes(pem + key.private_bytes(serialization.Encoding.PEM, *form))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(folder / "pem")
    return server, ssl.create_default_context(cadata=pem.decode())


@pytest.mark.parametrize(("name", "is_taken"), [("hook.example", True), ("other.example", False)])
def test_the_checked_address_is_connected_to_and_tls_verifies_the_name(
    tmp_path: Path, name: str, is_taken: bool
) -> None:
    """A resolver that answers otherwise the second time is not asked a second time."""
    of_server, trust = certified(tmp_path, name)
    with served(answering()) as receiver:
        receiver.socket = of_server.wrap_socket(receiver.socket, server_side=True)
        found, port = [["127.0.0.1"], ["10.0.0.1"]], receiver.server_port
        with nullcontext() if is_taken else pytest.raises(Undelivered, match="ConnectError"):
            post_to(found, port, [ip_network("127.0.0.1")], trust)
        assert [s.headers["host"] for s in receiver.seen] == [f"hook.example:{port}"] * is_taken
        assert found == [["10.0.0.1"]]


def test_the_client_reads_on_behind_an_event(running: Running, client: httpx2.Client) -> None:
    ids = add(client, "read", "the boat is blue", "the garden is large")
    with Client(running.url, running.key(Scope.READ, tenants=("read",))) as reader:
        told = list(reader.events("read", follow=False, include_text=True))
        assert [e["memory_id"] for e in told] == ids and told[0]["text"].startswith("user: the boat")
        follows = reader.events("read", after=told[0]["id"])
        assert next(follows)["id"] == told[1]["id"]
        (third,) = add(client, "read", "the cat is new")
        assert next(follows)["memory_id"] == third
        with pytest.raises(UndertowError, match="scope read"):
            next(reader.events("other"))
