"""Raw connections to a service: requests that are cut off, slow or not HTTP."""

from __future__ import annotations

import socket
from http.client import HTTPResponse
from typing import Any

import orjson

from .http import PROBLEM, SOON_S, Running, at

ADD = at("ann", "/memories")


def request_head(key: str, *headers: str, path: str = ADD, method: str = "POST") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "Host: localhost", f"X-API-Key: {key}", *headers, "", ""]
    return "\r\n".join(lines).encode()


class Wire:
    """A raw connection."""

    def __init__(self, running: Running) -> None:
        host, _, port = running.url.removeprefix("http://").partition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=SOON_S)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def head(self, key: str, *headers: str, path: str = ADD, method: str = "POST") -> None:
        self.socket.sendall(request_head(key, *headers, path=path, method=method))

    def answer(self) -> HTTPResponse:
        """The next response, read to its end."""
        response = HTTPResponse(self.socket)
        response.begin()
        response.read()
        return response

    def until_end(self) -> bytes:
        """Everything received until the service closes the connection."""
        return b"".join(iter(lambda: self.socket.recv(65_536), b""))

    def heard(self) -> tuple[int, dict[str, Any]]:
        """Status and problem of everything received until the service closes."""
        head, _, body = self.until_end().partition(b"\r\n\r\n")
        assert f"content-type: {PROBLEM}".encode() in head.lower()
        return int(head.split()[1]), orjson.loads(body)
