"""Sends calls with the key and time limits, and retries them after failures."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2

from undertow.serving.client.errors import ServiceError, failure_of, without_answer
from undertow.serving.client.requests import Call, checked_url, headers_of
from undertow.serving.client.retries import Retries


class AsyncTransport:
    """A service and a key. `close` leaves a given `http` open."""

    def __init__(
        self,
        url: str,
        key: str | None,
        *,
        timeout_s: float,
        retries: Retries,
        http: httpx2.AsyncClient | None,
    ) -> None:
        """ValueError: the URL or the key is invalid."""
        self.url = checked_url(url)
        self._headers = headers_of(key)
        self._timeout_s = timeout_s
        self._retries = retries
        self._own = http is None
        self._http = httpx2.AsyncClient() if http is None else http

    async def close(self) -> None:
        if self._own:
            await self._http.aclose()

    async def send(self, call: Call) -> httpx2.Response:
        """The whole response. ServiceError."""
        return await self._send(call, stream=False)

    @asynccontextmanager
    async def open(self, call: Call) -> AsyncIterator[httpx2.Response]:
        """The response as a stream. ServiceError, also if the stream breaks off."""
        response = await self._send(call, stream=True)
        try:
            yield response
        except httpx2.TransportError as error:
            raise without_answer(self.url, error) from error
        finally:
            await response.aclose()

    async def _send(self, call: Call, *, stream: bool) -> httpx2.Response:
        waits = self._retries.begin()
        while True:
            try:
                return await self._try(call, stream)
            except ServiceError as failure:
                wait_s = waits.after(failure)
                if wait_s is None:
                    raise
            await asyncio.sleep(wait_s)

    async def _try(self, call: Call, stream: bool) -> httpx2.Response:
        request = self._http.build_request(
            call.method,
            self.url + call.path,
            params=call.query or None,
            content=call.content,
            headers=[*self._headers, *call.headers],
            timeout=call.timeout_s or self._timeout_s,
        )
        try:
            response = await self._http.send(request, stream=stream, follow_redirects=False)
            if response.is_success:
                return response
            body = await response.aread()
            await response.aclose()
        except httpx2.TransportError as error:
            raise without_answer(self.url, error) from error
        raise failure_of(response.status_code, response.headers.get("retry-after"), body)
