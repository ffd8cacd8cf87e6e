"""The peers' side: answers requests of JSON lines in the environment that has the peer.

    python -m undertow.bench.peers.mem0_runner --url URL --encoder hash:384 --folder FOLDER

A request is {"id", "op", ...} on standard input, a reply {"id", "result"} or {"id", "error"} on standard
output; the first line, {"ready": ...}, says what runs. Of Undertow, which is not installed there, only the
hashing encoder is imported, so that both sides embed by the same function.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

from langchain_core.embeddings import Embeddings

REPLY_TOKENS = 2_000
"""The most of one reply: mem0ai's default. langmem has none, and a small model's reply may have no end."""

API_KEY = "UNDERTOW_PEER_API_KEY"
"""The variable that has the server's key: a command line can be read by everybody on the machine."""

LEAVE_S = 15.0
"""What a runner has for finishing what it was asked, once its standard input has ended."""

# a peer that asks another server than the one it was given would cost money and leak conversations
UNWANTED = ("OPENAI_API_KEY", "OPENAI_BASE_URL", "OPENROUTER_API_KEY")
# of a tracing service, which would be sent every conversation
TRACING = ("LANGSMITH_", "LANGCHAIN_")


@dataclass(slots=True)
class Spent:
    """What the calls of one request have cost; errors that the peer logged or passed over, not raised."""

    calls: int = 0
    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    completion_tokens: int = 0
    complaints: list[str] = field(default_factory=list)

    def complain(self, of: str) -> None:
        self.complaints.append(of[:300])

    def count(self, usage: Mapping[str, Any]) -> None:
        """`usage` as a chat completion has it."""
        self.calls += 1
        self.prompt_tokens += usage.get("prompt_tokens") or 0
        self.completion_tokens += usage.get("completion_tokens") or 0
        self.cached_prompt_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


@dataclass(frozen=True, slots=True)
class Options:
    """`encoder`: hash:DIM, or the folder of a sentence-transformers model. `folder` is kept between runs.

    `timeout_s`: of one attempt at an LLM call; the packages' client makes up to three.
    """

    url: str
    model: str
    encoder: str
    folder: Path
    threads: int
    timeout_s: float
    api_key: str


class Peer(Protocol):
    """Called from several threads, but never twice at once for one tenant."""

    def add(self, tenant: str, messages: Sequence[Mapping[str, str]], date: str | None) -> None:
        """Take in one exchange: messages of {"role", "speaker", "content"}, said at `date` (ISO 8601)."""
        ...

    def search(self, tenant: str, query: str, count: int) -> list[dict[str, Any]]:
        """{"date", "text"} of the `count` best memories, best first."""
        ...

    def close(self) -> None: ...


class Meter(logging.Handler):
    """Books what happens in a context to the request that the context is of: LangGraph's threads copy it."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self._now: ContextVar[Spent | None] = ContextVar("spent", default=None)

    @contextmanager
    def request(self) -> Iterator[Spent]:
        spent = Spent()
        token = self._now.set(spent)
        try:
            yield spent
        finally:
            self._now.reset(token)

    @property
    def spent(self) -> Spent | None:
        return self._now.get()

    def emit(self, record: logging.LogRecord) -> None:
        if self.spent is not None:
            self.spent.complain(record.getMessage())


class OneAtATime:
    """Stands for a local store's client, which is not made for several threads: its calls take turns."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._lock = threading.RLock()

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if not callable(found):
            return found

        def call(*args: Any, **options: Any) -> Any:
            with self._lock:
                return found(*args, **options)

        return call


class LocalEmbeddings(Embeddings):  # type: ignore[misc]  # not installed where mypy runs
    """A local encoder as a LangChain embedding, which both peers take. A query is embedded as a document."""

    def __init__(self, encode: Callable[[list[str]], Any]) -> None:
        """`encode` returns an array [texts, dim]."""
        self._encode = encode

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        vectors: list[list[float]] = self._encode(texts).tolist()
        return vectors

    def embed_query(self, text: str) -> list[float]:
        return self.embed_documents([text])[0]


def embeddings(encoder: str) -> LocalEmbeddings:
    """`encoder` as in `Options`; a model is called as LangChain's own wrapper calls it."""
    kind, _, size = encoder.partition(":")
    if kind == "hash":
        from undertow.engine.encoders.hashing import HashingEncoder

        hashing = HashingEncoder(int(size))
        return LocalEmbeddings(lambda texts: hashing.encode(texts).astype("float32"))
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(encoder, device="cpu")
    return LocalEmbeddings(partial(model.encode, show_progress_bar=False))


def dim_of(embedding: Embeddings) -> int:
    return len(embedding.embed_query("dimensions"))


def said(messages: Sequence[Mapping[str, str]], date: str | None) -> list[dict[str, str]]:
    """Chat messages whose text names its speaker and date: neither peer takes them in another way."""
    when = f"[{date}] " if date else ""
    return [{"role": m["role"], "content": f"{when}{m['speaker']}: {m['content']}"} for m in messages]


def serve(package: str, make: Callable[[Options, Meter], Peer]) -> None:
    """Answer requests until standard input ends; what is then under way has `LEAVE_S`."""
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what the peer prints is no reply
    given, meter = options(), Meter()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger().addHandler(meter)
    peer, lock = make(given, meter), threading.Lock()

    def reply(line: Mapping[str, Any]) -> None:
        with lock:
            channel.write(json.dumps(line) + "\n")
            channel.flush()

    def answer(request: dict[str, Any]) -> None:
        number = request.pop("id")
        with meter.request() as spent:
            try:
                result = getattr(peer, request.pop("op"))(**request)
            except Exception as error:  # noqa: BLE001 - the process boundary: it is told on the other side
                reply({"id": number, "error": f"{type(error).__name__}: {error}", "spent": asdict(spent)})
            else:
                reply({"id": number, "result": result, "spent": asdict(spent)})

    reply({"ready": f"{package} {version(package)}, runner {_made_of()}"})
    with ThreadPoolExecutor(given.threads) as pool:
        for line in sys.stdin:
            pool.submit(answer, json.loads(line))
        _leave_in(LEAVE_S)
    peer.close()


def _made_of() -> str:
    """What a peer is told is part of what its memories hang on."""
    files = (Path(__file__), Path(sys.modules["__main__"].__file__ or __file__))
    return hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=4).hexdigest()


def _leave_in(seconds: float) -> None:
    """Nobody hears a reply once the asking process is dead, and one of the LLM may take half an hour."""
    end = threading.Timer(seconds, os._exit, [1])
    end.daemon = True
    end.start()


def options() -> Options:
    """Of this process's command line, after which its environment has no key of another server."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", default="", help="left out: the server's first")
    parser.add_argument("--encoder", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--timeout-s", type=float, default=600.0)
    given = parser.parse_args()
    api_key = os.environ.pop(API_KEY, "none")
    for name in [name for name in os.environ if name in UNWANTED or name.startswith(TRACING)]:
        del os.environ[name]
    given.folder.mkdir(parents=True, exist_ok=True)
    model = given.model or _first_model(given.url, api_key)
    return Options(given.url, model, given.encoder, given.folder, given.threads, given.timeout_s, api_key)


def _first_model(url: str, api_key: str) -> str:
    from openai import OpenAI

    return OpenAI(base_url=url, api_key=api_key).models.list().data[0].id
