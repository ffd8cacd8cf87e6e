"""Tokens of an OIDC issuer beside keys. It signs with joserfc; the service checks with another library."""

from __future__ import annotations

import hmac
import json
import time
from base64 import urlsafe_b64encode
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import httpx2
import pytest
from joserfc import jwt
from joserfc.jwk import ECKey, OKPKey, RSAKey

from undertow.engine.base.model import UndertowError
from undertow.serving.auth import oidc
from undertow.serving.auth.authenticator import KeyRefused
from undertow.serving.auth.oidc import KeysUnread, TokenVerifier
from undertow.serving.auth.principal import NO_LIMITS
from undertow.serving.http.service_settings import ServiceSettings

from ...support.llm_servers import wait_until
from ...support.service.http import Running, at, is_problem, said, serving
from ...support.service.scripted_server import Reply, Seen, served

AUDIENCE = "https://memories.example"
WRITER = {"undertow_tenants": ["ann"], "scope": "openid undertow:read undertow:write"}


class Issuer:
    """An issuer on loopback. `keys`: those that it names now, by their ids."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {}
        self.odd: list[Any] = []
        self.moved: str | None = None
        self.answers, self.reads = True, 0
        self._open = ExitStack()
        self.url = self._open.enter_context(served(self._answer)).url

    def _answer(self, asked: Seen) -> Reply:
        self.reads += asked.path != "/jwks"
        keys = [key.as_dict(private=False) for key in self.keys.values()]
        documents = {
            "/.well-known/openid-configuration": {
                "issuer": self.url,
                "jwks_uri": self.moved or f"{self.url}/jwks",
            },
            "/jwks": {"keys": [*self.odd, *keys]},
        }
        return Reply.of(documents[asked.path], 200 if self.answers else 500)

    def key(self, kid: str, kind: str = "RSA") -> Any:
        """A new key, which it names from now on."""
        more: Any = {"kid": kid, "use": "sig"}
        match kind:
            case "RSA":
                made: Any = RSAKey.generate_key(2048, more)
            case "Ed25519":
                made = OKPKey.generate_key(kind, more)
            case _:
                made = ECKey.generate_key(kind, more)
        self.keys[kid] = made
        return made

    def token(self, key: Any, alg: str = "RS256", header: dict[str, Any] | None = None, **claims: Any) -> str:
        now = int(time.time())
        usual = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "ann@example",
            "iat": now,
            "exp": now + 300,
            **WRITER,
        }
        body = {name: value for name, value in (usual | claims).items() if value is not None}
        return jwt.encode({"alg": alg, "kid": key.kid, **(header or {})}, body, key, algorithms=[alg])

    def close(self) -> None:
        self._open.close()


@pytest.fixture(scope="module")
def issuer() -> Iterator[Issuer]:
    made = Issuer()
    made.key("rsa")
    made.key("ec", "P-256")
    yield made
    made.close()


@pytest.fixture(scope="module")
def running(issuer: Issuer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    bounds: dict[str, Any] = {"oidc_issuer": issuer.url, "oidc_audience": AUDIENCE}
    with serving(tmp_path_factory.mktemp("store"), **bounds) as service:
        key = issuer.keys["rsa"]
        wait_until(lambda: service.client_of(issuer.token(key)).get("/v1/tenants").status_code != 503)
        yield service


def searched(running: Running, token: str, tenant: str = "ann") -> httpx2.Response:
    return running.client_of(token).post(at(tenant, "/search"), json={"query": "boat"})


def test_a_token_does_what_its_claims_allow(running: Running, issuer: Issuer) -> None:
    for kid, alg in (("rsa", "RS256"), ("ec", "ES256")):
        client = running.client_of(issuer.token(issuer.keys[kid], alg))
        assert client.post(at("ann", "/memories"), json={"messages": said("the boat")}).status_code == 200
        assert client.post(at("ann", "/search"), json={"query": "boat"}).json()["results"]
        is_problem(client.post(at("bob", "/search"), json={"query": "boat"}), 403)
        is_problem(client.delete(at("ann", "/memories")), 403)
        is_problem(client.get("/v1/tenants"), 403)
    admin = issuer.token(issuer.keys["rsa"], scope="undertow:admin undertow:read")
    made = running.client_of(admin).post("/v1/webhooks", json={"url": "https://example.com"})
    is_problem(made, 403, "needs-key")
    assert running.client().post(at("ann", "/search"), json={"query": "boat"}).status_code == 200, (
        "keys as before"
    )
    for claims, status in (
        ({"undertow_tenants": None, "undertow_tenant_prefix": "an"}, 200),
        ({"undertow_tenants": None, "undertow_tenant_prefix": "b"}, 403),
        ({"undertow_tenants": None, "undertow_all_tenants": True}, 200),
        ({"scope": "undertow:write"}, 403),
        ({"scope": "read write"}, 403),
        ({"scope": None}, 403),
        ({"aud": ["https://other.example", AUDIENCE]}, 200),
    ):
        assert searched(running, issuer.token(issuer.keys["rsa"], **claims)).status_code == status, claims


AWAY_S = {"an hour ago": -3_600, "in an hour": 3_600}


@pytest.mark.parametrize(
    "claims",
    [
        {"iss": "https://evil.example"},
        {"iss": None},
        {"aud": "https://other.example"},
        {"aud": None},
        {"exp": "an hour ago"},
        {"exp": None},
        {"nbf": "in an hour"},
        {"sub": None},
        {"undertow_tenants": None},
        {"undertow_tenants": []},
        {"undertow_tenants": "ann"},
        {"undertow_tenants": ["ann"], "undertow_all_tenants": True},
        {"undertow_tenants": None, "undertow_tenant_prefix": ""},
        {"undertow_tenants": None, "undertow_all_tenants": "yes"},
        {"undertow_tenants": None, "undertow_all_tenants": 1},
    ],
    ids=str,  # the same in each process, so no time
)
def test_a_token_with_other_claims_is_refused(
    running: Running, issuer: Issuer, claims: dict[str, Any]
) -> None:
    now = int(time.time())
    at: dict[str, Any] = claims | {n: now + AWAY_S[c] for n, c in claims.items() if str(c) in AWAY_S}
    refused = is_problem(searched(running, issuer.token(issuer.keys["rsa"], **at)), 401, "key-refused")
    assert "ann@example" not in str(refused)


def test_a_token_that_the_issuer_did_not_sign_is_refused(running: Running, issuer: Issuer) -> None:
    good = issuer.token(issuer.keys["rsa"])
    head, body, signature = good.split(".")
    other = issuer.token(issuer.keys["rsa"], undertow_all_tenants=True, undertow_tenants=None).split(".")[1]
    stranger = RSAKey.generate_key(2048, {"kid": "rsa"})
    # its public key as a shared secret, and no signature at all
    signed = f"{part({'alg': 'HS256', 'kid': 'rsa'})}.{body}".encode()
    public = issuer.keys["rsa"].as_pem(private=False)
    digest = urlsafe_b64encode(hmac.digest(public, signed, "sha256")).decode().rstrip("=")
    for token in (
        f"{head}.{other}.{signature}",
        f"{head}.{body}.{signature[:-4]}AAAA",
        issuer.token(stranger),
        f"{signed.decode()}.{digest}",
        f"{part({'alg': 'none', 'kid': 'rsa'})}.{body}.{signature}",
        f"{part({'alg': 'none', 'kid': 'rsa'})}.{body}.",
        issuer.token(issuer.keys["ec"], "ES256", {"kid": "rsa"}),
        "a.b.c",
    ):
        is_problem(searched(running, token), 401, "key-refused")


def part(document: dict[str, str]) -> str:
    return urlsafe_b64encode(json.dumps(document).encode()).decode().rstrip("=")


SOON_S = 0.3


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oidc, "SOONEST_S", SOON_S)


def test_rotated_keys(issuer: Issuer, soon: None) -> None:
    """A new key is taken once it was read; a token of one that the issuer has dropped is refused."""
    first = issuer.key("first")
    with closing(TokenVerifier(issuer.url, AUDIENCE, NO_LIMITS)) as verifier:
        wait_until(lambda: accepted(verifier, issuer.token(first)))
        del issuer.keys["first"]
        second = issuer.key("second")
        with pytest.raises(KeysUnread):
            verifier.check(issuer.token(second))
        wait_until(lambda: accepted(verifier, issuer.token(second)))
        del issuer.keys["second"]
        wait_until(lambda: is_refused(verifier, issuer.token(first)))


@pytest.mark.parametrize("answers", [True, False])
def test_tokens_of_unknown_keys_do_not_flood_the_issuer(soon: None, answers: bool) -> None:
    issuer = Issuer()
    known, stranger = issuer.key("known"), RSAKey.generate_key(2048)
    issuer.answers = answers
    with closing(issuer), closing(TokenVerifier(issuer.url, AUDIENCE, NO_LIMITS)) as verifier:
        wait_until(lambda: issuer.reads > 0)
        began_s, before = time.monotonic(), issuer.reads
        for n in range(300):
            assert not accepted(verifier, issuer.token(stranger, header={"kid": f"{n}"}))
        assert issuer.reads - before <= 1 + (time.monotonic() - began_s) / SOON_S
        issuer.answers = True
        wait_until(lambda: accepted(verifier, issuer.token(known)))


def test_keys_that_cannot_be_used_are_passed_over(soon: None) -> None:
    issuer = Issuer()
    good = issuer.key("good")
    odd: list[Any] = [
        *({"kty": "RSA", "n": "AQAB", "e": "AQAB"}, {"kid": "x", "kty": "OKP", "crv": "X25519", "x": "AA"}),
        *(
            {"kid": "m", "kty": "AKP", "alg": "ML-DSA-44"},
            {"kid": "e", "kty": "EC", "crv": "P-256", "x": "A"},
        ),
        *({"kid": "o", "kty": "oct", "k": "AAAA"}, {"kty": 3}, "no object", None),
    ]
    with closing(issuer), closing(TokenVerifier(issuer.url, AUDIENCE, NO_LIMITS)) as verifier:
        issuer.odd = odd
        wait_until(lambda: accepted(verifier, issuer.token(good)))
        issuer.odd = [{"kid": ["x"]}, 3, {"kty": "RSA", "kid": "r"}]
        later = issuer.key("later")
        wait_until(lambda: accepted(verifier, issuer.token(later)))
        issuer.moved = "http://127.0.0.1/\r\nx"
        assert not accepted(verifier, issuer.token(RSAKey.generate_key(2048), header={"kid": "n"}))
        time.sleep(2 * SOON_S)
        issuer.moved = None
        last = issuer.key("last")
        wait_until(lambda: accepted(verifier, issuer.token(last)))


@pytest.mark.parametrize(
    ("kind", "alg"),
    [(kind, alg) for kind, of in oidc.ALGORITHMS.items() for alg in of],
)
def test_every_algorithm_is_checked(issuer: Issuer, kind: str, alg: str) -> None:
    key = issuer.key(f"{kind} {alg}", kind)
    with closing(TokenVerifier(issuer.url, AUDIENCE, NO_LIMITS)) as verifier:
        token = issuer.token(key, alg)
        wait_until(lambda: accepted(verifier, token))
        assert not accepted(verifier, token[:-8] + "AAAAAAAA")
    del issuer.keys[f"{kind} {alg}"]


def is_refused(verifier: TokenVerifier, token: str) -> bool:
    try:
        verifier.check(token)
    except KeysUnread:
        return False
    except KeyRefused:
        return True
    return False


def accepted(verifier: TokenVerifier, token: str) -> bool:
    try:
        return verifier.check(token).key_id.startswith("oidc-")
    except (KeyRefused, KeysUnread):
        return False


def test_while_the_issuer_is_down_its_last_keys_and_our_own_stay(tmp_path: Path) -> None:
    issuer = Issuer()
    key = issuer.key("only")
    bounds: dict[str, Any] = {"oidc_issuer": issuer.url, "oidc_audience": AUDIENCE}
    with serving(tmp_path / "before", **bounds) as service:
        client = service.client_of(issuer.token(key))
        wait_until(lambda: client.get("/v1/tenants").status_code == 403)
        issuer.close()
        assert client.get("/v1/tenants").status_code == 403, "known still"
    with serving(tmp_path / "after", **bounds) as service:
        waits = service.client_of(issuer.token(key)).get("/v1/tenants")
        assert (waits.status_code, waits.headers["retry-after"]) == (503, "5")
        assert service.client().get("/v1/tenants").status_code == 200


def test_subjects_have_rates_of_their_own(issuer: Issuer, tmp_path: Path) -> None:
    bounds: dict[str, Any] = {
        "oidc_issuer": issuer.url,
        "oidc_audience": AUDIENCE,
        "oidc_requests_per_s": 0.01,
    }
    with serving(tmp_path, **bounds) as service:
        key = issuer.keys["rsa"]
        clients = [service.client_of(issuer.token(key, sub=sub)) for sub in ("one", "two")]
        wait_until(lambda: clients[0].get("/v1/tenants").status_code == 403)
        is_problem(clients[0].get("/v1/tenants"), 429, "rate")
        is_problem(clients[1].get("/v1/tenants"), 403)


def test_settings_that_would_take_anybodys_tokens_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="go together"):
        ServiceSettings(oidc_issuer="https://i.example")
    with pytest.raises(ValueError, match="go together"):
        ServiceSettings(oidc_audience=AUDIENCE)
    for url in ("http://issuer.example", "ftp://127.0.0.1", "issuer"):
        with pytest.raises(ValueError, match="no https URL"):
            TokenVerifier(url, AUDIENCE, NO_LIMITS)
    with (
        pytest.raises(UndertowError, match="exclude each other"),
        serving(tmp_path, open_to_all=True, oidc_issuer="https://i.example", oidc_audience=AUDIENCE),
    ):
        pass
