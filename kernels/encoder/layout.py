"""One packed batch as the device takes it: the windows' tokens one after the other, without padding."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

QUERY_BLOCK = 64
"""Query rows of one attention program."""

WIDEST_HEAD = 128
"""Models with wider heads keep their own forward pass."""

ROW_TILE = 128
"""Token places of a batch are a multiple of this: the rows of one program of a matrix product."""


class PackedTokens(NamedTuple):
    """The parts of a packed batch: views of one buffer, all int32, in NumPy or torch.

    A batch has at most `sequences` windows; those that it lacks are empty and end where the last one ends.
    """

    ids: Any
    """[tokens]; what stands after the last window is not read."""
    positions: Any
    """[tokens]: each token's place in its window."""
    starts: Any
    """[sequences + 1]: window i is ids[starts[i] : starts[i + 1]]; the last entry is the number of tokens."""
    block_start: Any
    """[blocks]: where the window of each block of QUERY_BLOCK rows starts."""
    block_first: Any
    """[blocks]: the block's first row, counted from its window's start."""
    block_length: Any
    """[blocks]: the length of the block's window; 0 after the last block."""

    @property
    def used(self) -> Any:
        """[1]: the number of tokens. Programs whose rows all lie beyond it return at once."""
        return self.starts[-1:]


@dataclass(frozen=True)
class Layout:
    """The sizes of packed batches. Every batch has the same, so one CUDA graph serves all."""

    tokens: int
    sequences: int

    def __post_init__(self) -> None:
        if self.tokens < ROW_TILE or self.tokens % ROW_TILE or self.sequences < 1:
            raise ValueError(f"{self} needs tokens in multiples of {ROW_TILE}, and a sequence")

    @property
    def blocks(self) -> int:
        """Query blocks at most: each window may leave one block short."""
        return self.tokens // QUERY_BLOCK + self.sequences

    @cached_property
    def _ends(self) -> list[int]:
        sizes = (self.tokens, self.tokens, self.sequences + 1, *(self.blocks,) * 3)
        return [sum(sizes[: i + 1]) for i in range(len(sizes))]

    @property
    def size(self) -> int:
        """The numbers of one batch."""
        return self._ends[-1]

    def parts(self, buffer: Any) -> PackedTokens:
        """Views of `buffer`, int32 [size], in NumPy or torch."""
        ends = self._ends
        return PackedTokens(*(buffer[begin:end] for begin, end in zip([0, *ends[:-1]], ends, strict=True)))
