"""An encoder without a model, for tests and for benchmarks of everything else."""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from undertow.engine.encoders.base import TEXT_FORMAT, Fingerprint, Float16
from undertow.kernels.array_types import Bytes, Int64s
from undertow.kernels.hashed_words import add_words, find_words, sum_features

T = TypeVar("T", np.uint8, np.int16, np.int64)


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
            sums = np.empty((len(part), self.dim))
            sum_features(*self._words.look_up(part), sums)
            out[start : start + len(part)] = sums
        return out


class _WordTable:
    """The words seen so far, each with its features: see kernels/hashed_words.py. Thread-safe."""

    def __init__(self, dim: int, hits: int) -> None:
        self._dim = dim
        self._hits = hits
        self._lock = threading.Lock()
        self._count = 0
        self._words = np.empty(1 << 14, np.uint8)
        self._ends = np.empty(1 << 11, np.int64)
        self._bins = np.empty((1 << 11, hits), np.int16)
        self._slots = np.full(1 << 12, -1, np.int64)
        self._add([b""])

    def __len__(self) -> int:
        return self._count

    def look_up(self, texts: Sequence[str]) -> tuple[Int64s, Int64s, NDArray[np.int16]]:
        """The rows of all words of the texts, the number of words of each text, and the features by row."""
        parts = [text if text.isascii() else " ".join(_WORD.findall(text.lower())) for text in texts]
        encoded = [part.encode(errors="surrogatepass") for part in parts]
        ends = np.array([*accumulate(map(len, encoded))], np.int64)
        data = np.frombuffer(bytearray(b"".join(encoded)), np.uint8)
        counts = np.empty(len(texts), np.int64)
        found = np.empty((3, len(data) // 2 + len(texts) + 1), np.int64)
        with self._lock:
            count, unknown = self._find(data, ends, found, counts)
            if unknown:
                starts, stops = found[1:, :unknown].tolist()
                words = map(data.tobytes().__getitem__, map(slice, starts, stops))
                self._add([*dict.fromkeys(words)])
                self._find(data, ends, found, counts)
            return found[0, :count], counts, self._bins

    def _find(self, data: Bytes, ends: Int64s, found: Int64s, counts: Int64s) -> tuple[int, int]:
        return find_words(data, ends, self._slots, self._words, self._ends, found, counts)

    def _add(self, words: Sequence[bytes]) -> None:
        """Add words that are different, and not in the table."""
        first, count = self._count, self._count + len(words)
        text = b"".join(words)
        begin = int(self._ends[first - 1]) if first else 0
        self._words = _room(self._words, begin + len(text))
        self._ends, self._bins = _room(self._ends, count), _room(self._bins, count)
        hashes = b"".join([hashlib.blake2b(word, digest_size=2 * self._hits).digest() for word in words])
        in_slots = first
        if 2 * count > len(self._slots):
            self._slots, in_slots = np.full(1 << (4 * count).bit_length(), -1, np.int64), 0
        add_words(
            np.frombuffer(text, np.uint8),
            np.array([*map(len, words)], np.int64),
            np.frombuffer(hashes, "<u2"),
            self._dim,
            first,
            self._words,
            self._ends,
            self._bins,
            self._slots,
            in_slots,
        )
        self._count = count


def _room(held: NDArray[T], count: int) -> NDArray[T]:
    """An array with the same rows, and room for `count`; a new one if it has to grow."""
    if count <= len(held):
        return held
    grown = np.empty((2 * count, *held.shape[1:]), held.dtype)
    grown[: len(held)] = held
    return grown


_WORD = re.compile(r"\w+")
