"""Builds the indexes that a search of a large tenant needs without delaying the others of its shard.

The indexes of words, of metadata values and of times (engine/search) are built at the first search that
needs them, one slice in each round of the engine's work. Other calls are served between slices. The indexes
follow the live state, without a snapshot. A reopened engine begins anew. If the tenant was evicted between
two slices, the search builds the rest at once, so that it ends.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Generic, TypeVar

from undertow.engine.api.engine import Engine
from undertow.engine.base.model import UndertowError
from undertow.engine.base.queries import AnswerQuery, SearchQuery
from undertow.engine.cluster.shard.commands import NotYet
from undertow.engine.cluster.shard.quick import is_quick_call
from undertow.engine.llm.loop_tasks import then

T = TypeVar("T")
F = TypeVar("F")


class CallerGone(UndertowError):
    """The caller has cancelled the call."""


class IndexBuildQueue:
    """The search whose index is being built, one at a time. Used in the engine's rounds alone."""

    def __init__(self) -> None:
        self._holder: AfterIndexBuild[Any] | None = None

    @property
    def holder(self) -> AfterIndexBuild[Any] | None:
        """The search that builds its index now; None if there is none or it has ended."""
        if self._holder is not None and self._holder.done:
            self._holder = None
        return self._holder

    @holder.setter
    def holder(self, holder: AfterIndexBuild[Any] | None) -> None:
        self._holder = holder


class AfterIndexBuild(Generic[T]):
    """A command to repeat until its result is not None: `act`, once the tenant's keyword index is built.

    `check` raises, each time, if the tenant is not served here. Raises what it and `act` raise; CallerGone.
    """

    def __init__(
        self,
        builds: IndexBuildQueue,
        query: SearchQuery | AnswerQuery,
        check: Callable[[str], None],
        act: Callable[[Engine], T | NotYet],
    ) -> None:
        self._builds = builds
        self._query = query
        self._tenant = query.tenant
        self._check = check
        self._act = act
        self._waits = False
        self._rows = 0
        # the engine that indexed these rows
        self._engine: Engine | None = None
        # the caller's future: the command's own, which cannot be cancelled once it has run, if that is done
        self._promise: Future[Any] | None = None

    def promised(self, future: Future[F]) -> Future[F]:
        """A future for the result of `future`, which the caller may cancel until the result is there."""
        self._promise = future if future.done() else then(future, lambda result: result)
        return self._promise

    @property
    def done(self) -> bool:
        return self._promise is not None and self._promise.done()

    @property
    def cancelled(self) -> bool:
        """Whether the caller has cancelled the call."""
        return self._promise is not None and self._promise.cancelled()

    def is_quick(self, engine: Engine) -> bool:
        """Also while it waits for another search's index: a thread would ask it again and again."""
        return (self._waits and self._builds.holder not in (None, self)) or is_quick_call(engine, self._query)

    def __call__(self, engine: Engine) -> T | NotYet | None:
        try:
            if self.cancelled:
                raise CallerGone
            if not self._is_ready(engine):
                return NotYet.GO_ON if self._builds.holder is self else None
        except BaseException:
            self._leave()
            raise
        self._leave()
        return self._act(engine)

    def _is_ready(self, engine: Engine) -> bool:
        """Whether the index is built; builds one more slice if it is this search's turn."""
        if self._waits and self._builds.holder not in (None, self):
            return False  # without loading the tenant: it might evict the one whose index is being built
        self._check(self._tenant)
        if engine.is_ready(self._query):
            return True
        self._waits = True
        if self._builds.holder is None:
            self._builds.holder = self
        if self._builds.holder is not self:
            return False
        if self._engine is not engine:
            self._engine, self._rows = engine, 0
        rows, self._rows = self._rows, engine.prepare(self._query)
        # fewer rows: evicted between slices. Such a tenant is searched all the same, and indexed at once
        return self._rows <= rows

    def _leave(self) -> None:
        self._waits = False
        if self._builds.holder is self:
            self._builds.holder = None
