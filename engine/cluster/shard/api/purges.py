"""Purges at a shard. Turns are stored and searched while the bytes of erased tenants are removed."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from undertow.engine.api.engine import Engine
from undertow.engine.api.erasure import NotCertified, Removal, certificate_of, certify, remove_bytes
from undertow.engine.base.pacing import Pacing
from undertow.engine.base.results import Certificate
from undertow.engine.cluster.shard.commands import NotYet
from undertow.engine.cluster.shard.engine_work import EngineWork
from undertow.engine.llm.loop_tasks import hand_on

F = TypeVar("F")
T = TypeVar("T")


def after(first: Future[F], begin: Callable[[F], Future[T]]) -> Future[T]:
    """The result of what begins with the result of `first`; an error of either."""
    future: Future[T] = Future()

    def go_on(done: Future[F]) -> None:
        if (error := done.exception()) is None:
            begin(done.result()).add_done_callback(partial(hand_on, to=future))
        elif future.set_running_or_notify_cancel():
            future.set_exception(error)

    first.add_done_callback(go_on)
    return future


class _Purge:
    """One purge, in two calls of `go_on` if the first one runs beside appends."""

    def __init__(self, pacing: Pacing) -> None:
        self.begun = False
        # whose erasures wait for it
        self.askers: list[str] = []
        self._pacing = pacing
        self.future: Future[dict[str, Certificate]] = Future()
        self._removal: Removal | None = None

    def is_quick(self, engine: Engine) -> bool:
        """Whether the bytes are gone, and the rest takes no longer than an add."""
        is_gone = self._removal is not None and self._removal.journal is engine.journal
        return is_gone and engine.journal.commits_quickly

    def go_on(self, engine: Engine) -> dict[str, Certificate] | NotYet:
        self.begun = True
        removal, self._removal = self._removal, None
        if removal is not None and removal.journal is engine.journal:  # not of an engine that has failed
            return certify(engine.tenants, removal)
        with self._pacing.measured(*self.askers):
            removal = remove_bytes(engine.journal, engine.tenants)
        if not engine.journal.is_read_beside:
            return certify(engine.tenants, removal)
        self._removal = removal  # for the loop: only one thread may append
        return NotYet.GO_ON


class Purges:
    """The purges of one shard: one serves all who ask before it begins, as it rewrites the whole store."""

    def __init__(self, work: EngineWork, check: Callable[[str], None]) -> None:
        """`check` raises if a tenant is not served here."""
        self._ask = work.ask
        self._check = check
        self._work = work
        self._last: _Purge | None = None

    def purge(self, asker: str = "") -> Future[dict[str, Certificate]]:
        """Certificates by tenant key. `asker`: whose erasure waits for it, if one does."""
        last = self._last
        if last is None or last.begun or last.future.done():
            last = self._last = _Purge(self._work.purging)
            asked = self._ask(last.go_on, wait=True, is_quick=last.is_quick, reads=True, reads_journal=True)
            asked.add_done_callback(partial(hand_on, to=last.future))
        if asker:
            last.askers.append(asker)
        # a future for each caller, who may cancel it
        own: Future[dict[str, Certificate]] = Future()
        last.future.add_done_callback(partial(hand_on, to=own))
        return own

    def certify(self, tenant: str) -> Future[Certificate | None]:
        """The certificate of an erased tenant, after a purge if needed. None: no such erasure is known.

        A tenant whose erasures took much of the shard's time waits for its next purge: see Pacing.
        NotCertified: its last bytes are still at the shard that it came from.
        """

        def go_on(found: tuple[Certificate | None, ...]) -> Future[Certificate | None]:
            if not found:  # once more after the purge, as the tenant may be erased again meanwhile
                return after(self.purge(tenant), lambda _: self.certify(tenant))
            known: Future[Certificate | None] = Future()
            known.set_result(found[0])
            return known

        find = partial(self._find, tenant=tenant)
        return after(self._ask(find, wait=True, is_quick=lambda _: True), go_on)

    def _find(self, engine: Engine, tenant: str) -> tuple[Certificate | None, ...] | None:
        """The certificate, in a tuple; an empty one: a purge may begin for it; None: not yet."""
        self._check(tenant)
        key = engine.journal.info.tenant_key(tenant)
        tombstone = engine.tenants.erased.get(key)
        if tombstone is None or tombstone["purged"]:
            return (None if tombstone is None else certificate_of(key, tombstone),)
        if key in engine.tenants.arrived:
            raise NotCertified
        return None if self._work.purging.rest_s(tenant) else ()
