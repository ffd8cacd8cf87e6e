"""An encoder that is down for a while: turns and decisions wait for it. Nothing is lost or asked twice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from undertow.bench.mock.llm import MockLLM
from undertow.engine.api.engine import Engine
from undertow.engine.encoders.base import Float16
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.encoders.outage import EncoderDown
from undertow.engine.step.admission import Block
from undertow.engine.storage.row_codec import pack_turn
from undertow.engine.tenants.turn_columns import TurnColumns

from ...support.engine import settings_of, turns_of

LAKE = "the lake, word{n}"
LINKED = {"theta_sim": 0.2, "theta_merge": 0.2, "theta_count": 3}


class Fickle(HashingEncoder):
    """Fails `left` more times at texts with `word`, and says that it has been down for `silent_s`."""

    left, silent_s, word = 0, 0.0, ""

    def encode(self, texts: Sequence[str]) -> Float16:
        if self.left and any(self.word in text for text in texts):
            self.left -= 1
            raise EncoderDown("http://one/v1 does not answer", self.silent_s)
        return super().encode(texts)


def opened(folder: Path, encoder: Fickle) -> Engine:
    return Engine(folder, settings_of(**LINKED, llm_patience_s=5.0), encoder, llm=MockLLM())


def test_adds_wait_for_the_encoder_up_to_our_patience(tmp_path: Path) -> None:
    encoder = Fickle(64)
    with opened(tmp_path, encoder) as engine:
        encoder.left = 3
        assert [receipt.seq for receipt in engine.add_batch(turns_of("ann", 2))] == [0, 1]
        encoder.left, encoder.silent_s = 1, 6.0
        with pytest.raises(EncoderDown, match="does not answer"):
            engine.add_batch(turns_of("ann", 3))
        assert not len(engine.scheduler.inbox) and engine.stats()["turns"] == 2
        assert [receipt.seq for receipt in engine.add_batch(turns_of("ann", 3, 2))] == [2, 3, 4]


@pytest.mark.parametrize("word", ["lake", "reworded"])
def test_decisions_go_on_where_they_were_once_the_encoder_is_back(tmp_path: Path, word: str) -> None:
    """Of one tenant or of both: a text and a prompt may be due in one step."""
    ended: list[tuple[list[str], object]] = []
    for name in ("steady", "fickle"):
        encoder, llm = Fickle(64), MockLLM()
        with Engine(tmp_path / name, settings_of(**LINKED, llm_patience_s=5.0), encoder, llm=llm) as engine:
            engine.add_batch(turns_of("bob", 6, text=LAKE))
            assert engine.drain()
            engine.update(engine.get_all("bob")[0].id, "reworded by bob", tenant="bob")
            engine.scheduler.inbox.put_block(
                Block(TurnColumns.of(list(map(pack_turn, turns_of("ann", 6, text=LAKE)))))
            )
            if name == "fickle":
                encoder.left, encoder.silent_s, encoder.word = 1_000, 6.0, "reworded"
                engine.step()
                encoder.word = word
                assert engine.drain() is False, "it gives up, and says so"
                assert engine.is_stalled and not engine.server_lost and engine.scheduler.running_count
                encoder.left = 0
            assert engine.drain() is True and not engine.is_stalled
            memories = [memory.text for tenant in ("ann", "bob") for memory in engine.get_all(tenant)]
            ended.append((memories, llm.calls))
    assert "reworded by bob" in ended[0][0] and ended[0] == ended[1], "and no reply was asked for twice"


def test_a_tenant_that_is_erased_meanwhile_is_not_waited_for(tmp_path: Path) -> None:
    encoder = Fickle(64)
    with opened(tmp_path, encoder) as engine:
        engine.add_batch(turns_of("ann", 6, text=LAKE))
        encoder.left, encoder.silent_s = 1_000, 6.0
        assert engine.drain() is False
        engine.erase("ann")
        encoder.left = 0
        assert len(engine.add_batch(turns_of("bob", 1))) == 1 and engine.drain()
