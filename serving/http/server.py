"""The server process: uvicorn with connection limits, deadlines and a graceful shutdown."""

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
from undertow.engine.base.process_tuning import open_files
from undertow.serving.http.problems import MEDIA_TYPE, Problem
from undertow.serving.http.service import Service
from undertow.serving.http.service_settings import ServiceSettings

log = logging.getLogger(__name__)

MAX_HEADER_BYTES = 32 << 10
BACKLOG = 2_048
# connections that the event loop takes at once, before any of them can be refused
ACCEPTED_AT_ONCE = 64
# files that connections leave free: for the store, and for connections that are about to be refused
FILES_KEPT = 512
ACCEPT_LOG_S = 60.0
NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
TOO_MANY = "Too many connections are open. Try again in a moment."


class HttpServer(uvicorn.Server):
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends it at once.

    While it drains, /health/ready reports it, new requests are refused, and requests under way continue, up
    to the settings' time limit. The listening socket closes last.
    """

    def __init__(
        self, app: FastAPI, host: str, port: int, on_start: Callable[[int], None] = lambda _: None
    ) -> None:
        """`on_start` gets the port once requests are accepted. UndertowError: too few files may be open."""
        self._on_start = on_start
        self._service: Service = app.state.service
        app.state.max_connections = connections_possible(self._service.settings.max_connections)
        self._accept_failed_at = -ACCEPT_LOG_S
        super().__init__(config_of(app, host, port, self._service.settings))
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(BACKLOG)  # asyncio made it as short as what it takes at once
        if self.started:
            self._on_start(self.servers[0].sockets[0].getsockname()[1])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Handles a signal; uvicorn calls it in its main thread."""
        if self._service.load.draining or not self.started:
            self.should_exit = self.force_exit = True
            return
        self._service.load.draining = True

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """As by default, but for connections that cannot be accepted: asyncio reports each, every second."""
        error = context.get("exception")
        if not (isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)):
            loop.default_exception_handler(context)
        elif loop.time() - self._accept_failed_at >= ACCEPT_LOG_S:
            self._accept_failed_at = loop.time()
            log.error("connections cannot be accepted: %s. Raise the limit of open files.", error)

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


def connections_possible(wanted: int) -> int:
    """How many connections may be open at once, at most `wanted`, beside the files of the store.

    Raises this process's limit of open files as far as it may. UndertowError: it leaves none.
    """
    files = open_files(wanted + FILES_KEPT)
    possible = min(wanted, files - FILES_KEPT)
    cure = f"Raise it to {wanted + FILES_KEPT:,} (ulimit -n, or LimitNOFILE of a systemd unit)"
    if possible < 1:
        raise UndertowError(f"this process may open {files:,} files, and needs over {FILES_KEPT}. {cure}.")
    if possible < wanted:
        log.warning("at most %d connections at once: %d files may be open. %s.", possible, files, cure)
    return possible


def bound(host: str, port: int) -> list[socket.socket]:
    """Sockets bound to a host's addresses, for `HttpServer.serve`; not listening yet. UndertowError."""
    made: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for n, (family, kind, protocol, _, address) in enumerate(found):
            # the same free port at every address
            at = made[0].getsockname()[1] if made else port
            try:
                made.append(_bound_at(family, kind, protocol, (address[0], at, *address[2:])))
            except OSError as error:
                # a name may have addresses of a family that this machine lacks
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
    """uvicorn's options. Its access log is off: paths contain tenants' names."""
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
        backlog=ACCEPTED_AT_ONCE,
        timeout_keep_alive=settings.keep_alive_s,
        timeout_graceful_shutdown=1,  # `_drain` has waited already
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
    )


class Protocol(H11Protocol):
    """uvicorn's protocol with a bound on connections and a deadline for each phase of a request.

    headers: from the first byte, or the beginning of the connection; an idle connection does not stay for
    ever. body: for the rest of a body whose request is answered already; it is discarded, and has as long
    as any body. read: a client that reads nothing of a response is cut off.
    """

    _answered: RequestResponseCycle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        super().connection_made(transport)
        if len(self.connections) > self.config.app.state.max_connections:  # type: ignore[union-attr]
            self._say(Problem(429, "connections", TOO_MANY, retry_after_s=1))
        else:
            self._start("headers", self._settings.header_timeout_s, self._too_slow)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        # one piece may hold the end of a late body and the beginning of the next request
        if self.cycle is not self._answered or self.conn.their_state is not h11.SEND_BODY:
            self._stop("body")
        if self.conn.their_state is not h11.IDLE:  # the headers are complete
            self._stop("headers")
        elif not self.conn.trailing_data[0]:  # it was the end of a discarded body
            self._stay_alive()
        elif "headers" not in self._deadlines:
            self._start("headers", self._settings.header_timeout_s, self._too_slow)

    def eof_received(self) -> None:
        """Answers an incomplete request with 400. After a complete one the client counts as disconnected."""
        if self._lacks_body:
            self.cycle.disconnected = True  # the application's response would come too late
        is_cut = self._lacks_body or (self.conn.their_state is h11.IDLE and self.conn.trailing_data[0])
        if is_cut and not self.transport.is_closing():
            self._say(Problem(400, "cut-off", "The connection ended within a request."))

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._deadlines):
            self._stop(name)
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The write buffer is full: the client must read some of it."""
        super().pause_writing()
        self._start("read", self._settings.read_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop("read")

    def on_response_complete(self) -> None:
        self._answered = answered = self.cycle
        super().on_response_complete()
        if self.cycle is not answered:  # the next request is being served already
            return
        if self.conn.their_state is h11.SEND_BODY and not self.transport.is_closing():
            self._unset_keepalive_if_required()  # it may be shorter
            self._start("body", self._settings.body_timeout_s, self.transport.close)

    @property
    def _lacks_body(self) -> bool:
        """Whether a request is incomplete and not answered yet."""
        return self.conn.their_state is h11.SEND_BODY and self.conn.our_state is h11.SEND_RESPONSE

    @property
    def _settings(self) -> ServiceSettings:
        settings: ServiceSettings = self.config.app.state.service.settings  # type: ignore[union-attr]
        return settings

    def _stay_alive(self) -> None:
        """Starts uvicorn's keep-alive timer, as after a response; any further data stops it."""
        self._unset_keepalive_if_required()
        later = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
        self.timeout_keep_alive_task = later

    def _start(self, name: str, after_s: float, act: Callable[[], None]) -> None:
        self._deadlines[name] = self.loop.call_later(after_s, act)

    def _stop(self, name: str) -> None:
        if (deadline := self._deadlines.pop(name, None)) is not None:
            deadline.cancel()

    def _too_slow(self) -> None:
        self._stop("headers")
        if self.transport.is_closing() or self.conn.their_state is not h11.IDLE:
            return
        self._say(Problem(408, "slow", "The request's headers did not come in time."))

    def send_400_response(self, msg: str) -> None:
        """uvicorn's response to invalid HTTP."""
        self._say(Problem(400, "", "This is no HTTP/1.1 request, or its headers are too large."))

    def _say(self, problem: Problem) -> None:
        """Respond outside of any request, and close; if a response has begun, only close."""
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
        response = h11.Response(status_code=problem.status_code, headers=headers)
        events: list[Any] = [response, h11.Data(data=body), h11.EndOfMessage()]
        for event in events:
            if output := self.conn.send(event):
                self.transport.write(output)
        self.transport.close()
