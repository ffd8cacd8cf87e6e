"""Shards as Ray actors: detached, named by root and shard, restarted when they die.

A driver may end at any time: its shards live on, and the next driver finds them by their names. A restarted
shard takes its journal over. A shard that was removed from the map ends by itself and is not started again;
its callers get Removed.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa

from undertow.engine.base.config import Settings
from undertow.engine.base.model import UndertowError
from undertow.engine.base.trace import current_traceparent
from undertow.engine.cluster import shard_map
from undertow.engine.cluster.ray.shard_actor import ShardActor
from undertow.engine.cluster.routing.errors import ShardExited, ShardGone
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.cluster.wire import from_buffer, to_pieces, turns_table
from undertow.engine.step.admission import QueueFull
from undertow.engine.storage.location import Location

try:
    import ray
    from ray import cloudpickle
    from ray.exceptions import PendingCallsLimitExceeded, RayActorError, RayError, RayTaskError
except ModuleNotFoundError as missing:
    if missing.name != "ray":
        raise
    raise UndertowError(
        "a cluster needs Ray, which is not installed. Install it: pip install 'undertow[cluster]'"
    ) from None

NAMESPACE = "undertow"


class RayShard:
    """The calls of one shard's actor, which is found or started with the first of them."""

    def __init__(self, start: Starter, shard: str) -> None:
        self.shard = shard
        self._start = start
        self._actor: Any = None

    async def call(self, method: str, *args: Any) -> Any:
        """See ShardCalls. Removed: there is no such shard any more."""
        try:
            if self._actor is None:
                self._actor = await asyncio.to_thread(self._start, self.shard)
            if method == "add" and not isinstance(args[0], pa.Table):
                # a long list would not travel with the call
                args = (turns_table(args[0]), *args[1:])
            pieces = to_pieces(args[0]) if args and isinstance(args[0], pa.Table) else []
            rest = args[1:] if pieces else args
            answer = await self._actor.call.remote(method, rest, current_traceparent(), *pieces)
            return from_buffer(answer) if isinstance(answer, pa.Buffer) else answer
        except PendingCallsLimitExceeded:
            raise QueueFull(f"too many calls are pending at shard {self.shard}. Try again shortly.") from None
        except RayTaskError as error:
            from undertow.engine.storage.journal import Fenced  # loads Lance

            if isinstance(error.cause, Fenced):
                raise ShardExited(f"shard {self.shard}: {error.cause}") from None
            if isinstance(error.cause, shard_map.Removed) and await asyncio.to_thread(
                self._is_back, error.cause
            ):
                self._actor = None  # the former one, which ends; a new one follows it
                raise ShardGone(f"shard {self.shard}: {error.cause}") from None
            if isinstance(error.cause, UndertowError | ValueError):
                raise error.cause from None  # the shard's own error, without Ray's report around it
            raise
        except RayActorError as error:
            self._actor = None  # it restarts by itself; but if it is gone for good, a new one is needed
            raise ShardGone(f"shard {self.shard}: {_first_line(error)}") from None
        except RayError as error:  # a lost object or a dead node: cannot be told apart here
            raise ShardGone(f"shard {self.shard}: {_first_line(error)}") from None

    def _is_back(self, removed: shard_map.Removed) -> bool:
        """Whether a newer map has the shard again."""
        newest = self._start.newest_map()
        return newest.version > removed.version and self.shard in newest.all_shards

    async def end(self) -> None:
        """Close the shard's engine and end its actor for good, if there is one."""
        if (actor := self._actor or self._start.find(self.shard)) is None:
            return
        with suppress(RayError):  # dead already
            await actor.close.remote()
        ray.kill(actor, no_restart=True)


class Starter:
    """Finds the actors of a root's shards by their names, and starts those that are not there."""

    def __init__(self, root: Location, settings: Settings, resources: ClusterSettings, parts: Any) -> None:
        """`settings`, `resources` and `parts`: of shards that are started here."""
        self._root = root
        # a shard finds a bound that nobody has set on its own node, whose memory may be another
        self._settings = settings.model_dump(exclude={"arena_bytes"} - settings.model_fields_set)
        self._resources = resources.on(settings.device, _has_gpus)
        self._parts = cloudpickle.dumps(parts)  # type: ignore[no-untyped-call]

    def __call__(self, shard: str) -> Any:
        """The shard's actor, started if there is none. Removed: the shard is not in the map."""
        self.newest_map().require(shard)
        resources = self._resources
        environment = resources.environment()
        return (
            ray.remote(ShardActor)
            .options(
                name=actor_name(self._root, shard),
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=-1,
                # the router repeats calls itself, as Ray would not keep their order
                max_task_retries=0,
                max_pending_calls=resources.max_pending_calls,
                num_cpus=resources.num_cpus,
                num_gpus=resources.num_gpus,
                memory=resources.memory_bytes or None,
                runtime_env={"env_vars": environment} if environment else None,
            )
            .remote(str(self._root), shard, self._settings, self._parts, secrets.token_hex(8))
        )

    def newest_map(self) -> shard_map.ShardMap:
        return shard_map.load(self._root)

    def check(self, shards: Sequence[str]) -> None:
        """ResourcesLacking: there is no room for those of the shards that do not run yet."""
        missing = [shard for shard in shards if self.find(shard) is None]
        every: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        free: dict[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
        self._resources.check(len(missing), free, [node["Resources"] for node in every if node["Alive"]])

    def find(self, shard: str) -> Any:
        """See `actor_of`."""
        return actor_of(self._root, shard)


def actor_of(root: Location, shard: str) -> Any:
    """A shard's actor, also while it restarts; None: there is none."""
    try:
        return ray.get_actor(actor_name(root, shard), namespace=NAMESPACE)
    except ValueError:
        return None


def actor_name(root: Location, shard: str) -> str:
    """A shard's name in the cluster's namespace, with a hash of the root, which may be long."""
    return f"{hashlib.blake2b(str(root).encode(), digest_size=8).hexdigest()}-{shard}"


def connect(address: str | None = None, **options: Any) -> None:
    """Join the Ray cluster at `address`, or start one on this machine ("local"); once a process.

    `options`: of ray.init. UndertowError: there is no such cluster.
    """
    if ray.is_initialized():
        return
    # Ray's default of 15 would let this process starve the shards beside it
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        ray.init(address=address, namespace=NAMESPACE, **options)
    except ConnectionError as error:
        raise UndertowError(f"no Ray cluster at {address}: {error}. Start one with `ray start`.") from None


def _has_gpus() -> bool:
    held: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return held.get("GPU", 0) > 0


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
