"""What Prometheus is told: of a real service by its own scrape, and of shards that do not answer."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="the service's packages are not installed")
pytest.importorskip("orjson", reason="the engine's packages are not installed")

import httpx2
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from undertow.bench.mock.llm import MockLLM, MockReplies
from undertow.engine.base.model import Usage
from undertow.engine.base.trace import LLMRequest, Phase
from undertow.engine.cluster.routing.router import Router
from undertow.engine.cluster.shard.shard_metrics import BOUNDS_S, ShardMetrics
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.step.lag import LagTracker
from undertow.serving.auth.principal import Scope
from undertow.serving.telemetry.metrics import CONTENT_TYPE, HTTPMetrics

from ...support.cluster.in_process import LocalShards, begin, settings
from ...support.service.http import at, is_problem, said, serving

TENANTS = ("zebrafish-bob", "walrus/ann")
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(text: str) -> tuple[list[Metric], Samples]:
    families = list(text_string_to_metric_families(text))
    return families, {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}


def value(samples: Samples, name: str, **labels: str) -> float:
    """The sum over all samples of a name that have these labels."""
    found = [v for (n, have), v in samples.items() if n == name and labels.items() <= dict(have).items()]
    assert found, f"no sample {name} {labels}"
    return sum(found)


def metrics_of(client: httpx2.Client) -> tuple[list[Metric], Samples]:
    response = client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == CONTENT_TYPE
    return scraped(response.text)


def test_a_scrape_counts_requests_steps_and_llm_calls(tmp_path: Path) -> None:
    sound = EngineParts(
        llm=lambda _: MockLLM(MockReplies())
    )  # no reply is bad, whatever the prompts' words are
    with serving(tmp_path, parts=sound) as service:
        client = service.client()
        for tenant in TENANTS:
            for day in range(3):
                body = {"messages": said(f"pottery, day {day}")}
                assert client.post(at(tenant, "/memories"), json=body).status_code == 200
            assert client.post(at(tenant, "/search"), json={"query": "pottery"}).status_code == 200
        keyed = {"headers": {"Idempotency-Key": "once"}, "json": {"messages": said("again")}}
        for _ in range(2):
            assert client.post(at("zebrafish-bob", "/memories"), **keyed).status_code == 200  # type: ignore[arg-type]
        assert client.post(at("zebrafish-bob", "/flush")).status_code == 200
        assert client.post(at("zebrafish-bob", "/answer"), json={"question": "What?"}).status_code == 200
        is_problem(service.client_of(None).get(at("zebrafish-bob", "/memories")), 401, "no-key")
        is_problem(service.client(Scope.READ).post(at("walrus/ann", "/flush")), 403, "forbidden")
        assert client.get("/nowhere/zebrafish-bob").status_code == 404
        families, samples = metrics_of(client)
    assert value(samples, "undertow_turns_total", outcome="stored") == 7
    route = "/v1/tenants/{tenant}/memories"
    assert value(samples, "undertow_http_requests_total", route=route, method="POST", status="2xx") == 8
    assert value(samples, "undertow_http_request_seconds_count", route=route, method="POST") == 8
    assert value(samples, "undertow_http_requests_total", route="unmatched", status="4xx") == 2  # 401, 404
    assert value(samples, "undertow_http_refused_total", reason="no-key") == 1
    assert value(samples, "undertow_http_refused_total", reason="forbidden") == 1
    assert value(samples, "undertow_http_requests_in_flight") == 1  # the scrape itself
    assert value(samples, "undertow_shard_up") == 1
    assert value(samples, "undertow_decisions_total") >= 4
    assert value(samples, "undertow_journal_commit_seconds_count") >= 4
    assert value(samples, "undertow_journal_committed_rows_total") >= 7
    assert value(samples, "undertow_step_seconds_count") >= 4
    assert value(samples, "undertow_arena_bytes") > 0
    assert value(samples, "undertow_llm_requests_total", operation="answer", outcome="ok") == 1
    assert value(samples, "undertow_llm_tokens_total", operation="answer", kind="prompt") > 0
    assert value(samples, "undertow_llm_reachable") == 1
    assert value(samples, "undertow_shard_call_seconds_count", call="search") == 2
    assert value(samples, "undertow_shard_call_seconds_count", call="answer") == 1
    assert value(samples, "undertow_undecided_turns") >= 0
    check_conventions(families)
    labels = {v for _, have in samples for _, v in have}
    assert not [label for label in labels for tenant in TENANTS if tenant.partition("/")[0] in label]


def check_conventions(families: Iterable[Metric]) -> None:
    """Prometheus' own rules: a prefix, base units last, words of help; a histogram's buckets only grow."""
    for family in families:
        if family.name.startswith("process_"):
            continue
        assert re.fullmatch(r"undertow_[a-z_]+", family.name)
        assert not re.search(r"_(ms|milliseconds|kb|mb|percent)$", family.name)
        assert family.documentation.endswith(".")
        assert not family.name.endswith("_created")
        if family.type == "counter":
            assert {s.name for s in family.samples} <= {f"{family.name}_total"}
        if family.type == "histogram":
            assert family.name.endswith("_seconds")
            last: dict[Any, float] = {}
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    of = frozenset((k, v) for k, v in sample.labels.items() if k != "le")
                    assert sample.value >= last.get(of, 0)
                    last[of] = sample.value


def test_an_unreachable_shard_is_reported_as_down(tmp_path: Path) -> None:
    root = begin(tmp_path, 2)
    with (
        LocalShards(root, settings()) as shards,
        Router(root, shards.calls) as router,
    ):
        router.stats()
        shards.down.add("s1")
        shards.kill("s1")
        status = router.status()
        _, samples = scraped(HTTPMetrics().exposition(status).decode())
    assert value(samples, "undertow_shard_up", shard="s0") == 1
    assert value(samples, "undertow_shard_up", shard="s1") == 0
    assert value(samples, "undertow_arena_bytes", shard="s0") >= 0
    assert not [have for name, have in samples if name == "undertow_arena_bytes" and ("shard", "s1") in have]


def test_counts_survive_a_reopened_engine(tmp_path: Path) -> None:
    """A shard opens its engine anew after a fault; a counter that fell back would look like a restart."""
    shard_metrics = ShardMetrics()
    shard_metrics.ended(Phase("commit", 3, 1.0, 1.5))
    shard_metrics.ended(Phase("commit", 0, 2.0, 2.5))  # nothing to do: not counted
    shard_metrics.ended(Phase("step", 0, 2.0, 2.25))
    shard_metrics.requested(LLMRequest("merge", 0.0, 40.0, Usage(1, 10, 4, 2), "ok"))
    shard_metrics.requested(LLMRequest("merge", 0.0, 0.001, Usage(), "retry"))
    report = shard_metrics.report()
    assert report["phases"]["commit"]["work"] == 3
    assert sum(report["phases"]["commit"]["counts"]) == 1
    assert report["phases"]["step"]["total_s"] == 0.25
    merge = report["llm"]["merge"]
    assert merge["outcomes"] == {"ok": 1, "retry": 1}
    assert merge["tokens"] == {"prompt_tokens": 10, "cached_prompt_tokens": 4, "completion_tokens": 2}
    assert merge["counts"][0] == 1  # at most the first bound, which it equals
    assert merge["counts"][len(BOUNDS_S)] == 1  # more than the last


def test_lag_is_the_age_of_the_oldest_undecided_record() -> None:
    now_s = [0.0]
    lag_tracker = LagTracker(lambda: now_s[0])
    assert lag_tracker.oldest_s == 0
    lag_tracker.note("ann", 1, "first")
    now_s[0] = 5
    lag_tracker.note("ann", 3, "second")
    lag_tracker.note("ann", 3, "ignored")
    lag_tracker.note("bob", 0)
    now_s[0] = 7
    assert lag_tracker.oldest_s == 7
    assert [lag_tracker.traceparent_of("ann", seq) for seq in range(5)] == [
        "first",
        "first",
        "second",
        "second",
        None,
    ]
    lag_tracker.decided("ann", 2)
    assert lag_tracker.oldest_s == 2
    assert lag_tracker.traceparent_of("ann", 2) == "second"
    lag_tracker.decided("ann", 4)
    lag_tracker.forget("bob")
    assert lag_tracker.oldest_s == 0
