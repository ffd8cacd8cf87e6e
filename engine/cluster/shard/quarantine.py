"""Quarantined turns, which make the engine fail: each an Arrow file in the root, with the reason.

ROOT/parked/SHARD/TENANT_KEY/DEDUPE_HASH.arrow: one row of wire.TURNS, with the reason in the schema's
metadata. The names reveal neither the tenant nor the key, and an erasure finds them by the tenant's key.

An error message may quote the turn, so it stays in this file. A reason goes into receipts, status, logs and
the records of a bulk ingest, which no erasure reaches.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from undertow.engine.base.model import PackedTurn
from undertow.engine.cluster.wire import pack
from undertow.engine.storage.location import Location
from undertow.engine.storage.parked_turns import FOLDER, forget
from undertow.engine.storage.row_codec import key_hash

REASON, ERROR, PARKED_AT = b"reason", b"error", b"parked_at"


class QuarantinedTurn(NamedTuple):
    """A quarantined turn. `parked_at`: ISO 8601, in UTC; `error`: the traceback."""

    turn: PackedTurn
    reason: str
    error: str
    parked_at: str


class Quarantine:
    """The quarantined turns of one shard. A turn that is sent again stays parked.

    To retry one, remove its file and restart the shard.
    """

    def __init__(self, root: Location, shard: str, tenant_key: Callable[[str], str]) -> None:
        self._root = root
        self._folder = f"{FOLDER}/{shard}"
        self._tenant_key = tenant_key
        self._reasons = {name: self.read(name).reason for name in root.list(self._folder)}

    def concerns(self, tenants: Iterable[str]) -> bool:
        """Whether a turn of one of the tenants is parked."""
        keys = {name.split("/")[-2] for name in self._reasons}
        return bool(keys) and any(self._tenant_key(tenant) in keys for tenant in tenants)

    def reason(self, turn: PackedTurn) -> str | None:
        """Why the turn is parked; None: it is not."""
        return self._reasons.get(self._name(turn)) if self._reasons else None

    def park(self, turn: PackedTurn, reason: str, error: Exception | None = None) -> None:
        """Park a turn, durably. StoreError; safe to repeat. `reason` must not quote the turn."""
        texts = {
            REASON: reason,
            # without chained errors: those may quote other tenants' turns
            ERROR: "" if error is None else "".join(traceback.format_exception(error, chain=False)),
            PARKED_AT: datetime.now(UTC).isoformat(timespec="seconds"),
        }
        metadata = {name: text.encode(errors="replace") for name, text in texts.items()}
        table = pack([turn]).replace_schema_metadata(metadata)
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table)
        name = self._name(turn)
        self._root.write(name, sink.getvalue().to_pybytes())
        self._reasons[name] = reason

    def read(self, name: str) -> QuarantinedTurn:
        """One parked file, by its name in the root."""
        table = pa.ipc.open_file(pa.py_buffer(self._root.read(name) or b"")).read_all()
        row = [column[0].as_py() for column in table.columns]
        metadata = table.schema.metadata or {}
        texts = (metadata.get(name, b"").decode() for name in (REASON, ERROR, PARKED_AT))
        return QuarantinedTurn(PackedTurn(*row), *texts)

    def report(self) -> list[dict[str, str]]:
        """The file and the reason of each parked turn, without its text."""
        return [{"file": name, "reason": reason} for name, reason in sorted(self._reasons.items())]

    def forget(self, tenant: str) -> None:
        """Remove the parked turns of an erased tenant, at all shards: it may have moved since."""
        key = self._tenant_key(tenant)
        forget(self._root, key)
        mine = f"{self._folder}/{key}/"
        self._reasons = {name: why for name, why in self._reasons.items() if not name.startswith(mine)}

    def _name(self, turn: PackedTurn) -> str:
        return f"{self._folder}/{self._tenant_key(turn.tenant)}/{key_hash(turn.dedupe_key):016x}.arrow"


def reason_of(error: Exception) -> str:
    """The kind of an error and where it was raised, without its message: that may quote a turn."""
    last = (traceback.extract_tb(error.__traceback__) or [None])[-1]
    where = "" if last is None else f" in {last.name} ({Path(last.filename).name}:{last.lineno})"
    return f"{type(error).__name__}{where}"
