"""Filter by metadata: the filter, and the index of a tenant's metadata values."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from undertow.engine.base.limits import MAX_FILTER_KEYS, MAX_FILTER_VALUES
from undertow.engine.tenants.tenant import Tenant

Scalar = str | int | float | bool
# JSON distinguishes true from 1, Python's equality does not: (is a bool, value).
Value = tuple[bool, Scalar]

# The most recently used keys of a tenant that stay in memory: 4 bytes a turn each, plus the values.
KEYS_KEPT = MAX_FILTER_KEYS
NO_VALUE = -1
# Every payload with metadata contains this.
MARK = b'"metadata":'


@dataclass(frozen=True, slots=True)
class Where:
    """Metadata filter: for each key, a turn must have one of the values. Without keys all turns pass.

    Equality is that of JSON: 1 equals 1.0, but not true or "1". A list, an object or null in a turn's
    metadata equals nothing.
    """

    wanted: Mapping[str, frozenset[Value]] = field(default_factory=dict)

    @classmethod
    def of(cls, where: Mapping[str, Any] | None) -> Where:
        """From {key: value} or {key: [value, ...]} (any of them). ValueError names the key."""
        asked = where or {}
        if len(asked) > MAX_FILTER_KEYS:
            raise ValueError(f"where: {len(asked):,} keys. Filter by at most {MAX_FILTER_KEYS}.")
        return cls({key: frozenset(_values(key, values)) for key, values in asked.items()})

    @property
    def open(self) -> bool:
        return not self.wanted


def _values(key: str, asked: Any) -> list[Value]:
    values = asked if isinstance(asked, list | tuple | set | frozenset) else [asked]
    if not values:
        raise ValueError(f"where: {key!r} has an empty list, which no turn can match. Name a value.")
    texts = sum(isinstance(value, str) for value in values)
    if max(texts, len(values) - texts) > MAX_FILTER_VALUES:
        most = f"Name at most {MAX_FILTER_VALUES}, or search in parts."
        raise ValueError(f"where: {key!r:.80} has {len(values):,} values. {most}")
    if wrong := [value for value in values if not isinstance(value, Scalar)]:
        raise ValueError(
            f"where: {key!r} is {wrong[0]!r:.80}. Give text, a number, true or false, or a list of those."
        )
    return [_typed(value) for value in values]


def _typed(value: Scalar) -> Value:
    return isinstance(value, bool), value


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
        for column, values in zip(columns, where.wanted.values(), strict=True):
            passes &= column.any_of(values)
        return passes

    def rows(self, where: Where) -> int:
        """How many turns are indexed for all keys of the filter."""
        return min(map(len, self._columns_of(where)), default=0)

    def index_slice(self, tenant: Tenant, where: Where, rows: int) -> None:
        """Index at most so many of the missing turns."""
        _follow(tenant, self._columns_of(where), rows)

    def _columns_of(self, where: Where) -> list[_Column]:
        return [self._column(key) for key in where.wanted]

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
    """One key: the number of each turn's value, by arena row."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._numbers: dict[Value, int] = {}
        self._of_row = array("i")

    def __len__(self) -> int:
        return len(self._of_row)

    def append(self, metadata: Mapping[str, Any]) -> None:
        value = metadata.get(self._key)
        number = NO_VALUE
        if isinstance(value, Scalar):
            number = self._numbers.setdefault(_typed(value), len(self._numbers))
        self._of_row.append(number)

    def any_of(self, values: frozenset[Value]) -> NDArray[np.bool_]:
        wanted = [number for value in values if (number := self._numbers.get(value)) is not None]
        return np.isin(np.frombuffer(self._of_row, dtype=np.int32), wanted)


def _metadata(payload: bytes) -> Mapping[str, Any]:
    """The metadata of a turn's payload. Most have none, which shows without decoding."""
    if MARK not in payload:
        return {}
    found: Mapping[str, Any] = orjson.loads(payload).get("metadata", {})
    return found
