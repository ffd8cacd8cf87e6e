"""One delivery to a webhook, signed as Standard Webhooks (standardwebhooks.com) say."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import secrets
import ssl
import time

import httpx2

from undertow.engine.base.model import UndertowError
from undertow.serving.events.addresses import Addresses, AddressRefused

CONNECT_S, WHOLE_S = 5.0, 15.0
SECRET_BYTES = 32
GONE = 410
PREFIX = "whsec_"


class Undelivered(UndertowError):
    """A delivery failed. `gone`: the receiver wants no more."""

    def __init__(self, reason: str, *, gone: bool = False) -> None:
        super().__init__(reason)
        self.gone = gone


def new_secret() -> str:
    return PREFIX + base64.b64encode(secrets.token_bytes(SECRET_BYTES)).decode()


def signature(secret: str, message_id: str, at: int, body: bytes) -> str:
    """The header `webhook-signature` of a body sent at a time in seconds since 1970."""
    key = base64.b64decode(secret.removeprefix(PREFIX))
    digest = hmac.new(key, f"{message_id}.{at}.".encode() + body, hashlib.sha256).digest()
    return "v1," + base64.b64encode(digest).decode()


class Sender:
    """Posts to checked addresses. It follows no redirect, uses no proxy, and reads no body."""

    def __init__(self, addresses: Addresses, trust: ssl.SSLContext | None = None) -> None:
        """`trust`: whose certificates are taken; by default those that the system trusts."""
        self.addresses = addresses
        self.trust = trust

    async def post(self, url: str, secret: str, message_id: str, body: bytes, attempt: int = 0) -> None:
        """Undelivered: there was no 2xx. Each attempt takes the next address of the host."""
        try:
            async with asyncio.timeout(WHOLE_S):
                target = self.addresses.checked(url)
                found = await self.addresses.of(target)
                status = await self._post(target, found[attempt % len(found)], secret, message_id, body)
        except (AddressRefused, ValueError):
            raise Undelivered("no webhook may go to an address of this host") from None
        except (OSError, httpx2.TransportError) as error:  # a TimeoutError is an OSError
            raise Undelivered(type(error).__name__) from None
        if not 200 <= status < 300:
            raise Undelivered(f"HTTP {status}", gone=status == GONE)

    async def _post(self, url: httpx2.URL, address: str, secret: str, message_id: str, body: bytes) -> int:
        at = int(time.time())
        headers = {
            "host": url.netloc.decode("ascii"),
            "content-type": "application/json",
            "user-agent": "undertow",
            "webhook-id": message_id,
            "webhook-timestamp": str(at),
            "webhook-signature": signature(secret, message_id, at, body),
        }
        # the address takes the name's place, which TLS asks for and verifies
        name = {"sni_hostname": url.raw_host.decode("ascii")}
        self.trust = self.trust or httpx2.create_ssl_context()
        client = httpx2.AsyncClient(
            verify=self.trust, trust_env=False, timeout=httpx2.Timeout(WHOLE_S, connect=CONNECT_S)
        )
        async with (
            client,
            client.stream(
                "POST", url.copy_with(host=address), content=body, headers=headers, extensions=name
            ) as response,
        ):
            return response.status_code
