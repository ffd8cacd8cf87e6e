"""The server process: uvicorn with connection limits, deadlines and a graceful shutdown."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Coroutine
from types import FrameType
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.loops.auto import auto_loop_factory

from undertow.engine.base.model import UndertowError
from undertow.engine.base.process_tuning import open_files
from undertow.serving.http.protocol import Protocol
from undertow.serving.http.service import Service

log = logging.getLogger(__name__)

BACKLOG = 2_048
# connections that the event loop takes at once, before any of them can be refused
ACCEPTED_AT_ONCE = 64
# uvloop takes one connection of a socket in each iteration, so that a loop with much to do would hardly take
# any: it listens at so many doubles of each socket too
DOUBLES = 7
# files that connections leave free: for the store, and for connections that are about to be refused
FILES_KEPT = 512
ACCEPT_LOG_S = 60.0
NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


class HttpServer(uvicorn.Server):
    """Serves until SIGTERM or SIGINT, then drains; a second signal ends it at once.

    While it drains, /health/ready reports it, new requests are refused, and requests under way continue, up
    to the settings' time limit. The listening socket closes last.
    """

    def __init__(self, app: FastAPI, on_start: Callable[[int], None] = lambda _: None) -> None:
        """`on_start` gets the port once requests are accepted. UndertowError: too few files may be open."""
        self._on_start = on_start
        self._service: Service = app.state.service
        app.state.max_connections = connections_possible(self._service.settings.max_connections)
        self._accept_failed_at = -ACCEPT_LOG_S
        config = uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,  # paths contain tenants' names
            server_header=False,
            proxy_headers=False,
            backlog=ACCEPTED_AT_ONCE // (DOUBLES + 1),
            timeout_keep_alive=self._service.settings.keep_alive_s,
            timeout_graceful_shutdown=1,  # `_drain` has waited already
        )
        super().__init__(config)
        self._draining: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        assert sockets, "those of `bound`"
        asyncio.get_running_loop().set_exception_handler(self._on_loop_error)
        doubles = [one.dup() for one in sockets for _ in range(DOUBLES)]
        await super().startup([*sockets, *doubles])
        for one in sockets:
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
        self._service.feed.wake()  # streams of events end
        try:
            await asyncio.wait_for(self._service.load.idle(), s.drain_s)
        except TimeoutError:
            log.warning("%d requests are cut off", self._service.load.under_way)
        self.should_exit = True


def run_loop(work: Coroutine[Any, Any, None]) -> None:
    """As asyncio.run, on uvloop where it is installed."""
    with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
        runner.run(work)


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
