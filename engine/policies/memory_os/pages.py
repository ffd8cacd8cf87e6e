"""What MemoryOS takes as a page: a turn of the log, or a fact that NEMORI has distilled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from undertow.engine.base.model import Memory, MemoryKind
from undertow.engine.policies.work import Work, only_shown
from undertow.prompts.builders import ShownTurn

Key = TypeVar("Key", int, str)


@dataclass(frozen=True, slots=True)
class Page(Generic[Key]):
    """`key`: the seq of the turn, or the id of the fact. `sources`: the turns that it is of, ascending.

    `reach`: the turns whose words it may contain.
    """

    key: Key
    text: str
    timestamp: str | None
    sources: tuple[int, ...]
    reach: frozenset[int]


class Pages(ABC, Generic[Key]):
    """The pages of one job. A segment or a line knows those that it was made from."""

    # How a segment is stored.
    kind: MemoryKind
    segment_kind: str | None = None

    def __init__(self, work: Work) -> None:
        self.work = work

    @abstractmethod
    def keys(self, memory: Memory) -> Iterable[Key]:
        """The pages that a segment or a line was made from, also those that are gone."""

    @abstractmethod
    def existing(self, keys: Iterable[Key]) -> list[Page[Key]]:
        """These pages, without those that were deleted."""

    @abstractmethod
    def named(self, old: Memory | None, pages: Sequence[Page[Key]]) -> dict[str, Any]:
        """The fields by which a memory of these pages, and of those of its `old` version, knows them."""

    def segments(self) -> list[Memory]:
        """The current segments, in order of creation."""
        return [m for m in self.work.current(self.kind) if m.fact_kind == self.segment_kind]

    def made_of(
        self, said: Sequence[Page[Key]], shown: Sequence[Page[Key]], old: Memory | None
    ) -> tuple[tuple[int, ...], dict[str, Any]]:
        """The sources and the fields of a memory that tells of the pages `said`, with all that are `shown`.

        Its `old` version is still part of it.
        """
        told = {seq for page in said for seq in page.sources}
        seen = {seq for page in shown for seq in page.reach}
        if old is not None:
            told.update(old.source_seqs)
            seen.update(old.shown_seqs)
        sources = tuple(sorted(told))
        return sources, {"shown_seqs": only_shown(seen, sources), **self.named(old, shown)}


class TurnPages(Pages[int]):
    """A page is a turn, and a segment is an episode."""

    kind: MemoryKind = "episode"

    def keys(self, memory: Memory) -> Iterable[int]:
        return sorted(memory.reach)

    def existing(self, keys: Iterable[int]) -> list[Page[int]]:
        turns = [self.work.view.turn(seq) for seq in keys if self.work.view.exists(seq)]
        return [Page(t.seq, t.text, t.timestamp, (t.seq,), frozenset((t.seq,))) for t in turns]

    def named(self, old: Memory | None, pages: Sequence[Page[int]]) -> dict[str, Any]:
        return {}


class FactPages(Pages[str]):
    """A page is a fact of the kind `page`, and a segment one of the kind `segment`. `links` are the pages."""

    kind: MemoryKind = "fact"
    segment_kind = "segment"
    page_kind = "page"

    def keys(self, memory: Memory) -> Iterable[str]:
        return memory.links

    def existing(self, keys: Iterable[str]) -> list[Page[str]]:
        facts = {fact.id: fact for fact in self.work.current("fact")}
        found = [facts[key] for key in keys if key in facts]
        return [Page(f.id, f.text, f.timestamp, f.source_seqs, f.reach) for f in found]

    def named(self, old: Memory | None, pages: Sequence[Page[str]]) -> dict[str, Any]:
        before = () if old is None else old.links
        return {"links": tuple(dict.fromkeys((*before, *(page.key for page in pages))))}

    def waiting(self) -> list[Page[str]]:
        """The pages that no segment has had, in order of creation: short-term memory."""
        segments = [m for m in self.work.every("fact") if m.fact_kind == self.segment_kind]
        filed = {key for segment in segments for key in segment.links}
        pages = [f.id for f in self.work.current("fact") if f.fact_kind == self.page_kind]
        return self.existing(key for key in pages if key not in filed)


def as_turns(pages: Sequence[Page[Key]]) -> list[ShownTurn]:
    """The pages as a prompt shows them."""
    return [ShownTurn(n, page.timestamp, page.text) for n, page in enumerate(pages, 1)]
