"""Divides the memory of a GPU between the LLM server, the arena and the encoder.

The LLM server is another process, which reserves its share when it starts; arena and encoder are in this
process. Pure arithmetic over sizes, so that it can be tested without a GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Self

from undertow.engine.base.model import UndertowError

SETTING = "UNDERTOW_CARD_SHARES"


class GpuTooFull(UndertowError):
    """The GPU has too little free memory for the shares of arena and encoder."""


@dataclass(frozen=True, slots=True)
class GpuShares:
    """Fractions of the GPU's total memory. The rest is for the processes' CUDA contexts."""

    llm: float
    arena: float
    encoder: float

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse "llm=0.5,arena=0.35,encoder=0.1". ValueError."""
        names = [field.name for field in fields(cls)]
        shares: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = (piece.strip() for piece in part.partition("="))
            if name not in names or name in shares:
                raise ValueError(f"{part.strip()!r}: give each of {', '.join(names)} once, as in {name}=0.35")
            try:
                shares[name] = float(value)
            except ValueError:
                raise ValueError(f"the share of {name} must be a number from 0 to 1, not {value!r}") from None
            if not 0 <= shares[name] <= 1:
                raise ValueError(f"the share of {name} must be from 0 to 1, not {value}")
        if missing := [name for name in names if name not in shares]:
            raise ValueError(f"the share of {' and '.join(missing)} is missing: 0 is a share too")
        if not shares["arena"]:
            raise ValueError("the arena's share must not be 0: the memories searched are there")
        if sum(shares.values()) > 1 + 1e-9:
            raise ValueError(f"the shares add up to {sum(shares.values()):g}, and the card is 1")
        return cls(**shares)

    def arena_bytes(self, total_bytes: int, free_bytes: int, own_bytes: int = 0, pools_bytes: int = 0) -> int:
        """The size of the arena on a GPU of `total_bytes`. GpuTooFull names the sizes and the cure.

        free_bytes: free memory by the driver; own_bytes: memory that this process's encoder has taken;
        pools_bytes: arenas of this process's other open engines. The LLM server may have started or not.
        """
        arena, encoder = int(self.arena * total_bytes), int(self.encoder * total_bytes)
        to_take = arena + max(0, encoder - own_bytes)
        if free_bytes >= to_take:
            return arena
        fitting = math.floor((free_bytes - max(0, encoder - own_bytes)) / total_bytes * 100) / 100
        others = total_bytes - free_bytes - own_bytes - pools_bytes
        raise GpuTooFull(
            f"the card has {_gib(free_bytes)} of its {_gib(total_bytes)} GiB free, and the arena "
            f"({self.arena:g} of the card) with the encoder ({self.encoder:g}) needs {_gib(to_take)}. "
            f"{self._cure(others / total_bytes, fitting, pools_bytes)}"
        )

    def _cure(self, others: float, fitting: float, pools_bytes: int) -> str:
        lower = (
            f"lower the arena's share in {SETTING} to {fitting:g}"
            if fitting > 0
            else "free some of the card: no share of the arena would fit"
        )
        if pools_bytes:
            return (
                f"Another engine of this process holds {_gib(pools_bytes)} GiB: close it first, or {lower}."
            )
        if others > self.llm:
            return (
                f"Other processes hold {others:.2f} of the card, and the LLM server's share is {self.llm:g}: "
                f"start vLLM with --gpu-memory-utilization {self.llm:g}, or {lower}."
            )
        return f"{lower[0].upper()}{lower[1:]}."


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.1f}"
