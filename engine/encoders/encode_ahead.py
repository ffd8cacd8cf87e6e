"""Embeds the turns of the next step in a thread, while those of this step are committed and decided."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np

from undertow.engine.encoders.base import Encoded
from undertow.engine.encoders.embedding_cache import EmbeddingCache

# Fewer turns are not worth a thread: a commit and its decisions take less than they gain.
LEAST_AHEAD = 256

Keys = list[tuple[str, str]]


class EncodeAhead:
    """The encoder of admission: at most one batch is embedded ahead. Not thread-safe."""

    def __init__(self, encoder: EmbeddingCache) -> None:
        self._encoder = encoder
        self._thread = ThreadPoolExecutor(1, "encode-ahead")
        self._ahead: tuple[Keys, Future[Encoded]] | None = None

    def begin(self, tenants: Sequence[str], texts: Sequence[str]) -> None:
        """Begin to embed text i for tenant i, unless a batch was begun that `embed` has not asked for."""
        if self._ahead is None:
            with suppress(RuntimeError):  # no thread can be started: `embed` does it
                embedding = self._thread.submit(self._encoder.embed, tenants, texts)
                self._ahead = list(zip(tenants, texts, strict=True)), embedding

    def embed(self, tenants: Sequence[str], texts: Sequence[str]) -> Encoded:
        """As EmbeddingCache.embed, with what was embedded ahead."""
        if self._ahead is None:
            return self._encoder.embed(tenants, texts)
        (known, embedding), self._ahead = self._ahead, None
        if embedding.exception() is not None:  # the text at fault may have been dropped meanwhile
            return self._encoder.embed(tenants, texts)
        keys = list(zip(tenants, texts, strict=True))
        ahead = embedding.result()
        if keys == known:
            return ahead
        # some of them were duplicates, or have other texts with the timestamps that they inherit
        place = dict(zip(known, range(len(known)), strict=True))
        places = np.array([place.get(key, -1) for key in keys], np.int64)
        vectors = ahead.host[places]
        if len(missing := np.flatnonzero(places < 0).tolist()):
            others = self._encoder.embed([tenants[n] for n in missing], [texts[n] for n in missing])
            vectors[missing] = others.host
        return Encoded(vectors)

    def forget(self) -> None:
        """Drop what was embedded ahead, before a tenant's vectors are dropped from the cache."""
        if self._ahead is not None:
            self._ahead[1].exception()  # wait: its thread would fill the cache again
            self._ahead = None

    def close(self) -> None:
        """Wait for the thread to end."""
        self._thread.shutdown()
        self._ahead = None
