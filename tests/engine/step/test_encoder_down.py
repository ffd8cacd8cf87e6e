"""An encoder that is down for a while: turns and decisions wait for it. Nothing is lost or asked twice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from undertow.bench.mock.llm import MockLLM
from undertow.engine.api.engine import Engine
from undertow.engine.encoders.base import Float16
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.encoders.outage import EncoderDown
from undertow.engine.step.admission import Block
from undertow.engine.storage.row_codec import pack_turn
from undertow.engine.tenants.turn_columns import TurnColumns

from ...support.engine import settings_of, turns_of
from ...support.faults.harness import assert_same_state, end_state

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


def test_adds_are_durable_and_found_by_words_while_the_encoder_is_down(tmp_path: Path) -> None:
    encoder = Fickle(64)
    with opened(tmp_path, encoder) as engine:
        engine.add_batch(turns_of("ann", 2))
        encoder.left, encoder.silent_s = 1_000, 6.0
        assert [receipt.seq for receipt in engine.add_batch(turns_of("ann", 3, 2))] == [2, 3, 4]
        assert [receipt.seq for receipt in engine.add_batch(turns_of("new", 30, text=LAKE))][-1] == 29
        assert engine.add_batch(turns_of("new", 1, text=LAKE))[0].duplicate
        assert engine.drain() is False and engine.is_stalled, "decisions wait, and it says so"
        assert engine.lag.undecided_turns >= 33
        key = turns_of("ann", 1, 3)[0].dedupe_key
        engine.delete(engine.turns_by_key("ann", [key])[key]["id"], tenant="ann")
    with opened(tmp_path, encoder) as engine:  # a later process, in the same outage
        engine.resume()
        found = engine.search("new", "the lake word7", k_sub=1)
        assert "word7" in found.turns[0].memory and found.words_only
        with pytest.raises(EncoderDown):  # it may be there in other words
            engine.search("new", "unheard")
        encoder.left = 0
        assert engine.drain() is True and not engine.is_stalled
        assert not engine.search("ann", "word4").words_only
        assert engine.stats()["turns"] == 34


def test_where_waiting_would_not_help_it_is_an_error_and_nothing_is_stored(tmp_path: Path) -> None:
    encoder = Fickle(64)
    with opened(tmp_path, encoder) as engine:
        encoder.left, encoder.silent_s = 1, math.inf
        with pytest.raises(EncoderDown, match="does not answer"):
            engine.add_batch(turns_of("ann", 3))
        assert not len(engine.scheduler.inbox) and "ann" not in engine.tenants
        assert [receipt.seq for receipt in engine.add_batch(turns_of("ann", 3))] == [0, 1, 2]


@hypothesis_settings(max_examples=8)
@given(outages=st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.booleans()), min_size=1, max_size=12))
def test_outages_at_any_time_give_what_none_gives(outages: list[tuple[int, bool, bool]]) -> None:
    """Each of `outages`: how many turns are added, whether in one, and whether the engine is opened anew."""
    log = [
        turn
        for pair in zip(turns_of("ann", 24, text=LAKE), turns_of("bob", 24), strict=True)
        for turn in pair
    ]
    ended, held = [], []
    for fickle in (False, True):
        encoder, left = Fickle(64), list(log)
        with TemporaryDirectory() as store:
            engine = opened(Path(store), encoder)
            for count, is_down, reopens in outages:
                encoder.left = 1_000_000 if is_down and fickle else 0
                engine.add_batch(left[:count])
                del left[:count]
                if reopens and fickle:
                    engine.close()
                    engine = opened(Path(store), encoder)
                    engine.resume()
            encoder.left = 0
            engine.add_batch(left)
            assert engine.drain()
            engine.close()
            ended.append(end_state(Path(store)))
            with opened(Path(store), encoder) as engine:
                assert engine.idle
                of = [engine.tenants.existing(who).turns_segment for who in ("ann", "bob")]
                held.append([engine.arena.vectors(segment).tolist() for segment in of])
    assert_same_state(ended[1], ended[0])
    assert held[0] == held[1], "each has its vector, after a reload too"


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
