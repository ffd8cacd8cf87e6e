"""One shard's part in a resharding (see `coordinator`): its tenants move in batches, in three steps.

Their shard *seals* their logs, the other *pulls* them out of its journal in one commit, and the first
*releases* them. Every step is at most one commit of one journal, and can be repeated: what has been done is
read from the two journals. A step is on disk before it returns, whatever the durability of appends.

Whatever map its callers have, a tenant is served by one shard: at the source until it is sealed, at the
target once it has arrived. Its rows stay at the source, out of use, until that is cleared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import orjson

from undertow.engine.api.engine import Engine
from undertow.engine.base.results import Certificate
from undertow.engine.cluster.resharding.transfer import CONTENTS, TenantTransfer, reading
from undertow.engine.encoders.base import Fingerprint
from undertow.engine.storage.journal import Journal, Row
from undertow.engine.storage.location import Location, StoreError
from undertow.engine.tenants.migration_records import (
    InTransit,
    Move,
    Moved,
    MoveError,
    NotYet,
    move_of,
    move_row,
)

if TYPE_CHECKING:
    from undertow.engine.cluster.shard_map import Phase, ShardMap


class StaleMap(MoveError):
    """The call belongs to another version of the shard map than the shard has. Load the map again."""


@dataclass(frozen=True, slots=True)
class DepartingTenant:
    """A tenant, or the tombstone of one, that has yet to leave: its key, its target, its rows."""

    key: str
    to: str
    rows: int


class ReshardingParticipant:
    """One shard's part in reshardings. Called from the thread that owns the engine.

    `siblings`: the folder of the stores of all shards.
    """

    def __init__(self, engine: Engine, shard: str, siblings: Location, shard_map: ShardMap) -> None:
        """StoreError: the store belongs to another cluster."""
        if engine.journal.info.hash_key != shard_map.hash_key:
            raise StoreError(
                f"the store of shard {shard} has another hash key than the cluster's map: it belongs to "
                f"another cluster. Check {siblings / shard}."
            )
        self.map = shard_map
        self._engine = engine
        self._shard = shard
        self._siblings = siblings
        self._forget_moves()

    # ---- whom this shard serves

    def refusals(self, tenants: Sequence[str]) -> dict[str, Moved | InTransit]:
        """Why this shard does not serve some of these tenants, by name; it serves all others."""
        names = list(dict.fromkeys(tenants))
        refused: dict[str, Moved | InTransit] = {}
        for name, home, owner in zip(names, self.map.homes(names), self.map.owners(names), strict=True):
            if home == owner == self._shard:
                continue
            if home == self._shard:
                refusal = self._refusal_to_move(name, owner)
            elif owner == self._shard and self.map.tenant_key(name) in self._engine.tenants.arrived:
                refusal = None
            else:
                refusal = Moved(name, home)
            if refusal is not None:
                refused[name] = refusal
        return refused

    def _refusal_to_move(self, name: str, to: str) -> Moved | InTransit | None:
        """The refusal of a tenant that must leave; None: it is still served here.

        After the moving phase, new tenants that must leave are not taken any more.
        """
        tenants = self._engine.tenants
        key = self.map.tenant_key(name)
        if (move := tenants.departed.get(key)) is not None:
            return move.refusal(name)
        known = name in tenants or key in tenants.erased
        return None if known or self.map.phase == "moving" else InTransit(name, to)

    def adopt(self, shard_map: ShardMap) -> None:
        """Adopt a map, and forget the moves of an ended resharding. StaleMap: the shard has a newer one."""
        if shard_map.version < self.map.version:
            raise StaleMap(f"shard {self._shard} has map {self.map.version}, not {shard_map.version}.")
        self.map = shard_map
        self._forget_moves()

    def _forget_moves(self) -> None:
        """Delete the records of moves of a resharding that has ended."""
        tenants, journal = self._engine.tenants, self._engine.journal
        moves = [*tenants.departed.values(), *tenants.arrived.values()]
        if all(move.map_version == self.map.began for move in moves):
            return
        if tenants.departed and (left := self._rows_of(tenants.departed)):
            raise MoveError(
                f"shard {self._shard} has rows of {len(left)} tenants that have left it, and map "
                f"{self.map.version} moves nobody. Restore the cluster's maps from a backup."
            )
        journal.delete(None, before_lsn=journal.next_lsn, kinds=["move"])
        tenants.departed.clear()
        tenants.arrived.clear()

    # ---- the steps of a move

    def leaving(self) -> list[DepartingTenant]:
        """The tenants that have yet to leave, by key.

        Also those that are sealed but not released, that are only a tombstone, or whose first turn is queued.
        """
        tenants = self._engine.tenants
        here = tenants.stored_keys() | tenants.erased.keys() | tenants.departed.keys()
        here |= {self.map.tenant_key(name) for name in self._engine.scheduler.inbox.tenants}
        gone = {key for key, move in tenants.departed.items() if move.state == "released"}
        destinations = self.map.leaving(self._shard, sorted(here - gone))
        rows = self._rows_of(destinations)
        return [DepartingTenant(key, to, rows.get(key, 0)) for key, to in destinations.items()]

    def seal(self, version: int, keys: Sequence[str]) -> list[str]:
        """End the logs of these tenants here: from now on they are `InTransit`, also after a restart.

        Jobs under way are abandoned. Returns those of them whose queued turns were dropped, and not stored.
        StaleMap; ValueError for a tenant that need not leave.
        """
        self._expect(version, "moving", "closing")
        tenants = self._engine.tenants
        fresh = [key for key in keys if key not in tenants.departed]
        destinations = self.map.leaving(self._shard, fresh)
        if len(destinations) < len(fresh):
            raise ValueError(f"{len(fresh) - len(destinations)} tenants need not leave shard {self._shard}")
        rows = [move_row(key, Move("sealed", to, version)) for key, to in destinations.items()]
        queued = {self.map.tenant_key(name): name for name in self._engine.scheduler.inbox.tenants}
        names = queued | tenants.names_of(fresh)
        dropped = self._engine.dismiss([names[key] for key in fresh if key in names], rows)
        self._note(rows)
        self._engine.journal.sync()  # if lost, they would be served here again as well as over there
        return dropped

    def pull(self, version: int, source: str, keys: Sequence[str]) -> int:
        """Take tenants over out of the journal of the shard that has sealed them; returns their rows.

        In one commit, after which they are served here. Those that have arrived are skipped. StaleMap;
        NotYet; MoveError: they are not sealed there, or their vectors do not fit.
        """
        self._expect(version, "moving", "closing")
        tenants, journal = self._engine.tenants, self._engine.journal
        missing = [key for key in keys if key not in tenants.arrived]
        rows = self._take_over(version, source, missing) if missing else 0
        journal.sync()  # also what an earlier attempt has stored: the other shard's copy is to be purged
        return rows

    def _take_over(self, version: int, source: str, missing: Sequence[str]) -> int:
        tenants, journal = self._engine.tenants, self._engine.journal
        records = [move_row(key, Move("arrived", source, version)) for key in missing]
        with self._journal_of(source) as other:
            _check_compatible(journal, other)
            transfer = TenantTransfer(other, missing, self._shard, version)
            stones = transfer.tombstones(journal.next_lsn)
            buried = [Row("tombstone", "", key, -1, orjson.dumps(stone)) for key, stone in stones.items()]
            journal.append_stream(chain(buried, transfer.rows(), records))
        self._note(records)
        tenants.add(transfer.names, stones)
        self._engine.take_up(transfer.behind())
        return transfer.row_count

    def release(self, version: int, keys: Sequence[str]) -> None:
        """Answer `Moved` for these tenants from now on. StaleMap; NotYet; MoveError: one has not arrived."""
        self._expect(version, "moving", "closing")
        departed = self._engine.tenants.departed
        sealed = {key: departed[key] for key in keys if departed[key].state == "sealed"}
        for peer in sorted({move.peer for move in sealed.values()}):
            wanted = [key for key, move in sealed.items() if move.peer == peer]
            if missing := set(wanted) - self._arrived_at(peer, wanted, version):
                raise MoveError(f"{len(missing)} tenants have not arrived at shard {peer}; they stay sealed.")
        rows = [move_row(key, replace(move, state="released")) for key, move in sealed.items()]
        self._engine.journal.append(rows)
        self._note(rows)
        self._engine.journal.sync()  # before the phase ends in which it could be done again

    def clear(self, version: int) -> dict[str, Certificate]:
        """Once all have left: remove their rows, and the bytes of all that was deleted or erased.

        Certificates, by tenant key, of tenants that were erased here and had not been purged. StaleMap;
        MoveError: some have not left.
        """
        self._expect(version, "clearing")
        if waiting := len(self.leaving()):
            raise MoveError(f"{waiting} tenants have yet to leave shard {self._shard}. Move them first.")
        tenants, journal = self._engine.tenants, self._engine.journal
        gone = list(tenants.departed)
        if gone:
            journal.delete(gone, before_lsn=journal.next_lsn, kinds=CONTENTS)
        certificates = self._engine.purge()
        if gone:  # their tombstones have gone with them, and what these certify
            journal.delete(gone, before_lsn=journal.next_lsn, kinds=["tombstone"])
            for key in gone:
                tenants.erased.pop(key, None)
        journal.sync()  # before the moves are forgotten
        return {key: issued for key, issued in certificates.items() if key not in tenants.departed}

    # ---- helpers

    def _expect(self, version: int, *phases: Phase) -> None:
        """`version`: that of the map which began the resharding."""
        if version != self.map.began or self.map.phase not in phases:
            raise StaleMap(
                f"shard {self._shard} has map {self.map.version} ({self.map.phase or 'settled'}); this call "
                f"belongs to another phase, or to another resharding than that of map {version}."
            )

    def _note(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._engine.tenants.note_move(row.tenant_key, move_of(row))

    def _rows_of(self, keys: Mapping[str, Any]) -> dict[str, int]:
        """The rows with contents of these tenants in the journal; those with none are left out."""
        table = self._engine.journal.columns(["tenant_key", "lsn"], kinds=CONTENTS)
        counts = table.group_by("tenant_key").aggregate([("lsn", "count")])
        pairs = zip(counts["tenant_key"].to_pylist(), counts["lsn_count"].to_pylist(), strict=True)
        return {key: rows for key, rows in pairs if key in keys}

    def _arrived_at(self, peer: str, keys: Sequence[str], version: int) -> set[str]:
        wanted = Move("arrived", self._shard, version)
        with self._journal_of(peer) as journal, reading(journal):
            rows = journal.read(tenant_keys=keys, kinds=["move"], vectors=False)
            return {row.tenant_key for row in rows if move_of(row) == wanted}

    @contextmanager
    def _journal_of(self, shard: str) -> Iterator[Journal]:
        """Another shard's journal, to be acted upon. NotYet."""
        try:
            journal = Journal.open(self._siblings / shard, writable=False, settled=True)
        except StoreError as error:
            raise NotYet(f"shard {shard}: {error}") from error
        with closing(journal):
            yield journal


def _check_compatible(journal: Journal, other: Journal) -> None:
    """MoveError unless both stores have the same hash key and encoder."""
    if journal.info.hash_key != other.info.hash_key:
        raise MoveError(
            f"{other.location} and {journal.location} have different hash keys; no tenant can move."
        )
    mine, theirs = Fingerprint.stored(journal.info.encoder), Fingerprint.stored(other.info.encoder)
    if refusal := theirs.mismatch(mine):
        raise MoveError(refusal)
