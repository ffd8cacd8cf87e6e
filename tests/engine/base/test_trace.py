"""Spans of a step: in the Chrome trace, as NVTX ranges, and for nothing where nobody looks."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

pytest.importorskip("orjson", reason="the engine's packages are not installed")
pytest.importorskip("pydantic_settings", reason="the engine's packages are not installed")

from undertow.bench.mock.llm import MockLLM
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.trace import Trace
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.kernels import device


class Ranges:
    """Stands in for torch.cuda.nvtx: notes what was pushed and how deep."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.seen: list[tuple[int, str]] = []

    def range_push(self, msg: str) -> None:
        self.seen.append((len(self.open), msg))
        self.open.append(msg)

    def range_pop(self) -> None:
        self.open.pop()


def test_a_span_is_an_event_and_a_range(tmp_path: Path) -> None:
    ranges = Ranges()
    trace = Trace(tmp_path / "trace.json", ranges)
    with trace.span("decide", tenants=2), trace.span("gate", queries=3):
        pass
    trace.write()
    inner, outer = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    assert (inner["name"], inner["args"], outer["name"]) == ("gate", {"queries": 3}, "decide")
    assert outer["ts"] <= inner["ts"]
    assert ranges.seen == [(0, "decide"), (1, "gate")]
    assert ranges.open == []
    assert trace.seconds()["decide"] >= trace.seconds()["gate"] > 0


def test_a_range_ends_with_an_error_too() -> None:
    ranges = Ranges()
    with pytest.raises(ZeroDivisionError), Trace(ranges=ranges).span("gate"):
        _ = 1 / 0
    assert ranges.open == []


@pytest.mark.skipif(device.HAS_CUDA, reason="there is a CUDA device here")
def test_where_nobody_looks_a_span_does_nothing() -> None:
    trace = Trace()
    assert isinstance(trace.span("gate", queries=1), nullcontext)
    assert trace.span("gate") is trace.span("decide")
    assert trace.seconds() == {}


def test_where_there_is_a_card_spans_are_nvtx_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(device, "HAS_CUDA", True)
    pushed: list[str] = []
    note: Callable[[str], None] = pushed.append
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", note)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: pushed.append("end"))
    with Trace(ranges=device.nvtx_ranges()).span("commit"):
        pass
    assert pushed == ["commit", "end"]


@pytest.mark.gpu
def test_nvtx_takes_ranges_on_a_card() -> None:
    with Trace(ranges=device.nvtx_ranges()).span("commit"):
        pass


def test_every_phase_of_a_step_is_a_range(tmp_path: Path) -> None:
    ranges = Ranges()
    settings = Settings(encoder="hash:64", theta_sim=0.3, theta_count=2)
    trace = Trace(tmp_path / "trace.json", ranges)
    with Engine(tmp_path / "store", settings, HashingEncoder(64), llm=MockLLM(), trace=trace) as engine:
        for day in range(6):
            engine.add("ann", [{"role": "user", "content": f"pottery again, day {day} of the course"}])
        engine.drain()
    phases = {name for _, name in ranges.seen}
    assert phases >= {
        *("admit", "encode", "append", "resume", "decide", "gate", "embed", "nearest", "commit", "submit")
    }
    assert ranges.open == []
    assert {name for name in trace.seconds() if name in phases} == phases  # one name, both places
