"""The central promise: any batching, interleaving, interruption or delay gives what one-by-one gives."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from undertow.bench.mock.llm import MockReplies
from undertow.engine.api.engine import Engine
from undertow.engine.base.config import CallForm, Settings
from undertow.engine.base.model import Memory, PolicyName, Turn
from undertow.engine.base.results import SearchResult
from undertow.engine.encoders.base import Encoder
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.readers import read
from undertow.engine.step import effects
from undertow.engine.tenants import log

from ...support.engine import (
    RecordingLLM,
    Run,
    TableEncoder,
    assert_same,
    engine_run,
    ingest,
    interleaved,
    opened,
    oracle_run,
    read_back,
    settings_of,
    turn_of,
)
from ...support.oracles import pair_thetas
from ...support.policies.variants import VARIANTS
from ...support.soak.rare import COMPARED

LOCOMO = Path(__file__).parents[4] / "shared" / "data" / "locomo_dev.json"
REPLIES = MockReplies(1, refusal_rate=0.3, empty_rate=0.25, malformed_rate=0.08, malformed_sticky=True)
THETA = {"theta_sim": 0.5, "theta_merge": 0.6, "theta_count": 3}
SHORT = ("conv-26", "conv-30")
MIDDLE = (*SHORT, "conv-41")
LONG = (*MIDDLE, "conv-42", "conv-43")

Turns = dict[str, list[Turn]]


@pytest.fixture(scope="module")
def encoder() -> HashingEncoder:
    return HashingEncoder(384)


@pytest.fixture(scope="module")
def locomo() -> Turns:
    if not LOCOMO.exists():
        pytest.skip(
            "the LoCoMo development conversations may not be copied into the project: no locomo_dev.json"
        )
    turns: Turns = {}
    for record in read(LOCOMO, max_message_bytes=1_000_000):
        assert not record.errors
        for turn in record.turns:
            turns.setdefault(turn.tenant, []).append(turn)
    assert len(turns) == 5
    return turns


@pytest.fixture(scope="module", params=[*get_args(PolicyName), "paper", "by share"])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    shared = {**THETA, "window_messages": 6, "theta_evoke": 0.5, "theta_compare": 0.3, "heat_threshold": 2.0}
    if request.param == "by share":
        shared = {"theta_share": 0.06, "theta_count": 3, "salience_day_tokens": 2_000}
    if request.param == "paper":
        return {**shared, "policy": "recmem", "profile": "paper"}
    return {
        "policy": "recmem" if request.param == "by share" else request.param,
        "profile": "companion",
        "salience_turns": 6,
        "salience_day_tokens": 2_500,
        "quiet_share": 0.5,
        **shared,
    }


@pytest.fixture(scope="module")
def expected(locomo: Turns, encoder: HashingEncoder, options: dict[str, Any]) -> Run:
    return oracle_run(settings_of(**options), encoder, REPLIES, locomo)


def only(run: Run, names: tuple[str, ...]) -> Run:
    return Run(
        {n: run.decisions[n] for n in names},
        {n: run.versions[n] for n in names},
        {n: run.prompts[n] for n in names},
    )


# ---- the LoCoMo conversations


@pytest.mark.rarely(options=COMPARED)
def test_the_runs_contain_every_kind_of_decision(expected: Run, options: dict[str, Any]) -> None:
    if options["policy"] != "recmem":
        CHECKS[options["policy"]](expected)
        return
    for tenant, decisions in expected.decisions.items():
        seen = Counter(d.decision for d in decisions)
        assert all(seen[kind] > 0 for kind in ("waits", "merged", "fired", "parked")), tenant
        assert [d for d in decisions if d.merge_asked and d.decision in ("waits", "fired")], tenant
    every = [d for decisions in expected.decisions.values() for d in decisions]
    if options.get("profile") == "paper":
        empty = [d for d in every if d.decision == "fired" and not d.settled]
        refires = [d for d in every for e in empty if d.seq > e.seq and set(d.cluster) > set(e.cluster)]
        assert empty and refires
    else:
        check_salient_runs(expected, options)
    told = [d.thetas for d in every if d.thetas]
    assert len({*told}) == (20 if "theta_share" in options else 0)
    assert any(d.decision == "parked" and d.merge_asked and d.cluster == (d.seq,) for d in every)
    assert any(d.decision == "parked" and len(d.cluster) > 1 for d in every)
    asked = {p.operation for prompts in expected.prompts.values() for p in prompts}
    assert ("refine" in asked) == (options.get("profile") == "paper")
    versions = [m for of_tenant in expected.versions.values() for m in of_tenant]
    assert any(m.version > 2 for m in versions)
    assert any(m.supersedes for m in versions)


def check_salient_runs(run: Run, options: dict[str, Any]) -> None:
    """Salient turns are read, failing reads are parked, and quotas run out."""
    asked = [p for prompts in run.prompts.values() for p in prompts if p.operation == "salient"]
    windows = sum(len(decisions) // options["salience_turns"] for decisions in run.decisions.values())
    assert windows / 4 < len(asked) < windows
    every = [d for decisions in run.decisions.values() for d in decisions]
    assert any(d.decision == "parked" and d.cluster and not d.settled for d in every)
    assert not any(d.decision == "fired" and not d.settled for d in every), "an empty reply settles them too"


def check_eager_runs(run: Run) -> None:
    for tenant, decisions in run.decisions.items():
        seen = Counter((d.decision, bool(d.settled)) for d in decisions)
        assert seen.keys() == {("fired", True), ("fired", False), ("parked", True)}, tenant
        versions = run.versions[tenant]
        assert any(m.version > 2 and m.text for m in versions), "updates of updates"
        assert any(m.version > 1 and not m.text for m in versions), "deletions"
        assert any(len(m.sources) > 1 for m in versions)
        assert {p.operation for p in run.prompts[tenant]} == {"extract", "reconcile"}


def check_a_mem_runs(run: Run) -> None:
    for tenant, decisions in run.decisions.items():
        assert {d.decision for d in decisions} == {"fired", "parked"}, tenant
        versions = run.versions[tenant]
        assert any(m.version > 2 and m.shown for m in versions), "notes that evolve again"
        assert any(len(m.links) > 1 for m in versions)
        assert {p.operation for p in run.prompts[tenant]} == {"annotate", "connect"}


def check_memory_os_runs(run: Run) -> None:
    for tenant, decisions in run.decisions.items():
        assert {d.decision for d in decisions} == {"waits", "fired", "parked"}, tenant
        versions = run.versions[tenant]
        assert sum(m.kind == "episode" and m.version == 1 for m in versions) > 1, "several segments"
        assert any(m.kind == "episode" and m.version > 3 for m in versions), "pages that join"
        assert {p.operation for p in run.prompts[tenant]} == {"topic", "persona"}
    lines = [m for versions in run.versions.values() for m in versions if m.kind == "fact"]
    assert {m.fact_kind for m in lines} == {"profile", "knowledge", "agent"}
    assert any(m.version > 1 and m.text for m in lines), "told again"


def check_nemori_runs(run: Run) -> None:
    for tenant, decisions in run.decisions.items():
        seen = Counter((d.decision, bool(d.settled)) for d in decisions)
        assert seen.keys() == {("waits", False), ("fired", True), ("parked", True)}, tenant
        versions = run.versions[tenant]
        assert any(m.kind == "episode" and m.version > 1 for m in versions), "joined episodes"
        assert any(m.kind == "fact" and m.version > 1 and m.text for m in versions), "merged facts"
        assert any(m.kind == "fact" and not m.text for m in versions), "facts that others took the place of"
    used = {p.operation for prompts in run.prompts.values() for p in prompts}
    assert used == {"partition", "narrate", "select", "integrate", "predict", "distil", "consolidate"}


def check_himem_runs(run: Run) -> None:
    for tenant, decisions in run.decisions.items():
        assert Counter(d.decision for d in decisions).keys() == {"waits", "fired", "parked"}, tenant
        versions = run.versions[tenant]
        assert max(Counter(m.made_at_seq for m in versions if m.kind == "episode").values()) > 1
        assert any(m.kind == "fact" and m.shown for m in versions), "notes of a part of a window"
        assert {p.operation for p in run.prompts[tenant]} == {"segment", "notes"}


CHECKS: Mapping[str, Callable[[Run], None]] = {
    "eager": check_eager_runs,
    "nemori": check_nemori_runs,
    "himem": check_himem_runs,
    "a-mem": check_a_mem_runs,
    "memory-os": check_memory_os_runs,
}


@pytest.mark.rarely(options=COMPARED, batch_turns=(1,))
@pytest.mark.parametrize(
    ("batch_turns", "seed", "names"), [(7, 1, LONG), (None, 2, LONG), (512, None, SHORT), (1, 3, LONG)]
)
def test_any_batch_and_interleaving_gives_what_one_by_one_gives(
    batch_turns: int | None,
    seed: int | None,
    names: tuple[str, ...],
    locomo: Turns,
    encoder: Encoder,
    expected: Run,
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    if options["policy"] in ("nemori", "a-mem"):  # eight calls a window of three turns, and four a turn
        names = names[: 2 if batch_turns == 7 else 1]
    settings = settings_of(**options, batch_turns=batch_turns)
    turns = interleaved({name: locomo[name] for name in names}, seed)
    assert_same(engine_run(tmp_path, settings, encoder, REPLIES, turns), only(expected, names))


@pytest.mark.rarely(options=COMPARED)
def test_late_and_out_of_order_replies(
    locomo: Turns, encoder: Encoder, expected: Run, options: dict[str, Any], tmp_path: Path
) -> None:
    llm = RecordingLLM(REPLIES, latency_s=0.001, jitter_s=0.02)
    turns = {name: locomo[name] for name in MIDDLE}
    with opened(tmp_path, settings_of(**options, batch_turns=64), encoder, llm) as engine:
        ingest(engine, interleaved(turns, seed=4), 64)
        assert engine.drain()
    assert llm.max_in_flight > 1
    assert_same(read_back(tmp_path, llm.prompts), only(expected, MIDDLE))


@pytest.mark.rarely(options=COMPARED)
def test_tenants_put_out_of_memory_and_taken_back(
    locomo: Turns,
    encoder: Encoder,
    expected: Run,
    options: dict[str, Any],
    tmp_path: Path,
    evicted: list[str],
) -> None:
    llm = RecordingLLM(REPLIES)
    turns = {name: locomo[name] for name in MIDDLE}
    small = settings_of(**options).model_copy(update={"arena_bytes": 1 << 19})
    with opened(tmp_path, small, encoder, llm) as engine:
        for part in range(4):  # a quarter of each tenant's turns at a time, one tenant after the other
            for of_tenant in turns.values():
                size = -(-len(of_tenant) // 4)
                ingest(engine, of_tenant[part * size : (part + 1) * size], 64)
                assert engine.drain()
    assert len(evicted) > len(set(evicted)) == len(MIDDLE), "each of them, and not only once"
    assert_same(read_back(tmp_path, llm.prompts), only(expected, MIDDLE))


Figures = tuple[dict[str, int], list[SearchResult], list[list[Memory]]]


def figures(engine: Engine, names: tuple[str, ...]) -> Figures:
    found = [engine.search(name, "a trip to the beach with the kids") for name in names]
    return engine.stats(), found, [engine.get_all(name) for name in names]


@pytest.mark.rarely(options=COMPARED)
def test_closing_and_reopening_in_the_middle_changes_nothing(
    locomo: Turns, encoder: Encoder, expected: Run, options: dict[str, Any], tmp_path: Path
) -> None:
    """A session that ends with replies outstanding; the next sends those prompts again, and no others.

    Search, counts and memories are then the same live and in a third session, read from the journal.
    """
    settings = settings_of(**options, batch_turns=32)
    turns = interleaved({name: locomo[name] for name in MIDDLE}, seed=5)
    first, second = RecordingLLM(REPLIES, latency_s=0.005, jitter_s=0.05), RecordingLLM(REPLIES)
    with opened(tmp_path, settings, encoder, first) as engine:
        ingest(engine, turns[:400], 32)
        assert engine.lag.undecided_turns > 0
        assert engine.lag.running_jobs > 0
    with opened(tmp_path, settings, encoder, second) as engine:
        ingest(engine, turns[350:], 32)  # fifty turns once more: they are duplicates
        assert engine.drain()
        live = figures(engine, MIDDLE)
    wanted = only(expected, MIDDLE)
    assert_same(replace(read_back(tmp_path, {}), prompts=wanted.prompts), wanted)
    for name in MIDDLE:
        assert {*first.prompts[name], *second.prompts[name]} == {*wanted.prompts[name]}, name
    with opened(tmp_path, settings, encoder, None) as engine:
        assert figures(engine, MIDDLE) == live
    assert live[0]["facts"] and live[0]["dead_letters"]
    assert bool(live[0]["episodes"]) == (options["policy"] not in ("eager", "a-mem"))


@pytest.mark.rarely(options=COMPARED)
def test_without_an_llm_at_first_the_end_state_is_the_same(
    locomo: Turns, encoder: Encoder, expected: Run, options: dict[str, Any], tmp_path: Path
) -> None:
    settings = settings_of(**options)
    with opened(tmp_path, settings, encoder, None) as engine:
        ingest(engine, interleaved({name: locomo[name] for name in SHORT}, seed=6), 512)
        assert not engine.drain()
        assert engine.stats()["pending_jobs"] == len(SHORT)
        assert engine.stats()["llm_calls"] == 0
        assert all(engine.search(name, "a trip to the beach").turns for name in SHORT)
    llm = RecordingLLM(REPLIES)
    with opened(tmp_path, settings, encoder, llm) as engine:
        assert engine.drain()
        assert engine.stats()["pending_jobs"] == 0
    assert_same(read_back(tmp_path, llm.prompts), only(expected, SHORT))


# ---- random vectors, near thresholds and tied

DIM = 16
Vectors = NDArray[np.float16]


def exact(a: Vectors, b: Vectors) -> float:
    return float(np.dot(a.astype(np.float64), b.astype(np.float64)))


def pool_of(rng: np.random.Generator, count: int) -> Vectors:
    """Unit vectors with many equal or all but equal cosines: `count`, and each again with one bit less."""
    rows: list[Vectors] = []
    for _ in range(count):
        row = np.zeros(DIM)
        if rng.random() < 0.5:  # four halves, within few places: dot products are exact quarters
            row[rng.permutation(6)[:4]] = 0.5 * rng.choice([-1.0, 1.0, 1.0, 1.0], 4)
        else:
            row[:3] = rng.normal(size=3) + 1.0
            row /= np.linalg.norm(row)
        rows.append(row.astype(np.float16))
    for known in rows[:count]:
        near = known.copy()
        place = int(np.argmax(np.abs(near)))
        near[place] = np.nextafter(near[place], np.float16(0))
        rows.append(near)
    return np.stack(rows)


def threshold(rng: np.random.Generator, pool: Vectors, rank: int) -> float:
    """The very cosine of a pair, the one of this rank among three, or the next number above or below."""
    met = sorted(exact(*pool[rng.integers(0, len(pool), 2)]) for _ in range(3))[rank]
    theta = rng.choice([met, met, met, np.nextafter(met, 2.0), np.nextafter(met, -2.0)])
    return float(np.clip(theta, -1.0, 1.0))


def ways(policy: PolicyName) -> list[dict[str, Any]]:
    """A policy's plain settings, and those of its variants: drawn after the policy, which are so as often."""
    varied = [dict(variant.options) for variant in VARIANTS.values()]
    plain: list[dict[str, Any]] = [{"policy": policy, "calls": form} for form in get_args(CallForm)]
    return [*plain, *(options for options in varied if options["policy"] == policy)]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Settings, TableEncoder, MockReplies, Turns]:
    """Turns of one to three tenants whose vectors come from a small pool; thresholds that it meets."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    pool = pool_of(rng, draw(st.integers(2, 7)))
    rate = st.sampled_from([0.0, 0.3, 0.7])
    sick = draw(st.sampled_from([0.0, 0.1, 0.3]))
    replies = MockReplies(draw(st.integers(0, 99)), draw(rate), draw(rate), sick, malformed_sticky=True)
    turns: Turns = {}
    for name in [f"t{n}" for n in range(draw(st.integers(1, 3)))]:
        days = rng.integers(1, 28, draw(st.integers(8, 32)))
        said = [
            turn_of(name, n, f"{name} says {n} of {days[n]}", timestamp=f"2026-03-{days[n]:02d}T10:00:00")
            for n in range(len(days))
        ]
        session_turns = draw(st.integers(1, 6))
        turns[name] = [replace(turn, session_id=f"s{n // session_turns}") for n, turn in enumerate(said)]
    texts = [turn.text for of_tenant in turns.values() for turn in of_tenant]
    table = dict(zip(texts, pool[rng.integers(0, len(pool), len(texts))], strict=True))
    thetas = {"theta_sim": threshold(rng, pool, 1), "theta_merge": threshold(rng, pool, 2)}
    for name in draw(st.sampled_from([(), (), ("theta_merge",), ("theta_sim", "theta_merge")])):
        del thetas[name]
    settings = settings_of(
        short_term_pages=draw(st.sampled_from([1, 7])),
        heat_threshold=draw(st.sampled_from([1, 5])),
        **draw(st.sampled_from(get_args(PolicyName)).flatmap(lambda name: st.sampled_from(ways(name)))),
        **thetas,
        theta_share=draw(st.sampled_from([0.05, 0.3])),
        theta_count=draw(st.integers(1, 6)),
        window_messages=draw(st.sampled_from([1, 3, 8])),
        theta_evoke=threshold(rng, pool, 1),
        theta_compare=threshold(rng, pool, 0),
        batch_turns=draw(st.sampled_from([1, 2, 5, 512, None])),
        gate_lookahead_turns=draw(st.sampled_from([1, 3, 64])),
    )
    return settings, TableEncoder(table, pool), replies, turns


@hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(world=worlds(), seed=st.integers(0, 99))
def test_engine_equals_oracle_on_ties_and_near_ties(
    world: tuple[Settings, TableEncoder, MockReplies, Turns], seed: int
) -> None:
    settings, encoder, replies, turns = world
    with tempfile.TemporaryDirectory() as store:
        run = engine_run(Path(store), settings, encoder, replies, interleaved(turns, seed))
    assert_same(run, oracle_run(settings, encoder, replies, turns))


@hypothesis_settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(world=worlds(), seed=st.integers(0, 99))
def test_thresholds_that_turns_tell_are_those_of_the_oracle_on_ties(
    world: tuple[Settings, TableEncoder, MockReplies, Turns], seed: int
) -> None:
    settings, encoder, replies, turns = world
    settings = settings.under("recmem").model_copy(update={"theta_sim": None})
    with tempfile.TemporaryDirectory() as store, pytest.MonkeyPatch.context() as patched:
        patched.setattr(log, "THETA_TURNS", 4)
        patched.setattr(pair_thetas, "TURNS", 4)
        patched.setattr(effects, "SAMPLE_TURNS", 9)
        patched.setattr(pair_thetas, "SAMPLE", 9)
        run = engine_run(Path(store), settings, encoder, replies, interleaved(turns, seed))
        expected = oracle_run(settings, encoder, replies, turns)
    assert any(d.thetas for decisions in run.decisions.values() for d in decisions)
    assert_same(run, expected)
