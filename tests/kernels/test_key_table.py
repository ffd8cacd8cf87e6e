"""Tables of keys: they match what a dictionary of the hashes' low halves matches."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from undertow.kernels.key_table import KeyTable, add_keys, may_hold

TABLES = 3
FULL = st.integers(-(1 << 63), (1 << 63) - 1)
# of one place: the last slots, where a search goes on at the front
HIGH = st.integers(0, 30).map(lambda low: (1 << 32) - 1 - low)
# (table, hash) of each key of a batch
BATCHES = st.lists(
    st.lists(st.tuples(st.integers(0, TABLES - 1), st.one_of(FULL, st.integers(0, 255), HIGH)), max_size=40),
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(batches=BATCHES, asked=st.lists(FULL, max_size=5))
def test_a_table_matches_what_a_dictionary_matches(
    batches: list[list[tuple[int, int]]], asked: list[int]
) -> None:
    tables = [KeyTable() for _ in range(TABLES)]
    model: list[dict[int, list[int]]] = [{} for _ in tables]
    counts = [0] * TABLES
    for batch in batches:
        owners = np.array([owner for owner, _ in batch], np.int64)
        hashes = np.array([hash for _, hash in batch], np.int64)
        held = [hash & 0xFFFFFFFF in model[owner] for owner, hash in batch]
        assert may_hold(tables, owners, hashes).tolist() == held
        add_keys(tables, owners, hashes)
        for owner, hash in batch:
            model[owner].setdefault(hash & 0xFFFFFFFF, []).append(counts[owner])
            counts[owner] += 1
    assert [len(table) for table in tables] == counts
    for table, numbers in zip(tables, model, strict=True):
        for hash in [*numbers, *asked]:
            assert sorted(table.matches(hash)) == numbers.get(hash & 0xFFFFFFFF, [])


def test_a_table_costs_few_bytes_a_key_and_its_searches_stay_short() -> None:
    table = KeyTable()
    for _ in range(50):
        hashes = np.random.default_rng(len(table)).integers(-(1 << 63), 1 << 63, 1_000, dtype=np.int64)
        add_keys([table], np.zeros(1_000, np.int64), hashes)
        assert table.place[1] * 8 <= 16 * len(table)
    assert 10 * len(table) <= table.place[1] * 8
