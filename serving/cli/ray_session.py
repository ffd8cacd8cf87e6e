"""Connects to Ray, or starts it on this machine, and opens a cluster there."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

from undertow.engine.storage.location import Location
from undertow.serving.cli.errors import WrongUsage, wrong_usage
from undertow.serving.cli.options import check_settings, refuse_store
from undertow.serving.cli.output import say

if TYPE_CHECKING:
    from undertow.engine.base.config import Settings
    from undertow.engine.cluster.ray.cluster import Cluster
    from undertow.engine.cluster.shard.supervisor import EngineParts

# with --ray local, Ray's object store gets 1/STORE_SHARE of the machine's free memory
STORE_SHARE = 8
MAX_STORE_BYTES = 4 << 30
MIN_STORE_BYTES = 100 << 20
# This message of Ray is hidden: shards and workers that die are restarted, and their calls are repeated. Ray
# reports a lack of memory or a lost node in other messages, which stay.
RESTARTED = "^A worker died or was killed while executing a task"


@contextmanager
def open_cluster(
    root: Location,
    settings: Settings,
    address: str,
    *,
    shards: int | None = None,
    grow_to: int = 0,
    parts: EngineParts | None = None,
) -> Iterator[Cluster]:
    """The cluster of a root, with its shards running. With "local" they stop with this command.

    `shards`: the number of shards of a new root. `grow_to`: how many shards a local Ray must have room for.
    `parts`: engine parts of the shards started now. WrongUsage, UndertowError.
    """
    from undertow.engine.base.process_tuning import without_pandas
    from undertow.engine.cluster.settings import ClusterSettings
    from undertow.engine.cluster.shard_map import exists, load

    refuse_store(root)
    if shards is None and not exists(root):
        raise WrongUsage(f"{root} is not a cluster's root yet: give the number of shards with --shards.")
    check_settings(settings)
    with wrong_usage():
        resources = ClusterSettings()
    room_for = max(shards or len(load(root).all_shards), grow_to)
    with on_ray(address, room_for, resources.num_cpus):
        with without_pandas():
            from undertow.engine.cluster.ray.cluster import Cluster

        before = actors(root) if exists(root) else {}
        opened = Cluster.open(root, settings, shards=shards, resources=resources, parts=parts)
        if before:
            say(f"{len(before)} shards run already: they keep the settings they were started with.")
        try:
            yield opened
        finally:
            (opened.stop if address == "local" else opened.close)()


@contextmanager
def on_ray(address: str, shards: int, shard_cpus: float) -> Iterator[None]:
    """Connect to Ray; "local" starts one with room for the shards and for readers. UndertowError."""
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", RESTARTED)  # read when Ray is imported
    import ray
    from ray.exceptions import RayError

    from undertow.engine.base.model import UndertowError
    from undertow.engine.cluster.ray.actors import connect

    # Ray starts new processes; it does not fork this one
    warnings.filterwarnings("ignore", message="lance is not fork-safe")
    joined = not ray.is_initialized()
    with redirect_stdout(sys.stderr):  # Ray logs there; standard output is for results
        if joined:
            connect(address, **_local_options(shards, shard_cpus) if address == "local" else {}, **_QUIET)
        try:
            yield
        except RayError as error:
            raise UndertowError(f"the Ray cluster failed: {error}") from error
        finally:
            if joined:
                ray.shutdown()


# logging level 40: errors only
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": 40}


def _local_options(shards: int, shard_cpus: float) -> dict[str, Any]:
    import math

    import psutil

    free_bytes = psutil.virtual_memory().available // STORE_SHARE
    return {
        "num_cpus": max(os.cpu_count() or 1, math.ceil(shards * shard_cpus) + 2),
        "object_store_memory": max(MIN_STORE_BYTES, min(free_bytes, MAX_STORE_BYTES)),
        "include_dashboard": False,
    }


def actors(root: Location) -> dict[str, Any]:
    """The running actors of a root's shards, by shard."""
    from undertow.engine.cluster.ray.actors import actor_of
    from undertow.engine.cluster.shard_map import load

    return {shard: actor for shard in load(root).all_shards if (actor := actor_of(root, shard)) is not None}


def refuse_running(root: Location, address: str) -> None:
    """WrongUsage: shards of the root are running. Those of "local" never outlive their command."""
    if address == "local":
        return
    with on_ray(address, 0, 0):
        if running := actors(root):
            raise WrongUsage(
                f"{len(running)} shards of {root} are running. End them first: "
                f"undertow cluster drain --stop --store {root} --ray {address}"
            )
