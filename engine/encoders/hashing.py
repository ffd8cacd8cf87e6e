"""An encoder without a model, for tests and for benchmarks of everything else."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from undertow.engine.encoders.base import TEXT_FORMAT, Fingerprint, Float16, unit


class HashingEncoder:
    """Signed random features of words: no model, same bits on every machine, for tests and benchmarks.

    Each word (lower-cased, as often as it occurs) adds +1 or -1 at `HITS` hashed places. The sums are
    integers, exact in any order; the only rounding is the normalisation in fp64 and the cast to fp16.
    On LoCoMo exchanges of one conversation the cosines have median 0.33 and 99th percentile 0.63.
    """

    HITS = 16
    MAX_WORDS = 1 << 20  # a table that has grown larger is replaced by an empty one
    _CHUNK = 1024  # texts summed at a time, which bounds the memory of the sums

    def __init__(self, dim: int = 384) -> None:
        """`dim` in 16..16384, else ValueError."""
        if not 16 <= dim <= 16_384:
            raise ValueError(f"a hashing encoder has 16 to 16384 dimensions, not {dim}")
        self.dim = dim
        self.fingerprint = Fingerprint(f"hash:{dim}", f"hash-1-{TEXT_FORMAT}-{dim}", dim, "float64", "cpu")
        self._words = _WordTable(dim, self.HITS)

    def encode(self, texts: Sequence[str]) -> Float16:
        """Embed texts: float16 [n, dim], L2-normalised; a text without words is taken as one empty word."""
        if len(self._words) > self.MAX_WORDS:
            self._words = _WordTable(self.dim, self.HITS)
        out = np.empty((len(texts), self.dim), np.float16)
        for start in range(0, len(texts), self._CHUNK):
            part = texts[start : start + self._CHUNK]
            out[start : start + len(part)] = self._encode(part, self._words)
        return out

    def _encode(self, texts: Sequence[str], table: _WordTable) -> NDArray[np.float64]:
        words = [_WORD.findall(text.lower()) or [""] for text in texts]
        ids = list(map(table.__getitem__, chain.from_iterable(words)))
        rows = np.repeat(np.arange(len(texts)), [len(text) for text in words])
        bins = rows[:, None] * (2 * self.dim) + table.bins[ids]
        sums = np.bincount(bins.ravel(), minlength=2 * self.dim * len(texts))
        signed = sums.reshape(len(texts), 2, self.dim)
        return unit((signed[:, 0] - signed[:, 1]).astype(np.float64))


class _WordTable(dict[str, int]):
    """Word -> its row of `bins` [rows, hits]: a place below dim counts +1, place + dim counts -1."""

    def __init__(self, dim: int, hits: int) -> None:
        self._dim = dim
        self._hits = hits
        self._lock = threading.Lock()
        self.bins = np.zeros((1024, hits), np.int64)

    def __missing__(self, word: str) -> int:
        digest = hashlib.blake2b(word.encode(errors="surrogatepass"), digest_size=2 * self._hits).digest()
        with self._lock:
            row = self.get(word)
            if row is None:
                row = len(self)
                if row == len(self.bins):
                    self.bins = np.concatenate([self.bins, np.zeros_like(self.bins)])
                self.bins[row] = np.frombuffer(digest, "<u2").astype(np.int64) % (2 * self._dim)
                self[word] = row
        return row


_WORD = re.compile(r"\w+")
