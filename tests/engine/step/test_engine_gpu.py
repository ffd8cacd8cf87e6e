"""The engine on a card, over the LoCoMo conversations: it decides, remembers and asks what the CPU does.

The same body runs without a card on a pool on torch's CPU device, read by the reference gate.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lance", reason="the engine's packages are not installed")
pytest.importorskip("pydantic_settings", reason="the engine's packages are not installed")
pytest.importorskip("numba", reason="the engine's packages are not installed")

from undertow.bench.mock.replies import MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Turn, UndertowError
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.readers import read
from undertow.kernels.arena.row_codes import code_bytes

from ...support.engine import RecordingLLM, Run, assert_same, ingest, opened, read_back
from .test_eviction import use_pool

ROOT = Path(__file__).parents[3]
REPLIES = MockReplies(1, refusal_rate=0.3, empty_rate=0.25, malformed_rate=0.08, malformed_sticky=True)
THETA: dict[str, Any] = {"theta_sim": 0.5, "theta_merge": 0.6, "theta_count": 3}
NAMES = ("conv-26", "conv-30", "conv-41")
ENCODER = HashingEncoder(384)
ROW_BYTES = 2 * ENCODER.dim + 1
ROUNDS = 4
# rows of pools: for all of the three tenants with room to spare, and for one of them at a time
LARGE, SMALL = 20_000, 1_000

Turns = dict[str, list[Turn]]
OnPool = Callable[[pytest.MonkeyPatch, int], Settings]


def on_card(monkeypatch: pytest.MonkeyPatch, rows: int) -> Settings:
    share = rows * ROW_BYTES / torch.cuda.mem_get_info()[1]
    return Settings(device="cuda", card_shares=f"llm=0,arena={share:.9f},encoder=0.05", **THETA)


def on_card_with_codes(monkeypatch: pytest.MonkeyPatch, rows: int) -> Settings:
    more = (ROW_BYTES + code_bytes(ENCODER.dim)) / ROW_BYTES
    return on_card(monkeypatch, int(rows * more)).model_copy(update={"gate_int8": True})


def on_stand_in(monkeypatch: pytest.MonkeyPatch, rows: int) -> Settings:
    use_pool(monkeypatch, rows)
    return Settings(device="cpu", **THETA)


POOLS = [
    pytest.param(on_card, id="card", marks=pytest.mark.gpu),
    pytest.param(on_card_with_codes, id="card-codes", marks=pytest.mark.gpu),
    pytest.param(on_stand_in, id="stand-in"),
]


@pytest.fixture(scope="module")
def locomo(request: pytest.FixtureRequest) -> Turns:
    found = [
        path
        for folder in (ROOT.parent / "shared", ROOT / "shared")
        if (path := folder / "data" / "locomo_dev.json").exists()
    ]
    if not found:
        reason = "the LoCoMo development conversations (shared/data/locomo_dev.json) are not here"
        if request.config.getoption("--require-gpu"):
            pytest.fail(reason, pytrace=False)
        pytest.skip(reason)
    turns: Turns = {name: [] for name in NAMES}
    for record in read(found[0], max_message_bytes=1_000_000):
        for turn in record.turns:
            if turn.tenant in turns:
                turns[turn.tenant].append(turn)
    assert all(len(of) > 100 for of in turns.values())
    return turns


def figures(engine: Engine) -> list[object]:
    return [engine.stats(), *(engine.search(name, "a trip to the beach with the kids") for name in NAMES)]


def run(store: Path, settings: Settings, turns: Turns) -> tuple[Run, list[object]]:
    """A quarter of each tenant's turns at a time, one tenant after the other, and searches at the end."""
    llm = RecordingLLM(REPLIES)
    with opened(store, settings, ENCODER, llm) as engine:
        for part in range(ROUNDS):
            for of in turns.values():
                size = -(-len(of) // ROUNDS)
                ingest(engine, of[part * size : (part + 1) * size], 64)
                assert engine.drain()
        found = figures(engine)
    return read_back(store, llm.prompts), found


@pytest.fixture(scope="module")
def expected(locomo: Turns, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, list[object]]:
    return run(tmp_path_factory.mktemp("host"), Settings(device="cpu", **THETA), locomo)


@pytest.mark.parametrize("on_pool", POOLS)
@pytest.mark.parametrize("rows", [LARGE, SMALL])
def test_what_is_decided_is_what_the_host_decides(
    on_pool: OnPool,
    rows: int,
    locomo: Turns,
    expected: tuple[Run, list[object]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    evicted: list[str],
) -> None:
    found, figures_found = run(tmp_path, on_pool(monkeypatch, rows), locomo)
    assert_same(found, expected[0])
    assert figures_found == expected[1]
    if rows == SMALL:
        assert len(evicted) > len(set(evicted)) == len(NAMES), "each of them, and not only once"
    else:
        assert not evicted
    assert {d.decision for of in found.decisions.values() for d in of} >= {"waits", "merged", "fired"}


@pytest.mark.gpu
def test_a_closed_engine_leaves_the_card_to_the_next(tmp_path: Path) -> None:
    """Two pools of more than half of what is free, one after the other; at one time they are refused."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    shares = f"llm=0,arena={0.6 * free / total:.6f},encoder=0"
    settings = Settings(device="cuda", card_shares=shares)
    with Engine(tmp_path, settings, ENCODER) as first:
        assert first.arena.device == "cuda"
        with pytest.raises(UndertowError, match="Another engine of this process holds"):
            Engine(tmp_path, settings, ENCODER, writable=False)
    for _ in range(2):
        with Engine(tmp_path, settings, ENCODER) as again:
            assert again.arena.capacity_bytes is not None
            assert again.arena.capacity_bytes > free // 2
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info()[0] > free - (1 << 30)
