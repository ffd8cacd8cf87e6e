"""What test_router.py and test_router_bounds.py share."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from undertow.engine.cluster.routing.router import Router
from undertow.engine.cluster.settings import ClusterSettings
from undertow.engine.storage.location import Location

from ...support.cluster.in_process import LocalShards

SOON_S = 60


def routed(root: Location, shards: LocalShards, **changes: Any) -> Router:
    return Router(root, shards.calls, ClusterSettings(patience_s=SOON_S, **changes))


def statuses(sent: Sequence[Future[pa.Table]]) -> list[str]:
    return [s for future in sent for s in future.result(SOON_S).column("status").to_pylist()]


@contextmanager
def meanwhile(*works: Callable[[], object]) -> Iterator[None]:
    """Do things on other threads; their errors are raised at the end."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - handed to the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
