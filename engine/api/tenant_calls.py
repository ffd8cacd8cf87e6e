"""The engine's calls about a whole tenant: list, import, change of policy. See MemoryApi."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from undertow.engine.api.policy_change import check_edits, check_name, newest_policy
from undertow.engine.api.search_calls import SearchCalls, window_of
from undertow.engine.api.transfer.import_ import Import, TenantExists, earlier_import, note_row
from undertow.engine.api.views.events import store_events
from undertow.engine.api.views.listing import kinds_of, list_page
from undertow.engine.base.model import Turn
from undertow.engine.base.queries import EventPage, EventsQuery, ImportCommand, ListQuery, SetPolicyCommand
from undertow.engine.base.results import ImportReport, Page, Report
from undertow.engine.encoders.encode_ahead import EncodeAhead
from undertow.engine.search.where import Where
from undertow.engine.step.eviction import ArenaResidency
from undertow.engine.storage.journal import Row
from undertow.engine.storage.row_codec import Control, check_turn


class TenantCalls(SearchCalls):
    """A part of Engine. It declares what it needs beyond SearchCalls."""

    _residency: ArenaResidency
    _encode_ahead: EncodeAhead

    def _list(self, query: ListQuery) -> Page:
        where, kinds = Where.of(query.where), kinds_of(query.kinds)
        window = window_of(query.since, query.until)
        of = self.tenants.existing(query.tenant)
        passing, within = self.ranker.passing(of, where), self.ranker.within(of, window)
        return list_page(of, kinds, window, passing, within, limit=query.limit, after=query.after)

    def _events(self, query: EventsQuery) -> dict[str, EventPage]:
        return {query.home: store_events(self.journal, self.tenants, query)}

    def _import(self, command: ImportCommand) -> ImportReport:
        work = self.begin_import(command)
        while (done := self.go_on_importing(work)) is None:
            pass
        return done

    def begin_import(self, command: ImportCommand) -> Import:
        """Begin an import, for a caller that works on it in parts with `go_on_importing`."""
        key = self.journal.info.tenant_key(command.tenant)
        encode = partial(self._vectors, command.tenant)
        return Import(command, key, self.tenants.incarnation_of(key), self.settings, encode)

    def go_on_importing(self, work: Import) -> ImportReport | None:
        """Do a part of an import. Returns the report once everything is stored."""
        self._check_sound()
        if (done := self._imported_before(work)) is not None:
            return done
        for _ in work.steps:
            return None
        self.journal.append_stream(chain(work.rows, [note_row(work)]))
        self.tenants.add({work.key: work.tenant}, {})
        if not work.is_decided:
            self.take_up([work.tenant])
        return work.imported

    def _imported_before(self, work: Import) -> ImportReport | None:
        """What an earlier attempt of this call has stored; None if nothing is there. TenantExists."""
        tenants = self.tenants
        tenants.require_here([work.tenant])
        # the name may have been used and erased since the import began: its ids are then of a former life
        lived = tenants.incarnation_of(work.key) != work.generation
        if not (lived or work.tenant in tenants or self.scheduler.inbox.holds(work.tenant)):
            return None
        notes = tenants.stored(work.tenant, "note") if work.again else ()
        if (done := earlier_import(notes, work.fingerprint)) is None:
            raise TenantExists(work.tenant)
        return done

    def _vectors(self, tenant: str, texts: Sequence[str]) -> NDArray[np.float16]:
        return self._texts.encode([tenant] * len(texts), texts)

    def _set_policy(self, command: SetPolicyCommand) -> Report:
        self._check_sound()
        tenant, policy = command.tenant, command.policy
        check_name(policy)
        check_turn(Turn(tenant, (), ""))
        self.tenants.require_here([tenant])
        is_new = tenant not in self.tenants
        of = self.tenants.get(tenant)
        if is_new or (newest_policy(of) or self.journal.info.policy) != policy:
            if of.next_seq == 0:
                self.scheduler.begin_log(of, Control("policy", -1, {"policy": policy}))
            else:
                if not command.drop_edits:
                    check_edits(of)
                self._log(tenant, "policy", [{"policy": policy}])
        return self._reports.policy(tenant)

    # ---- moving to and from other shards (engine/cluster/resharding/participant.py)

    def dismiss(self, tenants: Sequence[str], records: Sequence[Row]) -> list[str]:
        """Stop all work of tenants that leave, and commit `records`, the last of their logs here.

        Returns those of them that had turns in the queue: these are dropped, and not stored.
        """
        self._check_sound()
        try:
            dropped = self.scheduler.release_tenants(tenants, records)
        except BaseException as error:
            self._failure = error  # work was dropped that the journal still holds here
            raise
        self._feedback.forget(tenants)
        self._forget_vectors(tenants)
        for name in tenants:
            self.tenants.remove(name)
        return dropped

    def _forget_vectors(self, tenants: Sequence[str]) -> None:
        self._encode_ahead.forget()
        for tenant in tenants:
            self._texts.forget(tenant)

    def take_up(self, tenants: Sequence[str]) -> None:
        """Queue the undecided records of tenants that have moved here."""
        self._residency.load(tenants)
