"""Access tokens of an OpenID Connect issuer, beside keys: who their holder is here.

The issuer's signing keys are read by a thread: at the start, every REFRESH_S, and when a token names one
that is not known. So no request waits for the issuer. While it is down, the keys read last stay in force.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx2
import jwt
import orjson

from undertow.engine.base.model import UndertowError
from undertow.serving.auth.authenticator import KeyRefused
from undertow.serving.auth.principal import KeyLimits, Principal, Scope, TenantScope

log = logging.getLogger(__name__)

# signatures that only the issuer can make: never a shared secret, never none
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
REFRESH_S, SOONEST_S, TIMEOUT_S = 600.0, 10.0, 5.0
LEEWAY_S = 30
MOST_BYTES = 1 << 20
SCOPE_PREFIX = "undertow:"
# claims: the tenants of a token by name, by a prefix of their names, or all of them
TENANTS, PREFIX, ALL = "undertow_tenants", "undertow_tenant_prefix", "undertow_all_tenants"


class KeysUnread(UndertowError):
    """The signing key of a token is not known yet: the issuer is being asked."""


class TokenVerifier:
    """Checks tokens of one issuer for one audience. Thread-safe."""

    def __init__(self, issuer: str, audience: str, limits: KeyLimits) -> None:
        """`limits`: of each subject. Begins to read the issuer's keys. ValueError: no URL of an issuer."""
        self._issuer, self._audience, self._limits = issuer, audience, limits
        _check_url(issuer)
        self._keys: Mapping[str, jwt.PyJWK] = {}
        self._read_at = -SOONEST_S
        self._asked, self._closed = threading.Event(), False
        self._thread = threading.Thread(target=self._follow, name="oidc", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed = True
        self._asked.set()
        self._thread.join(2 * TIMEOUT_S)

    def check(self, token: str) -> Principal:
        """The holder of a token. KeyRefused; KeysUnread: ask again in a second."""
        try:
            kid = jwt.get_unverified_header(token).get("kid", "")
            key = self._keys.get(kid)
            if key is None:
                raise self._unknown_key()
            claims = jwt.decode(
                token,
                key,
                algorithms=ALGORITHMS,
                audience=self._audience,
                issuer=self._issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud", "sub"], "strict_aud": False},
            )
            return _principal(claims, self._limits)
        except (jwt.PyJWTError, ValueError) as flaw:
            raise KeyRefused(f"token: {type(flaw).__name__}") from None

    def _unknown_key(self) -> UndertowError:
        if time.monotonic() - self._read_at < SOONEST_S:
            return KeyRefused("token: signed with a key that the issuer does not name")
        self._asked.set()
        return KeysUnread("The keys of the token's issuer are being read.")

    def _follow(self) -> None:
        while not self._closed:
            self._asked.clear()
            try:
                self._keys = self._read()
                self._read_at = time.monotonic()
            except (httpx2.HTTPError, jwt.PyJWTError, ValueError, KeyError, TypeError) as error:
                log.error(
                    "the keys of %s cannot be read: %s. The last ones stay.",
                    self._issuer,
                    type(error).__name__,
                )
            self._asked.wait(REFRESH_S if self._keys else SOONEST_S)

    def _read(self) -> dict[str, jwt.PyJWK]:
        """The issuer's keys for signatures, by their ids."""
        with httpx2.Client(timeout=TIMEOUT_S, follow_redirects=False) as client:
            described = _document(client, f"{self._issuer.rstrip('/')}/.well-known/openid-configuration")
            if described["issuer"] != self._issuer:
                raise ValueError("the document names another issuer")
            _check_url(described["jwks_uri"])
            keys = _document(client, described["jwks_uri"])["keys"]
        return {
            key["kid"]: jwt.PyJWK(key)
            for key in keys
            if key.get("use", "sig") == "sig" and key["kty"] != "oct"
        }


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
    if (
        not isinstance(names, list)
        or not all(isinstance(name, str) for name in names)
        or every not in (True, False)
    ):
        raise ValueError(TENANTS)
    if not isinstance(prefix, str | None):
        raise ValueError(PREFIX)
    granted = str(claims.get("scope", "")).split()
    scopes = frozenset(scope for scope in Scope if f"{SCOPE_PREFIX}{scope}" in granted)
    # the subject may be a mail address, and ids are in logs
    subject = hashlib.sha256(f"{claims['iss']}\x1f{claims['sub']}".encode()).hexdigest()
    return Principal(
        f"oidc-{subject[:16]}", "", TenantScope(tuple(names), prefix, bool(every)), scopes, limits
    )
