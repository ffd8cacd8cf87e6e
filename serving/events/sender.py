"""One delivery of a webhook: signed as Standard Webhooks say, to an address that was checked.

A host is resolved here, each of its addresses is checked, and one of these is connected to: what its name
resolves to a moment later changes nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import socket
import ssl
import time
from base64 import b64decode, b64encode
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any

import httpx2

from undertow.engine.base.model import UndertowError

WHOLE_S, CONNECT_S = 15.0, 5.0
PREFIX = "whsec_"
UNICAST = ip_network("2000::/3")
# beyond what is_global leaves out: relays to IPv4 and their kin, documentation, the wire server of Azure
_NEVER = "168.63.129.16/32 192.0.0.0/24 192.88.99.0/24 2001::/23 2001:db8::/32 2002::/16 3fff::/20"
NEVER = [ip_network(text) for text in _NEVER.split()]
WRONG_URL = (
    "needs https, port 443 or 8443, a host, and no user or fragment; http and other ports are for networks "
    "that the service's operator names."
)


class Undelivered(UndertowError):
    """There was no answer of 2xx; the text says what there was."""


class Sender:
    """It follows no redirect, uses no proxy, and reads no body. `networks`: at any port, by http too."""

    def __init__(self, networks: Sequence[IPv4Network | IPv6Network]) -> None:
        self._networks = networks
        # threads of their own, twice as many as one key may have webhooks; a name that hangs takes one
        self._threads = ThreadPoolExecutor(32, "resolve")
        self._looking: dict[str, asyncio.Future[Any]] = {}
        # whose certificates are taken; made at the first delivery
        self.trust: ssl.SSLContext | None = None

    def checked(self, text: str) -> httpx2.URL:
        """The URL of a webhook. ValueError."""
        try:
            url = httpx2.URL(text)
        except httpx2.InvalidURL:
            raise ValueError(WRONG_URL) from None
        is_open = url.scheme in ("http", "https") if self._networks else _is_ordinary(url)
        if not is_open or url.userinfo or url.fragment or not url.host or "%" in url.host:
            raise ValueError(WRONG_URL)
        return url

    async def post(self, url: str, secret: str, message_id: str, body: bytes, attempt: int) -> None:
        """Undelivered. Each attempt takes the next address of the host."""
        try:
            async with asyncio.timeout(WHOLE_S):
                status = await self._post(self.checked(url), signed(secret, message_id, body), body, attempt)
        except ValueError as error:
            raise Undelivered(str(error)) from None
        except (OSError, httpx2.TransportError) as error:  # TimeoutError is an OSError
            raise Undelivered(type(error).__name__) from None
        if not 200 <= status < 300:
            raise Undelivered(f"HTTP {status}")

    async def _post(self, url: httpx2.URL, headers: dict[str, str], body: bytes, attempt: int) -> int:
        found = await self.resolve(url.raw_host.decode("ascii"))
        for address in map(ip_address, found):
            is_named = any(address in network for network in self._networks)
            if not is_named and not (_is_ordinary(url) and is_public(address)):
                raise ValueError("no webhook may go to an address of this host")
        to = url.copy_with(host=found[attempt % len(found)])
        headers |= {"host": url.netloc.decode("ascii"), "content-type": "application/json"}
        tls = {"sni_hostname": url.raw_host.decode("ascii")}  # the name that it verifies
        self.trust = self.trust or httpx2.create_ssl_context()
        timeout = httpx2.Timeout(WHOLE_S, connect=CONNECT_S)
        async with (
            httpx2.AsyncClient(verify=self.trust, trust_env=False, timeout=timeout) as client,
            client.stream("POST", to, content=body, headers=headers, extensions=tls) as response,
        ):
            return response.status_code

    async def resolve(self, host: str) -> list[str]:
        """The addresses of a host, in text, at least one. OSError. A name is looked up once at a time."""
        with suppress(ValueError):
            return [str(ip_address(host))]
        if host not in self._looking:
            look = partial(
                socket.getaddrinfo, host, None, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG
            )
            looking = asyncio.get_running_loop().run_in_executor(self._threads, look)
            self._looking[host] = looking
            looking.add_done_callback(partial(self._looked, host))
        # who gives up waiting does not end the lookup, and the next try waits for the same one
        found = await asyncio.shield(self._looking[host])
        return [str(address[0]) for *_, address in found]

    def _looked(self, host: str, done: asyncio.Future[Any]) -> None:
        del self._looking[host]
        if not done.cancelled():
            done.exception()  # nobody may be waiting for it any more


def signed(secret: str, message_id: str, body: bytes) -> dict[str, str]:
    """The headers of a message that is sent now."""
    at, key = str(int(time.time())), b64decode(secret.removeprefix(PREFIX))
    mac = hmac.digest(key, f"{message_id}.{at}.".encode() + body, hashlib.sha256)
    made = "v1," + b64encode(mac).decode()
    return {"webhook-id": message_id, "webhook-timestamp": at, "webhook-signature": made}


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether it is one of a single host in the public internet, and no other address in another form."""
    if any(address in network for network in NEVER) or address.is_multicast or address.is_reserved:
        return False
    return address.is_global and (address.version == 4 or address in UNICAST)


def _is_ordinary(url: httpx2.URL) -> bool:
    """Whether it is of the form that is allowed for public addresses."""
    return url.scheme == "https" and url.port in (None, 443, 8443)
