"""The division of a card: what is refused, and that the text says what to do."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.engine.api import engine as engine_module
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import Settings
from undertow.engine.base.gpu_shares import GpuShares, GpuTooFull
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.step import eviction
from undertow.engine.storage.store_info import StoreError
from undertow.kernels.arena.arena import Arena
from undertow.kernels.arena.device_memory import DeviceMemory
from undertow.kernels.gate.gate import Gate

GIB = 1 << 30
TOTAL = 80 * GIB
SHARES = GpuShares(llm=0.5, arena=0.35, encoder=0.1)


def test_shares_are_read_in_any_order() -> None:
    assert GpuShares.parse(" arena=0.35, encoder=.1,llm=0.5") == SHARES
    assert GpuShares.parse("llm=0,arena=1,encoder=0") == GpuShares(0, 1, 0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("llm=0.5,arena=0.35", "share of encoder is missing"),
        ("arena=0.35", "share of llm and encoder is missing"),
        ("llm=0.5,arena=0.35,encoder=0.1,gate=0.1", "'gate=0.1': give each of llm, arena, encoder once"),
        ("llm=0.5,llm=0.5,arena=0.35", "give each of llm, arena, encoder once"),
        ("", "give each of"),
        ("llm=half,arena=0.35,encoder=0.1", "llm must be a number from 0 to 1, not 'half'"),
        ("llm=0.5,arena=-0.1,encoder=0.1", "arena must be from 0 to 1, not -0.1"),
        ("llm=0.5,arena=nan,encoder=0.1", "arena must be from 0 to 1, not nan"),
        ("llm=50,arena=35,encoder=10", "llm must be from 0 to 1, not 50"),
        ("llm=0.5,arena=0,encoder=0.1", "arena's share must not be 0"),
        ("llm=0.6,arena=0.35,encoder=0.1", "add up to 1.05"),
    ],
)
def test_wrong_shares_are_refused_by_name(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GpuShares.parse(text)
    with pytest.raises(ValueError, match=message):
        Settings(card_shares=text)


def test_the_setting_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum((d := Settings().shares).__getattribute__(n) for n in ("llm", "arena", "encoder")) < 1, d
    monkeypatch.setenv("UNDERTOW_CARD_SHARES", "llm=0.2,arena=0.6,encoder=0.1")
    assert Settings().shares == GpuShares(0.2, 0.6, 0.1)


@pytest.mark.parametrize("free_gib", [79, 38, 36])
def test_the_arena_gets_its_share_before_and_after_the_llm_server_starts(free_gib: int) -> None:
    assert SHARES.arena_bytes(TOTAL, free_gib * GIB) == 28 * GIB


def test_what_the_encoder_has_already_is_not_asked_for_again() -> None:
    with pytest.raises(GpuTooFull):
        SHARES.arena_bytes(TOTAL, 32 * GIB)
    assert SHARES.arena_bytes(TOTAL, 32 * GIB, own_bytes=4 * GIB) == 28 * GIB
    # an encoder beyond its share does not eat into the arena's
    with pytest.raises(GpuTooFull):
        SHARES.arena_bytes(TOTAL, 27 * GIB, own_bytes=13 * GIB)


def test_an_llm_server_beyond_its_share_is_named_with_the_value_to_start_it_with() -> None:
    with pytest.raises(GpuTooFull) as refusal:
        SHARES.arena_bytes(TOTAL, 8 * GIB)
    for part in (
        "8.0 of its 80.0 GiB free",
        "the arena (0.35 of the card)",
        "encoder (0.1) needs 36.0",
        "Other processes hold 0.90 of the card",
        "share is 0.5: start vLLM with --gpu-memory-utilization 0.5, or",
        "free some of the card",
    ):
        assert part in str(refusal.value)


def test_a_share_that_fits_is_offered() -> None:
    with pytest.raises(GpuTooFull, match=r"lower the arena's share in UNDERTOW_CARD_SHARES to 0.27\.$"):
        SHARES.arena_bytes(TOTAL, 30 * GIB)
    # contexts have eaten what the shares left over: no other process is to blame
    with pytest.raises(
        GpuTooFull, match=r"36\.0\. Lower the arena's share in UNDERTOW_CARD_SHARES to 0\.33\.$"
    ):
        GpuShares(0.6, 0.35, 0.1).arena_bytes(TOTAL, 35 * GIB)


@given(st.floats(0.01, 0.6), st.floats(0, 0.3), st.integers(0, 80 << 30), st.integers(0, 20 << 30))
def test_the_offered_share_is_taken(arena: float, encoder: float, free: int, own: int) -> None:
    free = min(free, TOTAL - own)
    shares = GpuShares(0.05, arena, encoder)
    try:
        assert shares.arena_bytes(TOTAL, free, own) <= free
    except GpuTooFull as refusal:
        offered = str(refusal).partition("UNDERTOW_CARD_SHARES to ")[2].rstrip(".")
        if offered:
            smaller = GpuShares(0.05, float(offered), encoder)
            assert 0 < smaller.arena_bytes(TOTAL, free, own) < int(arena * TOTAL)
        else:
            assert "no share of the arena would fit" in str(refusal)


def test_another_engine_of_this_process_is_named_and_not_taken_for_the_encoder() -> None:
    with pytest.raises(GpuTooFull, match=r"process holds 28\.0 GiB: close it first, or lower .* to 0\.\d+\."):
        SHARES.arena_bytes(TOTAL, 20 * GIB, own_bytes=2 * GIB, pools_bytes=28 * GIB)
    assert SHARES.arena_bytes(TOTAL, 40 * GIB, own_bytes=2 * GIB, pools_bytes=28 * GIB) == 28 * GIB


class FakeCard:
    """torch.cuda's figures of a card of 1 MiB, on which this process alone has pools.

    A pool that is gone stays reserved until the cache is emptied.
    """

    total = 1 << 20

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pools: list[tuple[weakref.ref[DeviceMemory], int]] = []
        monkeypatch.setattr(eviction, "resolve", lambda device: "cuda")
        monkeypatch.setattr(eviction, "make_arena", self.make_arena)
        monkeypatch.setattr(engine_module, "make_gate", Gate)
        monkeypatch.setattr("torch.cuda.empty_cache", self.empty_cache)
        monkeypatch.setattr("torch.cuda.memory_reserved", self.reserved)
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (self.total - self.reserved(), self.total))

    def reserved(self) -> int:
        return sum(nbytes for _, nbytes in self.pools)

    def empty_cache(self) -> None:
        self.pools = [(memory, nbytes) for memory, nbytes in self.pools if memory() is not None]

    def make_arena(self, dim: int, device: str, nbytes: int, coded: bool) -> Arena:
        memory = DeviceMemory(dim, "cpu", nbytes, coded)
        self.pools.append((weakref.ref(memory), nbytes))
        return Arena(dim, memory)


def test_a_closed_or_failed_engine_leaves_the_card_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = FakeCard(monkeypatch)
    settings, encoder = Settings(card_shares="llm=0,arena=0.6,encoder=0.1"), HashingEncoder(64)
    first = Engine(tmp_path / "a", settings, encoder)
    with pytest.raises(GpuTooFull, match="Another engine of this process holds"):
        Engine(tmp_path / "b", settings, encoder)
    first.close()
    for _ in range(2):
        with Engine(tmp_path / "a", settings, encoder) as again:
            assert again.arena.capacity_bytes
            assert card.reserved() == int(0.6 * card.total)
    with pytest.raises(StoreError):
        Engine(tmp_path / "a", settings, HashingEncoder(32))
    # the failed one's traceback is still at hand, and so is a reference to the closed ones
    with Engine(tmp_path / "a", settings, encoder):
        assert first.arena.nbytes == again.arena.nbytes == 0


def test_two_engines_that_fit_share_a_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card = FakeCard(monkeypatch)
    settings, encoder = Settings(card_shares="llm=0,arena=0.4,encoder=0.1"), HashingEncoder(64)
    coded = settings.model_copy(update={"gate_int8": True})
    with Engine(tmp_path / "a", settings, encoder) as plain, Engine(tmp_path / "b", coded, encoder) as other:
        assert (plain.arena.code_places is None, other.arena.code_places is None) == (True, False)
        assert card.reserved() == 2 * int(0.4 * card.total)
