"""Searches of large tenants by words, without holding up the others of their shard.

A tenant's keyword index (engine/search/keyword_index.py) is built at its first search, in slices: one in
each round of the shard's thread, which answers calls and steps its engine between them. The caller waits;
nobody else waits longer than a slice. No snapshot is needed, as the index follows the live state from
slice to slice. It begins anew where the engine was opened again; where the tenant was put out of the arena
between two slices, the search makes the rest at once, so as to end.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from undertow.engine.api.engine import Engine
from undertow.engine.base.model import UndertowError
from undertow.engine.cluster.shard.futures import hand_on

T = TypeVar("T")
F = TypeVar("F")


class CallerGone(UndertowError):
    """Whoever asked has called it off, and hears of nothing any more."""


class IndexBuildQueue:
    """Whose slices are made: one search's at a time, however many wait. On the keeper's thread alone."""

    def __init__(self) -> None:
        self._holder: AfterIndexBuild[Any] | None = None

    @property
    def holder(self) -> AfterIndexBuild[Any] | None:
        """None too where that search ended without being asked again, as no engine could be opened."""
        if self._holder is not None and self._holder.is_over:
            self._holder = None
        return self._holder

    @holder.setter
    def holder(self, holder: AfterIndexBuild[Any] | None) -> None:
        self._holder = holder


class AfterIndexBuild(Generic[T]):
    """Something to be asked until it gives other than None: `act`, once its tenant's words are there.

    `tenant`: checks that the tenant is served here, each time. What it and `act` raise is raised; CallerGone.
    """

    def __init__(
        self, preparing: IndexBuildQueue, tenant: Callable[[], str], act: Callable[[Engine], T]
    ) -> None:
        self._preparing = preparing
        self._tenant = tenant
        self._act = act
        self._waits = False
        self._rows = 0
        # the one that these rows were taken in by
        self._engine: Engine | None = None
        # the caller's; the keeper's own, by which it comes, cannot be cancelled any more once it was asked
        self._promise: Future[Any] = Future()

    def promised(self, future: Future[F]) -> Future[F]:
        """By this comes what comes by `future`. The caller may cancel it for as long as it has not come."""
        hand_on(future, self._promise, lambda result: result)
        return self._promise

    @property
    def is_over(self) -> bool:
        return self._promise.done()

    @property
    def called_off(self) -> bool:
        """Whether the caller has gone."""
        return self._promise.cancelled()

    def __call__(self, engine: Engine) -> T | None:
        try:
            if self.called_off:
                raise CallerGone
            if not self._is_ready(engine):
                return None
        except BaseException:
            self._leave()
            raise
        self._leave()
        return self._act(engine)

    def _is_ready(self, engine: Engine) -> bool:
        """Whether the words are there, after one more slice where it is this one's turn."""
        if self._waits and self._preparing.holder not in (None, self):
            return False  # without touching the tenant: it might be put out for the one that is being made
        tenant = self._tenant()
        if engine.is_ready(tenant):
            return True
        self._waits = True
        if self._preparing.holder is None:
            self._preparing.holder = self
        if self._preparing.holder is not self:
            return False
        if self._engine is not engine:
            self._engine, self._rows = engine, 0
        rows, self._rows = self._rows, engine.prepare(tenant)
        # evicted between slices: a tenant that is put out again and again is to be searched all the same
        return self._rows <= rows

    def _leave(self) -> None:
        if self._preparing.holder is self:
            self._preparing.holder = None
