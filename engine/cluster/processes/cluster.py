"""The cluster of a root on this machine: shards in worker processes, and one router over them."""

from __future__ import annotations

import asyncio
import os
import pickle
import secrets
from collections.abc import Callable, Sequence

from undertow.engine.base.config import Settings
from undertow.engine.cluster import shard_map
from undertow.engine.cluster.processes.pool import WorkerPool, WorkerProcess
from undertow.engine.cluster.processes.worker import WorkerConfig
from undertow.engine.cluster.root import agree_on_thresholds, make_root, with_policy
from undertow.engine.cluster.routing.router import Router
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.cluster.shard.supervisor import EngineParts
from undertow.engine.storage.location import Location

# A worker is back within seconds. A client that waits much longer for it is better told so.
PATIENCE_S = 10.0


class ProcessCluster(Router):
    """Engine's calls over all shards of a root. Leaving it closes them and ends their processes."""

    def __init__(
        self,
        root: Location,
        settings: Settings,
        workers: int,
        *,
        parts: EngineParts | None = None,
        begin: Callable[[], object] | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Serve a root by so many workers, at most one a shard; a new root has a shard for each.

        Blocks until all shards are open.

        `parts` and `begin`: module-level functions, see EngineParts and WorkerConfig. `loop`: see Router.
        UndertowError: a shard cannot be opened, or the root has other thresholds than the settings name.
        """
        make_root(root, workers)
        shards = shard_map.load(root).all_shards
        settings = with_policy(root, settings)
        agree_on_thresholds(root, settings)
        resources = ClusterSettings()
        if "patience_s" not in resources.model_fields_set:
            resources = resources.model_copy(update={"patience_s": PATIENCE_S})
        packed = pickle.dumps(parts or EngineParts())
        lives = {shard: secrets.token_hex(8) for shard in shards}
        processes: list[WorkerProcess] = []
        of_shard: dict[str, WorkerProcess] = {}
        shared, gpus = settings.shared_by(len(shards)), gpus_for(settings)
        for number, some in enumerate(spread(shards, workers)):
            config = WorkerConfig(str(root), {shard: lives[shard] for shard in some}, shared, packed, begin)
            gpu = {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if gpus else {}
            process = WorkerProcess(config, resources.environment() | gpu, resources.max_pending_calls)
            processes.append(process)
            of_shard |= dict.fromkeys(some, process)
        self._workers = WorkerPool(processes, of_shard)
        super().__init__(root, self._workers.calls, resources, settings.max_message_bytes, loop=loop)
        try:
            self._tasks.begin(self._workers.start()).result()
        except BaseException:
            self.close()
            raise

    async def _stop(self) -> None:
        await super()._stop()
        await self._workers.close()


def spread(shards: Sequence[str], workers: int) -> list[Sequence[str]]:
    """The shards of each worker: as evenly as possible, and none without a shard."""
    return [shards[n::workers] for n in range(min(workers, len(shards)))]


def gpus_for(settings: Settings) -> list[str]:
    """The GPUs of this machine that the workers divide, as CUDA_VISIBLE_DEVICES names them."""
    if settings.device == "cpu":
        return []
    from undertow.kernels.device import CUDA_DEVICE_COUNT  # loads torch where there is a GPU

    named = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(CUDA_DEVICE_COUNT)))
    return named.split(",")[:CUDA_DEVICE_COUNT]
