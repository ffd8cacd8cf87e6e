"""Text to vectors: a text gets the same bits alone and in any company.

What an encoder is and gives, which one the settings name, and `HashingEncoder` (no model: for tests, and
for benchmarks of everything else). torch and sentence_transformers are imported only when a model is loaded.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol, Self, get_type_hints, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from undertow.kernels.device import resolve

if TYPE_CHECKING:
    import torch

    from undertow.engine.base.config import Settings

Float16 = NDArray[np.float16]

TEXT_FORMAT = 1  # raise it when `model.spoken`, the windows or their averaging change


@dataclass(frozen=True)
class Fingerprint:
    """What made a store's vectors. `digest` covers weights, tokenizer, pooling, window and text format."""

    model: str
    digest: str
    dim: int
    dtype: str
    device: str

    @classmethod
    def stored(cls, fields: Mapping[str, Any]) -> Self:
        """The one that a store's description holds; StoreError if it holds none."""
        types = get_type_hints(cls)
        if fields.keys() != types.keys() or any(type(fields[name]) is not t for name, t in types.items()):
            # a machine that has no store, and only measures encoders, may miss its packages
            from undertow.engine.storage.store_info import StoreError

            raise StoreError(
                f"the encoder in store.json needs the fields {', '.join(types)}. "
                "Restore that file from a backup."
            )
        return cls(**fields)

    def with_timestamps(self) -> Fingerprint:
        """The same encoder over texts that begin with their timestamp: vectors of another kind."""
        return replace(self, digest=hashlib.blake2b(f"{self.digest}+timestamp".encode()).hexdigest())

    def mismatch(self, other: Fingerprint) -> str | None:
        """Why vectors of `other`, the encoder at hand, must not join those of self, the store's."""
        if (self.digest, self.dim) == (other.digest, other.dim):
            return None
        return (
            f"the store's vectors come from the encoder {self._identity()}, but the encoder at hand is "
            f"{other._identity()}; their vectors cannot be compared. Use the store's encoder, "
            "or run `undertow reindex` to embed the store again with the new one"
        )

    def drift(self, other: Fingerprint) -> str | None:
        """What differs between self, the store's, and `other` in the last bits only; None if nothing does."""
        if (self.dtype, self.device) == (other.dtype, other.device):
            return None
        return (
            f"the store's vectors were computed in {self.dtype} on {self.device}, new ones are computed in "
            f"{other.dtype} on {other.device}: the same text may differ in its last bits, so a decision very "
            "near a threshold may fall otherwise than it would have there"
        )

    def _identity(self) -> str:
        return f"{self.model} (digest {self.digest[:12]}, {self.dim} dimensions)"


class Encoder(Protocol):
    """What the engine asks of an encoder. The bits of row i depend on text i alone."""

    @property
    def dim(self) -> int: ...

    @property
    def fingerprint(self) -> Fingerprint: ...

    def encode(self, texts: Sequence[str]) -> Float16:
        """Embed texts: float16 [n, dim], L2-normalised, row i of text i; [0, dim] for no texts."""
        ...


@dataclass(frozen=True, slots=True)
class Encoded:
    """Vectors of texts, L2-normalised: on the host always, and on a device where they were computed there."""

    host: Float16
    """float16 [n, dim]."""
    device: torch.Tensor | None = None
    """float16 [n, dim], the same bits."""

    def on(self, device: str) -> Float16 | torch.Tensor:
        """The copy to hand to work on "cpu" or "cuda": the device's if it is there, else the host's."""
        if device == "cpu" or self.device is None or self.device.device.type != device:
            return self.host
        return self.device


@runtime_checkable
class DeviceEncoder(Encoder, Protocol):
    """An encoder that leaves its vectors on a device as well."""

    def embed(self, texts: Sequence[str]) -> Encoded:
        """As `encode`, with the vectors on the device too."""
        ...


def make_encoder(settings: Settings) -> Encoder:
    """The encoder that `settings.encoder` names: a model's name or folder, or `hash:DIM`.

    A model runs on `settings.device`. Raises ValueError for a malformed `hash:` name or a device that is
    not there, EncoderError for a model that cannot be loaded.
    """
    kind, _, size = settings.encoder.partition(":")
    if kind != "hash":
        return _model_encoder(settings.encoder, resolve(settings.device))
    if not (size.isascii() and size.isdigit()):
        raise ValueError(f"encoder {settings.encoder!r}: write the size after the colon, as in hash:384")
    return HashingEncoder(int(size))


def _model_encoder(model: str, device: str) -> Encoder:
    if device == "cuda":
        from undertow.engine.encoders.cuda import CudaSentenceEncoder

        return CudaSentenceEncoder(model)
    from undertow.engine.encoders.cpu import SentenceEncoder

    return SentenceEncoder(model)


class HashingEncoder:
    """Signed random features of words: no model, same bits on every machine, for tests and benchmarks.

    Each word (lower-cased, as often as it occurs) adds +1 or -1 at `HITS` hashed places. The sums are
    integers, exact in any order; the only rounding is the normalisation in fp64 and the cast to fp16.
    On LoCoMo exchanges of one conversation the cosines have median 0.33 and 99th percentile 0.63.
    """

    HITS = 16
    MAX_WORDS = 1 << 20  # the table of words is begun again when it has grown beyond this
    _CHUNK = 1024  # texts at a time, to bound the memory of the sums

    def __init__(self, dim: int = 384) -> None:
        """`dim` in 16..16384, else ValueError."""
        if not 16 <= dim <= 16_384:
            raise ValueError(f"a hashing encoder has 16 to 16384 dimensions, not {dim}")
        self._dim = dim
        self._words = _WordTable(dim, self.HITS)
        self._fingerprint = Fingerprint(f"hash:{dim}", f"hash-1-{TEXT_FORMAT}-{dim}", dim, "float64", "cpu")

    @property
    def dim(self) -> int:
        return self._dim

    @property
    def fingerprint(self) -> Fingerprint:
        return self._fingerprint

    def encode(self, texts: Sequence[str]) -> Float16:
        """Embed texts: float16 [n, dim], L2-normalised; a text without words is taken as one empty word."""
        if len(self._words) > self.MAX_WORDS:
            self._words = _WordTable(self._dim, self.HITS)
        out = np.empty((len(texts), self._dim), np.float16)
        for start in range(0, len(texts), self._CHUNK):
            part = texts[start : start + self._CHUNK]
            out[start : start + len(part)] = self._encode(part, self._words)
        return out

    def _encode(self, texts: Sequence[str], table: _WordTable) -> NDArray[np.float64]:
        words = [_WORD.findall(text.lower()) or [""] for text in texts]
        ids = list(map(table.__getitem__, chain.from_iterable(words)))
        rows = np.repeat(np.arange(len(texts)), [len(text) for text in words])
        bins = rows[:, None] * (2 * self._dim) + table.bins[ids]
        sums = np.bincount(bins.ravel(), minlength=2 * self._dim * len(texts))
        signed = sums.reshape(len(texts), 2, self._dim)
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


def unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows scaled to length 1; a row of zeros stays."""
    lengths = np.sqrt((vectors * vectors).sum(axis=1, keepdims=True))
    scaled: NDArray[np.float64] = vectors / np.where(lengths > 0, lengths, 1.0)
    return scaled
