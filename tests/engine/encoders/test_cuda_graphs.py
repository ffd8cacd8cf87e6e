"""CUDA graphs of fixed shapes, with a stand-in for CUDA."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from undertow.engine.encoders.cuda import FixedShape, GraphSpace


def test_a_fixed_shape_computes_and_overwrites() -> None:
    double = FixedShape(lambda x: 2.0 * x[:, :2].float(), torch.zeros((3, 4), dtype=torch.int32), (3, 2))
    first = double(torch.arange(12, dtype=torch.int32).reshape(3, 4))
    assert first.tolist() == [[0, 2], [8, 10], [16, 18]]
    assert double(torch.ones((3, 4), dtype=torch.int32)).data_ptr() == first.data_ptr()


def test_graphs_of_an_encoder_share_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a card: what torch is told. Warm-up and capture on that stream, never on the current one."""
    done: list[Any] = []
    current: list[Any] = ["main"]

    class Stream:
        def wait_stream(self, other: Any) -> None:
            done.append(("wait", self, other))

    class on:
        def __init__(self, stream: Any) -> None:
            self._stream = stream

        def __enter__(self) -> None:
            current.append(self._stream)

        def __exit__(self, *_: object) -> None:
            current.pop()

    main = current[0] = Stream()
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    captured: list[dict[str, Any]] = []

    def graph(graph: Any, **given: Any) -> on:
        captured.append({"graph": graph, **given})
        return on(given["stream"])

    monkeypatch.setattr(torch.cuda, "graph", graph)
    space = GraphSpace()
    first, second = (space.capture(lambda: done.append(current[-1])) for _ in range(2))
    own = captured[0]["stream"]
    assert own is not main
    assert done == 2 * [("wait", own, main), own, ("wait", main, own), own]
    assert [c["stream"] for c in captured] == [own, own]
    assert captured[0]["pool"] is captured[1]["pool"]
    assert [c["graph"] for c in captured] == [first, second]
    assert GraphSpace()._stream is not own


def test_a_graph_whose_capture_fails_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end could free the workspace that earlier graphs still write to."""
    for name in ("Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: SimpleNamespace(wait_stream=lambda _: None))
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", object)
    alive: weakref.WeakSet[Any] = weakref.WeakSet()

    class Graph:
        def __init__(self) -> None:
            alive.add(self)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    runs: list[None] = []

    def run() -> None:
        runs.append(None)
        if len(runs) == 2:
            raise MemoryError("no room")

    space = GraphSpace()
    with pytest.raises(MemoryError):
        space.capture(run)
    gc.collect()
    assert len(alive) == 1
    del space
    gc.collect()
    assert len(alive) == 0
