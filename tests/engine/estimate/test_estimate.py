"""`undertow estimate`: calls and tokens before any call, compared with those of an engine with a mock LLM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from undertow.bench.quality.datasets import Sample
from undertow.bench.system.estimate_check import Counted, compare, log_of, metered
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Message, PolicyName, Turn
from undertow.engine.encoders.base import Float16
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.encoders.token_count import TokenCount
from undertow.engine.estimate.assumptions import EXPECTED, Evenly, stand_in
from undertow.engine.estimate.estimate import FIGURES, TOTAL, Ranges, estimate, price
from undertow.engine.estimate.stand_ins import StandInEncoder, TenantLog

from ...support.cli import THETAS, conversation, run, write_log

SETTINGS = Settings(
    encoder="hash:384", device="cpu", llm_url=None, theta_sim=0.5, theta_merge=0.55, theta_count=3
)
BYTES = TokenCount("bytes", lambda text: len(text.encode()), template_tokens=7)
TURNS = 60


def under(policy: PolicyName, **parts: Any) -> Settings:
    return Settings(**{**SETTINGS.model_dump(exclude_unset=True), "policy": policy, **parts})


def sample(turns: int = TURNS) -> Sample:
    """Three sessions whose topics recur."""
    texts = [line["messages"][0]["content"] for line in conversation("ada", turns)]
    talk = tuple(
        Turn("ada", (Message("user", text), Message("assistant", f"noted {n}")), f"k{n}", f"s{n // 25}", None)
        for n, text in enumerate(texts)
    )
    return Sample("ada", talk, ((),) * turns, ())


def log() -> TenantLog:
    return log_of(sample(), HashingEncoder(384), SETTINGS)


def run_of(settings: Settings, refusal_rate: float = 0.0) -> tuple[Counted, Ranges]:
    """A run with the mock LLM, and the estimate with the mock's own counts."""
    real = metered([sample()], settings, HashingEncoder(384), BYTES, refusal_rate)
    return real, estimate([log()], settings, BYTES, real.guess())


# ---- against an engine

EXACT: dict[str, tuple[Settings, float, set[str], set[str]]] = {
    # settings, refused merges, operations with the same calls, and those with the same prompts to the byte
    "RecMem without merges": (under("recmem"), 1.0, {"episode"}, set()),
    "RecMem's paper without merges": (under("recmem", calls="paper"), 1.0, {"episode"}, {"episode"}),
    "eager": (under("eager"), 0.0, {"extract"}, {"extract"}),
    "A-Mem": (under("a-mem"), 0.0, {"annotate", "connect"}, {"annotate"}),
    "NEMORI": (under("nemori"), 0.0, {"partition", "narrate", "select", "predict", "distil"}, {"partition"}),
    "NEMORI without partition": (
        under("nemori", ablation="fixed-chunks", window_messages=14),
        *(0.0, {"narrate", "select", "predict", "distil", "integrate"}, {"narrate"}),
    ),
    "NEMORI-s": (under("nemori", ablation="direct-extraction"), 0.0, {"partition"}, {"partition"}),
    "HiMem": (under("himem"), 0.0, {"segment", "notes"}, {"segment", "notes"}),
    "HiMem's paper": (
        under("himem", calls="paper"),
        *(0.0, {"segment", "notes", "traits", "align"}, {"segment", "notes"}),
    ),
    "HiMem that splits sessions": (
        under("himem", context_tokens=2_048, himem_align_notes=False),
        *(0.0, {"segment", "notes", "traits"}, {"segment", "notes"}),
    ),
}


@pytest.mark.rarely(case=list(EXACT)[1::2])
@pytest.mark.parametrize("case", EXACT)
def test_what_does_not_depend_on_replies_equals_a_run_of_the_engine(case: str) -> None:
    settings, refusal_rate, calls, prompts = EXACT[case]
    real, found = run_of(settings, refusal_rate)
    for operation in calls:
        assert found[operation]["calls"]["expected"] == real.spent[operation].calls > 0, operation
    for operation in prompts:
        assert found[operation]["prompt_tokens"]["expected"] == real.spent[operation].prompt_tokens, operation


@pytest.mark.parametrize(
    ("settings", "operations"),
    [
        (under("recmem"), {"episode", "merge"}),
        (under("recmem", calls="paper"), {"episode", "merge", "refine"}),
        (under("recmem", ablation="without-facts"), {"episode", "merge"}),
        (under("recmem", ablation="direct-extraction"), {"direct"}),
        (under("eager"), {"extract", "reconcile"}),
        (
            under("nemori", management="append"),
            {"partition", "narrate", "select", "integrate", "predict", "distil"},
        ),
        (
            under("nemori", management="summary"),
            {"partition", "narrate", "select", "integrate", "predict", "distil", "summarise"},
        ),
        (
            under("nemori", management="a-mem", nemori_index="messages"),
            {"partition", "narrate", "select", "integrate", "predict", "distil", "annotate", "connect"},
        ),
        (
            under("nemori", management="memory-os", short_term_pages=1, heat_threshold=1.0),
            {"partition", "narrate", "select", "integrate", "predict", "distil", "topic", "persona"},
        ),
        (under("nemori", ablation="direct-extraction"), {"partition", "distil_direct", "consolidate"}),
        (under("himem"), {"segment", "notes"}),
        (under("himem", himem_align_notes=False), {"segment", "notes", "traits"}),
        (under("a-mem"), {"annotate", "connect"}),
        (under("memory-os"), {"topic", "persona"}),
    ],
)
def test_each_policy_and_ablation_asks_for_its_own_operations(
    settings: Settings, operations: set[str]
) -> None:
    assert set(estimate([log()], settings, BYTES)) == operations | {TOTAL}


def test_himem_that_aligns_its_episodes_asks_once_more_for_each() -> None:
    roomy = {"context_tokens": 32_768, "calls": "paper"}
    plain, aligned = (
        estimate([log()], under("himem", himem_align_episodes=aligned, **roomy), BYTES)["align"]["calls"]
        for aligned in (False, True)
    )
    assert plain["expected"] == 3 < aligned["expected"]


def test_a_budget_of_the_environment_does_not_cut_the_estimate() -> None:
    limited = under("eager", tenant_token_budget=1_000)
    assert estimate([log()], limited, BYTES) == estimate([log()], under("eager"), BYTES)


# ---- the assumptions


def test_ranges_enclose_what_is_expected_and_totals_add_up() -> None:
    for policy in get_args(PolicyName):
        ranges = estimate([log()], under(policy), BYTES)
        for figure in FIGURES:
            for row in ranges.values():
                assert row[figure]["low"] <= row[figure]["expected"] <= row[figure]["high"]
            parts = [row[figure]["expected"] for op, row in ranges.items() if op != TOTAL]
            assert ranges[TOTAL][figure]["expected"] == sum(parts) > 0


def test_whole_numbers_keep_their_mean_over_many_tenants() -> None:
    evenly, rarely, of_many = Evenly(1.5), Evenly(0.1), Evenly(0.46)
    assert [evenly.take() for _ in range(6)] == [1, 2, 1, 2, 1, 2]
    assert sum(rarely.take() for _ in range(1000)) == 100
    assert sum(of_many.take(7) for _ in range(100)) == 322


def test_a_stand_in_has_its_length_whatever_it_is_made_of() -> None:
    assert len(stand_in(["a b"], 300)) == 300
    assert stand_in(["one two three"], 7) == "one two"
    assert stand_in([" "], 10) == ""


def test_a_written_text_has_its_likeness_to_the_mean_of_its_turns() -> None:
    known = log()
    encoder = StandInEncoder([known], 0.8, embed_timestamp=False)
    texts = [turn.text for turn in known.turns[:3]]
    encoder.add("an episode", texts)
    encoder.add("of one message", [texts[0].split("\n")[0]])
    episode, fact, twice = encoder.encode(["an episode", "of one message", "an episode\nof one message"])
    mean = known.vectors[:3].sum(axis=0) / np.linalg.norm(known.vectors[:3].sum(axis=0))
    assert float(episode @ mean) == pytest.approx(0.8, abs=0.01)
    assert float(fact @ known.vectors[0]) == pytest.approx(0.8, abs=0.01)
    assert float(twice @ mean) > 0.5
    assert (encoder.encode(texts) == known.vectors[:3].astype(np.float16)).all()
    assert (encoder.encode(["an episode"])[0] == episode).all()


def test_a_price_is_that_of_prompts_and_completions() -> None:
    ranges = {TOTAL: {f: {"low": 1_000_000, "expected": 2_000_000, "high": 4_000_000} for f in FIGURES}}
    assert price(ranges, 0.5, 2.0) == {"low": 2.5, "expected": 5.0, "high": 10.0}


def test_an_error_is_a_share_of_what_was_metered_and_answers_are_no_construction() -> None:
    real, found = run_of(under("himem", calls="paper"))
    rows = compare(found, {**real.spent, "answer": real.spent["notes"]})
    assert set(rows) == {*real.spent, TOTAL} and rows["notes"]["calls"]["off"] == 0.0
    assert rows[TOTAL]["calls"]["metered"] == 12
    assert rows[TOTAL]["prompt_tokens"]["off"] == pytest.approx(0.0, abs=0.05)


# ---- the command


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log.jsonl", conversation("ada", TURNS) + conversation("bo", TURNS))


def test_the_command_reads_logs_and_stores_nothing(file: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    document = run("estimate", file, *THETAS, "--json").doc
    assert sorted(tmp_path.rglob("*")) == before
    assert (document["tenants"], document["turns"], document["theta_count"]) == (2, 2 * TURNS, 3)
    assert set(document["policies"]) == set(get_args(PolicyName))
    forms = [policies.values() for policies in document["policies"].values()]
    assert all(set(row) == set(FIGURES) for rows in forms for row in rows)
    # each tenant: six windows of twenty messages; one session, in two windows
    assert document["policies"]["nemori"]["partition"]["calls"]["expected"] == 2 * 6
    assert document["policies"]["himem"]["segment"]["calls"]["expected"] == 2 * 2
    assert document["policies"]["eager"]["extract"]["calls"]["expected"] == 2 * TURNS
    assert document["policies"]["recmem"]["episode"]["calls"]["expected"] > 0
    assert document["assumptions"]["expected"]["merge_share"] == EXPECTED.merge_share
    assert "bytes / 4" in document["tokens"]
    none = run("estimate", file, "--theta-sim", "0.99", "--policy", "recmem", "--json").doc["policies"]
    assert (set(none), none["recmem"][TOTAL]["calls"]["high"]) == ({"recmem"}, 0)


def test_the_same_log_twice_costs_once_and_vectors_are_kept(file: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.npz"
    once = run("estimate", file, *THETAS, "--vectors", kept, "--policy", "recmem", "--json").doc
    assert kept.exists()
    assert run("estimate", file, file, *THETAS, "--vectors", kept, "--policy", "recmem", "--json").doc == once


def test_a_date_is_inherited_within_a_session_as_ingestion_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sessions that take turns, dated at their first turn and once more later."""
    lines = [line | {"session": f"s{n % 2}"} for n, line in enumerate(conversation("ada", TURNS))]
    whole = [line | {"timestamp": lines[n % 2 + n // 30 * 30]["timestamp"]} for n, line in enumerate(lines)]
    bare = [line if n % 30 < 2 else {**line, "timestamp": None} for n, line in enumerate(whole)]
    logs = [write_log(tmp_path / f"{n}.jsonl", some) for n, some in enumerate((whole, bare))]
    given: list[str] = []

    class Heard(HashingEncoder):
        def encode(self, texts: Sequence[str]) -> Float16:
            given.extend(texts)
            return super().encode(texts)

    monkeypatch.setattr("undertow.engine.encoders.factory.make_encoder", lambda settings: Heard(384))
    monkeypatch.setenv("UNDERTOW_EMBED_TIMESTAMP", "1")
    monkeypatch.setenv("UNDERTOW_THETA_COUNT", "1000")  # a job would embed its cluster as one text
    estimated, inherited = (
        run("estimate", log, "--policy", "himem", "--json").doc["policies"] for log in logs
    )
    assert inherited == estimated
    estimating = set(given)
    given.clear()
    assert run("ingest", logs[1], "--store", tmp_path / "store", "--llm", "off").code == 0
    assert set(given) == estimating and len(estimating) == TURNS


def test_a_bad_line_is_told_and_the_rest_estimated(file: Path) -> None:
    with file.open("a") as to:
        to.write('{"tenant": "ada", "messages": 5}\n')
    done = run("estimate", file, *THETAS, "--policy", "himem", "--json")
    assert (done.code, done.doc["errors"], done.doc["turns"]) == (3, 1, 2 * TURNS)
    assert "messages" in done.err
    file.write_text('{"tenant": "ada", "messages": 5}\n')
    none = run("estimate", file)
    assert (none.code, none.out, "messages" in none.err) == (3, "", True)


def test_one_policy_is_estimated_with_the_settings_of_the_environment(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNDERTOW_ABLATION", "without-facts")
    monkeypatch.setenv("UNDERTOW_WINDOW_MESSAGES", "40")
    document = run("estimate", file, "--policy", "nemori", "--json").doc
    assert (document["ablation"], document["window_messages"]) == ("without-facts", 40)
    assert set(document["policies"]) == {"nemori"}
    assert set(document["policies"]["nemori"]) == {"partition", "narrate", "select", "integrate", TOTAL}
    assert document["policies"]["nemori"]["partition"]["calls"]["expected"] == 2 * 3


def test_prices_come_in_pairs(file: Path) -> None:
    alone = run("estimate", file, "--price-in", "1")
    assert (alone.code, "--price-out" in alone.err) == (2, True)
    prices = ("--price-in", "1", "--price-out", "2")
    shown = run("estimate", file, *THETAS, "--policy", "recmem", *prices)
    assert (shown.code, "Price, recmem: " in shown.out, "\x1b" in shown.out) == (0, True, False)
    document = run("estimate", file, *THETAS, "--policy", "eager", *prices, "--json").doc
    total = document["policies"]["eager"][TOTAL]
    expected = (total["prompt_tokens"]["expected"] + 2 * total["completion_tokens"]["expected"]) / 1e6
    assert document["price"]["eager"]["expected"] == pytest.approx(expected, abs=1e-4)
