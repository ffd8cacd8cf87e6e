"""Defects that were put into the product on purpose: the seeds must find each of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import pytest

from undertow.engine.cluster.resharding.transfer import TenantTransfer
from undertow.engine.storage.journal import Journal
from undertow.engine.storage.journal_rows import Row
from undertow.engine.storage.wal import WriteAheadLog
from undertow.kernels import key_table


def _acknowledges_before_the_flush(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(WriteAheadLog, "_fsync", property(lambda _: False, lambda *_: None), raising=False)


def _asks_nobody_for_its_claim(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Journal, "_check_claim", lambda _: None)


def _knows_no_key(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(key_table, "may_hold", lambda _, owners, __: np.zeros(len(owners), np.bool_))


def _moves_without_the_last(kind: str) -> Callable[[pytest.MonkeyPatch], None]:
    def put(patch: pytest.MonkeyPatch) -> None:
        every = TenantTransfer._rows

        def most(self: TenantTransfer) -> Iterator[Row]:
            rows = list(every(self))
            last = max((at for at, row in enumerate(rows) if row.kind == kind), default=-1)
            yield from (row for at, row in enumerate(rows) if at != last)

        patch.setattr(TenantTransfer, "_rows", most)

    return put


def _keeps_what_is_purged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Journal, "delete", lambda *_, **__: None)


DEFECTS: Mapping[str, Callable[[pytest.MonkeyPatch], None]] = {
    "acknowledged before the flush": _acknowledges_before_the_flush,
    "fencing not checked": _asks_nobody_for_its_claim,
    "keys not checked": _knows_no_key,
    "a move without the last turn": _moves_without_the_last("turn"),
    "a move without the last decision": _moves_without_the_last("decision"),
    "erased rows kept": _keeps_what_is_purged,
}
