"""ray_cluster.yaml: valid to Ray, and its autoscaler starts for each demand the node that can meet it."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from ray.autoscaler._private.node_provider_availability_tracker import NodeAvailabilitySummary
from ray.autoscaler._private.resource_demand_scheduler import _default_utilization_scorer, get_nodes_for
from ray.autoscaler._private.util import prepare_config, validate_config

from undertow.engine.base.gpu_shares import GpuShares
from undertow.engine.cluster.settings import ClusterSettings
from undertow.serving.vllm.ray_actor import ServerPlan

ROOT = Path(__file__).resolve().parents[2]
ENGINE, VLLM = "engine", "vllm"


@pytest.fixture
def written() -> dict[str, Any]:
    """The file as it is."""
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "ray_cluster.yaml").read_text())
    return loaded


@pytest.fixture
def config(written: dict[str, Any]) -> dict[str, Any]:
    """What Ray makes of it, with its defaults for what is left out."""
    prepared: dict[str, Any] = prepare_config(written)
    return prepared


@pytest.fixture
def shards(written: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> ClusterSettings:
    """The settings of shards where the file's environment of the head holds."""
    for name, value in head_environment(written).items():
        monkeypatch.setenv(name, value)
    return ClusterSettings()


def head_environment(written: dict[str, Any]) -> dict[str, str]:
    options = [option.split(maxsplit=1) for option in written["docker"]["head_run_options"]]
    assert all(flag == "--env" for flag, _ in options)
    return dict(assignment.split("=", 1) for _, assignment in options)


def started_for(demands: list[Any], config: dict[str, Any]) -> tuple[dict[str, int], list[Any]]:
    """(nodes that Ray's autoscaler would add to a bare head, demands it could not meet)."""
    scorer: Any = partial(
        _default_utilization_scorer, node_availability_summary=NodeAvailabilitySummary(node_availabilities={})
    )
    return get_nodes_for(
        config["available_node_types"],
        {"head": 1},
        config["head_node_type"],
        config["max_workers"],
        demands,
        scorer,
    )


def test_ray_takes_it(config: dict[str, Any]) -> None:
    validate_config(config)


def test_limits_leave_room_for_what_must_run(written: dict[str, Any]) -> None:
    types = written["available_node_types"]
    workers = {name: kind for name, kind in types.items() if name != written["head_node_type"]}
    assert set(workers) == {ENGINE, VLLM}
    assert all(0 < kind["min_workers"] <= kind["max_workers"] for kind in workers.values())
    assert sum(kind["max_workers"] for kind in workers.values()) == written["max_workers"]
    assert types["head"]["max_workers"] == 0
    assert written["idle_timeout_minutes"] >= 10, "a server loads its model for minutes"


@pytest.mark.parametrize("kind", [ENGINE, VLLM])
def test_each_demand_starts_its_own_kind_of_node(
    kind: str, config: dict[str, Any], shards: ClusterSettings
) -> None:
    most = config["available_node_types"][kind]["max_workers"]
    demand = shards.demand() if kind == ENGINE else ServerPlan(model="m").demand()
    assert demand["GPU"] > 0 and shards.autoscaling
    assert started_for([demand], config) == ({kind: 1}, [])
    assert started_for([demand] * most, config) == ({kind: most}, []), "a card each"
    _, unmet = started_for([demand] * (most + 1), config)
    assert unmet == [demand], "other nodes cannot meet it"


def test_readers_of_a_bulk_ingest_have_cpus_beside_the_shard(
    config: dict[str, Any], shards: ClusterSettings
) -> None:
    node = config["available_node_types"][ENGINE]["resources"]
    assert node["CPU"] - shards.num_cpus >= 2
    started, unmet = started_for([shards.demand(), *[{"CPU": 1}] * 8], config)
    assert (started, unmet) == ({ENGINE: 1}, [])
    server = ServerPlan(model="m").demand()
    vllm = config["available_node_types"][VLLM]["resources"]
    assert vllm["CPU"] == server["CPU"], "the server leaves no CPU that a reader could be given"


def test_images_are_named_by_version_and_by_what_runs_there(written: dict[str, Any]) -> None:
    from undertow import __version__

    assert f'version = "{__version__}"' in (ROOT / "pyproject.toml").read_text()
    assert written["docker"]["image"] == f"undertow-engine:{__version__}"
    types = written["available_node_types"]
    assert types[VLLM]["docker"]["worker_image"] == f"undertow-vllm:{__version__}"
    assert "docker" not in types[ENGINE] and "docker" not in types["head"]
    for dockerfile, image in (("Dockerfile", "undertow-engine"), ("Dockerfile.vllm", "undertow-vllm")):
        assert f"-t {image}:{__version__}" in (ROOT / dockerfile).read_text()


def test_nothing_is_installed_on_a_node(config: dict[str, Any]) -> None:
    """Ray's defaults for AWS would install a nightly build of Ray."""
    assert config["setup_commands"] == config["head_setup_commands"] == config["worker_setup_commands"] == []
    started = config["head_start_ray_commands"] + config["worker_start_ray_commands"]
    assert all(re.match(r"ray (stop|start)\b", command) for command in started)


def test_the_card_of_an_engine_node_has_no_share_for_a_server(written: dict[str, Any]) -> None:
    shares = GpuShares.parse(head_environment(written)["UNDERTOW_CARD_SHARES"])
    assert shares.llm == 0 and shares.arena >= 0.7


def test_what_is_to_be_filled_in_is_marked(written: dict[str, Any]) -> None:
    """No made-up id of an image, role or key that could be taken for a real one."""
    text = json.dumps(written)
    assert set(re.findall(r'"ami-[^"]*"', text)) == {'"ami-FILL-IN-OF-YOUR-REGION"'}
    for kind in written["available_node_types"].values():
        assert (
            kind["node_config"].get("IamInstanceProfile", {"Name": "FILL-IN"})["Name"].startswith("FILL-IN")
        )
    assert "http" not in text and "KeyName" not in text
