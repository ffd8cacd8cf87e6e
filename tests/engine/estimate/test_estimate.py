"""`undertow estimate`: calls and tokens before any call, held against what a real engine is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from undertow.bench.quality.datasets import Sample
from undertow.bench.system.estimates import check as estimate_check
from undertow.bench.system.estimates import real as estimate_real
from undertow.bench.system.estimates.check import Run, compare, metered
from undertow.bench.system.estimates.real import usage_in
from undertow.engine.base.config import Settings
from undertow.engine.base.model import Message, PolicyName, Turn, UndertowError
from undertow.engine.encoders.base import Float16
from undertow.engine.encoders.hashing import HashingEncoder
from undertow.engine.encoders.token_count import TokenCount, token_count
from undertow.engine.estimate.eager import EagerShape, eager_usage
from undertow.engine.estimate.estimate import FIGURES, TOTAL, Ranges, TenantLog, estimate, price
from undertow.engine.estimate.reply_guess import EXPECTED, Evenly, Guesser, stand_in
from undertow.prompts.builders import ShownTurn, episode_prompt

from ...support import eval as eval_harness
from ...support.cli import THETAS, conversation, run, write_log
from ...support.eval import written

SETTINGS = Settings(
    encoder="hash:384", device="cpu", llm_url=None, theta_sim=0.5, theta_merge=0.55, theta_count=3
)
BYTES = TokenCount("bytes", lambda text: len(text.encode()), template_tokens=7)
TURNS = 60


def turn(n: int, text: str, tenant: str = "ada") -> Turn:
    messages = (Message("user", text), Message("assistant", f"noted {n}"))
    return Turn(tenant, messages, f"k{n}", "s", "2026-05-08T10:00:00")


def talk() -> tuple[Turn, ...]:
    lines = conversation("ada", TURNS)
    return tuple(turn(n, line["messages"][0]["content"]) for n, line in enumerate(lines))


def under(policy: PolicyName, **parts: Any) -> Settings:
    return Settings(**{**SETTINGS.model_dump(exclude_unset=True), "policy": policy, **parts})


def log_of(turns: tuple[Turn, ...]) -> TenantLog:
    return TenantLog(turns, HashingEncoder(384).encode([t.text for t in turns]).astype(np.float32))


# ---- against a real engine


def test_without_merges_the_episode_prompts_are_those_that_an_engine_asks() -> None:
    turns = talk()
    sample = Sample("ada", turns, ((),) * len(turns), ())
    real = metered([sample], SETTINGS, HashingEncoder(384), BYTES, refusal_rate=1.0)
    assert real.stats["consolidations"] >= 10 and real.stats["merges"] == 0
    refusing = replace(EXPECTED, merge_share=0.0)
    found = estimate([log_of(turns)], SETTINGS, BYTES, refusing)["episode"]
    assert found["calls"]["expected"] == real.spent["episode"].calls
    # to the byte: the same clusters in the same words
    assert found["prompt_tokens"]["expected"] == real.spent["episode"].prompt_tokens


def test_the_total_of_a_run_that_grants_half_the_merges_is_near() -> None:
    turns = talk()
    sample = Sample("ada", turns, ((),) * len(turns), ())
    real = metered([sample], SETTINGS, HashingEncoder(384), BYTES, refusal_rate=0.5)
    rows = compare(estimate([log_of(turns)], SETTINGS, BYTES), real.spent)
    assert set(rows) == {"episode", "merge", "refine", TOTAL}
    assert rows[TOTAL]["prompt_tokens"]["metered"] == sum(u.prompt_tokens for u in real.spent.values())
    assert rows[TOTAL]["prompt_tokens"]["off"] == pytest.approx(0.245, abs=0.05)


def run_of(settings: Settings) -> tuple[Run, Ranges]:
    """A real run, and the estimate that knows how much was made of what in it."""
    turns = tuple(replace(t, session_id=f"s{n // 25}") for n, t in enumerate(talk()))
    real = metered([Sample("ada", turns, ((),) * TURNS, ())], settings, HashingEncoder(384), BYTES, 0.0)
    return real, estimate([log_of(turns)], settings, BYTES, real.told(settings.policy))


def assert_same(real: Run, found: Ranges, operation: str, *figures: str) -> None:
    for figure in figures:
        assert found[operation][figure]["expected"] == getattr(real.spent[operation], figure), operation


def test_nemori_without_partitioning_is_told_to_the_byte_where_its_windows_are_shown() -> None:
    real, found = run_of(under("nemori", ablation="fixed-chunks", window_messages=14))
    # 120 messages in windows of 14, the last of eight
    assert real.spent["narrate"].calls == 9 and "partition" not in {*real.spent, *found}
    assert_same(real, found, "narrate", "calls", "prompt_tokens")
    for operation in ("select", "predict", "distil", "integrate"):
        assert_same(real, found, operation, "calls")


def test_nemori_s_reads_what_each_group_holds_and_nothing_more() -> None:
    real, found = run_of(under("nemori", ablation="direct-extraction"))
    assert set(found) == {*real.spent, TOTAL} == {"partition", "distil_direct", "consolidate", TOTAL}
    assert_same(real, found, "partition", "calls", "prompt_tokens")


@pytest.mark.parametrize(("management", "operation"), [("append", None), ("summary", "summarise")])
def test_another_management_of_nemori_asks_for_its_own_calls(management: str, operation: str | None) -> None:
    ranges = estimate([log_of(talk())], under("nemori", management=management), BYTES)
    expected = {"partition", "narrate", "select", "integrate", "predict", "distil", TOTAL}
    assert set(ranges) == expected | ({operation} if operation else set())
    if operation:
        assert ranges[operation]["calls"]["expected"] == ranges["distil"]["calls"]["expected"]


def test_himem_asks_four_times_a_session() -> None:
    real, found = run_of(under("himem"))
    assert {op: row["calls"]["expected"] for op, row in found.items()} == {
        **dict.fromkeys(("segment", "notes", "traits", "align"), 3),
        TOTAL: 12,
    }
    assert {op: used.calls for op, used in real.spent.items()} == dict.fromkeys(real.spent, 3)
    for operation in ("segment", "notes"):
        assert_same(real, found, operation, "prompt_tokens")


def test_himem_splits_a_session_for_which_the_context_has_no_room() -> None:
    settings = under("himem", context_tokens=2_048, himem_align_notes=False)
    real, found = run_of(settings)
    assert real.spent["segment"].calls > 3 and "align" not in {*real.spent, *found}
    for operation in ("segment", "notes"):
        assert_same(real, found, operation, "calls", "prompt_tokens")


def test_himem_that_aligns_its_episodes_asks_once_more_for_each() -> None:
    log = log_of(talk())
    plain, aligned = (
        estimate([log], under("himem", himem_align_episodes=aligned, context_tokens=32_768), BYTES)["align"][
            "calls"
        ]["expected"]
        for aligned in (False, True)
    )
    assert plain == 1 < aligned


@pytest.mark.parametrize(("policy", "calls", "tokens"), [("nemori", 0.06, 0.45), ("himem", 0.0, 0.004)])
def test_the_total_of_a_run_is_near_where_counts_are_known(
    policy: PolicyName, calls: float, tokens: float
) -> None:
    """What is left is that the mock's narratives are shorter than an LLM's, and some of its facts alike."""
    real, found = run_of(under(policy))
    rows = compare(found, real.spent)
    assert set(rows) == set(found), "every operation that is estimated is asked for, and no other"
    assert rows[TOTAL]["calls"]["off"] == pytest.approx(calls, abs=0.03)
    assert rows[TOTAL]["prompt_tokens"]["off"] == pytest.approx(tokens, abs=0.05)


# ---- the figures


def test_ranges_enclose_what_is_expected_and_totals_add_up() -> None:
    log = log_of(talk())
    for policy in get_args(PolicyName):
        ranges = estimate([log, log], under(policy), BYTES)
        for figure in FIGURES:
            for row in ranges.values():
                assert row[figure]["low"] <= row[figure]["expected"] <= row[figure]["high"]
            parts = [row[figure]["expected"] for op, row in ranges.items() if op != TOTAL]
            assert ranges[TOTAL][figure]["expected"] == sum(parts) > 0


def test_an_eager_policy_reads_every_turn_with_the_recent_ones_before_it() -> None:
    one_each = TokenCount("lines", lambda text: 1, template_tokens=0)
    shape = EagerShape(
        extract_fixed_tokens=100,
        recent_turns=2,
        reconcile_fixed_tokens=50,
        similar_facts=2,
        added_share=1.0,
        shown_tokens=6,
        extracted_tokens=1,
        decision_tokens=3,
    )
    guess = replace(EXPECTED, facts=1, fact_chars=16)  # 4 tokens
    spent = eager_usage([turn(n, "hello") for n in range(4)], one_each, Guesser(guess), shape)
    extract, reconcile = spent["extract"], spent["reconcile"]
    # the turn is a line, after 0, 1, 2, 2 others
    assert (extract.calls, extract.prompt_tokens) == (4, 4 * 100 + 4 + (0 + 1 + 2 + 2))
    # one candidate each, beside 0, 1, 2, 2 stored facts, each of 4 + 6 tokens
    assert (reconcile.calls, reconcile.prompt_tokens) == (4, 4 * 50 + 10 * (4 + 0 + 1 + 2 + 2))
    assert (extract.completion_tokens, reconcile.completion_tokens) == (4 * 5, 4 * 3)


def test_an_eager_policy_that_finds_nothing_reconciles_nothing() -> None:
    spent = eager_usage(talk(), BYTES, Guesser(replace(EXPECTED, facts=0)))
    assert (spent["extract"].calls, spent["reconcile"].calls) == (TURNS, 0)


def test_whole_numbers_keep_their_mean_over_many_tenants() -> None:
    evenly = Evenly(1.5)
    assert [evenly.take() for _ in range(6)] == [1, 2, 1, 2, 1, 2]
    rarely = Evenly(0.1)
    assert sum(rarely.take() for _ in range(1000)) == 100
    of_many = Evenly(0.46)
    assert sum(of_many.take(7) for _ in range(100)) == 322


def test_a_stand_in_has_its_length_whatever_it_is_made_of() -> None:
    assert len(stand_in(["a b"], 300)) == 300
    assert stand_in(["one two three"], 7) == "one two"
    assert stand_in([" "], 10) == ""


def test_a_price_is_that_of_prompts_and_completions() -> None:
    row = {"low": 1_000_000, "expected": 2_000_000, "high": 4_000_000}
    ranges = {TOTAL: dict.fromkeys(FIGURES, row)}
    assert price(ranges, 0.5, 2.0) == {"low": 2.5, "expected": 5.0, "high": 10.0}


# ---- tokens


def words_tokenizer(folder: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.enable_truncation(5)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_tokenizer_counts_whole_texts_without_its_window(tmp_path: Path) -> None:
    tokens = token_count(SETTINGS, words_tokenizer(tmp_path))
    prompt = episode_prompt([ShownTurn(1, None, "Ana: hi\nBo: yes")] * 3)
    plain = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    plain.no_truncation()
    whole = sum(len(plain.encode(text).ids) for text in (prompt.system, prompt.user))
    assert tokens.of_prompt(prompt) == whole + tokens.template_tokens
    assert str(tmp_path) in tokens.name


def test_without_a_tokenizer_bytes_are_counted_and_it_is_said() -> None:
    tokens = token_count(SETTINGS)
    assert (tokens.of_text("12345678"), tokens.of_text("123456789")) == (2, 3)
    assert "bytes / 4" in tokens.name


def test_a_folder_without_a_tokenizer_is_refused_with_the_cure(tmp_path: Path) -> None:
    with pytest.raises(UndertowError, match=r"tokenizer\.json"):
        token_count(SETTINGS, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UndertowError, match=r"cannot be used as a tokenizer"):
        token_count(SETTINGS, tmp_path)


# ---- a real run's usage


USED = {"calls": 4, "prompt_tokens": 100, "cached_prompt_tokens": 50, "completion_tokens": 10}


def test_usage_is_read_from_stats_and_answers_are_no_construction() -> None:
    found = {"turns": 3, "usage": {"episode": USED, "answer": USED}}
    row = {"low": 1, "expected": 5, "high": 9}
    rows = compare(dict.fromkeys(("episode", TOTAL), dict.fromkeys(FIGURES, row)), usage_in(found))
    assert set(rows) == {"episode", TOTAL}
    assert rows[TOTAL]["calls"] == {**row, "metered": 4, "off": 0.25, "within": True}
    assert (rows[TOTAL]["prompt_tokens"]["off"], rows[TOTAL]["prompt_tokens"]["within"]) == (-0.95, False)
    with pytest.raises(ValueError, match="no usage by operation"):
        usage_in({"turns": 3})


def locomo_file(tmp_path: Path) -> Path:
    return written(tmp_path, *(eval_harness.conversation(sample_id=name) for name in ("conv-1", "conv-2")))


def summary(tmp_path: Path, **spent: Mapping[str, object]) -> Path:
    made_with = {"policy": "recmem", "theta_sim": 0.01, "theta_merge": 0.01, "theta_count": 2}
    file = tmp_path / "summary.json"
    about = {**made_with, "encoder": "hash:384", "ablation": None}
    file.write_text(json.dumps({**about, "construction": {"by_conversation": spent}}))
    return file


def test_a_real_run_is_estimated_with_its_own_thresholds_by_conversation(tmp_path: Path) -> None:
    data = locomo_file(tmp_path)
    both = summary(tmp_path, **{"conv-1": {"episode": USED}, "conv-2": {"episode": USED, "merge": USED}})
    out = tmp_path / "out"
    assert estimate_real.main([str(both), "--data", str(data), "--out", str(out)]) == 0
    [run] = json.loads((out / "estimate-real.json").read_text())["runs"]
    assert (run["policy"], run["theta_sim"], run["theta_count"]) == ("recmem", 0.01, 2)
    assert run["conv-1"][TOTAL]["calls"]["metered"] == 4
    assert run["conv-2"][TOTAL]["calls"]["metered"] == 8
    assert run["together"][TOTAL]["calls"]["metered"] == 12
    assert run["together"]["merge"]["prompt_tokens"]["metered"] == 100
    each = [run[name][TOTAL]["calls"]["high"] for name in ("conv-1", "conv-2")]
    assert run["together"][TOTAL]["calls"]["high"] >= max(each) > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--sample", "conv-9"], "it has conv-1, not conv-9"),
        ([], "--data has no conversation conv-3"),
    ],
)
def test_a_conversation_that_is_not_there_is_named(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, out = locomo_file(tmp_path), tmp_path / "out"
    name = "conv-1" if options else "conv-3"
    file = summary(tmp_path, **{name: {"episode": USED}})
    assert estimate_real.main([str(file), "--data", str(data), "--out", str(out), *options]) == 2
    assert said in capsys.readouterr().err
    with pytest.raises(SystemExit):
        estimate_check.main(["--data", str(data), "--sample", "conv9", "--out", str(out)])
    assert "'conv9'" in capsys.readouterr().err
    assert not out.exists()


# ---- the command


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return write_log(tmp_path / "log.jsonl", conversation("ada", TURNS) + conversation("bo", TURNS))


def test_the_command_reads_logs_and_stores_nothing(log: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    document = run("estimate", log, *THETAS, "--json").doc
    assert sorted(tmp_path.rglob("*")) == before
    assert (document["tenants"], document["turns"], document["theta_count"]) == (2, 2 * TURNS, 3)
    assert set(document["policies"]) == set(get_args(PolicyName))
    forms = [policies.values() for policies in document["policies"].values()]
    assert all(set(row) == set(FIGURES) for rows in forms for row in rows)
    # each tenant: six windows of twenty messages; one session, of which a window takes half
    assert document["policies"]["nemori"]["partition"]["calls"]["expected"] == 2 * 6
    assert document["policies"]["himem"]["segment"]["calls"]["expected"] == 2 * 2
    assert document["policies"]["eager"]["extract"]["calls"]["expected"] == 2 * TURNS
    recmem = document["policies"]["recmem"]
    assert recmem["episode"]["calls"]["expected"] > 0
    assert document["assumptions"]["expected"]["merge_share"] == EXPECTED.merge_share
    assert "bytes / 4" in document["tokens"]
    none = run("estimate", log, "--theta-sim", "0.99", "--policy", "recmem", "--json").doc["policies"]
    assert (set(none), none["recmem"][TOTAL]["calls"]["high"]) == ({"recmem"}, 0)


def test_the_same_log_twice_costs_once_and_vectors_are_kept(log: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.npz"
    once = run("estimate", log, *THETAS, "--vectors", kept, "--json").doc
    assert kept.exists()
    assert run("estimate", log, log, *THETAS, "--vectors", kept, "--json").doc == once


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
    estimated, inherited = (run("estimate", log, *THETAS, "--json").doc["policies"] for log in logs)
    assert inherited == estimated
    estimating = set(given)
    given.clear()
    assert run("ingest", logs[1], "--store", tmp_path / "store", "--llm", "off").code == 0
    assert set(given) == estimating and len(estimating) == TURNS


def test_a_bad_line_is_told_and_the_rest_estimated(log: Path) -> None:
    with log.open("a") as file:
        file.write('{"tenant": "ada", "messages": 5}\n')
    done = run("estimate", log, *THETAS, "--json")
    assert (done.code, done.doc["errors"], done.doc["turns"]) == (3, 1, 2 * TURNS)
    assert "messages" in done.err


def test_an_ablation_of_recmem_is_refused_with_the_cure(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERTOW_ABLATION", "without-facts")
    done = run("estimate", log)
    assert (done.code, "unset UNDERTOW_ABLATION" in done.err) == (2, True)


def test_one_policy_is_estimated_with_its_own_parts(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERTOW_ABLATION", "without-facts")
    monkeypatch.setenv("UNDERTOW_WINDOW_MESSAGES", "40")
    document = run("estimate", log, "--policy", "nemori", "--json").doc
    assert (document["ablation"], document["window_messages"]) == ("without-facts", 40)
    assert set(document["policies"]) == {"nemori"}
    assert set(document["policies"]["nemori"]) == {"partition", "narrate", "select", "integrate", TOTAL}
    assert document["policies"]["nemori"]["partition"]["calls"]["expected"] == 2 * 3


def test_prices_come_in_pairs(log: Path) -> None:
    alone = run("estimate", log, "--price-in", "1")
    assert (alone.code, "--price-out" in alone.err) == (2, True)
    shown = run("estimate", log, *THETAS, "--price-in", "1", "--price-out", "2")
    assert (shown.code, "Price, recmem: " in shown.out, "\x1b" in shown.out) == (0, True, False)
    document = run("estimate", log, *THETAS, "--price-in", "1", "--price-out", "2", "--json").doc
    total = document["policies"]["eager"][TOTAL]
    expected = (total["prompt_tokens"]["expected"] + 2 * total["completion_tokens"]["expected"]) / 1e6
    assert document["price"]["eager"]["expected"] == pytest.approx(expected, abs=1e-4)
