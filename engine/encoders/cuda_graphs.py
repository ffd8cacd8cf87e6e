"""The encoder for one shape on a device: fixed input and output buffers, and on CUDA a graph between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


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
        out_dim: int,
        graphs: GraphSpace | None = None,
    ) -> None:
        """`example`: an input of the shape, on the device; `compute` makes float32 [rows, out_dim] of it."""
        import torch

        self._compute = compute
        self._input = example.clone()
        self._output = torch.empty((len(example), out_dim), dtype=torch.float32, device=example.device)
        self._graph = None if graphs is None else graphs.capture(self._run)

    def __call__(self, batch: torch.Tensor) -> torch.Tensor:
        """The result of `compute`: float32 [rows, out_dim]; the next call overwrites it."""
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
