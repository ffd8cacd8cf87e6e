"""What a shard may use: read from the environment, checked against the cluster, refused in plain words."""

from __future__ import annotations

import pytest

from undertow.engine.base.process_tuning import ONE_HEAP
from undertow.engine.cluster.settings import THREAD_VARIABLES, ClusterSettings, ResourcesLacking

NODE = {"CPU": 4.0, "GPU": 1.0, "memory": 16e9}


def test_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERTOW_CLUSTER_NUM_GPUS", "0.5")
    monkeypatch.setenv("UNDERTOW_CLUSTER_THREADS", "2")
    found = ClusterSettings(num_cpus=3)
    assert found.demand() == {"CPU": 3.0, "GPU": 0.5}
    assert found.environment() == ONE_HEAP | dict.fromkeys(THREAD_VARIABLES, "2")
    assert ClusterSettings(threads=None).environment() == ONE_HEAP


@pytest.mark.parametrize(
    "wrong", [{"num_cpus": -1}, {"threads": 0}, {"window_turns": 0}, {"window_calls": 65}, {"gpus": 1}]
)
def test_unsound_settings_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError):
        ClusterSettings.model_validate(wrong)


def test_shards_that_find_room_pass() -> None:
    half = ClusterSettings(num_cpus=2, num_gpus=0.5)
    half.check(2, NODE, [NODE])
    half.check(4, {name: 2 * amount for name, amount in NODE.items()}, [NODE, NODE])
    ClusterSettings(num_cpus=0).check(1_000, {}, [])
    half.check(0, {}, [])


@pytest.mark.parametrize(
    ("asked", "free", "words"),
    [
        ({"num_cpus": 8}, NODE, "no node has that .at most CPU 4.*_NUM_CPUS"),
        ({"num_cpus": 1, "memory_bytes": 32 * 10**9}, NODE, "at most CPU 4, memory 1.6e.10"),
        ({"num_cpus": 1, "num_gpus": 1}, {**NODE, "GPU": 2.0}, "3 more shards .* CPU 4, GPU 2 free"),
        ({"num_cpus": 1}, {"CPU": 2.5}, "CPU 2.5 free"),
    ],
)
def test_shards_that_find_no_room_are_refused(
    asked: dict[str, float], free: dict[str, float], words: str
) -> None:
    settings = ClusterSettings.model_validate(asked)
    with pytest.raises(ResourcesLacking, match=words):
        settings.check(3, free, [NODE, NODE])
    ClusterSettings.model_validate({**asked, "autoscaling": True}).check(3, free, [NODE, NODE])
