"""The sentence encoder on a CUDA device, in CUDA graphs, with vectors left on the device.

A BERT or Qwen3 model runs over packed windows, without padding, in kernels of our own: one shape, one graph.
Others, and all without Triton, run their own forward pass over padded batches: a graph per shape.

Other texts cannot affect a text's bits. Packed, a kernel computes a token from its window alone, in an order
that does not depend on where the window stands. Padded, the shape depends on the window's length alone, so
each window always meets the same kernels, and a kernel computes a row from that row alone. The tests marked
`gpu` check this on the GPU at hand.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from math import lcm
from typing import TYPE_CHECKING, Any

import numpy as np

from undertow.engine.encoders.base import OWN_PROMPTS, Encoded, Float16, Prompts, with_prompt
from undertow.engine.encoders.cpu import Batch, Shape, WindowEncoder
from undertow.engine.encoders.model_files import DEFAULT_MODEL, Dtype, EncoderError
from undertow.engine.encoders.packed import PackedModel, weights_of, why_not_packed
from undertow.engine.encoders.tokenizer import Int32, Int64, TextWindows, Windows, spread
from undertow.kernels.encoder.layout import ROW_TILE

if TYPE_CHECKING:
    import torch

PIECE_CHARS = 1 << 19
"""Texts are tokenised in pieces of about this many characters, while the device computes another piece."""

MEAN_ROWS = 64
"""Texts with several windows are averaged in blocks of this many, again a fixed shape."""


class CudaSentenceEncoder(WindowEncoder):
    """Replays fixed shapes as CUDA graphs. Vectors stay on the device, with a copy on the host.

    Thread-safe: one call at a time uses the device. All work goes to torch's current stream.
    `packing_note`: why the model does not run packed, or that it does. `places`: token places of a batch.
    """

    # Token places of a packed batch for each multiprocessor, or more in all where a window takes more. With
    # two tiles of rows, or four, MiniLM's products take whole waves of programs. Four are 3% faster on an
    # H100; a text alone takes 0.96 ms in place of 0.70. The kernels skip what is empty.
    TOKENS = 4 * ROW_TILE

    # Maximum token places of a padded batch. A single window costs a whole batch, since its shape must not
    # depend on other windows: fewer places make a single question faster and waste less on the last batch of
    # each width. More places use the GPU better. With 8 Ki, the narrowest product of a 384-dimensional model
    # has 128 tiles of 128 x 192 for the 132 multiprocessors of an H100, and the widest activation (8 Ki x
    # 1536 in 16 bits: 24 MiB) stays in its second-level cache; with 16 Ki it would not. The fingerprint
    # distinguishes other numbers from the default, but not one default from the next.
    PLACES = 8_192

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        dtype: Dtype = "auto",
        device: str = "cuda",
        graphs: bool = True,
        places: int | None = None,
        packed: bool = True,
        prompts: Prompts = OWN_PROMPTS,
    ) -> None:
        """Load `model`, a name or a folder, in float16 unless `dtype` says otherwise.

        `device` "cpu" runs the same batches without graphs, for tests; `graphs` False does so on CUDA.
        `packed` False keeps the model's own forward pass even where the packed kernels could stand in.
        `places`: token places a batch, at most; by default TOKENS a multiprocessor if packed, else PLACES.
        Another number than PLACES means other shapes, for which cuBLAS may take other kernels and give other
        last bits: the fingerprint's `device` says so, as it says if batches are packed, whose bits do not
        depend on it.
        Raises EncoderError if the model is nowhere to be found, is not one of sentence-transformers, or
        torch has no CUDA; ValueError for `places` < 128, or fewer than a packed window needs.
        """
        import torch

        self.places = self.PLACES if places is None else places
        if self.places < 128:
            raise ValueError(f"places is {places}; give at least 128")
        if device == "cuda" and not torch.cuda.is_available():
            raise EncoderError(
                "torch finds no CUDA device for the encoder. Install a CUDA build of torch that fits the "
                "driver, or set UNDERTOW_DEVICE to cpu."
            )
        self._lock = threading.Lock()
        self._tokenizer_thread = ThreadPoolExecutor(1, thread_name_prefix="undertow-tokenizer")
        self._device = torch.device(device)
        self._graphs = GraphSpace() if graphs and device == "cuda" else None
        self._fixed: dict[Shape, FixedShape] = {}
        self._packed: PackedModel | None = None
        super().__init__(model, dtype, device, prompts)
        reason = why_not_packed(self._model, self.fingerprint.dtype, device) if packed else "not wanted"
        self.packing_note = f"padded batches: {reason}" if reason else "packed batches"
        if reason is None:
            whole_window = -(-self.window // ROW_TILE) * ROW_TILE
            usual = self.TOKENS
            if self._device.type == "cuda":
                usual *= torch.cuda.get_device_properties(self._device).multi_processor_count
            self._pack_into(max(usual, whole_window) if places is None else places)
        elif self.places != self.PLACES:
            self._computed_in(f"batches of {self.places} places")
        # All graphs share one memory pool: capturing the largest first avoids growth.
        self._shape(max(self._shapes, key=lambda shape: shape[0] * shape[1]))

    def _pack_into(self, tokens: int) -> None:
        """Run the model's weights over packed batches from now on, instead of the model."""
        if tokens < self.window:
            raise ValueError(f"places is {tokens}, but a window takes up to {self.window}")
        self.places = tokens
        self._packed = PackedModel(weights_of(self._model, self.window), tokens)
        self._shapes = [self._packed.shape]
        self._computed_in("packed batches")

    def _computed_in(self, how: str) -> None:
        self.fingerprint = replace(self.fingerprint, device=f"{self._device.type} in {how}")

    def shapes_up_to(self, window: int) -> list[Shape]:
        return self.shapes_of(window, self.places)

    def batches(self, lengths: Int64) -> list[Batch]:
        return super().batches(lengths) if self._packed is None else self._packed.batches(lengths)

    def pack(self, windows: Windows, batch: Batch, out: Int32) -> None:
        if self._packed is None:
            super().pack(windows, batch, out)
        else:
            self._packed.pack(windows, batch, out)

    def pooled(self, packed: torch.Tensor) -> torch.Tensor:
        return super().pooled(packed) if self._packed is None else self._packed.pooled(packed)

    @staticmethod
    def shapes_of(window: int, places: int) -> list[Shape]:
        """Widths in steps of 16 up to 256, of 32 beyond; places in multiples of 128, for whole tiles."""
        widths = [*range(16, 257, 16), *range(288, window + 1, 32)]
        widths = [*(w for w in widths if w <= window), window // 16 * 16 + 16]
        tiles = [lcm(width, 128) for width in widths]
        return [(w, max(8, places // tile * tile // w)) for w, tile in zip(widths, tiles, strict=True)]

    def prepare(self) -> None:
        """Capture every shape now instead of on first use, so that no later call is delayed."""
        with self._lock:
            for shape in self._shapes:
                self._shape(shape)

    def _encode(self, texts: Sequence[str]) -> Float16:
        return self._embed(texts).host

    def embed(self, texts: Sequence[str]) -> Encoded:
        """Embed texts: float16 [n, dim], L2-normalised, on the device and, copied, on the host.

        Long texts as in `encode`. EncoderError: a vector is not finite.
        """
        return self._embed(with_prompt(self.prompts.document, texts))

    def _embed(self, texts: Sequence[str]) -> Encoded:
        import torch

        if not texts:
            empty = torch.empty((0, self.dim), dtype=torch.float16, device=self._device)
            return Encoded(np.zeros((0, self.dim), np.float16), empty)
        with self._lock, torch.no_grad():
            vectors, first = self.run_windows(texts)
            result = self._of_texts(vectors, first)
            finite = torch.isfinite(result).all()
            host = torch.empty(result.shape, dtype=result.dtype, pin_memory=self._device.type == "cuda")
            host.copy_(result, non_blocking=True)
            if not finite.item():  # synchronises with all earlier work on the stream, including the copy
                raise self._damaged()
        return Encoded(host.numpy(), result)

    def run_windows(self, texts: Sequence[str]) -> tuple[torch.Tensor, Int64]:
        """Unit vectors of all windows, float32 [windows, dim], and the first window of each text."""
        import torch

        backlog = Backlog()
        firsts: list[Int64] = []
        parts: list[torch.Tensor] = []
        done: list[Int64] = []
        for windows, is_last in self._pieces(texts):
            firsts.append(windows.first + backlog.received)
            backlog.add(windows)
            for batch in backlog.take(self.batches(backlog.windows.lengths), only_full=not is_last):
                parts.append(self._run(backlog.windows, batch))
                done.append(backlog.numbers[batch.members])
            backlog.shrink()
        order = np.concatenate(done)
        row_of = np.empty(len(order), np.int64)
        row_of[order] = np.arange(len(order))
        return torch.cat(parts).index_select(0, self._upload(row_of)), np.concatenate(firsts)

    def run_packed(self, packed: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Unit vectors of batches as `fill` makes them: float32 [rows, dim] each, on the device.

        `packed`: int32, of the encoder's shapes (ValueError if not), on any device. The vectors are complete
        when the call returns; rows beyond a batch's windows mean nothing.
        """
        import torch

        shape_of = {self._buffer_shape(shape): shape for shape in self._shapes}
        for batch in packed:
            if tuple(batch.shape) not in shape_of:
                raise ValueError(f"a batch of shape {tuple(batch.shape)} is none of this encoder's")
        with self._lock:
            vectors = [self._shape(shape_of[tuple(b.shape)])(b).clone() for b in packed]
            if self._device.type == "cuda":
                torch.cuda.current_stream().synchronize()
        return vectors

    def _pieces(self, texts: Sequence[str]) -> Iterator[tuple[TextWindows, bool]]:
        """Windows of consecutive texts, and whether they are the last. A thread tokenises ahead."""
        starts = np.cumsum([len(text) for text in texts]) // PIECE_CHARS
        cuts = [0, *(np.flatnonzero(np.diff(starts)) + 1).tolist(), len(texts)]
        pieces = [texts[begin:end] for begin, end in pairwise(cuts)]
        ahead = self._tokenizer_thread.submit(self.windows, pieces[0]) if len(pieces) > 1 else None
        for i, piece in enumerate(pieces):
            windows = ahead.result() if ahead else self.windows(piece)
            is_last = i + 1 == len(pieces)
            ahead = None if is_last else self._tokenizer_thread.submit(self.windows, pieces[i + 1])
            yield windows, is_last

    def _run(self, windows: Windows, batch: Batch) -> torch.Tensor:
        """The unit vectors of one batch: a new tensor float32 [members, dim]."""
        return self._shape(batch.shape)(self.fill(windows, batch))[: len(batch.members)].clone()

    def fill(self, windows: Windows, batch: Batch) -> torch.Tensor:
        """A batch as the device takes it, written by `pack`: int32, on the host."""
        import torch

        # torch reuses pinned memory only after the copy from it is complete.
        pinned = self._device.type == "cuda"
        buffer = torch.empty(self._buffer_shape(batch.shape), dtype=torch.int32, pin_memory=pinned)
        self.pack(windows, batch, buffer.numpy())
        return buffer

    def _buffer_shape(self, shape: Shape) -> tuple[int, ...]:
        width, rows = shape
        return (rows, width + 1) if self._packed is None else (self._packed.layout.size,)

    def _shape(self, shape: Shape) -> FixedShape:
        if shape not in self._fixed:
            vectors = shape[1] if self._packed is None else self._packed.layout.sequences
            self._fixed[shape] = FixedShape(
                self.unit_pooled, self._example(shape), (vectors, self.dim), self._graphs
            )
        return self._fixed[shape]

    def _example(self, shape: Shape) -> torch.Tensor:
        """A batch of one window, on the device."""
        one = Windows(self._filler, np.array([0, len(self._filler)]))
        return self.fill(one, Batch(np.zeros(1, np.int64), shape)).to(self._device)

    def unit_pooled(self, packed: torch.Tensor) -> torch.Tensor:
        """`pooled`, normalised in fp64: float32 [rows, dim]."""
        with fixed_orders(self._device.type):
            return _unit(self.pooled(packed).double()).float()

    def _of_texts(self, vectors: torch.Tensor, first: Int64) -> torch.Tensor:
        """Vectors of windows to vectors of texts: float16 [texts, dim]."""
        counts = np.diff(np.append(first, len(vectors)))
        result = vectors.index_select(0, self._upload(first))
        long = np.flatnonzero(counts > 1)
        for start in range(0, len(long), MEAN_ROWS):
            some = long[start : start + MEAN_ROWS]
            members = vectors.index_select(0, self._upload(spread(first[some], counts[some])))
            result[self._upload(some)] = self._means(members, counts[some])
        return result.half()

    def _means(self, members: torch.Tensor, counts: Int64) -> torch.Tensor:
        """Normalised means of runs of `counts` rows, in fp64: float32 [runs, dim]; at most MEAN_ROWS runs."""
        import torch

        # One thread per column sums a run from first to last row, independent of other runs.
        lengths = self._upload(np.pad(counts, (0, MEAN_ROWS - len(counts))))
        sums = torch.segment_reduce(members.double(), "sum", lengths=lengths, axis=0, unsafe=True)
        return _unit(sums)[: len(counts)].float()

    def _upload(self, numbers: Int64) -> torch.Tensor:
        import torch

        host = torch.from_numpy(numbers)
        if self._device.type == "cpu":
            return host
        return host.pin_memory().to(self._device, non_blocking=True)

    def _measure_dim(self) -> int:
        import torch

        with torch.no_grad():
            return int(self.pooled(self._example(self._shapes[0])).shape[1])


class Backlog:
    """Windows that wait for a full batch while more texts are tokenised."""

    def __init__(self) -> None:
        self.windows = Windows(np.zeros(0, np.int32), np.zeros(1, np.int64))
        self.numbers = np.zeros(0, np.int64)
        """The windows' numbers in order of arrival over the whole call: int64 [windows]."""
        self.received = 0
        self._left = np.zeros(0, bool)

    def add(self, more: Windows) -> None:
        old = self.windows
        ids = np.concatenate([old.ids, more.ids]) if len(old) else more.ids
        offsets = np.concatenate([old.offsets, more.offsets[1:] + old.offsets[-1]])
        self.windows = Windows(ids, offsets)
        self.numbers = np.concatenate([self.numbers, np.arange(len(more)) + self.received])
        self.received += len(more)
        self._left = np.ones(len(self.windows), bool)

    def take(self, batches: Sequence[Batch], *, only_full: bool) -> Iterator[Batch]:
        for batch in batches:
            if not only_full or batch.full:
                self._left[batch.members] = False
                yield batch

    def shrink(self) -> None:
        """Keep the windows not taken."""
        rows = np.flatnonzero(self._left)
        lengths = self.windows.lengths[rows]
        ids = self.windows.ids[spread(self.windows.offsets[rows], lengths)]
        self.windows = Windows(ids, np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]))
        self.numbers = self.numbers[rows]


class GraphSpace:
    """A stream and a memory pool for capturing graphs with a common lifetime.

    The graphs share the pool, so they must not run concurrently. They need their own stream: torch keeps a
    cuBLAS workspace per stream (32 MiB on Hopper), graphs keep its raw address, and destroying any graph
    captured on the stream may free it (pytorch issue 193402). torch's default capture stream is shared.
    """

    def __init__(self) -> None:
        import torch

        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle()
        self._graphs: list[Any] = []

    def capture(self, run: Callable[[], None]) -> Any:
        """Capture the launches of `run`, after one warm-up run. Not thread-safe."""
        import torch

        # Libraries initialise on first use, which cannot be captured.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)  # a failed capture must not be destroyed before the others either
        # Other threads may allocate meanwhile.
        capture = torch.cuda.graph(
            graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
        )
        with torch.no_grad(), capture:
            run()
        return graph


class FixedShape:
    """Runs `compute` on batches of one shape. With a GraphSpace it is captured once and replayed."""

    def __init__(
        self,
        compute: Callable[[torch.Tensor], torch.Tensor],
        example: torch.Tensor,
        out_shape: tuple[int, int],
        graphs: GraphSpace | None = None,
    ) -> None:
        """`example`: an input of the shape, on the device; `compute` makes float32 [*out_shape] of it."""
        import torch

        self._compute = compute
        self._input = example.clone()
        self._output = torch.empty(out_shape, dtype=torch.float32, device=example.device)
        self._graph = None if graphs is None else graphs.capture(self._run)

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        """The result of `compute`: float32 [*out_shape]; the next call overwrites it."""
        import torch

        with torch.no_grad():
            self._input.copy_(batch, non_blocking=True)
            if self._graph is None:
                self._run()
            else:
                self._graph.replay()
        return self._output

    def _run(self) -> None:
        self._output.copy_(self._compute(self._input))


@contextmanager
def fixed_orders(device: str) -> Iterator[None]:
    """On CUDA, only kernels in which the order of a row's sums does not depend on where the row stands.

    Attention: the one that takes masks and never splits a row's keys over blocks. Products: none that splits
    the sum over blocks or adds up in 16 bits.
    """
    if device != "cuda":
        yield
        return
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel

    products: Any = torch.backends.cuda.matmul
    names = [f"allow_{dtype}_reduced_precision_reduction" for dtype in ("fp16", "bf16")]
    before = {name: (getattr(products, name), getattr(products, f"{name}_split_k")) for name in names}
    for name in names:
        setattr(products, name, (False, False))
    try:
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            yield
    finally:
        for name, values in before.items():
            setattr(products, name, values)


def _unit(vectors: torch.Tensor) -> torch.Tensor:
    """Rows scaled to length 1; a row of zeros stays."""
    lengths = (vectors * vectors).sum(dim=1, keepdim=True).sqrt()
    return vectors / lengths.where(lengths > 0, 1.0)
