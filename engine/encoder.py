"""Text to vectors: a text gets the same bits alone and in any company.

Three encoders' parts: `SentenceEncoder` (a sentence-transformers model), `HashingEncoder` (no model: for
tests, and for benchmarks of everything else) and `TenantTextCache` (identical texts of one tenant are
encoded once). torch and sentence_transformers are imported when a `SentenceEncoder` is made, not before.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from undertow.engine.sentence_model import (
    DEFAULT_MODEL,
    Dtype,
    EncoderError,
    load_model,
    model_digest,
    model_folder,
    single_threaded_pool,
    tokenizer_of,
    working_dtype,
)

if TYPE_CHECKING:
    from undertow.engine.config import Settings

Float16 = NDArray[np.float16]
Shape = tuple[int, int]  # padded tokens, rows

TEXT_FORMAT = 1  # raise it when `model.spoken`, the windows or their averaging change


@dataclass(frozen=True)
class Fingerprint:
    """What made a store's vectors. `digest` covers weights, tokenizer, pooling, window and text format."""

    model: str
    digest: str
    dim: int
    dtype: str
    device: str

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


def make_encoder(settings: Settings) -> Encoder:
    """The encoder that `settings.encoder` names: a model's name or folder, or `hash:DIM`.

    Raises ValueError for a malformed `hash:` name, EncoderError for a model that cannot be loaded.
    """
    kind, _, size = settings.encoder.partition(":")
    if kind != "hash":
        return SentenceEncoder(settings.encoder)
    if not (size.isascii() and size.isdigit()):
        raise ValueError(f"encoder {settings.encoder!r}: write the size after the colon, as in hash:384")
    return HashingEncoder(int(size))


class SentenceEncoder:
    """A sentence-transformers model on the CPU, run in batches of fixed shapes.

    Every window of a text goes through the model in the one shape (rows, padded tokens) that belongs to
    its length, whatever else is encoded, and every batch runs on a single thread; the batches are what
    runs in parallel. So neither neighbours nor the number of threads can reach a text's bits.
    """

    # Padded tokens -> rows of a batch. Measured on two AMX cores: below some 1,000 token places a batch the
    # matrix unit starves, above 1,500 the batch drops out of the cache, and filler weighs on small calls.
    SHAPES: ClassVar[dict[int, int]] = {
        **{16: 16, 32: 16, 48: 16, 64: 16, 80: 16, 96: 12, 112: 12, 128: 12},
        **{160: 8, 192: 8, 224: 8, 256: 8, 320: 8, 384: 8, 448: 8, 512: 8},
    }

    def __init__(
        self, model: str = DEFAULT_MODEL, *, dtype: Dtype = "auto", threads: int | None = None
    ) -> None:
        """Load `model`, a name or a folder. `dtype` "auto" is bfloat16 where the CPU has AMX, else float32.

        `threads`: batches in flight at once; torch's own thread count by default.
        Raises EncoderError if the model is nowhere to be found or is not one of sentence-transformers,
        ValueError for `threads` < 1.
        """
        import torch

        if threads is not None and threads < 1:
            raise ValueError(f"threads is {threads}; give at least 1")
        folder = model_folder(model)
        self._model = load_model(folder, model)
        self._head, *self._tail = self._model
        self._dtype = working_dtype(dtype)
        self._head.to(self._dtype)
        self._tokenizer, self._window = tokenizer_of(self._model)
        self._takes_types = "token_type_ids" in self._model.tokenizer.model_input_names
        self._shapes = _shapes_for(self._window, self.SHAPES)
        self._widths = np.array([width for width, _ in self._shapes])
        self._pad_id = self._model.tokenizer.pad_token_id or 0
        self._prefix = self._model.prompts.get(self._model.default_prompt_name or "") or ""
        self._filler = self._tokenizer.encode("").ids or [self._pad_id]
        self._pool = single_threaded_pool(threads or torch.get_num_threads())
        self._dim = int(self._pool.submit(self._run, [self._filler], self._shapes[0]).result().shape[1])
        self._fingerprint = Fingerprint(
            model=model,
            digest=model_digest(folder, TEXT_FORMAT, self._window, self._prefix),
            dim=self._dim,
            dtype=str(self._dtype).removeprefix("torch."),
            device="cpu",
        )

    @property
    def dim(self) -> int:
        return self._dim

    @property
    def fingerprint(self) -> Fingerprint:
        return self._fingerprint

    @property
    def window(self) -> int:
        """Tokens the model sees at once, special tokens included."""
        return self._window

    def encode(self, texts: Sequence[str]) -> Float16:
        """Embed texts: float16 [n, dim], L2-normalised, row i of text i; [0, dim] for no texts.

        A text over the window is embedded in consecutive windows; their normalised vectors are averaged
        and normalised again. Raises EncoderError if the model yields a vector that is not finite.
        """
        windows, first_window = self._windows(texts)
        if not windows:
            return np.zeros((0, self._dim), np.float16)
        batches = self._batches([len(w) for w in windows])
        vectors = np.empty((len(windows), self._dim))
        done = self._pool.map(lambda b: self._run([windows[i] for i in b[0]], b[1]), batches)
        for (rows, _), part in zip(batches, done, strict=True):
            vectors[rows] = part
        if not np.isfinite(vectors).all():
            raise EncoderError(
                f"the encoder {self._fingerprint.model} gave vectors that are not finite: its weights are "
                "damaged; fetch the model again"
            )
        return _unit(np.add.reduceat(_unit(vectors), first_window, axis=0)).astype(np.float16)

    def padding_share(self, texts: Sequence[str]) -> float:
        """Share of the token places computed for `texts` that hold padding or filler; for benchmarks."""
        lengths = [len(w) for w in self._windows(texts)[0]]
        places = sum(rows * width for _, (width, rows) in self._batches(lengths))
        return 1.0 - sum(lengths) / places if places else 0.0

    def _windows(self, texts: Sequence[str]) -> tuple[list[list[int]], NDArray[np.intp]]:
        """Token ids of every window, and for each text the index of its first."""
        windows: list[list[int]] = []
        first = np.empty(len(texts), np.intp)
        for i, tokens in enumerate(
            self._tokenizer.encode_batch_fast([self._prefix + _speakable(t) for t in texts])
        ):
            first[i] = len(windows)
            windows.append(tokens.ids or self._filler)
            windows.extend(part.ids for part in tokens.overflowing)
        return windows, first

    def _batches(self, lengths: Sequence[int]) -> list[tuple[NDArray[np.intp], Shape]]:
        """(indices of windows, shape) of each batch, the widest first: no long one is left to the end."""
        # side="right": a window is always shorter than its width. A batch without any padding would make
        # transformers drop the attention mask and take another kernel, and that is company.
        bucket = np.searchsorted(self._widths, lengths, side="right")
        batches = []
        for b in range(len(self._shapes) - 1, -1, -1):
            members, shape = np.flatnonzero(bucket == b), self._shapes[b]
            batches += [(members[i : i + shape[1]], shape) for i in range(0, len(members), shape[1])]
        return batches

    def _run(self, windows: Sequence[Sequence[int]], shape: Shape) -> NDArray[np.float32]:
        """One batch of exactly `shape`, filled up: float32 [len(windows), dim], not normalised."""
        import torch

        width, rows = shape
        ids = np.full((rows, width), self._pad_id, np.int64)
        mask = np.zeros((rows, width), np.int64)
        for row in range(rows):
            tokens = windows[row] if row < len(windows) else self._filler
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = 1
        features = {"input_ids": torch.from_numpy(ids), "attention_mask": torch.from_numpy(mask)}
        if self._takes_types:
            features["token_type_ids"] = torch.zeros_like(features["input_ids"])
        with torch.inference_mode():
            features = self._head(features)
            # pooling and what follows in fp32: a bf16 mean would throw away half of what is left
            features["token_embeddings"] = features["token_embeddings"].float()
            for module in self._tail:
                features = module(features)
        vectors: NDArray[np.float32] = features["sentence_embedding"][: len(windows)].numpy()
        return vectors


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
        return _unit((signed[:, 0] - signed[:, 1]).astype(np.float64))


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


class TenantTextCache:
    """Encodes a tenant's identical texts once; nothing is shared between tenants, not even a saving.

    A text that only another tenant has sent before is encoded again, so that the time of a call tells
    nothing about other tenants. Safe to call from several threads.
    """

    def __init__(self, encoder: Encoder, capacity: int) -> None:
        """Remember the `capacity` texts used last; 0: only within a call. ValueError below 0."""
        if capacity < 0:
            raise ValueError(f"the cache's capacity is {capacity} texts; give 0 or more")
        self._encoder = encoder
        self._capacity = capacity
        self._vectors: OrderedDict[tuple[str, str], Float16] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._vectors)

    def encode(self, tenants: Sequence[str], texts: Sequence[str]) -> Float16:
        """Embed text i for tenant i: float16 [n, dim]. ValueError if the lengths differ."""
        if len(tenants) != len(texts):
            raise ValueError(f"{len(tenants)} tenants for {len(texts)} texts; give one tenant a text")
        keys = list(zip(tenants, texts, strict=True))
        out = np.empty((len(texts), self._encoder.dim), np.float16)
        missing: dict[tuple[str, str], int] = {}
        fresh_of = np.full(len(texts), -1, np.int64)
        with self._lock:
            for i, key in enumerate(keys):
                known = self._vectors.get(key)
                if known is None:
                    fresh_of[i] = missing.setdefault(key, len(missing))
                else:
                    out[i] = known
                    self._vectors.move_to_end(key)
        if missing:
            fresh = self._encoder.encode([text for _, text in missing])
            out[fresh_of >= 0] = fresh[fresh_of[fresh_of >= 0]]
            self._remember(list(missing), fresh)
        return out

    def forget(self, tenant: str) -> None:
        """Drop what is kept of a tenant that is being erased."""
        with self._lock:
            for key in [k for k in self._vectors if k[0] == tenant]:
                del self._vectors[key]

    def _remember(self, keys: Sequence[tuple[str, str]], vectors: Float16) -> None:
        newest = max(0, len(keys) - self._capacity)
        with self._lock:
            for key, vector in zip(keys[newest:], vectors[newest:], strict=True):
                self._vectors[key] = vector.copy()  # a view would keep the whole batch alive
            while len(self._vectors) > self._capacity:
                self._vectors.popitem(last=False)


_WORD = re.compile(r"\w+")


def _speakable(text: str) -> str:
    """The text without lone surrogates, which JSON can carry and no tokenizer takes."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _shapes_for(window: int, shapes: Mapping[int, int]) -> list[Shape]:
    """The shapes for windows up to `window` tokens; the last is wider than that by at least one place."""
    widths = [width for width in sorted(shapes) if width <= window]
    return [(width, shapes[width]) for width in widths] + [(window // 16 * 16 + 16, shapes[max(shapes)])]


def _unit(vectors: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows scaled to length 1; a row of zeros stays."""
    lengths = np.sqrt((vectors * vectors).sum(axis=1, keepdims=True))
    scaled: NDArray[np.float64] = vectors / np.where(lengths > 0, lengths, 1.0)
    return scaled
