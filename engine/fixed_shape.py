"""One shape of the encoder on a device: fixed input and output, and on CUDA the graph between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class FixedShape:
    """Runs `compute` on batches of one shape.

    With `graph_memory`, a handle of `torch.cuda.graph_pool_handle()`, `compute` is captured once and
    replayed from then on. Graphs that share a memory must not run at the same time.
    """

    def __init__(
        self,
        compute: Callable[[torch.Tensor], torch.Tensor],
        example: torch.Tensor,
        out_dim: int,
        graph_memory: Any = None,
    ) -> None:
        """`example`: an input of the shape, on the device; `compute` makes float32 [rows, out_dim] of it."""
        import torch

        self._compute = compute
        self._input = example.clone()
        self._output = torch.empty((len(example), out_dim), dtype=torch.float32, device=example.device)
        self._graph = None if graph_memory is None else self._capture(graph_memory)

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

    def _capture(self, graph_memory: Any) -> Any:
        import torch

        # libraries set themselves up at first use, which no graph can hold
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            self._run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # other threads may allocate meanwhile
        capture = torch.cuda.graph(graph, pool=graph_memory, capture_error_mode="thread_local")
        with torch.no_grad(), capture:
            self._run()
        return graph
