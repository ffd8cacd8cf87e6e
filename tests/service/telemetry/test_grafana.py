"""The dashboard and the alerts ask for metrics and labels that there are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
import yaml  # type: ignore[import-untyped]

from undertow.serving.telemetry import metrics

from ...support.llm_servers import wait_until
from ...support.service.http import at, said, serving
from .test_metrics import metrics_of

FOLDER = Path(metrics.__file__).with_name("grafana")
# of a vector with labels, or without
USED = re.compile(r"\b(undertow_[a-z_]+)(?:\{([^}]*)\})?")
GROUPED = re.compile(r"(?:by|on) \(([^)]*)\)")


def expressions() -> Iterator[tuple[str, str]]:
    """Each with what has it."""
    for panel in orjson.loads((FOLDER / "dashboard.json").read_bytes())["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """The labels of each sample that a service at work tells."""
    with serving(tmp_path_factory.mktemp("store"), engine={"theta_sim": 0.3}) as service:
        client = service.client()
        for n in range(12):
            client.post(at("ann", "/memories"), json={"messages": said(f"the boat needs new planks {n}")})
        client.post(at("ann", "/search"), json={"query": "boat"})
        client.post(at("ann", "/search"), json={"query": ""})
        service.client_of(None).get(at("ann", "/memories"))
        wait_until(
            lambda: any(f.name == "undertow_llm_requests" and f.samples for f in metrics_of(client)[0])
        )
        families, _ = metrics_of(client)
    found: dict[str, set[str]] = {}
    for family in families:
        found.setdefault(family.name, set())
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.parametrize(("where", "expression"), list(expressions()))
def test_every_metric_and_label_is_told(labels: dict[str, set[str]], where: str, expression: str) -> None:
    used = USED.findall(expression)
    assert used, where
    have: set[str] = set()
    for name, selector in used:
        assert name in labels or name.removesuffix("_total") in labels, f"{where}: no metric {name}"
        own = labels.get(name, labels.get(name.removesuffix("_total"), set()))
        assert set(re.findall(r"(\w+)=", selector)) <= own, f"{where}: labels of {name} are {own}"
        have |= own
    for group in GROUPED.findall(expression):
        assert set(re.split(r",\s*", group)) <= have, where


def test_every_metric_of_a_shard_is_on_the_dashboard_or_said_not_to_be() -> None:
    shown = " ".join(expression for _, expression in expressions())
    left_out = {"undertow_journal_rows", "undertow_shard_uptime_seconds", "undertow_llm_requests_in_flight"}
    left_out |= {"undertow_journal_committed_rows"}
    assert {name for name in metrics.SHARD_METRICS if name not in shown} == left_out


def test_panels_and_alerts_are_whole() -> None:
    panels = orjson.loads((FOLDER / "dashboard.json").read_bytes())["panels"]
    assert [panel["id"] for panel in panels] == list(range(1, len(panels) + 1))
    assert len({(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels}) == len(panels)
    rules = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"][0]["rules"]
    for rule in rules:
        assert rule["annotations"].keys() == {"summary", "cure"}
        assert rule["labels"]["severity"] in ("page", "ticket")
