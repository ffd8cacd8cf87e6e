"""How the logs of a bulk ingest are cut into waves, and a wave's into tasks, by their size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from undertow.engine.cluster.bulk.reading import Piece
from undertow.engine.readers import Log

# rows in Arrow per byte of a log: each turn is there as words and as JSON
EXPANSION = {".gz": 12.0, ".parquet": 8.0}
PLAIN_EXPANSION = 2.0


def waves_of(pieces: Sequence[Piece], wave_bytes: int) -> Iterator[list[Piece]]:
    """Consecutive pieces whose rows fit into `wave_bytes` together; a larger one is a wave alone."""
    wave: list[Piece] = []
    size_bytes = 0.0
    for piece in pieces:
        if wave and size_bytes + rows_bytes(piece.log) > wave_bytes:
            yield wave
            wave, size_bytes = [], 0.0
        wave.append(piece)
        size_bytes += rows_bytes(piece.log)
    if wave:
        yield wave


def rows_bytes(log: Log) -> float:
    """About how many bytes a log's rows take in Arrow."""
    suffix = next((s for s in EXPANSION if log.name.endswith(s)), "")
    return log.size_bytes * EXPANSION.get(suffix, PLAIN_EXPANSION)
