"""Filter by time: the timestamps of a tenant's turns, read from the log once."""

from __future__ import annotations

from array import array
from datetime import datetime, timedelta

import numpy as np
import orjson
from numpy.typing import NDArray

from undertow.engine.base.model import time_key
from undertow.engine.tenants.tenant import Tenant

# Earlier than any timestamp.
UNDATED = -1
_MICROSECOND = timedelta(microseconds=1)


class TimeIndex:
    """One tenant's turns by time, in microseconds since the year 1; 8 bytes a turn.

    It follows the growing log. Deleted turns keep their entry: no search finds them.
    """

    def __init__(self) -> None:
        # By arena row.
        self._moments = array("q")

    def __len__(self) -> int:
        """The number of indexed turns."""
        return len(self._moments)

    def within(self, tenant: Tenant, start: datetime, end: datetime) -> NDArray[np.bool_]:
        """Which turns lie in this time, ends inclusive: bool [turns] by arena row. Undated turns do not."""
        self.follow(tenant)
        moments = np.frombuffer(self._moments, dtype=np.int64)
        return (moments >= _microseconds(start)) & (moments <= _microseconds(end))

    def follow(self, tenant: Tenant, most: int | None = None) -> None:
        """Add the turns that are new in the log, at most `most`."""
        end = None if most is None else len(self) + most
        for seq in tenant.seq_by_row[len(self) : end]:
            self._moments.append(_moment_of(tenant.payload(seq)))


def _moment_of(payload: bytes) -> int:
    """The timestamp in a turn's payload. A deleted turn has none."""
    timestamp = orjson.loads(payload).get("timestamp") if payload else None
    return UNDATED if timestamp is None else _microseconds(time_key(timestamp))


def _microseconds(moment: datetime) -> int:
    return (moment - datetime.min) // _MICROSECOND
