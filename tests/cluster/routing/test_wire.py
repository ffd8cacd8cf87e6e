"""Turns and receipts as Arrow tables: what goes in comes out, and what cannot travel is refused at once."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from undertow.engine.base.model import InputError, Message, Turn
from undertow.engine.base.results import Receipt
from undertow.engine.cluster.wire import (
    TURNS,
    Status,
    check_turns,
    from_buffer,
    from_pieces,
    pack,
    receipts_table,
    to_buffer,
    to_pieces,
    unpack,
    unpack_receipts,
)
from undertow.engine.storage.row_codec import stamped, turn_row

WORDS = st.text(max_size=20)
NAMES = st.text(min_size=1, max_size=8).filter(lambda name: "\0" not in name)
TIMES = st.sampled_from([None, "2026-03-01", "2026-03-01T10:00:00", "2026-03-01T10:00:00+00:00"])
MESSAGES = st.builds(
    Message, st.sampled_from(["user", "assistant", "system"]), WORDS, st.none() | WORDS, TIMES
)
METADATA = st.dictionaries(WORDS, st.integers(-(2**53), 2**53) | WORDS | st.none(), max_size=3)
TURN = st.builds(
    Turn, NAMES, st.lists(MESSAGES, min_size=1, max_size=3).map(tuple), WORDS, WORDS, TIMES, METADATA
)


@given(st.lists(TURN, max_size=8), TIMES)
def test_a_shard_stores_the_row_that_an_engine_would_store(turns: list[Turn], inherited: str | None) -> None:
    packed = unpack(pack(turns))
    assert len(packed) == len(turns)
    for turn, sent in zip(turns, packed, strict=True):
        assert (sent.tenant, sent.dedupe_key) == (turn.tenant, turn.dedupe_key)
        assert (sent.session_id, sent.text) == (turn.session_id, turn.text)
        # a turn without a time of its own gets that of its session when it is stored
        timestamp = turn.timestamp or inherited
        payload = sent.payload if timestamp == sent.timestamp else stamped(sent.payload, timestamp)
        assert payload == turn_row("t", "k", 1, 5, turn, timestamp).payload


@pytest.mark.parametrize(
    ("turn", "field"),
    [
        (Turn("", (Message("user", "hi"),), "k"), "tenant"),
        (Turn("a\0b", (Message("user", "hi"),), "k"), "tenant"),
        (Turn("\ud800", (Message("user", "hi"),), "k"), "tenant"),
        (Turn("a", (Message("user", "hi"),), "k", "\udfff"), "session"),
        (Turn("a", (Message("user", "half \ud83d"),), "k"), "messages"),
        (Turn("a", (Message("user", "hi"),), "k\ud83d"), "idempotency_key"),
        (Turn("a", (Message("user", "hi"),), "k", metadata={"at": object()}), "metadata"),
        (Turn("a", (Message("user", "hi"),), "k", metadata={"n": 1 << 70}), "metadata"),
    ],
)
def test_what_cannot_be_stored_is_refused_by_the_sender(turn: Turn, field: str) -> None:
    sound = Turn("a", (Message("user", "hi"),), "k")
    with pytest.raises(InputError) as caught:
        pack([sound, turn])
    assert caught.value.problem.field == field


def sound_table() -> pa.Table:
    return pack([Turn("a", (Message("user", "hi"),), "k"), Turn("b", (Message("user", "ho"),), "k")])


@pytest.mark.parametrize("tenant", ["", "a\0"])
def test_a_shard_refuses_a_table_with_no_owner(tenant: str) -> None:
    table = sound_table().set_column(0, TURNS.field(0), pa.array([tenant, "b"]))
    with pytest.raises(ValueError, match="tenant"):
        check_turns(table)


def test_a_shard_refuses_a_table_of_something_else() -> None:
    with pytest.raises(ValueError, match="columns"):
        check_turns(sound_table().drop_columns(["text"]))
    holed = sound_table().set_column(4, TURNS.field(4), pa.array(["x", None]))
    with pytest.raises(ValueError, match="'text'"):
        check_turns(holed)
    for vectors, dim in (([b"ab", b"abcd"], None), ([b"abc", None], None), ([b"ab", None], 2)):
        with pytest.raises(ValueError, match="vectors"):
            check_turns(sound_table().set_column(6, TURNS.field(6), pa.array(vectors)), dim)


def test_receipts_keep_their_order_and_say_what_became_of_each() -> None:
    table = receipts_table(
        [
            (Status.STORED, "id-1", 7, None),
            (Status.DUPLICATE, None, None, None),
            (Status.PARKED, None, None, "RuntimeError: bang"),
        ]
    )
    assert unpack_receipts(table, ["a", "b", "a"]) == [
        Receipt("a", "id-1", 7, False),
        Receipt("b", None, None, True),
        Receipt("a", None, None, False, parked="RuntimeError: bang"),
    ]


def test_a_slice_travels_without_the_rest() -> None:
    turns = [Turn("a", (Message("user", f"{n} " + 1000 * "x"),), f"k{n}") for n in range(100)]
    sent = to_buffer(pack(turns).slice(40, 2))
    assert sent.size < 8_000
    assert [turn.dedupe_key for turn in unpack(from_buffer(sent))] == ["k40", "k41"]


@pytest.mark.parametrize("rows", [0, 3])
def test_tables_travel_as_they_are(rows: int) -> None:
    turns = pack([Turn("a", (Message("user", f"{n}"),), f"k{n}") for n in range(rows)])
    receipts = receipts_table([(Status.STORED, f"id-{n}", n, None) for n in range(rows)])
    for table in (turns, receipts):
        assert from_buffer(to_buffer(table)).equals(table)
        assert from_buffer(to_buffer(table)).schema.equals(table.schema)
        assert from_pieces(to_pieces(table)).equals(table)


def test_a_large_table_travels_in_pieces_that_ray_sends_with_the_call() -> None:
    turns = pack([Turn("a", (Message("user", f"{n} " + 1000 * "x"),), f"k{n}") for n in range(300)])
    pieces = to_pieces(turns)
    assert len(pieces) > 5 and max(map(len, pieces)) < 100 * 1024
    assert from_pieces(pieces).equals(turns)
    vast = pack([Turn("a", (Message("user", 900_000 * "x"),), f"k{n}") for n in range(5)])
    (whole,) = to_pieces(vast)
    assert from_pieces([whole]).equals(vast)


def test_a_table_whose_text_is_no_unicode_is_refused() -> None:
    sound = pack([Turn("a", (Message("user", "hi"),), "k")])
    text = pa.array([b"\xff\xfe"]).view(pa.string())
    broken = sound.set_column(sound.schema.get_field_index("text"), TURNS.field("text"), text)
    with pytest.raises(ValueError, match="UTF8"):
        check_turns(broken)
