"""The service as a client sees it: its URL, what every call carries, and what it means if none answers."""

from __future__ import annotations

import httpx2

from undertow.serving.client.errors import ServiceError, TimedOut, UnexpectedAnswer, Unreachable


def checked_url(url: str) -> str:
    """The service's URL without a slash at its end. ValueError."""
    try:
        parsed = httpx2.URL(url)
    except httpx2.InvalidURL as error:
        raise ValueError(f"{url!r} is no URL: {error}. Give one such as http://localhost:8080") from error
    if parsed.scheme not in ("http", "https") or not parsed.host or parsed.query or parsed.fragment:
        raise ValueError(f"{url!r} is no service's URL; give one such as http://localhost:8080")
    return url.rstrip("/")


def headers_of(key: str | None) -> list[tuple[str, str]]:
    """What every call carries. ValueError, without a word of it: the key cannot be one."""
    if key is None:
        return []
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise ValueError("the key is empty or holds what no key holds; give it as it was made")
    return [("authorization", f"Bearer {key}")]


def without_answer(url: str, error: httpx2.TransportError) -> ServiceError:
    """The error that a connection's failure stands for."""
    why = str(error) or type(error).__name__
    if isinstance(error, httpx2.SSEError):
        return UnexpectedAnswer(why)
    if isinstance(error, httpx2.TimeoutException) and not isinstance(error, httpx2.ConnectTimeout):
        return TimedOut(
            f"{url} gave no answer in time ({why}); it may have done what was asked. Give a longer "
            "timeout_s, or let the service do it in a job."
        )
    return Unreachable(f"no answer from {url}: {why}. Check the URL and that the service runs.")
