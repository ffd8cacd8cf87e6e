"""Search by time: when each of a tenant's turns was said, read from the log once."""

from __future__ import annotations

from array import array
from datetime import datetime, timedelta

import numpy as np
import orjson
from numpy.typing import NDArray

from undertow.engine.base.model import time_key
from undertow.engine.tenants.tenant import Tenant

# earlier than any moment
UNDATED = -1
_MICROSECOND = timedelta(microseconds=1)


class TimeIndex:
    """One tenant's turns by time, in microseconds since the year 1; 8 bytes a turn.

    It follows the log as that grows. Deleted turns keep what they had: nobody finds them.
    """

    def __init__(self) -> None:
        # by arena row
        self._moments = array("q")

    def within(self, tenant: Tenant, start: datetime, end: datetime) -> NDArray[np.bool_]:
        """Which turns are of this time, both ends included, bool [turns], by arena row; no undated one is."""
        self._follow(tenant)
        moments = np.frombuffer(self._moments, dtype=np.int64)
        return (moments >= _microseconds(start)) & (moments <= _microseconds(end))

    def _follow(self, tenant: Tenant) -> None:
        """Take in the turns that have come since."""
        for seq in tenant.seq_by_row[len(self._moments) :]:
            self._moments.append(_moment_of(tenant.records[seq]))


def _moment_of(record: object) -> int:
    """Of a turn's payload; a deleted one has none."""
    if not isinstance(record, bytes):
        return UNDATED
    timestamp = orjson.loads(record).get("timestamp")
    return UNDATED if timestamp is None else _microseconds(time_key(timestamp))


def _microseconds(moment: datetime) -> int:
    return (moment - datetime.min) // _MICROSECOND
