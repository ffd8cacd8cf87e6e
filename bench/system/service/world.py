"""The tenants of a run, what they say, and the requests that a load sends for them.

Texts are drawn from function words and a generated vocabulary with the skew of a natural one, so that words
are shared and no topic recurs: without an LLM, a tenant whose topic recurs is blocked and decides no more.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle, islice, product
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from undertow.bench.machine import LOCOMO
from undertow.bench.system.throughput_load import copies

# turns of each tenant, and tenants
SIZES = {20: 1_000, 1_000: 100, 10_000: 10}
TOP_K = 10

FUNCTION_WORDS = (
    "the and to of a i in that it was my for you is on we with but have at this so be they he she had as "
    "not are her his about from there me if what when your been were an will or who our then just up out "
    "by would could after before"
)
# Of a text's words, so many are function words, as in English.
FUNCTION_SHARE = 0.4
VOCABULARY = 20_000
MESSAGE_WORDS, QUERY_WORDS, SENTENCE_WORDS = (10, 40), (4, 12), 9
_BLOCK = 4_096


def _generated(count: int) -> list[str]:
    """Distinct pronounceable words, of four letters and of six."""
    syllables = [a + b for a, b in product("bdfgklmnprstvz", "aeiou")]
    pairs = ["".join(pair) for pair in product(syllables, repeat=2)]
    triples = ("".join(parts) for parts in product(syllables, repeat=3))
    step = 17  # neighbours in rank have no syllables in common
    return [*pairs, *(word for n, word in enumerate(triples) if n % step == 0)][:count]


def _shares(count: int, flat: float) -> NDArray[np.float64]:
    """Zipf's law as Mandelbrot has it: the share of rank r is proportional to 1 / (r + flat)."""
    weights = 1.0 / (np.arange(1, count + 1) + flat)
    shares: NDArray[np.float64] = weights / weights.sum()
    return shares


_FUNCTION = FUNCTION_WORDS.split()
_WORDS = np.array([*_FUNCTION, *_generated(VOCABULARY)], dtype=object)
_CUMULATIVE = np.cumsum(
    np.concatenate(
        (
            FUNCTION_SHARE * _shares(len(_FUNCTION), 5.0),
            (1.0 - FUNCTION_SHARE) * _shares(len(_WORDS) - len(_FUNCTION), 10.0),
        )
    )
)


class Texts:
    """Texts drawn from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)

    def messages(self, count: int) -> list[str]:
        return [_sentences(words) for words in self._drawn(count, MESSAGE_WORDS)]

    def queries(self, count: int) -> list[str]:
        return [" ".join(words) + "?" for words in self._drawn(count, QUERY_WORDS)]

    def _drawn(self, count: int, bounds: tuple[int, int]) -> Iterator[list[str]]:
        lengths = self.random.integers(bounds[0], bounds[1] + 1, count)
        ends = np.cumsum(lengths)
        total = int(ends[-1]) if count else 0
        ranks = np.searchsorted(_CUMULATIVE, self.random.random(total) * _CUMULATIVE[-1])
        words = _WORDS[ranks].tolist()
        for start, end in zip((ends - lengths).tolist(), ends.tolist(), strict=True):
            yield words[start:end]


def _sentences(words: list[str]) -> str:
    return " ".join(
        " ".join(words[i : i + SENTENCE_WORDS]) + "." for i in range(0, len(words), SENTENCE_WORDS)
    )


def exchange(asked: str, answered: str) -> list[dict[str, str]]:
    """The messages of one turn. An empty answer is none."""
    said = {"user": asked, "assistant": answered}
    return [{"role": role, "content": content} for role, content in said.items() if content]


class Request(NamedTuple):
    """One HTTP request. `sent`: its bytes, with all headers."""

    adds: bool
    tenant: str
    sent: bytes


@dataclass(frozen=True, slots=True)
class World:
    """`tenants` tenants of `turns` turns each, drawn from a seed."""

    turns: int
    tenants: int
    seed: int = 0

    @property
    def names(self) -> list[str]:
        return [f"tenant-{n}" for n in range(self.tenants)]

    def exchanges(self) -> Iterator[tuple[str, str, str]]:
        """Tenant, user's and assistant's message of every turn; the tenants take turns."""
        texts, order = Texts(self.seed), (name for _ in range(self.turns) for name in self.names)
        while names := list(islice(order, _BLOCK)):
            said = texts.messages(2 * len(names))
            yield from zip(names, said[::2], said[1::2], strict=True)

    def write_log(self, path: Path) -> None:
        """All turns as JSON lines that `undertow ingest` reads."""
        with path.open("w", encoding="utf-8") as file:
            for n, (tenant, *said) in enumerate(islice(self.exchanges(), self.tenants * self.turns)):
                line = {"tenant": tenant, "session": f"s{n // (10 * self.tenants)}"}
                json.dump({**line, "messages": exchange(*said)}, file)
                file.write("\n")

    def requests(self, url: str, key: str, count: int, *, add_share: float, seed: int) -> list[Request]:
        """`count` requests of tenants drawn at random, each with a text of its own."""
        texts = Texts(seed)
        adds = texts.random.random(count) < add_share
        tenants = texts.random.integers(0, self.tenants, count).tolist()
        messages, queries = iter(texts.messages(2 * count)), iter(texts.queries(count))
        host, names = urlsplit(url).netloc, self.names
        return [
            _add(host, key, names[tenant], next(messages), next(messages))
            if is_add
            else _search(host, key, names[tenant], next(queries))
            for tenant, is_add in zip(tenants, adds.tolist(), strict=True)
        ]

    def one_search_each(self, url: str, key: str) -> list[Request]:
        """A search for every tenant: it loads the tenant and builds its keyword index."""
        queries, host = Texts(self.seed + 1).queries(self.tenants), urlsplit(url).netloc
        return [_search(host, key, name, query) for name, query in zip(self.names, queries, strict=True)]


class Conversations(World):
    """The first turns of LoCoMo's conversations, whose topics recur.

    Requests add the turns that follow, or search with them, from a place that is drawn from the seed.
    """

    def exchanges(self) -> Iterator[tuple[str, str, str]]:
        for turn in copies(LOCOMO, self.tenants):
            yield turn.tenant, turn.messages[0].content, "".join(m.content for m in turn.messages[1:])

    def requests(self, url: str, key: str, count: int, *, add_share: float, seed: int) -> list[Request]:
        later = list(islice(self.exchanges(), self.tenants * self.turns, None))
        host, random = urlsplit(url).netloc, np.random.default_rng(seed)
        said = islice(cycle(later), int(random.integers(len(later))), None)
        return [
            _add(host, key, tenant, asked, answered) if is_add else _search(host, key, tenant, asked)
            for is_add, (tenant, asked, answered) in zip(random.random(count) < add_share, said, strict=False)
        ]


def _add(host: str, key: str, tenant: str, asked: str, answered: str) -> Request:
    body = {"messages": exchange(asked, answered)}
    return Request(True, tenant, request(host, key, "POST", f"/v1/tenants/{tenant}/memories", body))


def _search(host: str, key: str, tenant: str, query: str) -> Request:
    body = {"query": query, "top_k": TOP_K}
    return Request(False, tenant, request(host, key, "POST", f"/v1/tenants/{tenant}/search", body))


def request(host: str, key: str, method: str, path: str, body: object = None) -> bytes:
    """The bytes of a request. `body`: bytes as they are, None: none, all else as JSON."""
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    head = (
        f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data
