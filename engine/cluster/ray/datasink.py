"""A Ray dataset into the shards of a root."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import closing
from functools import partial
from typing import Any

import pyarrow as pa
from ray.data import Dataset
from ray.data.block import BlockAccessor
from ray.data.datasource import Datasink, WriteResult

from undertow.engine.base.config import Settings
from undertow.engine.base.model import UndertowError
from undertow.engine.base.results import TableReport
from undertow.engine.cluster.bulk.read_ahead import free_cpus
from undertow.engine.cluster.ray.cluster import Cluster
from undertow.engine.cluster.settings import ClusterSettings, ResourcesLacking
from undertow.engine.storage.location import Location


def write_turns(
    dataset: Dataset,
    root: Location | str,
    settings: Settings,
    *,
    source: str,
    shards: int | None = None,
    resources: ClusterSettings | None = None,
) -> TableReport:
    """Store the rows of a dataset, which have the columns of the `messages` format, in the dataset's order.

    Ray must be initialised. Reading and earlier steps of the dataset run side by side; one task at a time
    hands rows to the shards, which store side by side, so that a tenant's turns keep their order. `source`
    names where the rows are from: what Ray repeats after a failure changes nothing. To repeat a whole run,
    the rows need the column `idempotency_key`, since Ray may split a dataset differently. `shards` and
    `resources`: see Cluster.open. InputError names the row of a task; UndertowError. Both leave earlier rows
    stored.
    """
    open_cluster = partial(Cluster.open, Location.of(root), settings, resources=resources)
    open_cluster(shards=shards).close()  # the shards start before the dataset's tasks take their CPUs
    if free_cpus() < 1:
        raise ResourcesLacking(
            "the shards leave no CPU for the dataset's tasks. Add nodes, or take fewer shards."
        )
    sink = TurnSink(open_cluster, source)
    dataset.context.execution_options.preserve_order = True
    try:
        dataset.write_datasink(sink, concurrency=1, ray_remote_args={"num_cpus": 0})
    except Exception as error:  # noqa: BLE001 - Ray wraps what a task raises
        raise (_our_error(error) or error) from None
    return sink.report


def _our_error(error: BaseException | None) -> UndertowError | None:
    """The error of ours that Ray has wrapped."""
    while error is not None and not isinstance(error, UndertowError):
        error = getattr(error, "cause", None) or error.__cause__
    return error


class TurnSink(Datasink[TableReport]):
    """Hands blocks of rows to a cluster. For `write_turns`, which keeps their order.

    `report`: what was stored, once the write is complete.
    """

    def __init__(self, open_cluster: Callable[[], Cluster], source: str) -> None:
        self._open, self._source = open_cluster, source
        self.report = TableReport(0, 0)

    def write(self, blocks: Iterable[Any], ctx: Any) -> TableReport:
        """Store the rows of one task; durable and searchable on return."""
        with closing(self._open()) as cluster:
            tables = [BlockAccessor.for_block(block).to_arrow() for block in blocks]
            if not (tables := [table for table in tables if table.num_rows]):
                return TableReport(0, 0)  # a filter has left nothing, perhaps no columns
            rows = pa.concat_tables(tables, promote_options="permissive")
            return cluster.add_table(rows, source=f"{self._source}/{ctx.task_idx}")

    def on_write_complete(self, write_result: WriteResult[TableReport]) -> None:
        """Add up what the tasks have stored."""
        reports = write_result.write_returns
        self.report = TableReport(
            *(sum(getattr(r, name) for r in reports) for name in ("turns", "new_turns", "parked_turns"))
        )
