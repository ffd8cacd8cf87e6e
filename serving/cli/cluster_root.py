"""Reads a store, or a cluster's root as if it were one store, while others write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from undertow.engine.storage.location import Location
from undertow.serving.cli.errors import WrongUsage

if TYPE_CHECKING:
    from undertow.engine.api.views.reports import Reports


@contextmanager
def open_reports(store: Location) -> Iterator[Reports]:
    """The reports of a store, while others may be writing it."""
    from undertow.engine.api.views.reports import Reports
    from undertow.engine.storage.journal import Journal

    journal = Journal.open(store, writable=False)
    try:
        yield Reports(journal)
    finally:
        journal.close()


def is_root(store: Location) -> bool:
    """Whether the location is a cluster's root."""
    from undertow.engine.cluster.shard_map import exists

    return exists(store)


def store_of(store: Location, tenant: str) -> Location:
    """The store that holds the tenant: the given one or, in a cluster, its shard's.

    During resharding this is the shard that has the tenant now.
    """
    if not is_root(store):
        return store
    from undertow.engine.cluster.shard_map import load
    from undertow.engine.storage.store_info import is_store

    shard_map = load(store)
    locations = [
        _location(store, shard) for shard in dict.fromkeys((shard_map.owner(tenant), shard_map.home(tenant)))
    ]
    for location in locations[:-1]:
        if is_store(location):
            with open_reports(location) as reports:
                if tenant in reports.tenants:
                    return location
    return locations[-1]


@contextmanager
def every_reports(store: Location) -> Iterator[list[Reports]]:
    """The reports of `stores_of`."""
    with ExitStack() as stack:
        yield [stack.enter_context(open_reports(location)) for location in stores_of(store)]


def stores_of(store: Location) -> list[Location]:
    """The given store or, in a cluster, the stores of all shards that have one."""
    if not is_root(store):
        return [store]
    from undertow.engine.cluster.shard_map import load
    from undertow.engine.storage.store_info import is_store

    locations = [_location(store, shard) for shard in load(store).all_shards]
    return [location for location in locations if is_store(location)]


def refuse_root(store: Location, command: str) -> None:
    """WrongUsage: the location is a cluster's root, but the command writes a single store."""
    if is_root(store):
        raise WrongUsage(
            f"{store} is the root of a cluster, whose journals its running shards write: {command}."
        )


def _location(root: Location, shard: str) -> Location:
    return root / f"shards/{shard}"
