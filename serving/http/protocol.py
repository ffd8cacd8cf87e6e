"""HTTP/1.1 on one connection: uvicorn's protocol with bounds, deadlines and answers to what is no request."""

from __future__ import annotations

import asyncio
import http
import re
from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import Any
from urllib.parse import unquote_to_bytes

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from undertow.serving.http.middleware.admission import PLACE, Admission
from undertow.serving.http.middleware.disconnects import gone
from undertow.serving.http.middleware.front import OPEN_PATHS
from undertow.serving.http.middleware.load_limits import OVERLOAD, SOON_S
from undertow.serving.http.problems import CLOSE, MEDIA_TYPE, Problem
from undertow.serving.http.service_settings import ServiceSettings

MAX_HEADER_BYTES = 32 << 10
LINGER_S = 2.0  # how long to read on after the service has ended its side of a connection
TOO_MANY = "Too many connections are open. Try again in a moment."
# what tells how the service does is answered also when it has too much to do
WATCHED = frozenset({b"/metrics", b"/v1/status", *(path.encode() for path in OPEN_PATHS)})


def written(problem: Problem) -> tuple[bytes, bytes]:
    """The head and the body of a response."""
    body = orjson.dumps(problem.document)
    headers = {"Content-Type": MEDIA_TYPE, "Content-Length": str(len(body)), **(problem.headers or {})}
    status = f"HTTP/1.1 {problem.status_code} {http.HTTPStatus(problem.status_code).phrase}\r\n"
    lines = "".join(f"{name.lower()}: {value}\r\n" for name, value in headers.items())
    return f"{status}{lines}\r\n".encode("latin-1"), body


OWN = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store"}
OF_TENANT = re.compile(rb"/(?:v1/tenants|mcp)/([^/]+)")
UNREAD, UNREAD_BODY = written(Problem(429, *OVERLOAD[:2], headers=OWN, retry_after_s=SOON_S))


def tenant_in(path: bytes) -> bytes:
    """A tenant's name in a path, decoded as it may be written in many ways; empty: there is none."""
    found = OF_TENANT.match(path)
    return unquote_to_bytes(found[1]) if found else b""


class Joined:
    """A transport that writes a response's head with what follows it at once, usually the whole body.

    Two writes cost twice the time of the kernel, and wake a client for a head alone.

    It closes in two stages if more of a request may come (`lingers`): first it ends what it writes, and reads
    on. To close with data unread resets a connection, and the client may lose the response (RFC 9112, 9.6).
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, lingers: Callable[[], bool]
    ) -> None:
        self._transport = transport
        self._loop = loop
        self.lingers = lingers
        self._head = b""
        self._ends = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(b"HTTP/1.1 ") and data.endswith(b"\r\n\r\n"):
            self._head = data
            self._loop.call_soon(self.flush)  # it may be all of the response
            return
        if not self._ends:  # else it is of a request before the one that ended it
            self._transport.write(data)

    def is_closing(self) -> bool:
        return self._ends or self._transport.is_closing()

    def close(self, at_once: bool = False) -> None:
        self.flush()
        if at_once or self.is_closing() or not self.lingers():
            self._transport.close()
            return
        self._ends = True
        self._transport.write_eof()
        self._loop.call_later(LINGER_S, self._transport.close)

    def flush(self) -> None:
        """Write the head that waits, if there is one. Not to a connection that ends, is lost or aborted."""
        if self._head and not self.is_closing():
            self.write(b"")


class Incoming(Enum):
    """How much has come of the request that is being received."""

    NOTHING = "nothing"
    HEADERS = "a part of the headers"
    BODY = "the headers, and not all of the body"


class Protocol(HttpToolsProtocol):
    """A bound on connections and on headers, and a deadline for each phase of a request.

    headers: from the first byte, or the beginning of the connection; an idle connection does not stay for
    ever. body: for the rest of a body whose request is answered already; it is discarded, and has as long
    as any body. read: a client that reads nothing of a response is cut off.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._deadlines: dict[str, asyncio.TimerHandle] = {}
        self._incoming = Incoming.NOTHING
        self._head_bytes = 0
        self._serving: RequestResponseCycle | None = None
        # the request that is being received: whose place it takes; it is answered already, unread
        self._tenant = b""
        self._is_refused = False
        self._admission: Admission = self.config.app.state.service.admission  # type: ignore[union-attr]
        self._joined = Joined(transport, self.loop, self._lingers)
        self._cut_off = partial(self._joined.close, True)
        super().connection_made(self._joined)  # type: ignore[arg-type]
        if len(self.connections) > self.config.app.state.max_connections:  # type: ignore[union-attr]
            self._say(Problem(429, "connections", TOO_MANY, retry_after_s=1))
        else:
            self._start("headers", self._settings.header_timeout_s, self._too_slow)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._unset_keepalive_if_required()
        self._head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self._refuse()
            return
        except httptools.HttpParserUpgrade:  # the parser has stopped: it takes no further request
            self._end_after_response()
            return
        if self._head_bytes > MAX_HEADER_BYTES + len(data) * (self._incoming is Incoming.BODY):
            self._refuse()  # headers, or a trailer or an extension of a chunk that does not end
        elif self._incoming is Incoming.HEADERS:
            if "headers" not in self._deadlines:
                self._start("headers", self._settings.header_timeout_s, self._too_slow)
        elif self._incoming is Incoming.NOTHING and self._is_idle and "headers" not in self._deadlines:
            if data.strip(b"\r\n"):
                self._stay_alive()
            else:  # empty lines before a request, which put no deadline off
                self._start("headers", self._settings.header_timeout_s, self._too_slow)

    def on_message_begin(self) -> None:
        self._incoming = Incoming.HEADERS
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """ValueError, which the parser makes an HttpParserError: no HTTP/1.x, no host, too large headers.

        Also if the connection ends: what came with its last request is not looked at.
        """
        if self.transport.is_closing():
            raise ValueError("the connection ends")
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers) > MAX_HEADER_BYTES:
            raise ValueError("the headers are too large")
        version = self.parser.get_http_version()
        hosts = sum(name == b"host" for name, _ in self.headers)
        if version not in ("1.0", "1.1") or hosts > 1 or (version == "1.1" and not hosts):
            raise ValueError("another version, or not one host")
        self._admit()
        if not self._is_refused:
            super().on_headers_complete()
        self._incoming = Incoming.BODY
        self._head_bytes = 0
        self._stop("headers")

    def _admit(self) -> None:
        """Give the request a place, or refuse it. What comes behind a request under way waits for that."""
        path = httptools.parse_url(self.url).path if self._is_idle else b""
        self._tenant = tenant_in(path)
        if self._is_idle and path not in WATCHED and self._admission.refuses(self._tenant):
            self._is_refused = True
            self.transport.write(UNREAD + (b"" if self.parser.get_method() == b"HEAD" else UNREAD_BODY))
            stays = self.parser.get_http_version() != "1.0" and self.parser.should_keep_alive()
            if stays and not self.flow.write_paused:  # else it reads no answers, which would pile up
                self._start("body", self._settings.body_timeout_s, self._cut_off)
            else:
                self.transport.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        """ValueError: it is a trailer, which would become a header of a request under way."""
        if self._incoming is Incoming.BODY:
            raise ValueError("trailers are not taken")
        super().on_header(name, value)

    def on_chunk_header(self) -> None:
        self._head_bytes = 0

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._incoming = Incoming.NOTHING
        self._head_bytes = 0
        self._stop("body")
        if self.transport.is_closing():  # it is refused, and nothing more of it comes
            self._cut_off()
        if not self._is_refused:
            super().on_message_complete()
            if self._tenant and PLACE not in self.scope:
                self.scope[PLACE] = self._admission.enter(self._tenant)  # type: ignore[literal-required]
        self._is_refused = False

    def eof_received(self) -> None:
        """Answers an incomplete request with 400. After a complete one the client counts as disconnected."""
        self._joined.flush()  # uvloop closes the transport after this, and not by `Joined.close`
        if self._incoming is not Incoming.NOTHING and not self._is_refused:
            self._say(Problem(400, "cut-off", "The connection ended within a request."))

    def connection_lost(self, exc: Exception | None) -> None:
        for name in list(self._deadlines):
            self._stop(name)
        super().connection_lost(exc)
        self._joined.lingers = bool  # else it and this hold each other, until a collection, which takes long
        if self._serving is not None and not self._serving.response_complete:
            self._serving.disconnected = True  # uvicorn tells only the newest, which may be pipelined
            self._serving.message_event.set()
            if not self._serving.more_body:
                gone(self._serving.scope)  # type: ignore[arg-type]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._serving = cycle
        super()._start_asgi_task(cycle, app)

    def pause_writing(self) -> None:
        """The write buffer is full: the client must read some of it."""
        super().pause_writing()
        self._start("read", self._settings.read_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop("read")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            return
        if self._incoming is Incoming.BODY and self.cycle.response_complete:
            self._unset_keepalive_if_required()  # it may be shorter
            self._start("body", self._settings.body_timeout_s, self._cut_off)

    @property
    def _is_idle(self) -> bool:
        """Whether no request waits for its response."""
        return self.cycle is None or self.cycle.response_complete

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
        self._stop(name)
        self._deadlines[name] = self.loop.call_later(after_s, act)

    def _stop(self, name: str) -> None:
        if (deadline := self._deadlines.pop(name, None)) is not None:
            deadline.cancel()

    def _lingers(self) -> bool:
        """Read on if more of a request may come, unless the client is behind with reading responses."""
        self.flow.resume_reading()
        return self._incoming is not Incoming.NOTHING and not self.flow.write_paused

    def shutdown(self) -> None:
        self._joined.lingers = bool  # False: the shutdown would wait for it
        super().shutdown()
        if self.transport.is_closing():
            self._cut_off()

    def _too_slow(self) -> None:
        self._stop("headers")
        self._say(Problem(408, "slow", "The request's headers did not come in time."))

    def _refuse(self) -> None:
        """Answer what the parser does not take."""
        self._say(Problem(400, "", "This is no HTTP/1.1 request, or its headers are too large."))

    def _end_after_response(self) -> None:
        """Close the connection once the requests that have come are answered."""
        self.flow.pause_reading()
        if self._is_idle:
            self.transport.close()
        else:
            self.cycle.keep_alive = False

    def _say(self, problem: Problem) -> None:
        """Respond to an incomplete or invalid request, and close.

        If the response to it has begun, only close; earlier requests are answered first, and instead.
        """
        if self.transport.is_closing():
            return
        if self._is_refused:  # which is its response
            self.transport.close()
            return
        if not self._is_idle and self._incoming is not Incoming.BODY:
            self._end_after_response()
            return
        if not self._is_idle:
            self.cycle.disconnected = True  # the application's response would come too late
            self.cycle.message_event.set()
            if self.cycle.response_started or self.pipeline:
                self._cut_off()
                return
        problem.headers = {**(problem.headers or {}), **CLOSE}
        self.transport.write(b"".join(written(problem)))
        self.transport.close()
