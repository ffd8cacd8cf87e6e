"""One shape of the encoder on a device: fixed input and output, and on CUDA the graph between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class GraphSpace:
    """Where graphs are captured that live and die together: a stream and a memory of their own.

    They share that memory, so they must not run at the same time. The stream is theirs because torch keeps
    a cuBLAS workspace for each stream (32 MiB on Hopper), graphs keep its bare address, and the end of any
    graph captured there may free it (pytorch issue 193402). torch's own capture stream is everybody's.
    """

    def __init__(self) -> None:
        import torch

        self._stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._memory = torch.cuda.graph_pool_handle()
        self._graphs: list[Any] = []

    def capture(self, run: Callable[[], None]) -> Any:
        """A graph of what `run` launches, after one run to warm up. No other thread may be in here."""
        import torch

        # libraries set themselves up at first use, which no graph can hold
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            run()
        torch.cuda.current_stream().wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        self._graphs.append(graph)  # one whose capture fails must not end before the others either
        # other threads may allocate meanwhile
        capture = torch.cuda.graph(
            graph, pool=self._memory, stream=self._stream, capture_error_mode="thread_local"
        )
        with torch.no_grad(), capture:
            run()
        return graph


class FixedShape:
    """Runs `compute` on batches of one shape: with a GraphSpace captured once and replayed from then on."""

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
        """What `compute` makes of the batch: float32 [rows, out_dim]; the next call overwrites it."""
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
