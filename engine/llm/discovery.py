"""Addresses of LLM servers: URLs, or names of the Ray actors that run them.

    http://10.0.0.7:8000/v1,http://10.0.0.8:8000/v1
    ray:vllm-0,ray:vllm-1

An actor that Ray restarts on another node gets another URL and keeps its name. So the name is a stable
address for all processes of the Ray cluster. Imports only the standard library: the node of a server has
little else.
"""

from __future__ import annotations

import re
import sys
from concurrent.futures import Future
from typing import Any
from urllib.parse import urlsplit

from undertow.engine.base.model import UndertowError

BY_NAME = "ray:"
NAMESPACE = "undertow"
_PATIENCE_S = 10.0
_CURE = "`python -m undertow.serving.vllm.ray_actor status` shows the servers, `start` starts them"


class NoServer(UndertowError):
    """The actor has no URL now. It may have one later."""


class NoCluster(UndertowError):
    """This process is in no Ray cluster, so it cannot ask actors."""


class NamedActor:
    """The actor that runs a server, by its address `ray:NAME`. Use it from one thread at a time."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._question: Future[str] | None = None

    def url(self) -> str:
        """The URL of its server now. Waits up to 10 s for the answer. NoServer, NoCluster."""
        try:
            # An unanswered call is kept: an actor without a node must not accumulate thousands.
            self._question = self._question or self._asked()
            url = self._question.result(_PATIENCE_S)
        except (NoServer, NoCluster):
            raise
        except TimeoutError as silence:
            raise NoServer(f"{self.address} is silent: its actor may wait for a node. {_CURE}") from silence
        except Exception as trouble:  # any Ray error; the actor may be restarted later
            reason = str(trouble).strip().partition("\n")[0] or type(trouble).__name__
            raise NoServer(f"{self.address} cannot be asked for its server: {reason}. {_CURE}") from trouble
        finally:
            if self._question is not None and self._question.done():
                self._question = None
        if not url:
            raise NoServer(f"the server of {self.address} is not up; its actor starts it. {_CURE}")
        return url

    def _asked(self) -> Future[str]:
        ray: Any = sys.modules.get("ray")  # a process in a cluster has imported it
        if ray is None or not ray.is_initialized():
            raise NoCluster(
                f"{self.address} names an actor on Ray, and this process is in no Ray cluster. Use --ray "
                "(undertow.connect in Python), or give the URL that "
                "`python -m undertow.serving.vllm.ray_actor status` shows"
            )
        try:
            actor = ray.get_actor(self.address.removeprefix(BY_NAME), namespace=NAMESPACE)
        except ValueError:
            raise NoServer(f"Ray has no actor of this name: {self.address}. {_CURE}") from None
        question: Future[str] = actor.url.remote().future()
        return question


def server_addresses(text: str | None) -> tuple[str, ...]:
    """The servers that `llm_url` names, comma separated, each once: URLs with their `/v1`, or `ray:NAME`.

    ValueError if there is none, or for one that is neither.
    """
    named = [address.strip() for address in (text or "").split(",") if address.strip()]
    return tuple(dict.fromkeys(_address(address, text) for address in named or [""]))


def _address(address: str, text: str | None) -> str:
    if re.fullmatch(rf"{BY_NAME}[\w.-]+", address):
        return address
    if (url := http_url(address)) is None:
        which = f", of which {address!r} is no address" if "," in (text or "") else ""
        raise ValueError(
            f"llm_url is {text!r}{which}; give a server's URL such as http://127.0.0.1:8000/v1, the name of "
            "its actor on Ray such as ray:vllm-0, or several with commas between them"
        )
    return url


def http_url(address: str) -> str | None:
    """A server's URL with its `/v1`. None: it is no URL."""
    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        return None
    return address.rstrip("/") + ("" if parts.path.strip("/") else "/v1")
