"""Vectors that a file or table brings along, checked against the store's encoder.

A column `vectors` has one list of `dim` float16 or float32 values a row, L2-normalised, or null. The schema's
metadata name the encoder that made them: key ENCODER_KEY, value the `digest` of `encoder` in store.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from undertow.engine.base.model import BadInput
from undertow.engine.readers.plain_rows import PlainRows
from undertow.engine.readers.record import PackedRecord
from undertow.engine.storage.journal_rows import binary_vectors

COLUMN = "vectors"
ENCODER_KEY = b"undertow.encoder"
# A vector rounded to float16 is as near to length 1 as this, with room for the rounding of float32.
LENGTH_TOLERANCE = 1e-3

Float16 = NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class StoreEncoder:
    """The encoder of a store: vectors of it have `dim` values. `digest`: of its fingerprint."""

    dim: int
    digest: str

    def refusal(self, schema: pa.Schema, source: str) -> BadInput | None:
        """Why vectors with this schema cannot be used; None: they can, or there are none."""
        if COLUMN not in schema.names:
            return None
        kind = schema.field(COLUMN).type
        digest = (schema.metadata or {}).get(ENCODER_KEY, b"").decode(errors="replace")
        if not _is_list_of_floats(kind):
            reason = f"has the type {kind}"
            cure = "Write a list of float16 or float32 a row, or leave the column out."
        elif not digest:
            reason = f"does not name its encoder: the schema's metadata lack {ENCODER_KEY.decode()!r}"
            cure = f"Set it to the encoder's digest ({self.digest} for this store), or leave the column out."
        elif digest != self.digest:
            reason = f"holds vectors of the encoder {digest}, and the store's is {self.digest}"
            cure = "Embed the texts with the store's encoder, or leave the column out."
        else:
            return None
        return BadInput(source, None, COLUMN, reason, cure)

    def read(self, column: pa.Array) -> GivenVectors:
        """The vectors of a column of accepted type, and what is wrong with each."""
        count, lengths = len(column), pc.list_value_length(column).fill_null(0).to_numpy()
        given = column.is_valid().to_numpy(zero_copy_only=False)
        fits = given & (lengths == self.dim)
        held = column if fits.all() else column.filter(pa.array(fits))
        values = held.flatten().to_numpy(zero_copy_only=False).reshape(-1, self.dim)
        vectors = np.zeros((count, self.dim), np.float16)
        with np.errstate(over="ignore", invalid="ignore"):
            vectors[fits] = values
            norms = np.sqrt(np.square(values, dtype=np.float32).sum(axis=1))
        norm = np.ones(count)
        norm[fits] = norms
        bad = {
            int(n): self._reason(int(lengths[n]), float(norm[n]))
            for n in np.flatnonzero(given & ~(fits & (np.abs(norm - 1) <= LENGTH_TOLERANCE)))
        }
        return GivenVectors(vectors, given, bad)

    def _reason(self, length: int, norm: float) -> str:
        if length != self.dim:
            return f"has {length} values, and the store's encoder makes {self.dim}"
        if not np.isfinite(norm):
            return "holds NaN or infinity"
        return "is zero" if norm == 0 else f"has the length {norm:.4g}, not 1"


def _is_list_of_floats(kind: pa.DataType) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_list(kind) for is_list in lists) and kind.value_type in (pa.float16(), pa.float32())


@dataclass(frozen=True, slots=True)
class GivenVectors:
    """The vectors of a batch of rows: float16 [rows, dim], zeros where `given` bool [rows] is False.

    `bad`: by row, why a vector cannot be used.
    """

    vectors: Float16
    given: NDArray[np.bool_]
    bad: dict[int, str]

    def of_rows(self, rows: NDArray[np.int64]) -> pa.Array:
        """The vectors of these rows, int64 [n], as a column of TURNS: binary [n]."""
        return pc.if_else(pa.array(self.given[rows]), binary_vectors(self.vectors[rows]), None)

    def checked(
        self, plain: PlainRows, records: Sequence[PackedRecord], lines: NDArray[np.int64], source: str
    ) -> tuple[PlainRows, list[PackedRecord]]:
        """Without the turns of rows whose vectors cannot be used; the records say why.

        `lines` int64 [rows]: the number of each row.
        """
        at = {int(line): n for n, line in enumerate(lines)} if records else {}
        checked = [self._record(record, at[record.position], source) for record in records]
        refused = np.isin(plain.rows, list(self.bad))
        for n in plain.rows[refused].tolist():
            problem = _problem(source, int(lines[n]), self.bad[n])
            checked.append(PackedRecord(int(lines[n]), errors=(problem,)))
        if refused.any():
            plain = PlainRows(plain.rows[~refused], plain.turns.filter(pa.array(~refused)))
        return plain, sorted(checked, key=lambda record: record.position)

    def _record(self, record: PackedRecord, row: int, source: str) -> PackedRecord:
        """The record, refused if its vector is bad, or cannot be that of its turns."""
        reason = self.bad.get(row)
        if reason is None and self.given[row] and len(record.turns) > 1:
            reason = f"is one vector for {len(record.turns)} turns"
        if reason is None or record.errors:
            return record
        return replace(record, turns=(), errors=(_problem(source, record.position, reason),))


def _problem(source: str, row: int, reason: str) -> BadInput:
    cure = "Give the L2-normalised vector of the row's one exchange, or null to have it embedded."
    return BadInput(source, row, COLUMN, reason, cure)
