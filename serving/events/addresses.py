"""Where a webhook may go: the public internet by https, and networks that the operator names.

A name is resolved here, each of its addresses is checked, and the connection is made to a checked address:
a name that resolves otherwise a moment later changes nothing.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

import httpx2

from undertow.engine.base.model import UndertowError

Network = IPv4Network | IPv6Network
Resolve = Callable[[str, int], Awaitable[Sequence[str]]]

PORTS = frozenset({443, 8443})
MOST_CHARS = 2_000
HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252})|[0-9A-Fa-f:.]{2,45}")
UNICAST = ip_network("2000::/3")
# beyond what is_global leaves out: relays to IPv4 and their kin, documentation, and the wire server of Azure
NEVER = tuple(
    map(
        ip_network,
        ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2001:db8::/32", "2002::/16")
        + ("3fff::/20",),
    )
)


class AddressRefused(UndertowError):
    """A webhook may not go there."""


class Addresses:
    """Resolves the hosts of webhooks. `networks`: where any port and plain http are allowed too."""

    def __init__(self, networks: Sequence[Network] = (), resolve: Resolve | None = None) -> None:
        """`resolve`: the addresses of a host, in text; by default the system's resolver."""
        self._networks = tuple(networks)
        self.resolve = resolve or self._by_system
        # threads of their own: a resolver that hangs takes none from others
        self._threads = ThreadPoolExecutor(8, "resolve")

    def checked(self, text: str) -> httpx2.URL:
        """The URL. ValueError says why a webhook cannot have it; addresses are checked at each delivery."""
        try:
            url = httpx2.URL(text[: MOST_CHARS + 1])
        except httpx2.InvalidURL:
            raise ValueError("is no URL. Give one such as https://example.com/hook.") from None
        if len(text) > MOST_CHARS or url.userinfo or url.fragment or not HOST.fullmatch(_host(url)):
            raise ValueError("needs a host, and has no user, no fragment, and at most 2,000 characters.")
        if url.scheme == "http" and self._networks:
            return url
        if url.scheme != "https":
            raise ValueError("is no https URL; http is for networks that the service's operator names.")
        if _port(url) not in PORTS and not self._networks:
            raise ValueError(f"names port {url.port}; use 443 or 8443.")
        return url

    async def of(self, url: httpx2.URL) -> list[str]:
        """All addresses of the URL's host. AddressRefused: one of them is not allowed; OSError."""
        found = list(await self.resolve(_host(url), _port(url)))
        if not found or not all(self._allows(url, text) for text in found):
            raise AddressRefused("The host has an address where no webhook may go.")
        return found

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _allows(self, url: httpx2.URL, text: str) -> bool:
        try:
            address = ip_address(text)
        except ValueError:
            return False
        if any(address in network for network in self._networks):
            return True
        return url.scheme == "https" and _port(url) in PORTS and is_public(address)

    async def _by_system(self, host: str, port: int) -> list[str]:
        def look() -> list[str]:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_ADDRCONFIG)
            return list(dict.fromkeys(str(address[0]) for *_, address in found))

        return await asyncio.get_running_loop().run_in_executor(self._threads, look)


def is_public(address: IPv4Address | IPv6Address) -> bool:
    """Whether it is one of a single host in the public internet, and no other address in another form."""
    if any(address in network for network in NEVER) or address.is_multicast or address.is_reserved:
        return False
    return address.is_global and (address.version == 4 or address in UNICAST)


def _host(url: httpx2.URL) -> str:
    return url.raw_host.decode("ascii")


def _port(url: httpx2.URL) -> int:
    return url.port or (443 if url.scheme == "https" else 80)
