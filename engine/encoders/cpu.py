"""A sentence-transformers model in batches of fixed shapes: the base of all devices, and the CPU.

The length of a window determines the shape (padded tokens, rows) in which it goes through the model, whatever
else is encoded: short batches are filled up. So other texts cannot affect a text's bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray

from undertow.engine.encoders.base import (
    OWN_PROMPTS,
    TEXT_FORMAT,
    Fingerprint,
    Float16,
    Prompts,
    speakable,
    unit,
    with_prompt,
)
from undertow.engine.encoders.model_files import (
    AMX,
    DEFAULT_MODEL,
    Dtype,
    EncoderError,
    cpu_has,
    load_model,
    model_digest,
    model_folder,
    prompts_of,
    single_threaded_pool,
    tokenizer_of,
    working_dtype,
)
from undertow.engine.encoders.tokenizer import Int32, Int64, TextWindows, Windows, make_tokens

if TYPE_CHECKING:
    import torch

Shape = tuple[int, int]  # padded tokens, rows

TAKES_ADDITIVE_MASK = frozenset({"bert"})
"""Model types that add a four-dimensional mask to the attention scores of every layer unchanged. Others may
refuse it, or use it in place of their own (sliding windows)."""


ROWS = 2
"""Rows of a batch on a CPU without AMX, see `rows_of`."""


class Batch(NamedTuple):
    """The windows (their numbers, int64) of one batch, its shape, and whether no later window could join."""

    members: Int64
    shape: Shape
    full: bool = True


class WindowEncoder(ABC):
    """Windows, shapes, batches and the forward pass. Subclasses run the batches on their device.

    `window`: the model's maximum tokens, including special ones. `tokenizer_note`: which tokenizer, and why.
    """

    def __init__(self, model: str, dtype: Dtype, device: str, prompts: Prompts) -> None:
        """Load `model`, a name or a folder. EncoderError: not found, or no sentence-transformers model."""
        folder = model_folder(model)
        self._model = load_model(folder, model).to(device)
        self._head, *self._tail = self._model
        transformer: Any = self._head
        form = transformer.auto_model.config
        self._dtype = working_dtype(dtype, device, getattr(form, "dtype", None))
        self._head.to(self._dtype)
        tokenizer, self.window = tokenizer_of(self._model)
        self._additive_mask = form.model_type in TAKES_ADDITIVE_MASK and form._attn_implementation == "sdpa"
        self._takes_types = "token_type_ids" in self._model.tokenizer.model_input_names
        self._pad_id = int(self._model.tokenizer.pad_token_id or 0)
        self.prompts = prompts_of(folder, self._model, prompts)
        self._filler = np.array(tokenizer.encode("").ids or [self._pad_id], np.int32)
        self._tokens, self.tokenizer_note = make_tokens(tokenizer, self.window, self._filler.tolist())
        self._shapes = self.shapes_up_to(self.window)
        self._widths = np.array([width for width, _ in self._shapes])
        self.dim = self._measure_dim()
        self.fingerprint = Fingerprint(
            model=model,
            digest=model_digest(folder, TEXT_FORMAT, self.window, self.prompts.document or ""),
            dim=self.dim,
            dtype=str(self._dtype).removeprefix("torch."),
            device=device,
        )

    @abstractmethod
    def shapes_up_to(self, window: int) -> list[Shape]:
        """The shapes for windows of up to `window` tokens, by width; the last is wider than `window`."""

    @abstractmethod
    def _measure_dim(self) -> int:
        """The dimension of the vectors, measured by running the model once."""

    @abstractmethod
    def _encode(self, texts: Sequence[str]) -> Float16:
        """As `encode`, of texts that have their prompts."""

    def encode(self, texts: Sequence[str]) -> Float16:
        """Embed texts: float16 [n, dim], L2-normalised, row i of text i; [0, dim] for no texts.

        A text over the window is embedded in consecutive windows; their normalised vectors are averaged
        and normalised again. Raises EncoderError if the model yields a vector that is not finite.
        """
        return self._encode(with_prompt(self.prompts.document, texts))

    def encode_queries(self, texts: Sequence[str]) -> Float16:
        """As `encode`, with the model's prompt for queries."""
        return self._encode(with_prompt(self.prompts.query, texts))

    def padding_share(self, texts: Sequence[str]) -> float:
        """The share of computed token places for `texts` that is padding or filler; for benchmarks."""
        lengths = self.windows(texts).lengths
        places = sum(width * rows for _, (width, rows), _ in self.batches(lengths))
        return 1.0 - int(lengths.sum()) / places if places else 0.0

    def windows(self, texts: Sequence[str]) -> TextWindows:
        """The token ids of the windows of each text."""
        # Most texts skip the call, which matters at millions of tokens a second.
        return self._tokens([t if t.isascii() else speakable(t) for t in texts])

    def batches(self, lengths: Int64) -> list[Batch]:
        """Batches of all windows by shape, the widest first, so that no long one is left to the end."""
        # side="right": a window is always shorter than its width. For a batch without padding, transformers
        # would drop a two-dimensional mask and use another kernel, so that other texts would affect the bits.
        bucket = np.searchsorted(self._widths, lengths, side="right")
        order = np.argsort(bucket, kind="stable")
        ends = np.searchsorted(bucket[order], np.arange(len(self._shapes)), side="right")
        found: list[Batch] = []
        for b in range(len(self._shapes) - 1, -1, -1):
            members, rows = order[ends[b - 1] if b else 0 : ends[b]], self._shapes[b][1]
            for i in range(0, len(members), rows):
                found.append(Batch(members[i : i + rows], self._shapes[b], i + rows <= len(members)))
        return found

    def pack(self, windows: Windows, batch: Batch, out: Int32) -> None:
        """Write a batch into `out`, int32 [rows, width + 1]: ids with padding, then each row's length."""
        width = out.shape[1] - 1
        begins = windows.offsets[batch.members]
        lengths = windows.offsets[batch.members + 1] - begins
        count = len(lengths)
        column = np.arange(width)
        mask = column < lengths[:, None]
        # Places beyond a window temporarily hold another window's ids.
        np.take(windows.ids, begins[:, None] + column, mode="clip", out=out[:count, :-1])
        out[:count, :-1][~mask] = self._pad_id
        out[:count, -1] = lengths
        out[count:, :-1] = self._pad_id
        out[count:, : len(self._filler)] = self._filler
        out[count:, -1] = len(self._filler)

    def pooled(self, packed: torch.Tensor) -> torch.Tensor:
        """The model over one packed batch: float32 [rows, dim], not normalised.

        A pure function of the packed rows: no branch here or below depends on what they hold, as
        `batches` leaves no batch without padding.
        """
        import torch

        ids = packed[:, :-1].long()
        mask = torch.arange(ids.shape[1], device=ids.device) < packed[:, -1:]
        features = {"input_ids": ids, "attention_mask": self._attention_mask(mask)}
        if self._takes_types:
            features["token_type_ids"] = torch.zeros_like(ids)
        with torch.inference_mode():
            features = self._head(features)
            features["attention_mask"] = mask.long()  # as pooling wants it
            # pooling and later modules in fp32: a 16-bit mean would lose half of the remaining precision
            features["token_embeddings"] = features["token_embeddings"].float()
            for module in self._tail:
                features = module(features)
        vectors: torch.Tensor = features["sentence_embedding"]
        return vectors

    def _attention_mask(self, mask: torch.Tensor) -> torch.Tensor:
        """The transformer's mask for bool [rows, width].

        Additive in the working dtype if possible: torch would convert a boolean mask in every layer.
        """
        import torch

        if not self._additive_mask:
            return mask.long()
        zeros = torch.zeros(mask.shape, dtype=self._dtype, device=mask.device)
        return zeros.masked_fill_(~mask, float("-inf"))[:, None, None, :]

    def _damaged(self) -> EncoderError:
        return EncoderError(
            f"the encoder {self.fingerprint.model} gave vectors that are not finite in "
            f"{self.fingerprint.dtype}: its weights are damaged, or its numbers are too large for that "
            "type; fetch the model again or use another one"
        )


class SentenceEncoder(WindowEncoder):
    """The encoder on the CPU: each batch runs on a single thread, and batches run in parallel.

    So the number of threads cannot affect a text's bits either.
    """

    # Padded tokens of a batch.
    WIDTHS: ClassVar[tuple[int, ...]] = (
        *(16, 32, 48, 64, 80, 96, 112, 128),
        *(160, 192, 224, 256, 320, 384, 448, 512),
    )

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        dtype: Dtype = "auto",
        threads: int | None = None,
        prompts: Prompts = OWN_PROMPTS,
    ) -> None:
        """Load `model`, a name or a folder. `dtype` "auto" is bfloat16 where the CPU has `BF16_UNITS`.

        `threads`: batches in flight at once; torch's own thread count by default.
        Raises EncoderError if the model is not found or is no sentence-transformers model,
        ValueError for `threads` < 1.
        """
        import torch

        if threads is not None and threads < 1:
            raise ValueError(f"threads is {threads}; give at least 1")
        self._threads = threads or torch.get_num_threads()
        super().__init__(model, dtype, "cpu", prompts)
        if not cpu_has(AMX):  # the shapes affect the last bits, so fingerprints must differ
            self.fingerprint = replace(self.fingerprint, device=f"cpu in batches of {ROWS} rows")

    @cached_property
    def _pool(self) -> ThreadPoolExecutor:
        return single_threaded_pool(self._threads)

    def shapes_up_to(self, window: int) -> list[Shape]:
        widths = [*(width for width in self.WIDTHS if width <= window), window // 16 * 16 + 16]
        on_amx = cpu_has(AMX)
        return [(width, rows_of(width, on_amx=on_amx)) for width in widths]

    def _encode(self, texts: Sequence[str]) -> Float16:
        if not texts:
            return np.zeros((0, self.dim), np.float16)
        windows = self.windows(texts)
        batches = self.batches(windows.lengths)
        vectors = np.empty((len(windows), self.dim))
        done = self._pool.map(lambda batch: self._run(windows, batch), batches)
        for batch, part in zip(batches, done, strict=True):
            vectors[batch.members] = part
        if not np.isfinite(vectors).all():
            raise self._damaged()
        return unit(np.add.reduceat(unit(vectors), windows.first, axis=0)).astype(np.float16)

    def _run(self, windows: Windows, batch: Batch) -> NDArray[np.float32]:
        """float32 [members, dim], not normalised."""
        import torch

        width, rows = batch.shape
        packed = np.empty((rows, width + 1), np.int32)
        self.pack(windows, batch, packed)
        vectors: NDArray[np.float32] = self.pooled(torch.from_numpy(packed))[: len(batch.members)].numpy()
        return vectors

    def _measure_dim(self) -> int:
        one = Windows(self._filler, np.array([0, len(self._filler)]))
        [batch] = self.batches(one.lengths)
        return int(self._pool.submit(self._run, one, batch).result().shape[1])


def rows_of(width: int, *, on_amx: bool) -> int:
    """Rows of a batch of `width` tokens.

    Few, because short batches are filled up: with 2 rows instead of 4, a single query takes half the time,
    eight texts three fifths, and 384 texts 5 to 14% more (AVX512-BF16). On AMX, measured on two cores, the
    matrix unit is underused below about 1,000 token places a batch, and above 1,500 a batch exceeds the
    cache.
    """
    if not on_amx:
        return ROWS
    return 16 if width <= 80 else 12 if width <= 128 else 8
