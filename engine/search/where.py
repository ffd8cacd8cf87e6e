"""The metadata filter: what the values of a turn's metadata must be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from undertow.engine.base.limits import MAX_FILTER_KEYS, MAX_FILTER_VALUES
from undertow.engine.base.queries import FilterOperator

Scalar = str | int | float | bool
# JSON distinguishes true from 1, Python's equality does not: (is a bool, value).
Value = tuple[bool, Scalar]

SCALARS = "text, a number, true or false"
OPERATORS = get_args(FilterOperator)


@dataclass(frozen=True, slots=True)
class Condition:
    """One operator and its values: several for `$in`, one for all others. `$eq` is `$in` with one value."""

    operator: FilterOperator
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Where:
    """Metadata filter: a turn must meet every condition on every key. Without keys all turns pass.

    Equality is that of JSON: 1 equals 1.0, but not true or "1". A list, an object or null in a turn's
    metadata equals nothing. `$gt`, `$gte`, `$lt` and `$lte` compare numbers with numbers, and texts with
    texts by code points; `$prefix` is for texts. A value of another type, or none, passes `$ne` alone.
    """

    conditions: Mapping[str, tuple[Condition, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, where: Mapping[str, Any] | None) -> Where:
        """From {key: value}, {key: [value, ...]}: any of them, or {key: {operator: value, ...}}: all of them.

        ValueError names the key and the operator.
        """
        asked = where or {}
        if len(asked) > MAX_FILTER_KEYS:
            raise ValueError(f"where: {len(asked):,} keys. Filter by at most {MAX_FILTER_KEYS}.")
        return cls({key: tuple(_conditions(key, given)) for key, given in asked.items()})

    @property
    def open(self) -> bool:
        return not self.conditions


def typed(value: Scalar) -> Value:
    return isinstance(value, bool), value


def _conditions(key: str, given: Any) -> list[Condition]:
    if isinstance(given, Mapping):
        conditions = list(_operators(f"where: {key!r:.80}", given))
    else:
        values = given if isinstance(given, list | tuple | set | frozenset) else [given]
        conditions = [_any_of(f"where: {key!r:.80}", values)]
    asked = [value for condition in conditions for _, value in condition.values]
    texts = sum(isinstance(value, str) for value in asked)
    if max(texts, len(asked) - texts) > MAX_FILTER_VALUES:
        most = f"Name at most {MAX_FILTER_VALUES}, or search in parts."
        raise ValueError(f"where: {key!r:.80} has {len(asked):,} values. {most}")
    return conditions


def _operators(of_key: str, given: Mapping[str, Any]) -> Iterator[Condition]:
    if not given:
        raise ValueError(f"{of_key} is {{}}, with no operator. Name one of {', '.join(OPERATORS)}.")
    for operator, value in given.items():
        named = f"{of_key} {operator}"
        match operator:
            case "$in" if isinstance(value, list | tuple | set | frozenset):
                yield _any_of(named, value)
            case "$in":
                raise ValueError(f"{named} is {value!r:.80}. Give a list of values.")
            case "$eq":
                yield _any_of(named, [value], lists=False)
            case "$ne":
                yield Condition("$ne", _any_of(named, [value], lists=False).values)
            case "$gt" | "$gte" | "$lt" | "$lte":
                yield Condition(operator, (_comparable(named, value),))
            case "$prefix" if isinstance(value, str):
                yield Condition("$prefix", (typed(value),))
            case "$prefix":
                raise ValueError(f"{named} is {value!r:.80}. Give the text that values begin with.")
            case _:
                known = ", ".join(OPERATORS)
                raise ValueError(f"{of_key} has the operator {operator!r:.80}. Use one of {known}.")


def _any_of(named: str, values: Any, *, lists: bool = True) -> Condition:
    if not values:
        raise ValueError(f"{named} has an empty list, which no turn can match. Name a value.")
    if wrong := [value for value in values if not isinstance(value, Scalar)]:
        cure = f"Give {SCALARS}, or a list of those." if lists else f"Give {SCALARS}."
        raise ValueError(f"{named} is {wrong[0]!r:.80}. {cure}")
    return Condition("$in", tuple(map(typed, values)))


def _comparable(named: str, value: Any) -> Value:
    """A bound of a range. NaN is none: it has no place in an order."""
    if isinstance(value, bool) or not isinstance(value, str | int | float) or value != value:
        raise ValueError(f"{named} is {value!r:.80}. Compare with a number or with text.")
    return typed(value)
