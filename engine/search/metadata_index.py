"""The index of a tenant's metadata values, which answers filters by them."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from undertow.engine.base.limits import MAX_FILTER_KEYS
from undertow.engine.search.where import Condition, Scalar, Value, Where, typed
from undertow.engine.tenants.tenant import Tenant

# The most recently used keys of a tenant that stay in memory: 4 bytes a turn each, plus the values.
KEYS_KEPT = MAX_FILTER_KEYS
# also the last entry of a table by number
NO_VALUE = -1
# Every payload with metadata contains this.
MARK = b'"metadata":'


class MetadataIndex:
    """One tenant's metadata values by key, read from the log when a key is first used.

    It follows the growing log. Deleted turns keep their entry: no search finds them.
    """

    def __init__(self) -> None:
        self._columns: OrderedDict[str, _Column] = OrderedDict()

    def passing(self, tenant: Tenant, where: Where) -> NDArray[np.bool_]:
        """Which turns match the filter: bool [turns] by arena row."""
        passes = np.ones(len(tenant.seq_by_row), dtype=bool)
        columns = self._columns_of(where)
        _follow(tenant, columns)
        for column, conditions in zip(columns, where.conditions.values(), strict=True):
            passes &= column.passing(conditions)
        return passes

    def rows(self, where: Where) -> int:
        """How many turns are indexed for all keys of the filter."""
        return min(map(len, self._columns_of(where)), default=0)

    def index_slice(self, tenant: Tenant, where: Where, rows: int) -> None:
        """Index at most so many of the missing turns."""
        _follow(tenant, self._columns_of(where), rows)

    def _columns_of(self, where: Where) -> list[_Column]:
        return [self._column(key) for key in where.conditions]

    def _column(self, key: str) -> _Column:
        self._columns[key] = column = self._columns.pop(key, _Column(key))
        if len(self._columns) > KEYS_KEPT:
            self._columns.popitem(last=False)
        return column


def _follow(tenant: Tenant, columns: Sequence[_Column], most: int | None = None) -> None:
    """Add the turns that are new in the log, at most `most`. Each is read once for all keys."""
    first, end = min(map(len, columns), default=0), len(tenant.seq_by_row)
    for row in range(first, end if most is None else min(end, first + most)):
        metadata = _metadata(tenant.payload(tenant.seq_by_row[row]))
        for column in columns:
            if len(column) == row:
                column.append(metadata)


class _Column:
    """One key: its distinct values in order of arrival, and the number of each turn's value by arena row."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._numbers: dict[Value, int] = {}
        self._of_row = array("i")
        # for ranges: the values by number, and the numbers in the order of their values: of numbers, of texts
        self._values: list[Any] = []
        self._orders: tuple[list[int], list[int]] = [], []

    def __len__(self) -> int:
        return len(self._of_row)

    def append(self, metadata: Mapping[str, Any]) -> None:
        value = metadata.get(self._key)
        number = NO_VALUE
        if isinstance(value, Scalar):
            number = self._numbers.setdefault(typed(value), len(self._numbers))
        self._of_row.append(number)

    def passing(self, conditions: Sequence[Condition]) -> NDArray[np.bool_]:
        """Which turns meet all conditions: bool [turns]. Distinct values are tested, then looked up."""
        table = np.ones(len(self._numbers) + 1, dtype=bool)
        for condition in conditions:
            among = np.zeros_like(table)
            among[self._chosen(condition)] = True
            table &= ~among if condition.operator == "$ne" else among
        return table[np.frombuffer(self._of_row, dtype=np.int32)]

    def _chosen(self, condition: Condition) -> list[int]:
        """The numbers of the values that meet a condition; for `$ne`, of those that do not."""
        if condition.operator in ("$in", "$ne"):
            return [number for value in condition.values if (number := self._numbers.get(value)) is not None]
        ((_, bound),) = condition.values
        order, of = self._in_order(texts=isinstance(bound, str)), self._values.__getitem__
        match condition.operator:
            case "$gt":
                return order[bisect_right(order, bound, key=of) :]
            case "$gte":
                return order[bisect_left(order, bound, key=of) :]
            case "$lt":
                return order[: bisect_left(order, bound, key=of)]
            case "$lte":
                return order[: bisect_right(order, bound, key=of)]
        length = len(str(bound))
        end = bisect_right(order, bound, key=lambda number: of(number)[:length])
        return order[bisect_left(order, bound, key=of) : end]

    def _in_order(self, *, texts: bool) -> list[int]:
        """The numbers of all values that are texts, or of those that are numbers, in the values' order."""
        known = len(self._values)
        if known < len(self._numbers):
            for number, (is_bool, value) in enumerate(islice(self._numbers, known, None), known):
                self._values.append(value)
                if not is_bool:
                    self._orders[isinstance(value, str)].append(number)
            for order in self._orders:
                order.sort(key=self._values.__getitem__)  # what was sorted before is one run
        return self._orders[texts]


def _metadata(payload: bytes) -> Mapping[str, Any]:
    """The metadata of a turn's payload. Most have none, which shows without decoding."""
    if MARK not in payload:
        return {}
    found: Mapping[str, Any] = orjson.loads(payload).get("metadata", {})
    return found
