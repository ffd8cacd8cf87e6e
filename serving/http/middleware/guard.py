"""Authentication: by API key, or without keys on a loopback address only."""

from __future__ import annotations

import logging
import re
from typing import Protocol

from starlette.datastructures import Headers

from undertow.serving.auth.audit import WITHOUT_KEY
from undertow.serving.auth.authenticator import Authenticator, KeyRefused, is_loopback
from undertow.serving.auth.limits import RequestRates
from undertow.serving.auth.oidc import KeysUnread, TokenVerifier
from undertow.serving.auth.principal import NO_LIMITS, Principal, Scope, TenantScope
from undertow.serving.http.problems import Problem

log = logging.getLogger(__name__)

CHALLENGE = {"WWW-Authenticate": "Bearer"}
NO_KEY = (
    "Send your key, or a token, as Authorization: Bearer ut_... or as X-API-Key. /docs needs none, and "
    "describes the API."
)
NOT_LOOPBACK = (
    "Without keys, this service answers to localhost and the loopback addresses, 127.x.x.x and [::1]."
)
# an IPv6 address in brackets, or a name or IPv4 address; and a port
HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9.-]+))(?::[0-9]{1,5})?")
# most of the time between two reads of an issuer's keys
RETRY_S = 5.0
# three parts in URL-safe base64; a key has no dots
JWT = re.compile(r"[\w-]+\.[\w-]+\.[\w-]+", re.ASCII)
ANYONE = Principal(WITHOUT_KEY, "", TenantScope(all_tenants=True), frozenset(Scope), NO_LIMITS)


class Guard(Protocol):
    """Identifies the sender of a request from its headers."""

    def admit(self, headers: Headers) -> Principal:
        """Problem: 401 for a missing or invalid key; 403: a host that is not loopback; 429: over its rate."""
        ...


class KeyGuard:
    """Requires a key, or a token. A request with a valid one counts against its rate, bad input included."""

    def __init__(self, keys: Authenticator, rates: RequestRates, tokens: TokenVerifier | None = None) -> None:
        self._keys = keys
        self._rates = rates
        self._tokens = tokens

    def admit(self, headers: Headers) -> Principal:
        text = key_text(headers)
        if text is None:
            raise Problem(401, "no-key", NO_KEY, headers=CHALLENGE)
        try:
            holders = self._tokens if self._tokens is not None and JWT.fullmatch(text) else self._keys
            principal = holders.check(text)
        except KeyRefused as refused:
            log.info("key refused: %s", refused.reason)
            raise Problem(401, "key-refused", str(refused), headers=CHALLENGE) from None
        except KeysUnread as unread:
            raise Problem(503, "issuer", f"{unread} Try again.", retry_after_s=RETRY_S) from None
        wait_s = self._rates.take(principal)
        if wait_s:
            words = "This key sends more requests than it may. Wait."
            raise Problem(429, "rate", words, retry_after_s=wait_s)
        return principal


class OpenGuard:
    """Allows everything to everyone: for one's own machine, on a loopback address only.

    A request must have a loopback Host. Otherwise a web page could make a browser on this machine send one,
    through a DNS name that resolves to it.
    """

    def admit(self, headers: Headers) -> Principal:
        host = headers.get("host", "")
        parts = HOST.fullmatch(host)
        origin = headers.get("origin")
        if (
            parts is None
            or not is_loopback((parts[1] or parts[2]).lower())
            or (origin is not None and origin.partition("//")[2] != host)
        ):
            raise Problem(403, "host", NOT_LOOPBACK)
        return ANYONE


def key_text(headers: Headers) -> str | None:
    """The key in a request's headers, if any. mem0's client says Token where others say Bearer."""
    scheme, _, text = headers.get("authorization", "").partition(" ")
    if scheme.lower() in ("bearer", "token") and text.strip():
        return text.strip()
    return headers.get("x-api-key")
