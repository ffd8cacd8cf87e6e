"""Access tokens of an OpenID Connect issuer, beside keys: who their holder is here.

The issuer's signing keys are read by a thread: at the start, every REFRESH_S, and when a token names one
that is not known. So no request waits for the issuer. While it is down, the keys read last stay in force.
"""

from __future__ import annotations

import hashlib
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx2
import jwt
import orjson

from undertow.engine.base.model import UndertowError
from undertow.serving.auth.authenticator import KeyRefused
from undertow.serving.auth.principal import KeyLimits, Principal, Scope, TenantScope

log = logging.getLogger(__name__)

# signatures that only the issuer can make, by a key's type and curve: never a shared secret, never none
ALGORITHMS: Mapping[str, tuple[str, ...]] = {
    "RSA": ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    "P-256": ("ES256",),
    "P-384": ("ES384",),
    "P-521": ("ES512",),
    "Ed25519": ("EdDSA",),
}
REFRESH_S, SOONEST_S, TIMEOUT_S = 600.0, 10.0, 5.0
LEEWAY_S = 30
MOST_BYTES = 1 << 20
MOST_UNKNOWN, MOST_KID_CHARS = 1_000, 200
SCOPE_PREFIX = "undertow:"
# how the ids of those begin who come with a token
TOKEN_ID = "oidc-"
# claims: the tenants of a token by name, by a prefix of their names, or all of them
TENANTS, PREFIX, ALL = "undertow_tenants", "undertow_tenant_prefix", "undertow_all_tenants"


class KeysUnread(UndertowError):
    """The signing key of a token is not known yet: the issuer is being asked."""


class SigningKey(NamedTuple):
    key: Any
    algorithms: tuple[str, ...]


class TokenVerifier:
    """Checks tokens of one issuer for one audience. Thread-safe."""

    def __init__(self, issuer: str, audience: str, limits: KeyLimits) -> None:
        """`limits`: of each subject. Begins to read the issuer's keys. ValueError: no URL of an issuer."""
        self._issuer, self._audience, self._limits = issuer, audience, limits
        _check_url(issuer)
        self._keys: Mapping[str, SigningKey] = {}
        # when the last read that succeeded began, and when tokens first named keys that are not known
        self._read_at = -math.inf
        self._unknown: OrderedDict[str, float] = OrderedDict()
        self._asked, self._closed = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._follow, name="oidc", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._asked.set()
        self._thread.join(2 * TIMEOUT_S)

    def check(self, token: str) -> Principal:
        """The holder of a token. KeyRefused; KeysUnread: ask again in some seconds."""
        try:
            kid = str(jwt.get_unverified_header(token).get("kid", ""))
            key = self._keys.get(kid)
            if key is None:
                raise self._unknown_key(kid)
            claims = jwt.decode(
                token,
                key.key,
                algorithms=key.algorithms,
                audience=self._audience,
                issuer=self._issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
            return _principal(claims, self._limits)
        except (jwt.PyJWTError, ValueError) as flaw:
            raise KeyRefused(f"token: {type(flaw).__name__}") from None

    def _unknown_key(self, kid: str) -> UndertowError:
        """Refused, if the issuer's keys were read since a token first named this one."""
        since = self._unknown.setdefault(kid[:MOST_KID_CHARS], time.monotonic())
        while len(self._unknown) > MOST_UNKNOWN:
            self._unknown.popitem(last=False)
        if self._read_at > since:
            return KeyRefused("token: signed with a key that the issuer does not name")
        self._asked.set()
        return KeysUnread("The keys of the token's issuer are being read.")

    def _follow(self) -> None:
        """Read the keys at times, and when a token asks for it; at most once in SOONEST_S."""
        with httpx2.Client(timeout=TIMEOUT_S, follow_redirects=False) as client:
            while not self._closed.is_set():
                self._asked.clear()
                began_s = time.monotonic()
                try:
                    self._keys = self._read(client)
                    self._read_at = began_s
                except Exception as error:  # noqa: BLE001 - whatever an issuer sends, it is asked again
                    kind = type(error).__name__
                    log.error("the keys of %s cannot be read (%s); the last ones stay", self._issuer, kind)
                self._asked.wait(REFRESH_S if self._keys else SOONEST_S)
                self._closed.wait(max(0.0, began_s + SOONEST_S - time.monotonic()))

    def _read(self, client: httpx2.Client) -> dict[str, SigningKey]:
        """The issuer's keys for signatures, by their ids; others are passed over (RFC 7517, section 5)."""
        described = _document(client, f"{self._issuer.rstrip('/')}/.well-known/openid-configuration")
        if described["issuer"] != self._issuer:
            raise ValueError("the document names another issuer")
        _check_url(described["jwks_uri"])
        found = {}
        for raw in _document(client, described["jwks_uri"])["keys"]:
            try:
                algorithms = ALGORITHMS[raw.get("crv", raw["kty"])]
                if raw.get("use", "sig") == "sig":
                    usable = tuple(name for name in algorithms if name == raw.get("alg", name))
                    found[str(raw["kid"])] = SigningKey(jwt.PyJWK(raw, algorithms[0]).key, usable)
            except (jwt.PyJWTError, AttributeError, KeyError, TypeError, ValueError) as flaw:
                log.warning("a key of %s cannot be used: %s", self._issuer, type(flaw).__name__)
        return found


def _document(client: httpx2.Client, url: str) -> dict[str, Any]:
    response = client.get(url).raise_for_status()
    if len(response.content) > MOST_BYTES:
        raise ValueError("the document is too large")
    found: dict[str, Any] = orjson.loads(response.content)
    return found


def _check_url(url: str) -> None:
    """ValueError: keys that come without TLS could be anybody's."""
    parts = urlsplit(url)
    if parts.scheme != "https" and not (
        parts.scheme == "http" and parts.hostname in ("127.0.0.1", "localhost", "::1")
    ):
        raise ValueError(f"{url!r:.200} is no https URL of an issuer")


def _principal(claims: Mapping[str, Any], limits: KeyLimits) -> Principal:
    """ValueError: the claims name no tenants, or not in their form."""
    names, prefix, every = claims.get(TENANTS, []), claims.get(PREFIX), claims.get(ALL, False)
    if not (isinstance(names, list) and all(isinstance(n, str) for n in names) and isinstance(every, bool)):
        raise ValueError(TENANTS)
    if not isinstance(prefix, str | None):
        raise ValueError(PREFIX)
    granted = str(claims.get("scope", "")).split()
    scopes = frozenset(scope for scope in Scope if f"{SCOPE_PREFIX}{scope}" in granted)
    # the subject may be a mail address, and ids are in logs
    subject = hashlib.sha256(f"{claims['iss']}\x1f{claims['sub']}".encode()).hexdigest()
    return Principal(
        f"{TOKEN_ID}{subject[:16]}", "", TenantScope(tuple(names), prefix, every), scopes, limits
    )
