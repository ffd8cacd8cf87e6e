"""The turns of the next step are embedded while those of this one are stored."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from undertow.engine.api.engine import Engine
from undertow.engine.base.model import Turn
from undertow.engine.encoders.base import Fingerprint, Float16
from undertow.engine.step.admission import Block
from undertow.engine.storage.journal import Journal
from undertow.engine.storage.row_codec import pack_turn
from undertow.engine.tenants.turn_columns import TurnColumns

from ...support.engine import ENCODER, NEVER, rows_of, settings_of, turns_of

COUNT = 300


@dataclass
class WatchedEncoder:
    """The hashing encoder. `refused`: a text that it fails at. `begun`: its second call has begun."""

    refused: str = ""
    calls: list[list[str]] = field(default_factory=list)
    begun: threading.Event = field(default_factory=threading.Event)
    dim: int = ENCODER.dim
    fingerprint: Fingerprint = ENCODER.fingerprint

    def encode(self, texts: Sequence[str]) -> Float16:
        self.calls.append(list(texts))
        if len(self.calls) == 2:
            self.begun.set()
        if any(self.refused and self.refused in text for text in texts):
            raise RuntimeError("no such word")
        return ENCODER.encode(texts)


def opened_with(encoder: WatchedEncoder, store: Path, **more: int) -> Engine:
    return Engine(store, settings_of(**NEVER, batch_turns=COUNT, **more), encoder)


def queue(engine: Engine, turns: Sequence[Turn]) -> None:
    engine.scheduler.inbox.put_block(Block(TurnColumns.of([pack_turn(turn) for turn in turns])))


def test_the_next_turns_are_embedded_before_those_before_them_are_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, append = WatchedEncoder(), Journal.append
    seen: list[bool] = []

    def waits(self: Journal, rows: Sequence[object]) -> None:
        if rows and not seen:
            seen.append(encoder.begun.wait(20))
        append(self, rows)

    with opened_with(encoder, tmp_path) as engine:
        queue(engine, turns_of("t0", COUNT))
        queue(engine, turns_of("t1", COUNT))
        monkeypatch.setattr(Journal, "append", waits)
        assert engine.step(storing=True).admitted == COUNT and seen == [True]
        assert engine.step(storing=True).admitted == COUNT
        assert [len(texts) for texts in encoder.calls] == [COUNT, COUNT], "each text is embedded once"
    rows = rows_of(tmp_path, "turn")
    expected = ENCODER.encode([f"user: word{n} other{n}\nassistant: I see." for n in range(COUNT)])
    for tenant in ("t0", "t1"):
        vectors = np.stack([row.vector for row in rows if row.tenant == tenant and row.vector is not None])
        assert vectors.tobytes() == expected.tobytes()


def test_calls_that_wait_are_embedded_ahead_too(tmp_path: Path) -> None:
    encoder = WatchedEncoder()
    with opened_with(encoder, tmp_path) as engine:
        tickets = [engine.scheduler.inbox.put(turn) for turn in turns_of("t0", 2 * COUNT)]
        engine.step()
        assert encoder.begun.wait(20)
        engine.step()
        assert [ticket.receipt and ticket.receipt.seq for ticket in tickets] == list(range(2 * COUNT))


def test_nothing_is_embedded_ahead_behind_known_turns(tmp_path: Path) -> None:
    encoder = WatchedEncoder()
    with opened_with(encoder, tmp_path) as engine:
        turns = turns_of("t0", 2 * COUNT)
        engine.add_batch(turns)
        embedded = sum(map(len, encoder.calls))
        queue(engine, turns)
        while not engine.scheduler.inbox.is_empty:
            assert engine.step(storing=True).duplicates == COUNT
        assert sum(map(len, encoder.calls)) == embedded


def test_a_text_that_cannot_be_embedded_does_not_lose_the_turns_before_it(tmp_path: Path) -> None:
    with opened_with(WatchedEncoder(refused=f"word{COUNT + 5} "), tmp_path) as engine:
        queue(engine, turns_of("t0", 2 * COUNT))
        assert engine.step(storing=True).admitted == COUNT
        with pytest.raises(RuntimeError, match="no such word"):
            engine.step(storing=True)
    assert len(rows_of(tmp_path, "turn")) == COUNT


def test_vectors_embedded_ahead_go_with_an_erased_tenant(tmp_path: Path) -> None:
    encoder = WatchedEncoder()
    with opened_with(encoder, tmp_path, encode_cache_texts=10_000) as engine:
        engine.add_batch(turns_of("gone", 1, start=9_000))
        encoder.calls.clear()
        queue(engine, turns_of("stays", COUNT))
        queue(
            engine, [turn for n in range(COUNT // 2) for t in ("gone", "new") for turn in turns_of(t, 1, n)]
        )
        engine.step(storing=True)
        assert encoder.begun.wait(20)
        engine.erase("gone")
        assert engine.step(storing=True).admitted == COUNT // 2
        assert not any(name == "gone" for name, _ in engine._texts._vectors)
        assert engine._encode_ahead._ahead is None
