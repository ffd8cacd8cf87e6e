"""What a worker of a bulk ingest feeds to the shards: the turns of one group, in order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa
import pyarrow.compute as pc

from undertow.engine.cluster.bulk.reading import REPORTS, Span, spans
from undertow.engine.cluster.bulk.records import IngestRecords
from undertow.engine.cluster.wire import TURNS, Status
from undertow.engine.storage.location import Location

if TYPE_CHECKING:
    from undertow.engine.base.config import Settings
    from undertow.engine.cluster.settings import ClusterSettings

CALL_TURNS = 2_048
# of a group, how many reasons of parked turns are reported
TOLD_PARKED = 10


class Feeder(Protocol):
    """What takes turns in: a `Router`."""

    def add_table(self, table: pa.Table) -> pa.Table: ...

    def close(self) -> None: ...


def router_to(root: Location, settings: Settings, resources: ClusterSettings) -> Feeder:
    """A way to the shards of a root, for a worker: it loads no engine."""
    from undertow.engine.cluster.ray.actors import RayShard, Starter
    from undertow.engine.cluster.routing.router import Router

    start = Starter(root, settings, resources, None)
    return Router(root, lambda shard: RayShard(start, shard), resources)


@dataclass(slots=True)
class FeedReport:
    """What became of the turns of one group, by `Status`, and why some are parked."""

    counts: Counter[str] = field(default_factory=Counter)
    parked: list[str] = field(default_factory=list)

    @property
    def turns(self) -> int:
        return self.counts.total()

    def note(self, receipts: pa.Table) -> None:
        self.counts.update(receipts.column("status").to_pylist())
        if self.counts[Status.PARKED] > len(self.parked):
            parked = receipts.filter(pc.equal(receipts.column("status"), Status.PARKED.value))
            self.parked += parked.column("detail").to_pylist()[: TOLD_PARKED - len(self.parked)]


def inspect(block: pa.Table) -> tuple[list[Span], list[bytes]]:
    """Where the groups of a sorted block are, and the reports on files in it."""
    found = spans(block)
    reports = [block.slice(s.offset, s.rows).column("payload") for s in found if s.group == REPORTS]
    return [s for s in found if s.group != REPORTS], [data for r in reports for data in r.to_pylist()]


def feed_group(
    tables: Iterable[pa.Table], group: int, connect: Callable[[], Feeder], root: Location, wave: str
) -> FeedReport:
    """Store one group's turns, one call after another; then note in the root that they are stored.

    Repeated, or cut off anywhere, it changes nothing: a turn is sent once all before it are stored, and what
    was stored before is a duplicate.
    """
    fed = FeedReport()
    feeder = connect()
    try:
        for turns in calls(tables):
            fed.note(feeder.add_table(turns))
    finally:
        feeder.close()
    IngestRecords(root).note_stored(wave, group)
    return fed


def calls(tables: Iterable[pa.Table], call_turns: int = CALL_TURNS) -> Iterator[pa.Table]:
    """The rows of some tables as wire.TURNS, in order, cut anew: each but the last has `call_turns` rows."""
    rest = TURNS.empty_table()
    for table in tables:
        turns = pa.table(table.select(TURNS.names).columns, schema=TURNS)
        rest = pa.concat_tables([rest, turns]) if rest.num_rows else turns
        while rest.num_rows >= call_turns:
            yield rest.slice(0, call_turns)
            rest = rest.slice(call_turns)
    if rest.num_rows:
        yield rest
