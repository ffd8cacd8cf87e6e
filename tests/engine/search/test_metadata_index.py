"""Search by metadata: what passes is what a scan over the turns' metadata says, and each tier gives its k."""

from __future__ import annotations

import gc
import operator
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.model import Message, Turn
from undertow.engine.base.results import Receipt
from undertow.engine.search import metadata_index as metadata_module
from undertow.engine.search.metadata_index import KEYS_KEPT, MetadataIndex
from undertow.engine.search.where import Where
from undertow.engine.tenants.tenant import Tenant

from ...support.engine import NEVER, open_engine
from ...support.faults.harness import TOPICS

ALL: dict[str, Any] = {"k_sub": 500, "k_epi": 500, "k_sem": 500}
QUERY = "boat and tide and garden"
VALUES: list[Any] = ["work", "home", "1", 1, 1.0, True, False, 0, 2.5, None, ["work"], {"a": 1}, "", "ü"]

Metadata = dict[str, Any]


def marked(tenant: str, n: int, metadata: Metadata) -> Turn:
    topic = TOPICS[n % 3].split()
    said = " ".join([*topic[n % 4 : n % 4 + 5], f"n{n}"])
    stamp = f"2026-04-{1 + n % 28:02d}T10:00:00"
    return Turn(tenant, (Message("user", said),), f"key {n}", "s", stamp, metadata)


def some_metadata(count: int, seed: int) -> list[Metadata]:
    rng = random.Random(seed)
    return [
        {key: rng.choice(VALUES) for key in ("topic", "n", "metadata") if rng.random() < 0.7}
        for _ in range(count)
    ]


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return open_engine(tmp_path, MockLLM(MockReplies(1)), theta_sim=0.5, theta_merge=0.6, theta_count=3)


def same(value: Any, asked: Any) -> bool:
    """Equal as in JSON, and no list or object."""
    if isinstance(value, bool) or isinstance(asked, bool):
        return value is asked
    return isinstance(value, str | int | float) and value == asked


def passes(metadata: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    return all(
        key in metadata
        and any(same(metadata[key], one) for one in (asked if isinstance(asked, list) else [asked]))
        for key, asked in where.items()
    )


def ids(engine: Engine, tenant: str, **how: Any) -> dict[str, list[str]]:
    found = engine.search(tenant, QUERY, **how)
    return {"turn": [h.id for h in found.turns]} | {
        kind: [h.id for h in hits] for kind, hits in (("episode", found.episodes), ("fact", found.facts))
    }


def expected(
    engine: Engine, tenant: str, of_turns: list[Metadata], where: Mapping[str, Any]
) -> dict[str, list[str]]:
    """A search without the filter, cut down to what rests on a turn that passes."""
    found = engine.search(tenant, QUERY, **ALL)
    return {
        kind: [h.id for h in hits if any(meets_all(of_turns[seq], where) for seq in h.source_seqs)]
        for kind, hits in (("turn", found.turns), ("episode", found.episodes), ("fact", found.facts))
    }


def add_beside_a_large_tenant(engine: Engine, metadata: list[Metadata]) -> None:
    """Ann's turns, decided, and those of another who says the same more often, all under one topic."""
    engine.add_batch([marked("ann", n, m) for n, m in enumerate(metadata)])
    assert engine.drain()
    engine.add_batch([marked("eve", n, {"topic": "work"}) for n in range(400)])


WHERES: list[dict[str, Any]] = [
    {"topic": "work"},
    {"topic": ["work", "home"]},
    {"topic": 1},
    {"topic": "1"},
    {"topic": True},
    {"topic": [False, 2.5]},
    {"topic": 0},
    {"topic": ""},
    {"n": ["ü", "work", 1, True], "topic": ["home", "work", True, "1", 2.5]},
    {"metadata": "work"},
    {"topic": "nowhere"},
    {"no such key": "work"},
    {},
]


@pytest.mark.parametrize("seed", range(2))
def test_a_filtered_search_is_the_search_cut_down(seed: int, engine: Engine) -> None:
    metadata = some_metadata(60, seed)
    with engine:
        add_beside_a_large_tenant(engine, metadata)
        assert {m.kind for m in engine.get_all("ann")} == {"episode", "fact"}
        counts = []
        for where in WHERES:
            wanted = expected(engine, "ann", metadata, where)
            assert ids(engine, "ann", where=where, **ALL) == wanted, where
            few = ids(engine, "ann", where=where, k_sub=3, k_epi=2, k_sem=4)
            cut = {"turn": 3, "episode": 2, "fact": 4}
            assert few == {kind: wanted[kind][: cut[kind]] for kind in wanted}, "each tier gives its k"
            counts.append(len(wanted["turn"]))
        assert counts[-1] == 60 and counts[-2] == counts[-3] == 0
        assert sum(0 < n < 60 for n in counts[:-3]) >= 8


def test_the_filter_follows_the_log_and_what_is_deleted_and_updated(engine: Engine, tmp_path: Path) -> None:
    metadata = some_metadata(60, 7)
    where = {"topic": ["work", "home"]}
    turns = [marked("ann", n, m) for n, m in enumerate(metadata)]
    with engine:
        receipts: list[Receipt] = []
        for start in range(0, 60, 20):
            receipts += engine.add_batch(turns[start : start + 20])
            assert engine.drain()
            assert ids(engine, "ann", where=where, **ALL) == expected(engine, "ann", metadata, where)
        gone = next(r for r in receipts if passes(metadata[r.seq or 0], where))
        engine.delete(gone.id or "")
        assert gone.id not in ids(engine, "ann", where=where, **ALL)["turn"]
        changed = next(r for r in receipts if r is not gone and passes(metadata[r.seq or 0], where))
        updated = engine.update(changed.id or "", "boat tide garden")
        after = ids(engine, "ann", where=where, **ALL)["turn"]
        assert changed.id not in after and updated.id in after, "the new turn has the old one's metadata"
        assert engine.drain()
        live = ids(engine, "ann", where=where, **ALL)
    with open_engine(tmp_path) as engine:
        assert ids(engine, "ann", where=where, **ALL) == live


def test_a_tenant_with_an_index_is_searched_exactly(tmp_path: Path) -> None:
    with open_engine(tmp_path, ivf_rows=300, **NEVER) as engine:
        engine.add_batch([marked("ann", n, {"rare": n % 100 == 0}) for n in range(400)])
        engine.search("ann", QUERY)
        assert "ann" in engine.ranker.indexes()
        found = engine.search("ann", QUERY, k_sub=10, where={"rare": True})
        assert (found.turn_recall, sorted(h.source_seqs[0] for h in found.turns)) == (1.0, [0, 100, 200, 300])


@pytest.mark.parametrize(
    ("where", "match"),
    [
        ({"topic": []}, "empty list"),
        ({"topic": None}, "None"),
        ({"a": [1, {}]}, "'a' is {}"),
        ({f"key {n}": 1 for n in range(17)}, "at most 16"),
        ({"a": list(range(65))}, "at most 64"),
        ({"a": {"$in": ["x"] * 64, "$ne": "y"}}, "'a' has 65 values.*at most 64"),
        ({"a": {}}, "'a' is {}, with no operator. Name one of \\$eq"),
        ({"a": {"$gt": 1, "gt": 1}}, "'a' has the operator 'gt'. Use one of \\$eq, "),
        ({"a": {"$gt": True}}, "'a' \\$gt is True. Compare with a number or with text"),
        ({"a": {"$lte": float("nan")}}, "'a' \\$lte is nan. Compare"),
        ({"a": {"$prefix": 5}}, "'a' \\$prefix is 5. Give the text"),
        ({"a": {"$in": 5}}, "'a' \\$in is 5. Give a list"),
        ({"a": {"$in": []}}, "'a' \\$in has an empty list"),
        ({"a": {"$eq": [1]}}, "'a' \\$eq is \\[1\\]. Give text, a number, true or false.$"),
        ({"a": {"$ne": None}}, "'a' \\$ne is None. Give text"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(where: dict[str, Any], match: str, engine: Engine) -> None:
    with engine:
        engine.add_batch([marked("ann", 0, {})])
        with pytest.raises(ValueError, match=match):
            engine.search("ann", QUERY, where=where)


def test_a_query_is_bounded(engine: Engine) -> None:
    with engine:
        engine.add_batch([marked("ann", 0, {})])
        with pytest.raises(ValueError, match="at most 8,192"):
            engine.search("ann", "x" * 8_193)
        with pytest.raises(ValueError, match="at most 8,192"):
            engine.recall("ann", "x" * 8_193)


def test_metadata_is_read_once_and_kept_within_bounds(
    engine: Engine, calls_of: Callable[..., list[int]]
) -> None:
    reads = calls_of(metadata_module, "_metadata", len)
    with engine:
        engine.add_batch([marked("ann", n, {"topic": "work"}) for n in range(40)])
        for _ in range(3):
            engine.search("ann", QUERY, where={"topic": "work"})
        assert len(reads) == 40
        engine.add_batch([marked("ann", n, {}) for n in range(40, 45)])
        engine.search("ann", QUERY, where={"topic": "work"})
        assert len(reads) == 45
        engine.search("ann", QUERY, where={f"new {n}": "work" for n in range(10)} | {"topic": "work"})
        assert len(reads) == 90, "all new keys are read in one pass"
        for n in range(3 * KEYS_KEPT):
            engine.search("ann", QUERY, where={f"key {n}": 1})
        tenant = engine.tenants.get("ann")
        assert len(engine.ranker._metadata[tenant]._columns) == KEYS_KEPT
        assert engine.drain()
        del tenant
        engine.tenants.evict("ann")
        gc.collect()
        assert len(engine.ranker._metadata) == 0, "it goes with the tenant's live state"


# ---- operators, against a plain reading of each

NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([2**53, 2**53 + 1, float(2**53)]),
    st.floats(allow_nan=False, allow_infinity=False),
)
TEXTS = st.one_of(st.text("abü\U0001f600", max_size=3), st.text(max_size=4).filter(str.isprintable))
SCALARS = st.one_of(NUMBERS, TEXTS, st.booleans())
ODD = st.sampled_from([None, [], [1], ["a"], {}, {"a": 1}])
WORLDS = st.lists(st.fixed_dictionaries({}, optional={"a": SCALARS | ODD, "b": SCALARS}), max_size=30)
OPERATED = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(("$eq", "$ne"), SCALARS),
        **dict.fromkeys(("$gt", "$gte", "$lt", "$lte"), NUMBERS | TEXTS),
        "$in": st.lists(SCALARS, min_size=1, max_size=4),
        "$prefix": TEXTS,
    },
).filter(bool)
ASKED = st.dictionaries(st.sampled_from("ab"), OPERATED | SCALARS | st.lists(SCALARS, min_size=1, max_size=3))
ORDERS: dict[str, Callable[[Any, Any], bool]] = {
    "$gt": operator.gt,
    "$gte": operator.ge,
    "$lt": operator.lt,
    "$lte": operator.le,
}


def meets(value: Any, name: str, bound: Any) -> bool:
    """One operator, of a value as it stands in the metadata; None: it is missing."""
    if name in ("$eq", "$ne"):
        return same(value, bound) == (name == "$eq")
    if name == "$in":
        return any(same(value, one) for one in bound)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return False
    if isinstance(value, str) != isinstance(bound, str):
        return False
    return str(value).startswith(bound) if name == "$prefix" else ORDERS[name](value, bound)


def meets_all(metadata: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    return all(
        all(meets(metadata.get(key), name, bound) for name, bound in asked.items())
        if isinstance(asked, dict)
        else passes(metadata, {key: asked})
        for key, asked in where.items()
    )


class Logged:
    """Of a tenant what the index reads: its turns' payloads."""

    def __init__(self) -> None:
        self.payloads: list[bytes] = []

    @property
    def seq_by_row(self) -> range:
        return range(len(self.payloads))

    def payload(self, seq: int) -> bytes:
        return self.payloads[seq]

    def add(self, world: list[Metadata]) -> None:
        self.payloads += [orjson.dumps({"metadata": metadata}) for metadata in world]


@given(first=WORLDS, more=WORLDS, wheres=st.lists(ASKED, min_size=1, max_size=3))
@example(first=[{"a": 2**53}, {"a": 2**53 + 1}], more=[], wheres=[{"a": {"$gt": float(2**53)}}])
@example(first=[{"a": True}, {"a": 1}, {}], more=[{"a": "1"}], wheres=[{"a": {"$ne": 1}}])
@example(first=[{"a": "\U0010ffff"}, {"a": ""}], more=[{"a": "a"}], wheres=[{"a": {"$prefix": ""}}])
def test_operators_are_read_as_written(
    first: list[Metadata], more: list[Metadata], wheres: list[Any]
) -> None:
    tenant, index, world = Logged(), MetadataIndex(), first + more
    for added in (first, more):  # the second time it follows the log
        tenant.add(added)
        for where in wheres:
            passing = index.passing(cast(Tenant, tenant), Where.of(where)).tolist()
            assert passing == [meets_all(metadata, where) for metadata in world[: len(passing)]]
    assert len(passing) == len(world)


OPERATED_WHERES: list[dict[str, Any]] = [
    {"topic": {"$prefix": "w"}},
    {"n": {"$gt": 0, "$lte": 2.5}},
    {"n": {"$ne": 1}, "topic": {"$in": ["work", 1, True]}},
    {"topic": {"$gte": "home"}, "n": ["work", 2.5, 1, ""]},
    {"no such key": {"$ne": 1}, "topic": "work"},
    {"topic": {"$lt": "1"}},
]


def test_a_search_by_operators_is_the_search_cut_down(engine: Engine) -> None:
    metadata = some_metadata(60, 5)
    with engine:
        add_beside_a_large_tenant(engine, metadata)
        for where in OPERATED_WHERES:
            found = ids(engine, "ann", where=where, **ALL)
            assert found == expected(engine, "ann", metadata, where), where
            assert 0 < len(found["turn"]) < 60
