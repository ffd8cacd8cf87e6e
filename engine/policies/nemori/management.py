"""What every management of NEMORI's facts does (section 3.3): evoke known ones, consolidate new ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

from undertow.engine.base.model import Memory
from undertow.engine.policies.base import Effect, Tiers, Vector
from undertow.engine.policies.work import Steps, Work, only_shown


@dataclass(frozen=True, slots=True)
class Statement:
    """A fact before it is stored, and the turns that say it, ascending.

    Of two facts in conflict the later said one wins, so only these turns are its sources. Other shown turns
    are kept only_shown: a continued episode is read as a whole, with all that was said long before.
    """

    text: str
    said: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of facts: the shown turns, their episode, and the prompt's version."""

    turns: tuple[int, ...]
    episode_id: str | None
    version: str


class Management(ABC):
    """Stateless. `evoke` returns the known facts from which an episode is predicted (section 3.3.1).

    `consolidate` stores what the prediction missed (section 3.3.3).
    """

    # What an answer is given. Section 4.1: k, m and r. Turns without an episode are found by none of these.
    tiers: Tiers = Tiers(k_epi=10, k_sem=20, raw_of_best=2, consolidated=False)

    @abstractmethod
    def evoke(self, job: Work, vector: Vector) -> Generator[Effect, Any, list[Memory]]:
        """The known facts about the episode with this vector, the most important first."""

    @abstractmethod
    def consolidate(self, job: Work, facts: Sequence[Statement], origin: Origin) -> Steps:
        """Store facts with distinct texts."""

    def distilled_from(self, job: Work, fact: Memory) -> frozenset[int]:
        """The turns that are distilled again where this fact is lost.

        A fact that a deleted turn shakes without being among them is not lost: see `remake`.
        """
        return fact.reach

    def remake(self, job: Work, shaken: Sequence[Memory], lost: Sequence[Memory]) -> Steps:
        """Make shaken facts again without the words of a deleted turn, which the `lost` ones are of."""
        return
        yield


def add_fact(job: Work, fact: Statement, vector: Vector, origin: Origin, **more: Any) -> None:
    """Store a new fact as it was distilled."""
    beside = only_shown(origin.turns, fact.said)
    by = {"episode_id": origin.episode_id, "shown_seqs": beside, **more}
    job.new("fact", fact.text, vector, fact.said, origin.version, **by)
