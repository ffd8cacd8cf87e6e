"""`undertow eval` with an LLM: what is kept of a run, what is told of it, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from undertow.bench.mock.llm import MockLLM
from undertow.bench.mock.server import spawn_server
from undertow.bench.quality.datasets import Question, Sample
from undertow.bench.quality.json_lines import KeptLines
from undertow.bench.quality.run.answers import Answering
from undertow.bench.quality.run.llm_requests import Asker
from undertow.bench.quality.systems.base import Material, System
from undertow.engine.base.config import Settings
from undertow.serving.cli.commands.eval.answers import _left_out

from ...support.cli import Ran, run
from ...support.eval import conversation, haystack, kept_lines, talk, written
from ...support.llm_servers import completion, odd_server, server_stats


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with spawn_server(refusal_rate=0.4) as url:
        yield url


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A plain conversation with four questions that are asked, and one that is not."""
    return written(tmp_path, conversation())


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def boat(tmp_path: Path) -> Path:
    """Seven turns about one thing."""
    texts = (f"the wooden boat and its varnish, day {n}" for n in range(1, 15))
    return written(tmp_path, conversation(conversation=talk(texts)))


def evaluated(path: Path, out: Path, url: str, *options: str, benchmark: str = "locomo", **env: str) -> Ran:
    fixed = ("eval", benchmark, "--data", path, "--llm", url, "--out", out, "--json")
    return run(*fixed, *options, env=env)


def test_a_run_keeps_every_answer_and_verdict(path: Path, out: Path, url: str) -> None:
    told = evaluated(path, out, url, "--policy", "full-context").doc
    answers, verdicts = kept_lines(out / "answers.jsonl"), kept_lines(out / "verdicts.jsonl")
    asked = ["made-up:0", "made-up:1", "made-up:3", "made-up:4"]
    assert [line["question_id"] for line in answers] == [line["question_id"] for line in verdicts] == asked
    first = answers[0]
    assert first["gold"] == "made up" and first["answer"].startswith("From memory: ")
    assert first["material"]["turns"][0] == {
        "number": 1,
        "date": "8 May 2023, 13:56",
        "text": "Ann: I signed up for the pottery course.\nBen: My brother sells canoes.",
    }
    assert first["evidence"] == ["D1:1"] and "D1:1" in first["in_turns"]
    assert first["tokens"]["calls"] == 1 and first["model"] == "mock-llm"
    assert (told["questions"], told["left_out"], told["errors"], told["unjudged"]) == (4, 1, 0, 0)
    assert told["by_category"].keys() == {"single-hop", "multi-hop", "temporal", "open-domain"}
    assert told["judge"]["mean"] == sum(v["verdict"] == "right" for v in verdicts) / 4
    assert told["f1"]["mean"] == pytest.approx(sum(a["f1"] for a in answers) / 4, abs=1e-4)
    shown = told["evidence_shown"]
    assert shown == {"in_turns": pytest.approx(2 / 3, abs=1e-4), "behind_memories": None}, "D9:9 is nowhere"
    assert told["query"]["prompt_tokens_per_question"] > 0
    assert told["construction"]["per_conversation"]["calls"] == 0
    assert told["latency_on_this_machine"]["llm_s_p95"] > 0
    assert told["prompt_versions"]["answer"] == first["prompt_version"]
    assert json.loads((out / "summary.json").read_text()) == told


def test_the_engine_is_the_default_and_its_construction_is_told(boat: Path, out: Path, url: str) -> None:
    told = evaluated(boat, out, url, "--theta-sim", "0.4", "--theta-count", "3").doc
    assert (told["policy"], told["theta_sim"], told["theta_merge"]) == ("recmem", 0.4, 0.4)
    assert told["built"]["turns"] == 7 and told["built"]["episodes"] > 0
    spent = told["construction"]["per_conversation"]
    assert spent["calls"] == told["built"]["llm_calls"] > 0
    by_operation = told["construction"]["by_operation"]
    assert sum(one["tokens"] for one in by_operation.values()) == spent["tokens"]
    assert "answer" not in by_operation
    shown = kept_lines(out / "answers.jsonl")[0]["material"]
    assert shown["episodes"] and shown["facts"]


HIMEM_CALLS = {"segment": 1, "notes": 1}


@pytest.mark.parametrize(
    ("policy", "operations", "tiers", "told_of_it"),
    [
        ("eager", {"extract": 7}, {"facts", "turns"}, {}),
        ("a-mem", {"annotate": 14, "connect": 13}, {"facts"}, {"k_epi": 0, "k_sem": 10}),
        # fourteen messages are no whole window: it ends with a flush; it shows the turns of the best episodes
        ("nemori", {"partition": 1}, {"episodes", "facts", "turns"}, {"raw_of_best": 2}),
        ("himem", HIMEM_CALLS, {"episodes", "facts"}, {"k_epi": 10, "k_sem": 10}),
    ],
)
def test_a_policy_decides_every_turn_once_and_shows_its_own_tiers(
    boat: Path,
    out: Path,
    url: str,
    monkeypatch: pytest.MonkeyPatch,
    policy: str,
    operations: dict[str, int],
    tiers: set[str],
    told_of_it: dict[str, int],
) -> None:
    monkeypatch.setenv("UNDERTOW_POLICY", "recmem")  # what the option says counts
    told = evaluated(boat, out, url, "--policy", policy).doc
    assert told.items() >= {"policy": policy, **told_of_it}.items()
    assert (told["built"]["turns"], told["built"]["waiting_turns"]) == (7, 0)
    by_operation = told["construction"]["by_operation"]
    assert {name: by_operation[name]["calls"] for name in operations} == operations
    shown = kept_lines(out / "answers.jsonl")[0]["material"]
    assert {tier for tier in ("episodes", "facts", "turns") if shown[tier]} == tiers
    assert evaluated(boat, out, url, "--policy", policy).doc == told, "nothing is done again"


def best_effort(body: Any, number: int) -> tuple[int, Any]:
    """Judges by the question: notes are enough for one, episodes for another, and of one it says nothing."""
    asked = body["messages"][1]["content"]
    usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
    if not asked.startswith(("Notes and turns:", "Episodes:")) or "Facts:" in asked:
        return 200, completion("it was varnish", usage=usage)
    enough = "pottery" in asked or ("canoes" in asked and asked.startswith("Episodes:"))
    judged = "no JSON" if "Nothing was noted" in asked else json.dumps({"lines": [1], "sufficient": enough})
    return 200, completion(judged, usage=usage)


def test_best_effort_answers_from_the_notes_where_they_are_enough(
    boat: Path, out: Path, tmp_path: Path, url: str
) -> None:
    best = tmp_path / "best"
    options = ("--policy", "himem", "--judge-llm", "off")
    hybrid = evaluated(boat, out, url, *options).doc
    mode = {"UNDERTOW_ANSWER_MODE": "best_effort"}
    assert f"--memories-of {out} that needs no new" in evaluated(boat, out, url, *options, **mode).err
    with odd_server(best_effort, models=("mock-llm",)) as judging:
        again = (*options, "--memories-of", str(out))
        told = evaluated(boat, best, judging, *again, **mode).doc
    lines = kept_lines(best / "answers.jsonl")
    assert [line["tokens"]["calls"] for line in lines] == [2, 3, 5, 2], "a bad reply is asked to be repaired"
    assert [line["tokens"]["prompt_tokens"] for line in lines] == [200, 300, 500, 200]
    said = [line["answer"] for line in lines]
    assert said == ["it was varnish"] * 3 + ["Not answerable from memory."]
    assert [bool(line["material"]["facts"]) for line in lines] == [True, False, True, True], "the named lines"
    assert [bool(line["material"]["episodes"]) for line in lines] == [False, True, True, True]
    assert (hybrid["answer_mode"], told["answer_mode"]) == ("hybrid", "best_effort")
    assert (hybrid["query"]["calls_per_question"], told["query"]["calls_per_question"]) == (1, 3)
    assert told["query"]["prompt_tokens_per_question"] == 300
    assert told["built"] == hybrid["built"], "what the notes missed is not learnt from a question"


def test_longmemeval_says_when_it_was_asked_and_asks_what_cannot_be_known(out: Path, tmp_path: Path) -> None:
    seen: list[str] = []

    def reply(body: Any, number: int) -> tuple[int, Any]:
        seen.append(body["messages"][1]["content"])
        return 200, completion("yes")

    path = written(tmp_path, haystack(), haystack("q2_abs"))
    with odd_server(reply) as url:
        told = evaluated(path, out, url, "--policy", "full-context", benchmark="longmemeval").doc
    assert told["judge"]["mean"] == 1.0 and told["left_out"] == 0
    assert told["by_category"]["abstention"]["questions"] == 1
    asked = [prompt for prompt in seen if "Question:" in prompt and "Turns:" in prompt]
    assert len(asked) == 2 and all('Asked on: "30 May 2023, 23:40"' in prompt for prompt in asked)


def test_a_finished_run_asks_nothing_again_and_more_runs_are_added(path: Path, out: Path, url: str) -> None:
    options = ("--policy", "naive-rag-2048")
    first = evaluated(path, out, url, *options).doc
    kept, calls = (out / "answers.jsonl").read_bytes(), server_stats(url)["calls"]["answer"]
    assert evaluated(path, out, url, *options).doc == first
    assert server_stats(url)["calls"]["answer"] == calls
    both = evaluated(path, out, url, *options, "--repeats", "2").doc
    assert server_stats(url)["calls"]["answer"] == calls + 8, "four answers and four verdicts"
    assert (out / "answers.jsonl").read_bytes().startswith(kept)
    assert [line["run"] for line in kept_lines(out / "answers.jsonl")] == [1] * 4 + [2] * 4
    assert (both["judge"]["mean"], both["judge"]["spread"]) == (first["judge"]["mean"], 0.0)
    assert both["judge"]["standard_error"] == first["judge"]["standard_error"], "no more questions by it"
    assert both["questions"] == 4


def test_a_bad_reply_is_an_error_and_no_answer(path: Path, out: Path) -> None:
    def reply(body: Any, number: int) -> tuple[int, Any]:
        question = body["messages"][1]["content"]
        return 200, completion("" if "zeppelin" in question else "yes")

    with odd_server(reply) as url:
        told = evaluated(path, out, url, "--policy", "full-context").doc
        again = evaluated(path, out, url, "--policy", "full-context").doc
    assert (told["questions"], told["errors"], told["first_error"]) == (4, 1, "it was empty")
    failed = kept_lines(out / "answers.jsonl")[3]
    assert failed["error"] == "it was empty" and not {"answer", "f1", "model"} & failed.keys()
    assert failed["tokens"]["calls"] == 2, "asked, and once more to repair"
    assert len(kept_lines(out / "verdicts.jsonl")) == 3, "there is nothing to judge"
    assert told["by_category"]["open-domain"]["judge"]["mean"] == 0.0
    assert told["judge"]["mean"] == 0.75, "all that was judged is right, and the error is not"
    assert again["errors"] == 1 and again["judge"] == told["judge"]


def test_an_error_is_asked_again_by_the_same_command(path: Path, out: Path) -> None:
    cured, asked = [False], [0]

    def reply(body: Any, number: int) -> tuple[int, Any]:
        asked[0] += 1
        return 200, completion("yes" if cured[0] or "zeppelin" not in body["messages"][1]["content"] else "")

    words = ("eval", "locomo", "--data", path, "--out", out, "--policy", "full-context")
    with odd_server(reply) as url:
        first = run(*words, "--llm", url)
        assert "warning: 1 questions got no answer and count as wrong, with an F1 of 0" in first.err
        assert "asks them again" in first.err
        cured[0], before = True, asked[0]
        told = evaluated(path, out, url, "--policy", "full-context").doc
        assert asked[0] - before == 2, "the answer that was missing and its verdict"
    assert (told["errors"], told["first_error"], told["judge"]["mean"]) == (0, None, 1.0)
    assert len(kept_lines(out / "verdicts.jsonl")) == 4
    assert all("answer" in line for line in kept_lines(out / "answers.jsonl")), "the later line counts"


def test_a_run_goes_on_with_the_model_that_began_it(path: Path, out: Path) -> None:
    options = ("--policy", "full-context", "--judge-llm", "off")

    def reply(body: Any, number: int) -> tuple[int, Any]:
        return 200, completion("yes") | {"model": "one name for all"}

    with odd_server(reply, models=("a", "b")) as url:
        assert evaluated(path, out, url, *options).doc["llm_model"] == "a"
    with odd_server(reply, models=("b", "a")) as url:
        refused = evaluated(path, out, url, *options)
        assert refused.code == 1 and "llm_model 'a', now 'b'" in refused.err
        assert evaluated(path, out, url, *options, "--llm-model", "a").code == 0


def test_not_one_answer_is_a_failure(path: Path, out: Path) -> None:
    with odd_server(lambda body, number: (200, completion(""))) as url:
        failed = evaluated(path, out, url, "--policy", "full-context")
    assert failed.code == 1 and "not one question was answered: it was empty" in failed.err
    assert failed.doc["f1"]["mean"] == failed.doc["judge"]["mean"] == 0.0


def test_a_prompt_that_does_not_fit_names_the_setting_before_any_call(
    out: Path, tmp_path: Path, url: str
) -> None:
    talked = talk(["sails and ropes " * 300])
    path, before = written(tmp_path, conversation(conversation=talked)), server_stats(url)["calls"]
    options = ("--policy", "full-context")
    refused = evaluated(path, out, url, *options, UNDERTOW_CONTEXT_TOKENS="2048")
    assert refused.code == 1
    assert "UNDERTOW_CONTEXT_TOKENS is 2048" in refused.err and "made-up:0" in refused.err
    assert server_stats(url)["calls"] == before
    assert evaluated(path, tmp_path / "other", url, *options, UNDERTOW_CONTEXT_TOKENS="4096").code == 0


def test_a_folder_of_another_run_is_refused(path: Path, out: Path, tmp_path: Path, url: str) -> None:
    options = ("--policy", "naive-rag-2048")
    assert evaluated(path, out, url, *options).code == 0
    for other, named in (
        (("--policy", "naive-rag-4096"), "policy 'naive-rag-2048', now 'naive-rag-4096'"),
        ((*options, "--encoder", "hash:64"), "encoder 'hash:384', now 'hash:64'"),
        ((*options, "--questions", "2"), "questions_per_sample None, now 2"),
    ):
        refused = evaluated(path, out, url, *other)
        assert refused.code == 1 and named in refused.err and "--out" in refused.err
    written(tmp_path, conversation(sample_id="changed"))
    assert "data_digest" in evaluated(path, out, url, *options).err
    (out / "run.json").write_text("[]")
    assert "Name another --out" in evaluated(path, out, url, *options).err


def constructed(url: str) -> int:
    return sum(calls for operation, calls in server_stats(url)["calls"].items() if operation != "answer")


def test_other_answers_come_of_the_same_memories(boat: Path, out: Path, tmp_path: Path, url: str) -> None:
    thetas = ("--theta-sim", "0.4", "--theta-count", "3", "--judge-llm", "off")
    whole, calls = evaluated(boat, out, url, *thetas).doc, constructed(url)
    refused = evaluated(boat, out, url, *thetas, UNDERTOW_K_EPI="1", UNDERTOW_K_SUB="2")
    assert refused.code == 1 and "k_epi 5, now 1; k_sem 10, now 2; k_sub 10, now 2. " in refused.err
    assert f"--memories-of {out} that needs no new memories" in refused.err
    same = (*thetas, "--memories-of", str(out))
    for name, empty in (("subconscious", "turns"), ("episodic", "episodes"), ("semantic", "facts")):
        folder = tmp_path / name
        told = evaluated(boat, folder, url, *same, "--ablation", f"without-{name}").doc
        assert (told["construction"], told["built"]) == (whole["construction"], whole["built"])
        assert told["memories_of"] == "out" and not (folder / "store").exists()
        assert told["memories_id"] == json.loads((out / "run.json").read_text())["id"]
        shown = kept_lines(folder / "answers.jsonl")[0]["material"]
        assert [tier for tier in ("turns", "episodes", "facts") if not shown[tier]] == [empty]
    without_turns = json.loads((tmp_path / "subconscious" / "summary.json").read_text())
    assert without_turns["evidence_shown"]["in_turns"] is None
    assert without_turns["evidence_shown"]["behind_memories"] > 0
    kept = evaluated(boat, tmp_path / "kept", url, *same, "--ablation", "without-consolidated").doc
    assert kept["retain_consolidated"] is False
    shown = kept_lines(tmp_path / "kept" / "answers.jsonl")[0]["material"]["turns"]
    assert len(shown) == whole["built"]["waiting_turns"] < 7
    assert constructed(url) == calls, "nothing was built again"


def test_ablations_of_construction_build_what_they_leave(boat: Path, tmp_path: Path, url: str) -> None:
    thetas = ("--theta-sim", "0.4", "--theta-count", "3", "--judge-llm", "off")
    made = {"direct-extraction": {"direct"}, "without-facts": {"episode", "merge"}}
    for name, operations in made.items():
        told = evaluated(boat, tmp_path / name, url, *thetas, "--ablation", name).doc
        assert told["ablation"] == name
        assert told["construction"]["by_operation"].keys() == operations
    options = (*thetas, "--memories-of", str(tmp_path / "without-facts"))
    other = evaluated(boat, tmp_path / "other", url, *options)
    assert other.code == 1 and "are others: ablation 'without-facts', now None." in other.err
    assert not (tmp_path / "other").exists()
    nemori = ("--policy", "nemori", "--judge-llm", "off", "--ablation")
    told = evaluated(boat, tmp_path / "notes", url, *nemori, "a-mem-management").doc
    assert told["construction"]["by_operation"].keys() >= {"annotate"} and told["k_epi"] == 0
    assert evaluated(boat, tmp_path / "P", url, *nemori, "index-messages").doc["nemori_index"] == "messages"
    both = ("index-and-retrieve-messages", "--memories-of", str(tmp_path / "P"))
    assert evaluated(boat, tmp_path / "PP", url, *nemori, *both).doc["narratives"] is False


def test_answers_of_two_models_are_not_mixed(path: Path, out: Path) -> None:
    options = ("--policy", "full-context", "--judge-llm", "off")
    with odd_server(lambda body, number: (200, completion("yes") | {"model": "one"})) as url:
        assert evaluated(path, out, url, *options).doc["answering_model"] == "one"
    with odd_server(lambda body, number: (200, completion("yes") | {"model": "two"})) as url:
        refused = evaluated(path, out, url, *options, "--repeats", "2")
    assert refused.code == 1 and "model 'one', and now it is 'two'" in refused.err
    assert {line["model"] for line in kept_lines(out / "answers.jsonl")} == {"one"}


def test_another_judge(path: Path, out: Path, url: str) -> None:
    with odd_server(lambda body, number: (200, completion("no") | {"model": body["model"]})) as other:
        options = ("--policy", "full-context", "--judge-llm", other, "--judge-model", "b")
        told = evaluated(path, out, url, *options).doc
    assert (told["answering_model"], told["judge_model"]) == ("mock-llm", "b")
    assert told["judge"]["mean"] == 0.0


def test_without_a_judge_there_are_only_overlaps(path: Path, out: Path, url: str) -> None:
    told = evaluated(path, out, url, "--policy", "full-context", "--judge-llm", "off").doc
    assert told["judge"]["mean"] is None and told["f1"]["mean"] is not None
    assert not (out / "verdicts.jsonl").exists()


def test_an_unreachable_server_leaves_what_was_answered(path: Path, out: Path, url: str) -> None:
    options = ("--policy", "full-context")
    refused = evaluated(path, out, "http://127.0.0.1:9/v1", *options, UNDERTOW_LLM_PATIENCE_S="0.1")
    assert refused.code == 4 and "run the same command again" in refused.err
    assert evaluated(path, out, url, *options).doc["questions"] == 4


def test_the_table_says_what_is_in_no_score(path: Path, out: Path) -> None:
    with spawn_server(undecided_rate=1.0) as url:
        words = ("eval", "locomo", "--data", path, "--llm", url, "--out", out, "--policy", "full-context")
        told = run(*words)
    assert "full-context on locomo, 1 run" in told.out and "open-domain" in told.out
    assert "4 answers got no verdict" in told.err


def test_errors_that_a_peer_only_logged_are_told() -> None:
    told: dict[str, Any] = {"errors": 0, "unjudged": 0, "policy": "mem0", "built": {"complaints": 3}}
    assert list(_left_out(told)) == ["3 errors were logged by mem0 and not raised: memories may be missing."]


LLM = ("--llm", "http://127.0.0.1:9")
NO_JUDGE = (*LLM, "--judge-llm", "off")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--llm", "off"), "--evidence-only"),
        ((*LLM, "--ablation", "without-all"), "there are direct-extraction, "),
        ((*LLM, "--ablation", "without-facts", "--policy", "eager"), "part of recmem"),
        ((*LLM, "--policy", "full-context", "--memories-of", "x"), "no memories"),
        ((*LLM, "--out", "x", "--memories-of", "x"), "own folder"),
        (("--policy", "memgpt"), "there are recmem, "),
        ((*NO_JUDGE, "--judge-prompt", "own.j2"), "--judge-prompt is for a judge"),
        ((*LLM, "--judge-llm", "nowhere"), "nowhere"),
        ((*NO_JUDGE, "--judge-model", "a"), "--judge-model"),
        *(
            (("--evidence-only", option, value), f"{option} has no meaning")
            for option, value in (
                *(("--ablation", "without-facts"), ("--memories-of", "out"), ("--policy", "recmem"), LLM),
                *(("--llm-model", "a"), ("--judge-model", "a"), ("--repeats", "1"), ("--questions", "3")),
                *(("--theta-sim", "0.7"), ("--theta-merge", "0.7"), ("--theta-count", "3")),
                *(("--judge-llm", "off"), ("--judge-prompt", "own.j2"), ("--profile", "companion")),
            )
        ),
    ],
)
def test_wrong_usage(tmp_path: Path, options: tuple[str, ...], why: str) -> None:
    refused = run("eval", "locomo", "--data", written(tmp_path, conversation()), *options)
    assert refused.code == 2 and why in refused.err


def test_an_unusable_judge_prompt_is_refused_first(path: Path, out: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.j2"
    own.write_text("{{ question }} {{ answer }}")
    refused = evaluated(path, out, "http://127.0.0.1:9/v1", "--judge-prompt", str(own))
    assert refused.code == 1 and "does not use gold" in refused.err
    assert not (out).exists()


def test_the_seconds_of_a_question_are_those_of_its_first_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = [0.0]
    monkeypatch.setattr(
        "undertow.bench.quality.run.answers.time", SimpleNamespace(perf_counter=lambda: now_s[0])
    )

    class WarmingUp(System):
        name = "warming-up"

        def __init__(self) -> None:
            self.searches = 0

        def material(self, sample: Sample, question: Question) -> Material:
            self.searches += 1
            now_s[0] += 4.0 if self.searches == 1 else 0.25
            return Material()

    question = Question("q", "Where?", "single-hop", (), "here", None)
    asked = [(Sample("t", (), (), (question,)), question)]
    system = WarmingUp()
    settings = Settings(encoder="hash:384")
    with (
        closing(KeptLines(tmp_path / "answers.jsonl")) as lines,
        closing(Asker(settings, MockLLM())) as asker,
    ):
        answering = Answering(system, settings, lines, asker)
        answering.check_room(asked, [1, 2])
        answering.answer(asked, [1, 2], lambda: None)
    assert system.searches == 3
    assert [line["retrieval_s"] for line in kept_lines(tmp_path / "answers.jsonl")] == [4.0, 4.0]
