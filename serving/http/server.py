"""The server that runs the application: uvicorn, with bounds on connections and an end that loses nothing."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any

import h11
import orjson
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from undertow.engine.base.model import UndertowError
from undertow.serving.http.problems import MEDIA_TYPE, Problem
from undertow.serving.http.service_settings import ServiceSettings
from undertow.serving.http.services import Service

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 32 << 10
BACKLOG = 2_048
NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
TOO_MANY = "Too many connections are open. Try again in a moment."


class HttpServer(uvicorn.Server):
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends it at once.

    Draining: /health/ready says so and new requests are refused, while those under way go on, as long as the
    settings allow. Only then is the listening socket closed.
    """

    def __init__(
        self, app: FastAPI, host: str, port: int, on_start: Callable[[int], None] = lambda _: None
    ) -> None:
        """`on_start` is told the port, once requests are taken."""
        self._on_start = on_start
        self._service: Service = app.state.service
        super().__init__(config_of(app, host, port, self._service.settings))
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_start(self.servers[0].sockets[0].getsockname()[1])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """What uvicorn calls at a signal, in its main thread. The signal counts as dealt with."""
        if self._service.load.draining or not self.started:
            self.should_exit = self.force_exit = True
            return
        self._service.load.draining = True

    async def on_tick(self, counter: int) -> bool:
        if self._service.load.draining and self._draining is None:
            self._draining = asyncio.create_task(self._drain())
        return await super().on_tick(counter)

    async def _drain(self) -> None:
        s = self._service.settings
        log.info("draining: %d requests are under way", self._service.load.under_way)
        await asyncio.sleep(s.drain_notice_s)
        try:
            await asyncio.wait_for(self._service.load.idle(), s.drain_s)
        except TimeoutError:
            log.warning("%d requests are cut off", self._service.load.under_way)
        self.should_exit = True


def bound(host: str, port: int) -> list[socket.socket]:
    """Sockets at a host's addresses for `HttpServer.serve`, which refuse till then. UndertowError."""
    made: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for n, (family, kind, protocol, _, address) in enumerate(found):
            # a free port is taken once: the same at every address
            at = made[0].getsockname()[1] if made else port
            try:
                made.append(_bound_at(family, kind, protocol, (address[0], at, *address[2:])))
            except OSError as error:
                # a name may have an address of a family that this machine does not speak
                if error.errno not in NOT_HERE or (n == len(found) - 1 and not made):
                    raise
    except OSError as error:
        for one in made:
            one.close()
        raise UndertowError(
            f"cannot listen at port {port} of {host}: {error.strerror}. Give another --port or --host, "
            "or end what listens there."
        ) from error
    return made


def _bound_at(family: int, kind: int, protocol: int, address: tuple[Any, ...]) -> socket.socket:
    one = socket.socket(family, kind, protocol)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        one.bind(address)
    except OSError:
        one.close()
        raise
    return one


def config_of(app: FastAPI, host: str, port: int, settings: ServiceSettings) -> uvicorn.Config:
    """uvicorn's options. Its access log is off: paths hold tenants' names."""
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        http=Protocol,
        ws="none",
        loop="asyncio",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=1,  # `_drain` has waited already
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )


class Protocol(H11Protocol):
    """uvicorn's, with a bound on connections, and a deadline for a request's headers.

    That runs from the request's first byte, or the connection's beginning: without it, connections that say
    nothing stay for ever. The same goes for a body that is still to come when its request is answered: what
    of it comes is passed over, and it has as long as any body. And who reads nothing of an answer is cut off.
    """

    _deadline: asyncio.TimerHandle | None = None
    # of what is left of the body of `_answered`
    _overdue: asyncio.TimerHandle | None = None
    _answered: RequestResponseCycle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._settings.max_connections:
            self._say(Problem(429, "connections", TOO_MANY, retry_after_s=1))
        else:
            self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # one piece may hold the end of a late body and the beginning of the next request
        if self.cycle is not self._answered or self.conn.their_state is not h11.SEND_BODY:
            self._stop_waiting_for_body()
        if self.conn.their_state is not h11.IDLE:  # the headers are there
            self._stop_waiting()
        elif not self.conn.trailing_data[0]:  # it was the end of a body that nobody waited for
            self._stay_alive()
        elif self._deadline is None:
            self._wait_for_headers()

    def eof_received(self) -> None:
        """A request that was cut off is told so. After a whole one, its sender counts as gone."""
        if self._lacks_body:
            self.cycle.disconnected = True  # what the application says now comes too late
        is_cut = self._lacks_body or (self.conn.their_state is h11.IDLE and self.conn.trailing_data[0])
        if is_cut and not self.transport.is_closing():
            self._say(Problem(400, "cut-off", "The connection ended within a request."))

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self._stop_waiting_for_body()
        self._stop_waiting_for_reader()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """As much waits for the reader as may."""
        super().pause_writing()
        self._unread = self.loop.call_later(self._settings.read_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_waiting_for_reader()

    def on_response_complete(self) -> None:
        self._answered = answered = self.cycle
        super().on_response_complete()
        if self.cycle is not answered:  # another request was there already
            return
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._unset_keepalive_if_required()  # it may be shorter
            self._overdue = self.loop.call_later(self._settings.body_timeout_s, self.transport.close)

    @property
    def _lacks_body(self) -> bool:
        """Whether a request has neither come to its end nor been answered."""
        return self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.SEND_RESPONSE

    @property
    def _settings(self) -> ServiceSettings:
        settings: ServiceSettings = self.config.app.state.service.settings  # type: ignore[union-attr]
        return settings

    def _stay_alive(self) -> None:
        """As uvicorn does behind an answer; it stops at whatever comes next, be it the end of a body."""
        self._unset_keepalive_if_required()
        later = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        self.timeout_keep_alive_task = later

    def _wait_for_headers(self) -> None:
        self._deadline = self.loop.call_later(self._settings.header_timeout_s, self._too_slow)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _stop_waiting_for_body(self) -> None:
        if self._overdue is not None:
            self._overdue.cancel()
            self._overdue = None

    def _stop_waiting_for_reader(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _too_slow(self) -> None:
        self._deadline = None
        if self.transport.is_closing() or self.conn.their_state is not h11.IDLE:
            return
        self._say(Problem(408, "slow", "The request's headers did not come in time."))

    def send_400_response(self, msg: str) -> None:
        """What uvicorn answers to what is no HTTP."""
        self._say(Problem(400, "", "This is no HTTP/1.1 request, or its headers are too large."))

    def _say(self, problem: Problem) -> None:
        """Answer outside any request, and close. Nothing is said behind an answer."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        body = orjson.dumps(problem.document)
        headers = [
            ("content-type", MEDIA_TYPE),
            ("content-length", str(len(body))),
            ("connection", "close"),
            *(problem.headers or {}).items(),
        ]
        events: list[Any] = [
            h11.Response(status_code=problem.status_code, headers=headers),
            h11.Data(data=body),
            h11.EndOfMessage(),
        ]
        for event in events:
            if output := self.conn.send(event):
                self.transport.write(output)
        self.transport.close()
