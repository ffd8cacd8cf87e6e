"""Search by metadata: what a caller asks for, and which of a tenant's turns have it."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from undertow.engine.tenants.tenant import Tenant

Scalar = str | int | float | bool
# JSON tells true from 1, Python's equality does not
Value = tuple[bool, Scalar]

# of a tenant, how many keys are kept in memory, those asked for last: 4 bytes a turn each, and the values
KEYS_KEPT = 16
NO_VALUE = -1
# how the payload of a turn with metadata says so
MARK = b'"metadata":'


@dataclass(frozen=True, slots=True)
class Where:
    """Metadata filter: for each key, the values of which a turn must have one. Empty: all turns pass.

    Text, numbers and booleans are equal as in JSON: 1 and 1.0 are, 1 and true or "1" are not. What is
    a list, an object or null in a turn's metadata equals nothing.
    """

    wanted: Mapping[str, frozenset[Value]] = field(default_factory=dict)

    @classmethod
    def of(cls, where: Mapping[str, Any] | None) -> Where:
        """From {key: value} or {key: [value, ...]}, meaning any of them. ValueError names the key."""
        return cls({key: frozenset(_values(key, asked)) for key, asked in (where or {}).items()})

    @property
    def open(self) -> bool:
        return not self.wanted


def _values(key: str, asked: Any) -> list[Value]:
    values = asked if isinstance(asked, list | tuple | set | frozenset) else [asked]
    if not values:
        raise ValueError(f"where: {key!r} has an empty list, which no turn can match. Name a value.")
    if wrong := [value for value in values if not isinstance(value, Scalar)]:
        raise ValueError(
            f"where: {key!r} is {wrong[0]!r:.80}. Give text, a number, true or false, or a list of those."
        )
    return [_typed(value) for value in values]


def _typed(value: Scalar) -> Value:
    return isinstance(value, bool), value


class MetadataIndex:
    """One tenant's metadata by key: which value each turn has, read from the log when first asked for.

    It follows the log as that grows. Deleted turns keep what they had: nobody finds them.
    """

    def __init__(self) -> None:
        self._columns: OrderedDict[str, _Column] = OrderedDict()

    def passing(self, tenant: Tenant, where: Where) -> NDArray[np.bool_]:
        """Which turns have what is asked for, bool [turns], by arena row."""
        passes = np.ones(len(tenant.seq_by_row), dtype=bool)
        for key, values in where.wanted.items():
            passes &= self._column(tenant, key).any_of(values)
        return passes

    def _column(self, tenant: Tenant, key: str) -> _Column:
        column = self._columns.pop(key, None) or _Column(key)
        self._columns[key] = column
        if len(self._columns) > KEYS_KEPT:
            self._columns.popitem(last=False)
        column.follow(tenant)
        return column


class _Column:
    """A number for each distinct value of one key, by arena row."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._numbers: dict[Value, int] = {}
        self._of_row = array("i")

    def follow(self, tenant: Tenant) -> None:
        """Take in the turns that have come since."""
        for seq in tenant.seq_by_row[len(self._of_row) :]:
            value = _metadata(tenant.records[seq]).get(self._key)
            number = NO_VALUE
            if isinstance(value, Scalar):
                number = self._numbers.setdefault(_typed(value), len(self._numbers))
            self._of_row.append(number)

    def any_of(self, values: frozenset[Value]) -> NDArray[np.bool_]:
        wanted = [number for value in values if (number := self._numbers.get(value)) is not None]
        return np.isin(np.frombuffer(self._of_row, dtype=np.int32), wanted)


def _metadata(record: object) -> Mapping[str, Any]:
    """Of a turn's payload; most have none, which is seen without decoding it."""
    if not isinstance(record, bytes) or MARK not in record:
        return {}
    found: Mapping[str, Any] = orjson.loads(record).get("metadata", {})
    return found
