"""An HTTP server in a thread that answers as a test says, also wrongly, partly, late or never."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Piece = bytes | threading.Event | None
"""Of a streamed body: bytes; an event to wait for; None: the connection breaks."""


@dataclass
class Reply:
    """One answer; a body in pieces has no length. `cut`: after so many bytes of the body the connection ends,
    -1: before any answer."""

    status: int = 200
    body: bytes | Sequence[Piece] = b"{}"
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None

    @classmethod
    def of(cls, document: Any, status: int = 200) -> Reply:
        return cls(status, json.dumps(document).encode(), {"content-type": "application/json"})


@dataclass(frozen=True)
class Seen:
    """One request, as it came in."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class ScriptedServer(ThreadingHTTPServer):
    """Sends what `answer` returns for a request; None: nothing until the server is closed."""

    def __init__(self, answer: Callable[[Seen], Reply | None], port: int, protocol: str) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.answer, self.protocol = answer, protocol
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.seen: list[Seen] = []
        self.closing = threading.Event()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has left is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def handle_one_request(self) -> None:
        self.protocol_version = self.server.protocol
        self.raw_requestline = self.rfile.readline()
        if not self.raw_requestline or not self.parse_request():
            self.close_connection = True
            return
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        seen = Seen(self.command, self.path, headers, body)
        self.server.seen.append(seen)
        reply = self.server.answer(seen)
        if reply is None:
            self.server.closing.wait()
        if reply is None or reply.cut == -1:
            self.close_connection = True
        else:
            self._send(reply)

    def _send(self, reply: Reply) -> None:
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        if isinstance(reply.body, bytes):
            self.send_header("content-length", str(len(reply.body)))
            self.close_connection |= reply.cut is not None
            pieces: Sequence[Piece] = [reply.body[: reply.cut]]
        else:
            self.close_connection = True
            pieces = reply.body
        self.end_headers()
        for piece in pieces:
            if isinstance(piece, bytes):
                self.wfile.write(piece)
            elif piece is not None:
                piece.wait(60)
            else:
                self.connection.close()
                return

    def log_message(self, format: str, *args: Any) -> None:
        pass


@contextmanager
def served(
    answer: Callable[[Seen], Reply | None], *, port: int = 0, protocol: str = "HTTP/1.0"
) -> Iterator[ScriptedServer]:
    server = ScriptedServer(answer, port, protocol)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()
