"""A cache of embeddings per tenant. Tenants share nothing, not even the time saved."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from undertow.engine.encoders.base import DeviceEncoder, Encoded, Encoder, Float16, QueryEncoder
from undertow.engine.encoders.tokenizer import Int64

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Key = tuple[str, ...]
"""Tenant and text; a third word for queries."""


class EmbeddingCache:
    """Encodes a tenant's identical texts once.

    A text that only another tenant has sent is encoded again, so that the duration of a call reveals nothing
    about other tenants. Thread-safe.
    """

    def __init__(self, encoder: Encoder, capacity: int) -> None:
        """Cache the `capacity` most recently used texts; 0 caches only within a call. ValueError below 0."""
        if capacity < 0:
            raise ValueError(f"the cache's capacity is {capacity} texts; give 0 or more")
        self._encoder = encoder
        self._device_encoder = encoder if isinstance(encoder, DeviceEncoder) else None
        self._query_encoder = encoder if isinstance(encoder, QueryEncoder) else None
        self._capacity = capacity
        self._vectors: OrderedDict[Key, Float16] = OrderedDict()
        self._lock = threading.Lock()
        # how long the encoder takes for a single text: a moving average; any time where a server is asked
        self.text_s = math.inf if getattr(encoder, "asks_a_server", False) else 0.0

    def encode(self, tenants: Sequence[str], texts: Sequence[str]) -> Float16:
        """Embed text i for tenant i: float16 [n, dim]. ValueError if the lengths differ."""
        return self.embed(tenants, texts).host

    def encode_queries(self, tenant: str, texts: Sequence[str]) -> Float16:
        """Embed texts to search a tenant with, in one call: float16 [n, dim]."""
        if self._query_encoder is None:
            return self.encode([tenant] * len(texts), texts)
        keys: list[Key] = [(tenant, text, "query") for text in texts]
        known = self._recall(keys)
        if len(known) == len(texts):
            return np.stack([known[i] for i in range(len(texts))])
        vectors = self._measured(self._query_encoder.encode_queries, texts)
        self._remember(keys, vectors)
        return vectors

    def embed(self, tenants: Sequence[str], texts: Sequence[str]) -> Encoded:
        """As `encode`, and on the device too if the encoder leaves vectors there."""
        if len(tenants) != len(texts):
            raise ValueError(f"{len(tenants)} tenants for {len(texts)} texts; give one tenant a text")
        keys: list[Key] = list(zip(tenants, texts, strict=True))
        # A larger call would replace all of the cache, and is hardly in it.
        cached = len(keys) <= self._capacity
        known = self._recall(keys) if cached else {}
        # The first of each unknown text. Dicts and maps, because ingest runs this for every text.
        missing = dict.fromkeys(keys if not known else (k for i, k in enumerate(keys) if i not in known))
        fresh = self._embed([text for _, text, *_ in missing]) if missing else None
        if fresh is not None:
            if cached:
                self._remember(list(missing), fresh.host)
            if len(missing) == len(texts):
                return fresh
        number = dict(zip(missing, range(len(missing)), strict=True))
        fresh_of = np.fromiter((number.get(key, -1) for key in keys), np.int64, len(keys))
        out = np.empty((len(texts), self._encoder.dim), np.float16)
        for i, vector in known.items():
            out[i] = vector
        if fresh is None:
            return Encoded(out)
        new = fresh_of >= 0
        out[new] = fresh.host[fresh_of[new]]
        return Encoded(out, None if fresh.device is None else _joined(fresh.device, out, fresh_of))

    def forget(self, tenant: str) -> None:
        """Drop the vectors of a tenant that is being erased."""
        with self._lock:
            for key in [k for k in self._vectors if k[0] == tenant]:
                del self._vectors[key]

    def _recall(self, keys: Sequence[Key]) -> dict[int, Float16]:
        """The cached vectors by position in `keys`."""
        with self._lock:
            known = {i: v for i, v in enumerate(map(self._vectors.get, keys)) if v is not None}
            for i in known:
                self._vectors.move_to_end(keys[i])
        return known

    def _embed(self, texts: Sequence[str]) -> Encoded:
        if self._device_encoder is not None:
            return self._measured(self._device_encoder.embed, texts)
        return Encoded(self._measured(self._encoder.encode, texts))

    def _measured(self, embed: Callable[[Sequence[str]], T], texts: Sequence[str]) -> T:
        began_s = time.perf_counter()
        embedded = embed(texts)
        if len(texts) == 1 and math.isfinite(self.text_s):
            self.text_s += 0.1 * (time.perf_counter() - began_s - self.text_s)
        return embedded

    def _remember(self, keys: Sequence[Key], vectors: Float16) -> None:
        newest = max(0, len(keys) - self._capacity)
        with self._lock:
            for key, vector in zip(keys[newest:], vectors[newest:], strict=True):
                self._vectors[key] = vector.copy()  # a view would keep the whole batch alive
            while len(self._vectors) > self._capacity:
                self._vectors.popitem(last=False)


def _joined(fresh: torch.Tensor, host: Float16, fresh_of: Int64) -> torch.Tensor:
    """Row i is row fresh_of[i] of `fresh`, or, if that is -1, row i of `host`, copied to the device."""
    import torch

    known = np.flatnonzero(fresh_of < 0)
    sent = torch.from_numpy(host[known]).to(fresh.device)
    rows = fresh_of.copy()
    rows[known] = len(fresh) + np.arange(len(known))
    return torch.cat([fresh, sent]).index_select(0, torch.from_numpy(rows).to(fresh.device))
