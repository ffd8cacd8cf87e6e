"""Settings of a cluster: the resources of a shard and the bounds of a router. Prefix: UNDERTOW_CLUSTER_."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from pydantic import Field, model_validator
from pydantic_settings import SettingsConfigDict

from undertow.engine.base.environment import CheckedSettings
from undertow.engine.base.model import UndertowError
from undertow.engine.base.process_tuning import ONE_HEAP

# libraries that start as many threads as they find cores, by the variable that bounds them
THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"),
    *("NUMBA_NUM_THREADS", "LANCE_CPU_THREADS", "RAYON_NUM_THREADS"),
)


class ResourcesLacking(UndertowError):
    """The cluster lacks resources that its shards need."""


class ClusterSettings(CheckedSettings):
    """One shard's share of the cluster, and the bounds between a router and a shard."""

    model_config = SettingsConfigDict(env_prefix="UNDERTOW_CLUSTER_")

    # CPUs that Ray sets aside for a shard
    num_cpus: float = Field(default=1.0, ge=0)
    # of a shard: a fraction lets several share a card. If it is not set: see `on`
    num_gpus: float = Field(default=0.0, ge=0)
    # main memory that a node must have free for a shard; 0: not counted
    memory_bytes: int = Field(default=0, ge=0)
    # in a shard, of each library that has threads; None: as many as each likes
    threads: int | None = Field(default=None, ge=1)
    # more nodes may come: shards that find no room yet wait for them
    autoscaling: bool = False

    # calls and turns of one router under way at a shard (a single call may have more turns), and turns that
    # wait in the router for it, those included; calls: never more than a quarter of max_pending_calls
    window_calls: int = Field(default=64, ge=1)
    window_turns: int = Field(default=8_192, ge=1)
    lane_turns: int = Field(default=16_384, ge=1)
    # turns of one call to a shard
    call_turns: int = Field(default=2_048, ge=1, le=65_536)
    # calls of any kind of one router pending at a shard; more are refused and retried
    max_pending_calls: int = Field(default=256, ge=8)
    # how long calls wait for a shard that is down, before they fail
    patience_s: float = Field(default=300.0, gt=0)

    @model_validator(mode="after")
    def _leave_room(self) -> Self:
        """The adds of both routes to a shard (see Route) must leave places for other calls.

        Otherwise the successors of a refused add could take its place, and wait for it at the shard.
        """
        if "window_calls" in self.model_fields_set and 4 * self.window_calls > self.max_pending_calls:
            raise ValueError(
                f"window_calls ({self.window_calls}) may be a quarter of max_pending_calls "
                f"({self.max_pending_calls}) at most. Lower UNDERTOW_CLUSTER_WINDOW_CALLS."
            )
        return self

    def on(self, device: str, has_gpus: Callable[[], bool]) -> Self:
        """With a GPU for each shard that would use one, unless num_gpus is set.

        Ray hides no GPU from a shard that asks for none, so all of a node would use its first.
        """
        if "num_gpus" in self.model_fields_set or device == "cpu" or (device == "auto" and not has_gpus()):
            return self
        return self.model_copy(update={"num_gpus": 1.0})

    def demand(self) -> dict[str, float]:
        """What one shard takes, by Ray's name of the resource."""
        asked = {"CPU": self.num_cpus, "GPU": self.num_gpus, "memory": float(self.memory_bytes)}
        return {name: amount for name, amount in asked.items() if amount}

    def environment(self) -> dict[str, str]:
        """Variables of a shard's process, with those of OpenTelemetry that are set here.

        Headers are left out, as they may hold secrets, which Ray would show: set them on the nodes.
        """
        threads = {} if self.threads is None else dict.fromkeys(THREAD_VARIABLES, str(self.threads))
        traced = {name: value for name, value in os.environ.items() if name.startswith("OTEL_")}
        return ONE_HEAP | threads | {name: value for name, value in traced.items() if "HEADERS" not in name}

    def check(self, shards: int, free: Mapping[str, float], nodes: Sequence[Mapping[str, float]]) -> None:
        """ResourcesLacking unless there is room for `shards` more shards.

        `free`: what the cluster has left of each resource; `nodes`: the total of each node.
        """
        if self.autoscaling or not shards or not (demand := self.demand()):
            return
        asked = ", ".join(f"{name} {amount:g}" for name, amount in demand.items())
        if not any(_fits(node, demand) for node in nodes):
            largest = ", ".join(f"{n} {max((x.get(n, 0.0) for x in nodes), default=0.0):g}" for n in demand)
            raise ResourcesLacking(
                f"a shard needs {asked}, and no node has that (at most {largest}). Add larger nodes, or "
                "lower UNDERTOW_CLUSTER_NUM_CPUS, _NUM_GPUS or _MEMORY_BYTES."
            )
        if not _fits(free, {name: shards * amount for name, amount in demand.items()}):
            left = ", ".join(f"{name} {free.get(name, 0.0):g}" for name in demand)
            raise ResourcesLacking(
                f"{shards} more shards need {asked} each, and the cluster has {left} free. Add nodes, stop "
                "what runs there, or lower UNDERTOW_CLUSTER_NUM_CPUS, _NUM_GPUS or _MEMORY_BYTES."
            )


def _fits(free: Mapping[str, float], demand: Mapping[str, float]) -> bool:
    return all(free.get(name, 0.0) + 1e-9 >= amount for name, amount in demand.items())
