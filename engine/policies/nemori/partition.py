"""NEMORI's windows of messages and their partition into groups (section 3.2.1)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from undertow.engine.policies.base import MemoryView


def window(turns: Sequence[int], size: int, view: MemoryView) -> tuple[int, ...]:
    """The shortest prefix of `turns` with at least `size` messages; () if there are fewer."""
    count = 0
    for taken, seq in enumerate(turns, 1):
        count += len(view.turn(seq).messages)
        if count >= size:
            return tuple(turns[:taken])
    return ()


@dataclass(frozen=True, slots=True)
class Partition:
    """Groups of the numbers 1 to n, each number in exactly one, and the repairs that this took."""

    groups: tuple[tuple[int, ...], ...]
    missing: int = 0
    repeated: int = 0
    invented: int = 0

    @property
    def repairs(self) -> int:
        return self.missing + self.repeated + self.invented


def partition_of(named: Sequence[Sequence[int]], count: int) -> Partition:
    """A partition of 1 to `count` from the groups in an LLM's reply, in their order, each ascending.

    A repeated number keeps its first group and an invented one is dropped. A missing one joins the group of
    the nearest named number, or of the lower of two. Without any named number, all are one group.
    """
    place: dict[int, int] = {}
    repeated = invented = 0
    for group, numbers in enumerate(named):
        for number in numbers:
            invented += not 1 <= number <= count
            repeated += number in place
            if 1 <= number <= count:
                place.setdefault(number, group)
    missing = [n for n in range(1, count + 1) if n not in place]
    joined = {n: place[min(place, key=lambda m: (abs(m - n), m))] if place else 0 for n in missing}
    of_group: dict[int, list[int]] = {}
    for number, group in sorted((place | joined).items()):
        of_group.setdefault(group, []).append(number)
    groups = tuple(tuple(of_group[group]) for group in sorted(of_group))
    return Partition(groups, len(missing), repeated, invented)
